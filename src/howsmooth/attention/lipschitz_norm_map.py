"""LipschitzNorm attention: scores divided by the size of all queries, keys and values together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from howsmooth._util.validation import validated
from howsmooth.attention.dot_product_map import SelfAttention


class LipschitzNormAttention(nn.Module):
    r"""softmax(QKᵀ/c)V·W with a divisor c that makes attention globally Lipschitz (Dasoulas, Scaman, Virmaux 2021).

    For each head

    .. math:: c = \max(\|Q\|_F\|K\|_{\infty,2},\ \|Q\|_F\|V\|_{\infty,2},\ \|K\|_{\infty,2}\|V\|_{\infty,2}),

    with :math:`\|\cdot\|_{\infty,2}` the norm of the largest token. c depends on all tokens, so this is no
    `AttentionMap`: `howsmooth.measure` treats it as a function.

    The map is continuous everywhere, but smooth only piece by piece: it has kinks where another product, or another
    token, becomes the largest, and where two of Q, K, V vanish. There c = 0, and every token gets the plain mean of the
    values, which is the limit of the map; derivatives there are those of the mean.

    Args:
        query, key, value, output: weights as in `torch.nn.Linear`; ``output=None`` leaves the heads side by side.
        heads: number of heads, each with a divisor of its own.

    Attributes:
        in_features, out_features: widths of a token and of an output token.

    >>> import torch
    >>> attention = LipschitzNormAttention(*torch.eye(4).repeat(4, 1, 1), heads=2)
    >>> attention(torch.ones(3, 4)).shape, attention.divisor(torch.ones(3, 4))
    (torch.Size([3, 4]), tensor([3.4641, 3.4641]))
    """

    kind = "lipschitz_norm"

    @validated
    def __init__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor | None = None, *, heads: int = 1):
        super().__init__()
        self.projections = SelfAttention(query, key, value, output, heads=heads, scale=1.0)
        self.heads = heads
        self.in_features, self.out_features = self.projections.in_features, self.projections.out_features

    def divisor(self, x: Tensor) -> Tensor:
        """c of every head, ``(heads,)`` or ``(batch, heads)``."""
        divisors = divisor_of(*self.projections.project(x[None] if x.dim() == 2 else x))
        return divisors[0] if x.dim() == 2 else divisors

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(n, d)`` or ``(batch, n, d)``."""
        query, key, value = self.projections.project(x[None] if x.dim() == 2 else x)  # (batch, heads, n, ·)
        c = divisor_of(query, key, value)
        # c = 0 only when two of Q, K, V vanish; then QKᵀ = 0 as well, and any divisor gives uniform weights.
        scores = query @ key.mT / torch.where(c > 0, c, 1.0)[..., None, None]
        out = (torch.softmax(scores, dim=-1) @ value @ self.projections.output_weight).sum(1)
        return out[0] if x.dim() == 2 else out

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, heads={self.heads}"


def divisor_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The c of each item and head, from Q, K, V of shape ``(batch, heads, n, ·)``."""
    queries = torch.linalg.vector_norm(query, dim=(-2, -1))
    largest_key = torch.linalg.vector_norm(key, dim=-1).amax(-1)
    largest_value = torch.linalg.vector_norm(value, dim=-1).amax(-1)
    return torch.stack([queries * largest_key, queries * largest_value, largest_key * largest_value]).amax(0)
