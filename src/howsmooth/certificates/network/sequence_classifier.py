"""Modules of which classifiers of sequences are made: a stack of layers between embeddings and classes.

They are modules like any other: certificates read them as they read every network (`howsmooth.network`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_tensor
from howsmooth._util.validation import check_count, check_one_of, check_weights, validated
from howsmooth.errors import InvalidInput

POOLS = ("mean", "first")


class CentredNorm(nn.Module):
    """A normalisation that subtracts a token's mean and does not divide: x ↦ γ(x − mean) + β.

    >>> CentredNorm(2)(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.], grad_fn=<AddBackward0>)
    """

    @validated
    def __init__(self, width: int):
        super().__init__()
        check_weights(2 * check_count(width, "width", most=2**62), "the normalisation")
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Every token less its mean."""
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class SelfAttend(nn.Module):
    """Self-attention as a map of one argument: a layer that is called like `torch.nn.MultiheadAttention`, or a map."""

    @validated
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention of the tokens."""
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]
        return first_tensor(self.layer(x))


class Residual(nn.Module):
    """x ↦ x + branch(x), the branch a sequence of modules.

    >>> Residual(nn.Identity())(torch.ones(2))
    tensor([2., 2.])
    """

    @validated
    def __init__(self, *branch: nn.Module):
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        """x plus its branch."""
        return x + self.branch(x)


class SequenceClassifier(nn.Module):
    """Token ids or vectors, layers, a pool over tokens, classes.

    Args:
        layers: modules that map tokens to tokens, see the module.
        classes: reads logits from the pooled token: a linear map, or a sequence with normalisations before it.
        embedding: vectors of token ids; without one the inputs are vectors themselves.
        positions: added to the first tokens, ``(longest, d)``.
        pool: "mean" of all tokens, or the "first".

    >>> net = SequenceClassifier([Residual(CentredNorm(4), nn.Linear(4, 4))], nn.Linear(4, 2), nn.Embedding(9, 4))
    >>> net(torch.tensor([1, 5, 2])).shape
    torch.Size([2])
    """

    positions: Tensor | None

    @validated
    def __init__(
        self,
        layers: Iterable[nn.Module],
        classes: nn.Module,
        embedding: nn.Embedding | None = None,
        positions: Tensor | None = None,
        pool: str = "mean",
    ):
        super().__init__()
        self.layers, self.classes, self.embedding = nn.Sequential(*layers), classes, embedding
        self.pool = check_one_of(pool, POOLS, "pool")
        self.register_parameter("positions", None if positions is None else nn.Parameter(positions.clone()))

    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors of token ids; vectors as they are."""
        if tokens.is_floating_point():
            return tokens
        if self.embedding is None:
            raise InvalidInput("this network has no embedding: give it vectors, not token ids.")
        return self.embedding(tokens)

    def placed(self, vectors: Tensor) -> Tensor:
        """Vectors with their positions added."""
        if self.positions is None:
            return vectors
        if vectors.shape[-2] > len(self.positions):
            raise InvalidInput(f"there are {len(self.positions)} positions, but {vectors.shape[-2]} tokens.")
        return vectors + self.positions[: vectors.shape[-2]]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(…, classes)`` of ids ``(…, n)`` or vectors ``(…, n, d)``."""
        hidden = self.layers(self.placed(self.embed(tokens)))
        return self.classes(hidden.mean(-2) if self.pool == "mean" else hidden[..., 0, :])
