"""Sequences of tokens from a vocabulary: the one set whose inputs cannot be moved a little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.validation import check_finite, validated
from howsmooth.errors import InvalidInput
from howsmooth.sets.input_sets import InputSet
from howsmooth.sets.token_sets import TokenSet


class Embeddings(InputSet):
    """Sequences of tokens from a vocabulary: X = transform(E[ids]), each row of ``matrix`` a token.

    Args:
        matrix: E, ``(vocabulary, d)``, such as a language model's input embeddings.
        transform: what happens between the embeddings ``(…, n, d)`` and the map, such as adding positions and the
            first normalisation; differentiable, and given a batch of sequences at once.

    >>> over = Embeddings(torch.eye(3))
    >>> over.sequence(torch.tensor([2, 0]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]], dtype=torch.float64)
    """

    @validated
    def __init__(self, matrix: Tensor, transform: Callable[[Tensor], Tensor] | None = None):
        if matrix.dim() != 2 or 0 in matrix.shape or not matrix.is_floating_point():
            raise InvalidInput(
                f"embeddings are a floating (vocabulary, d) matrix with at least one row, got {matrix.dtype} of shape "
                f"{tuple(matrix.shape)}."
            )
        check_finite(matrix, "the embedding matrix")
        self.matrix, self.transform = matrix.detach().double().cpu(), transform
        if transform is None:
            self.width = matrix.shape[1]

    def token_set(self, width: int) -> TokenSet | None:
        radius = float(self.matrix.norm(dim=-1).max())
        if self.transform is not None or radius == 0:
            return None
        return TokenSet.ball(radius, width, "largest embedding")

    def describe(self) -> dict[str, Any]:
        return {"set": "embeddings", "vocabulary": len(self.matrix), "transformed": self.transform is not None}

    def sequence(self, ids: Tensor) -> Tensor:
        """The input of these token ids, ``(…, n)`` → ``(…, n, d)``."""
        return self.transformed(self.matrix[ids])

    def at(self, z: Tensor) -> Tensor:
        """The input of token ids, which are the coordinates of this set."""
        return self.sequence(z)

    def transformed(self, embedded: Tensor) -> Tensor:
        """What the map is given for these embeddings."""
        return embedded if self.transform is None else self.transform(embedded)

    def nearest(self, x: Tensor) -> Tensor:
        """The ids of the embeddings nearest to the tokens of x, ``(…, n, d)`` → ``(…, n)``."""
        return (self.matrix.square().sum(-1) - 2 * x.double() @ self.matrix.mT).argmin(-1)

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.sequence(torch.randint(len(self.matrix), (n,), generator=generator)).to(dtype)

    def project_(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            raise InvalidInput("inputs cannot be brought back through the transform of embeddings: give ids instead.")
        return x.copy_(self.matrix[self.nearest(x)])
