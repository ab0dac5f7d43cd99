"""Between tokens and heads: the linear maps on both ends of attention, for a whole block or head by head.

`into_heads` turns tangents of the input into tangents of the raw queries, keys and values (``(maps, n, width)``), and
`from_heads` carries cotangents back; `combine` and `distribute` do the same on the output side. The block form sums
over heads; the head form keeps one map per head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap, Heads
from howsmooth.attention.memory_layout import in_layout, join_channels, join_heads, matmul


@dataclass(frozen=True)
class Projection(ABC):
    """The linear ends of an attention map, seen as a batch of maps on tokens.

    Attributes:
        weight_in, weight_out: ``(…, width of an input token, q + k + v)`` and ``(…, v, width of an output token)``.
        widths: of queries, keys and values.
    """

    weight_in: Tensor
    weight_out: Tensor
    widths: tuple[int, ...]

    @abstractmethod
    def into_heads(self, v: Tensor) -> Heads:
        """Tangents of the input → tangents of raw q, k, v."""

    @abstractmethod
    def from_heads(self, gquery: Tensor, gkey: Tensor, gvalue: Tensor) -> Tensor:
        """Cotangents of raw q, k, v → cotangents of the input (the transpose of `into_heads`)."""

    @abstractmethod
    def combine(self, mixed: Tensor) -> Tensor:
        """Tangents of the heads' outputs → tangents of the output."""

    @abstractmethod
    def distribute(self, u: Tensor) -> Tensor:
        """The transpose of `combine`."""

    @abstractmethod
    def maps_of(self, index: Tensor) -> Tensor:
        """Positions of the (item, head) maps that belong to the given items of the batch."""

    @abstractmethod
    def select(self, index: Tensor) -> Projection:
        """The projection for some items of the batch."""

    def to(self, dtype: torch.dtype) -> Projection:
        """The projection in another dtype."""
        return self._changed(lambda tensor: tensor.to(dtype))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BlockProjection(Projection):
    """All heads at once: tokens ``(batch, n, d)``, one fused matrix in, one matrix out."""

    heads: int
    kv_heads: int

    @classmethod
    def of(cls, attention: AttentionMap, dtype: torch.dtype | None = None) -> BlockProjection:
        """The projection of a map, in its own dtype or another."""
        dtype = attention.dtype if dtype is None else dtype
        weights = [weight.to(dtype) for weight in attention.input_weights]
        weight_in = torch.cat([weight.flatten(0, 1) for weight in weights]).mT  # a view: products take either order
        widths = tuple(weight.shape[1] for weight in weights)
        return cls(
            weight_in, attention.output_weight.to(dtype).flatten(0, 1), widths, attention.heads, attention.kv_heads
        )

    def into_heads(self, v: Tensor) -> Heads:
        heads = list(zip((self.heads, self.kv_heads, self.kv_heads), self.widths, strict=True))
        projected = matmul(v, self.weight_in).split([count * width for count, width in heads], dim=-1)
        query, key, value = (t.unflatten(-1, shape).transpose(1, 2) for t, shape in zip(projected, heads, strict=True))
        return query.flatten(0, 1), self._repeat(key), self._repeat(value)

    def from_heads(self, gquery: Tensor, gkey: Tensor, gvalue: Tensor) -> Tensor:
        query = gquery.unflatten(0, (-1, self.heads))
        grads = (query, self._gather(gkey), self._gather(gvalue))
        return matmul(join_channels([join_heads(grad) for grad in grads]), self.weight_in.mT)

    def combine(self, mixed: Tensor) -> Tensor:
        return matmul(join_heads(mixed.unflatten(0, (-1, self.heads))), self.weight_out)

    def distribute(self, u: Tensor) -> Tensor:
        mixed = matmul(u, self.weight_out.mT).unflatten(-1, (self.heads, self.widths[2]))
        return mixed.transpose(1, 2).flatten(0, 1)

    def maps_of(self, index: Tensor) -> Tensor:
        return (index[:, None] * self.heads + torch.arange(self.heads, device=index.device)).flatten()

    def select(self, index: Tensor) -> Projection:
        return self

    def _repeat(self, shared: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        if group > 1:
            shared = in_layout(shared, lambda t: t.repeat_interleave(group, dim=1))
        return shared.flatten(0, 1)

    def _gather(self, grad: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        grad = grad.unflatten(0, (-1, self.kv_heads, group))
        return grad[:, :, 0] if group == 1 else in_layout(grad, lambda t: t.sum(2))


@dataclass(frozen=True)
class HeadProjection(Projection):
    """One map per head and batch item: tokens ``(maps, n, d)``.

    With orthonormal bases Q_in of the span of a head's q, k, v weights and Q_out of the range of its output matrix, the
    map in reduced coordinates Q_outᵀ J Q_in has the singular values of J and vectors of a fraction of the length:
    3k and k coordinates per token instead of d. As Q_in comes from a QR decomposition, the weights in its coordinates
    are triangular: queries depend on the first k coordinates alone, keys on the first 2k.
    """

    basis_in: Tensor | None = None  # (maps, d, width)
    basis_out: Tensor | None = None  # (maps, d_out, width_out)

    @classmethod
    def of(cls, attention: AttentionMap, batch: int, reduced: bool, dtype: torch.dtype) -> HeadProjection:
        weights = [attention.per_head(weight) for weight in attention.input_weights]
        weight_in = torch.cat(weights, dim=1).to(dtype).mT.contiguous()
        weight_out = attention.output_weight.to(dtype)
        basis_in = basis_out = None
        if reduced and weight_in.shape[-1] < weight_in.shape[-2]:
            basis_in, weight_in = torch.linalg.qr(weight_in)
        if reduced and weight_out.shape[-2] < weight_out.shape[-1]:
            basis_out, triangle = torch.linalg.qr(weight_out.mT)
            weight_out = triangle.mT

        widths = tuple(weight.shape[1] for weight in weights)
        return cls(weight_in, weight_out, widths, basis_in, basis_out).select(
            torch.arange(len(weight_in)).repeat(batch)
        )

    def into_heads(self, v: Tensor) -> Heads:
        if self.basis_in is None:
            query, key, value = (v @ self.weight_in).split(self.widths, dim=-1)
        else:
            query, key, value = (v[..., : block.shape[1]] @ block for block in self._triangle())
        return query, key, value

    def from_heads(self, gquery: Tensor, gkey: Tensor, gvalue: Tensor) -> Tensor:
        if self.basis_in is None:
            return torch.cat([gquery, gkey, gvalue], dim=-1) @ self.weight_in.mT
        query, key, value = self._triangle()
        back = gvalue @ value.mT
        back[..., : key.shape[1]].add_(gkey @ key.mT)
        back[..., : query.shape[1]].add_(gquery @ query.mT)
        return back

    def _triangle(self) -> Heads:
        """The columns of the triangular weights that belong to queries, keys and values, less their zeros."""
        ends = list(accumulate(self.widths))
        query, key, value = (
            self.weight_in[:, :end, end - width : end] for width, end in zip(self.widths, ends, strict=True)
        )
        return query, key, value

    def combine(self, mixed: Tensor) -> Tensor:
        return mixed @ self.weight_out

    def distribute(self, u: Tensor) -> Tensor:
        return u @ self.weight_out.mT

    def maps_of(self, index: Tensor) -> Tensor:
        return index

    def select(self, index: Tensor) -> HeadProjection:
        return self._changed(lambda tensor: tensor[index])
