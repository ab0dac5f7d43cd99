"""Sequences of given tokens: the one discrete set of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.validation import check_finite, validated
from howsmooth.errors import InvalidInput
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.input_sets import InputSet


class Tokens(InputSet):
    """Sequences of given tokens: X = transform(E[ids]), each row of ``matrix`` a token.

    Args:
        matrix: E, ``(vocabulary, d)``, such as a language model's input embeddings, or the tokens of a text.
        transform: a function between the tokens ``(…, n, d)`` and the map, such as adding positions and the first
            normalisation; differentiable, and called with a batch of sequences at once.

    >>> over = Tokens(torch.eye(3))
    >>> over.sequence(torch.tensor([2, 0]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]], dtype=torch.float64)
    """

    @validated
    def __init__(self, matrix: Tensor, transform: Callable[[Tensor], Tensor] | None = None):
        if matrix.dim() != 2 or 0 in matrix.shape or not matrix.is_floating_point():
            raise InvalidInput(
                f"tokens are rows of a floating (vocabulary, d) matrix, at least one, got {matrix.dtype} of shape "
                f"{tuple(matrix.shape)}."
            )
        check_finite(matrix, "the matrix of tokens")
        self.matrix, self.transform = matrix.detach().double().cpu(), transform
        if transform is None:
            self.width = matrix.shape[1]

    def ellipsoid(self, width: int) -> Ellipsoid | None:
        radius = float(self.matrix.norm(dim=-1).max())
        if self.transform is not None or radius == 0:
            return None
        return Ellipsoid.ball(radius, width, "largest token")

    def describe(self) -> dict[str, Any]:
        return {"set": "tokens", "vocabulary": len(self.matrix), "transformed": self.transform is not None}

    def sequence(self, ids: Tensor) -> Tensor:
        """The input of these token ids, ``(…, n)`` → ``(…, n, d)``."""
        return self.transformed(self.matrix[ids])

    def at(self, z: Tensor) -> Tensor:
        """The input of token ids, which are the coordinates of this set."""
        return self.sequence(z)

    def transformed(self, embedded: Tensor) -> Tensor:
        """The input of the map for these tokens."""
        return embedded if self.transform is None else self.transform(embedded)

    def nearest(self, x: Tensor) -> Tensor:
        """The ids of the rows nearest to the tokens of x, ``(…, n, d)`` → ``(…, n)``."""
        return (self.matrix.square().sum(-1) - 2 * x.double() @ self.matrix.mT).argmin(-1)

    def random(self, generator: torch.Generator, n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.sequence(torch.randint(len(self.matrix), (n,), generator=generator)).to(dtype)

    def project_(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            raise InvalidInput("inputs cannot be projected through the transform of the tokens: give ids instead.")
        return x.copy_(self.matrix[self.nearest(x)])
