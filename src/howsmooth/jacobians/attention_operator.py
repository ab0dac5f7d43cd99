"""The Jacobian of attention in closed form: block or head by head, whole or one path at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import check_finite, validated
from howsmooth.attention.attention_map import AttentionMap, Heads, MapModule
from howsmooth.attention.memory_layout import prefers_channels_first
from howsmooth.attention.stages import Chain
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, power_steps, random_input
from howsmooth.jacobians.product_error import Moments, PathErrors, Rounding, select_maps
from howsmooth.jacobians.projection import BlockProjection, HeadProjection, Projection
from howsmooth.jacobians.softmax_products import EvaluationPoint, Mixing
from howsmooth.jacobians.tiles import Tile, trim_memory

Path = Literal["all", "value", "score"]
DEFAULT_MEMORY = 2**29
"""Bytes of attention weights stored between products (512 MiB); beyond it they are recomputed tile by tile, and what
that needs beside them (`Mixing.beside`) is taken from it."""
LARGEST_POINT_ERROR = 5e-5
"""Relative error of the weights, from logits so large that rounding moves them, at which a wider dtype is needed."""
LARGEST_PRODUCT_ERROR = 3e-4
"""Share of ‖Jᵀu‖ that the error of a product may have before a wider dtype is taken, with u = Jv/|Jv| and v random or,
at the second look, Jᵀu itself. That is a third to a half of the norm on ordinary heads: both ends leave most of 10⁻³
free."""
_POWER_STEPS = 2


@dataclass(frozen=True, eq=False, repr=False)
class AttentionJacobian(JacobianOperator):
    """Products with the Jacobian of an `AttentionMap` at x; build it with `attention_jacobian`.

    Attributes:
        errors: bounds on the rounding of products, head by head; None where they are measured otherwise.
        path: one of the two additive parts, or both ("all"): "value" (weights P held fixed: the map P ⊗ WV) or "score"
            (values held fixed: the part that moves through the weights).
    """

    mixing: Mixing
    chains: tuple[Chain, ...]
    projection: Projection
    batch_shape: torch.Size
    errors: PathErrors | None = None
    path: Path = "all"

    def __post_init__(self) -> None:
        query, n = self.mixing.query, self.mixing.query.shape[1]
        vars(self).update(
            in_shape=torch.Size([n, self.projection.weight_in.shape[-2]]),
            out_shape=torch.Size([n, self.projection.weight_out.shape[-1]]),
            dtype=query.dtype,
            device=query.device,
            method="closed form, streamed" if self.mixing.streamed else "closed form",
        )

    @classmethod
    def of(
        cls, point: EvaluationPoint, mixing: Mixing, items: torch.Size, per_head: bool, reduced: bool
    ) -> AttentionJacobian:
        """From the evaluated weights of a map, without bounds on rounding; ``items``: the batch shape of x."""
        attention, dtype = point.attention, point.dtype
        projection: Projection
        if per_head:
            projection = HeadProjection.of(attention, len(mixing.query) // attention.heads, reduced, dtype)
            items = torch.Size([*items, attention.heads])
        else:
            projection = BlockProjection.of(attention, dtype)
        return cls(mixing, point.chains, projection, items).to_preferred_layout()

    @cached_property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        product = 0.0 if self.errors is None else self.of_maps(self.errors.along(self.path))
        # Errors of many roundings have no preferred direction: N^{-½} of their length lies along one, in mean square.
        # Some have more; but the Lanczos bound adds up the errors of all steps as if none cancelled.
        return Accuracy(self.mixing.point_error, product, 1 / math.sqrt(min(self.in_size, self.out_size)))

    def of_maps(self, per_head: Tensor) -> Tensor:
        """A bound for each map from those of its heads, whose errors are stacked before the output projection."""
        parts = per_head.reshape(*self.batch_shape, -1)
        return parts.squeeze(-1) if self.by_head else torch.linalg.vector_norm(parts, dim=-1)

    @property
    def by_head(self) -> bool:
        """Whether every head is a map of its own."""
        return isinstance(self.projection, HeadProjection)

    @property
    def heads_per_map(self) -> int:
        """Number of heads that one map of the batch has."""
        return len(self.mixing.query) // max(1, self.batch_size)

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        return self.combined(*self.tangents(v))

    def tangents(self, v: Tensor) -> Heads:
        """Tangents of queries, keys and values from those of the input."""
        heads = self.projection.into_heads(v.to(self.dtype).reshape(-1, *self.in_shape))
        query, key, value = (chain.jvp(t) for chain, t in zip(self.chains, heads, strict=True))
        return query, key, value

    def combined(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Tangents of the output from those of queries, keys and values."""
        scores = None if self.path == "value" else (query, key)
        moved = self.mixing.jvp(scores, None if self.path == "score" else value)
        return self.projection.combine(moved).reshape(*self.batch_shape, *self.out_shape)

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = self.projection.distribute(u.to(self.dtype).reshape(-1, *self.out_shape))
        heads = self.mixing.vjp(grad, score=self.path != "value", value=self.path != "score")
        back = self.projection.from_heads(*(chain.vjp(t) for chain, t in zip(self.chains, heads, strict=True)))
        return back.reshape(*self.batch_shape, *self.in_shape)

    def line_costs(self) -> tuple[float, float]:
        if not self._has_blocks:
            return super().line_costs()
        n, width = self.in_shape[0], sum(t.shape[-1] for t in (self.mixing.query, self.mixing.key, self.mixing.value))
        row = n * width * self.in_shape[1]  # the rows of one token touch the weights of one query
        product = n * width * (4 * n / 3 + self.in_shape[1])
        return self.out_size * min(1.0, row / product), self.in_size

    def rows(self, index: Tensor) -> Tensor:
        if not self._has_blocks:
            return super().rows(index)
        token, coordinate = index // self.out_shape[1], index % self.out_shape[1]
        first = int(token.min())
        blocks = self.token_blocks(slice(first, int(token.max()) + 1))
        lines = index.new_empty((len(index), *self.batch_shape, *self.in_shape), dtype=self.dtype)
        for a in coordinate.unique().tolist():
            unit = torch.zeros((*blocks.batch_shape, *blocks.out_shape), dtype=self.dtype, device=self.device)
            unit[..., a] = 1
            here = coordinate == a
            rows = blocks.rmatvec(unit)[token[here] - first]
            lines[here] = rows.reshape(-1, *self.batch_shape, *self.in_shape)
        return lines

    @property
    def _has_blocks(self) -> bool:
        """Whether `TokenBlocks` can take the maps apart: one input, or every head a map of its own."""
        return self.by_head or self.batch_size == 1

    def token_blocks(self, rows: slice) -> TokenBlocks:
        """The blocks J_ij of some output tokens and all input tokens."""
        from howsmooth.jacobians.attention_operator import TokenBlocks

        return TokenBlocks(self, rows)

    @torch.no_grad()
    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor | None:
        """f(x) of every map, ``batch_shape + (n, width)``, from the weights that are known: x is where they are taken.

        >>> import howsmooth as hs
        >>> attention, x = hs.SelfAttention.random(8, heads=2, dtype=torch.float64), torch.ones(3, 8).double()
        >>> torch.allclose(attention_jacobian(attention, x).value_at(attention, x), attention(x))
        True
        """
        if not isinstance(f, AttentionMap):
            return None
        tokens = x.detach().reshape(-1, *x.shape[-2:])
        mixed = self.mixing.mixed_values(f, tokens).unflatten(0, (-1, f.heads)).to(self.dtype)
        if self.by_head:
            weight = f.output_weight.to(mixed)
            return (mixed @ weight).reshape(*self.batch_shape, *mixed.shape[-2:-1], weight.shape[-1])
        out = self.projection.combine(mixed.flatten(0, 1))
        out = out if f.output_bias is None else out + f.output_bias.to(out)
        return out.reshape(*self.batch_shape, *out.shape[-2:])

    def bounded(self, rounding: Rounding, moments: Moments | None = None, together: bool = False) -> AttentionJacobian:
        """The operator with bounds on its errors; ``moments`` and ``together`` make them sharper for some products."""
        mixing = self.mixing if moments is None else replace(self.mixing, moments=moments)
        return replace(self, errors=rounding.path_errors(mixing, self.by_head, together=together))

    def along(self, path: Path) -> AttentionJacobian:
        """The same Jacobian restricted to one path."""
        if path not in ("all", "value", "score"):
            raise InvalidInput(f"a path is 'all', 'value' or 'score', got {path!r}.")
        return replace(self, path=path)

    def rounded(self, dtype: torch.dtype) -> AttentionJacobian:
        chains, projection = tuple(chain.to(dtype) for chain in self.chains), self.projection.to(dtype)
        mixing = self.mixing.rounded(dtype)
        return replace(self, mixing=mixing, chains=chains, projection=projection, errors=None).to_preferred_layout()

    def to_preferred_layout(self) -> AttentionJacobian:
        """The same operator with channels before tokens in memory, where that is faster (`attention.memory_layout`)."""
        if self.by_head or not prefers_channels_first(self.batch_shape + self.in_shape, self.dtype):
            return self
        chains = tuple(chain.channels_first() for chain in self.chains)
        return replace(self, mixing=self.mixing.channels_first(), chains=chains)

    def subset(self, index: Tensor) -> AttentionJacobian:
        maps = self.projection.maps_of(index)
        return replace(
            self,
            mixing=self.mixing.select(maps),
            chains=tuple(chain.select(maps) for chain in self.chains),
            projection=self.projection.select(index),
            batch_shape=index.shape,
            errors=None if self.errors is None else select_maps(self.errors, maps),
        )

    def lift_in(self, v: Tensor) -> Tensor:
        return self._lift(v, getattr(self.projection, "basis_in", None))

    def lift_out(self, u: Tensor) -> Tensor:
        return self._lift(u, getattr(self.projection, "basis_out", None))

    def _lift(self, vector: Tensor, basis: Tensor | None) -> Tensor:
        if basis is None:
            return vector
        several = vector.dim() - len(self.batch_shape) - 2  # top-k vectors have an axis of their own
        return vector @ basis.mT.reshape(*self.batch_shape, *[1] * several, basis.shape[2], basis.shape[1])


@validated
@full_precision
def attention_jacobian(
    attention: AttentionMap, x: Tensor, *, per_head: bool = False, reduced: bool = False, memory: int = DEFAULT_MEMORY
) -> AttentionJacobian:
    """The Jacobian of an attention map at x, ``(n, d)`` or ``(batch, n, d)``, in closed form.

    Args:
        per_head: one map x ↦ W_h f_h(x) per head; the batch shape is then ``(heads,)`` or ``(batch, heads)``.
        reduced: with ``per_head``, work in orthonormal coordinates of each head's own subspaces: same singular values,
            shorter vectors (`lift_in` and `lift_out` lead back to tokens). For 2- and Frobenius norms.
        memory: bytes of attention weights to store between products.

    Half precision is computed in float32; otherwise the wider dtype of x and the weights is used. Where float32 cannot
    resolve the logits to `LARGEST_POINT_ERROR`, or cancellation leaves more than `LARGEST_PRODUCT_ERROR` of a map,
    float64 is taken. Logits that float64 cannot resolve are refused; the error of products is stated (`Accuracy`).

    >>> import howsmooth as hs, torch
    >>> J = attention_jacobian(hs.SelfAttention.random(8, heads=2), torch.randn(5, 8))
    >>> J.matvec(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """
    dtype = dtype_of_products(attention, x)

    def build(dtype: torch.dtype) -> tuple[AttentionJacobian, Rounding]:
        point = EvaluationPoint.at(attention, x, dtype)
        rounding = Rounding(point)
        operator = AttentionJacobian.of(point, Mixing.at(point, memory), x.shape[:-2], per_head, reduced)
        return operator.bounded(rounding), rounding

    with torch.no_grad():
        operator, rounding = build(dtype)
        if dtype == torch.float32:
            resolved = resolved_in_float32(operator, partial(operator.bounded, rounding, together=True))
            operator = build(torch.float64)[0] if resolved is None else resolved
    check_logits(operator)
    return operator


@full_precision
@torch.no_grad()
def unbounded_jacobian(attention: AttentionMap, x: Tensor, memory: int) -> AttentionJacobian:
    """The Jacobian of a block in the dtype of x without bounds on rounding; `composed_jacobian` measures its error."""
    attention.terms.check(x.shape[-2], attention.heads, math.prod(x.shape[:-2]))
    point = EvaluationPoint.at(attention, x, x.dtype, errors=False)
    mixing = Mixing.at(point, memory, moments=False)
    return AttentionJacobian(mixing, point.chains, BlockProjection.of(attention, x.dtype), x.shape[:-2])


def dtype_of_products(attention: MapModule, x: Tensor) -> torch.dtype:
    """The wider dtype of x and the weights, at least float32, once both are finite and fit each other."""
    check_tokens(x)
    if x.shape[-1] != attention.in_features:
        raise InvalidInput(
            f"tokens are {x.shape[-1]} wide, but the attention takes {attention.in_features}: "
            f"x has shape {tuple(x.shape)}, expected (…, n, {attention.in_features})."
        )
    for name, tensor in attention.named_buffers():
        if tensor.is_floating_point() and "logit_biases" not in name:
            check_finite(tensor, name.replace("_", " "))
    if isinstance(attention, AttentionMap):
        attention.terms.check(x.shape[-2], attention.heads, math.prod(x.shape[:-2]))
    return torch.promote_types(torch.promote_types(x.dtype, attention.dtype), torch.float32)


def check_logits(operator: AttentionJacobian) -> None:
    """Refuse logits that rounding moves too far, and return the workspace of streamed products."""
    if operator.accuracy.point > LARGEST_POINT_ERROR:
        raise InvalidInput(
            f"the attention logits are so large that {str(operator.dtype).removeprefix('torch.')} moves them by "
            f"{operator.accuracy.point:.1g}: scale the input or the weights down."
        )
    if operator.mixing.streamed:
        trim_memory()


def resolved_in_float32(
    operator: AttentionJacobian, sharpened: Callable[[], AttentionJacobian], lower: Tensor | float = 0.0
) -> AttentionJacobian | None:
    """The operator, with sharper bounds on its errors where these are needed; None where float32 is too coarse.

    Float32 is too coarse where it cannot resolve the logits, or leaves an error above `LARGEST_PRODUCT_ERROR` of some
    map. ``lower`` are known lower bounds on the norms.
    """
    if operator.accuracy.point > LARGEST_POINT_ERROR:
        return None
    size = torch.as_tensor(lower, dtype=torch.float64).to(operator.device)

    def is_exact_enough() -> bool:
        return bool((operator.accuracy.product <= LARGEST_PRODUCT_ERROR * size).all())

    if is_exact_enough():
        return operator
    for step, (moved, back) in enumerate(power_steps(operator, random_input(operator), _POWER_STEPS)):
        size = torch.maximum(size, torch.where(moved > 0, back / moved, 0.0))
        if step == 0 and not is_exact_enough():
            operator = sharpened()
        if is_exact_enough():
            return operator
    return None


class TokenBlocks(JacobianOperator):
    """The blocks J_ij for the queries ``rows`` and all keys, as a batch of d × d maps.

    J_ij is the derivative of output token i in input token j. In one head, with D the slopes of the weights (see
    `howsmooth.jacobians.softmax_products`), M the derivatives of the token stages and W the output matrix,

        J_ij = W [ P_ij M^v_j + D_ij (v_j − o_i)(q_iᵀ M^k_j) ] + δ_ij W Σ_l D_il (v_l − o_i)(k_lᵀ M^q_i),

    (o_i only for softmax weights). A product with all blocks of one query takes O(n) head vectors and no n × n × width
    product.

    Batch shape ``(rows, n)``, or ``(rows, heads, n)`` when the parent works head by head. The parent must hold a single
    input.
    """

    def __init__(self, parent: AttentionJacobian, rows: slice):
        mixing = parent.mixing
        everyone = slice(0, len(mixing.query))
        n = mixing.query.shape[1]
        weights, slopes = mixing.weights_of(Tile(everyone, rows, slice(0, n)))
        slopes = torch.zeros_like(slopes) if parent.path == "value" else slopes
        weights = torch.zeros_like(weights) if parent.path == "score" else weights
        self.query = mixing.query[:, rows].transpose(0, 1)[:, :, None]  # (rows, heads, 1, k)
        self.weights = weights.transpose(0, 1)[..., None]  # (rows, heads, n, 1)
        self.slopes = slopes.transpose(0, 1)[..., None]
        self.value = mixing.value  # (heads, n, v)
        self.centre = mixing.output[:, rows].transpose(0, 1)[:, :, None]  # (rows, heads, 1, v)
        if not mixing.softmax:
            self.centre = torch.zeros_like(self.centre)
        spread = self.slopes * (self.value - self.centre)  # (rows, heads, n, v)
        self.pull = mixing.key.mT @ spread  # Σ_l D_il k_l (v_l − o_i)ᵀ, (rows, heads, k, v)
        tokens = torch.arange(rows.start, rows.stop, device=weights.device)
        self.diagonal = tokens - rows.start, slice(None), tokens  # (row i, every head, key i) of (rows, heads, n, ·)
        self.parent, self.projection = parent, parent.projection
        self.by_head = parent.by_head
        count = rows.stop - rows.start
        batch = torch.Size([count, len(mixing.query), n] if self.by_head else [count, n])
        self._take_after(parent, batch_shape=batch, in_shape=parent.in_shape[1:], out_shape=parent.out_shape[1:])
        longer = max(1.0, n / max(1, mixing.chain))  # sums are over all tokens here, not by tiles
        error = torch.as_tensor(parent.accuracy.product) * longer**0.5
        self.accuracy = Accuracy(parent.accuracy.point, error.reshape(-1, 1) if self.by_head else error.reshape(()))

    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        heads = zip(self.parent.chains, self.projection.into_heads(v), strict=True)
        query, key, value = (chain.jvp(self._split(t)) for chain, t in heads)
        mixed = self.weights * value
        mixed += self.slopes * (self.query * key).sum(-1, keepdim=True) * (self.value - self.centre)
        mixed[self.diagonal] += (query[self.diagonal][..., None, :] @ self.pull).squeeze(-2)
        return self.projection.combine(self._join(mixed))

    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = self._split(self.projection.distribute(u))
        gvalue = self.weights * grad
        along = self.slopes * (grad * (self.value - self.centre)).sum(-1, keepdim=True)
        gkey = along * self.query
        gquery = torch.zeros_like(gkey)
        gquery[self.diagonal] = (self.pull @ grad[self.diagonal][..., None]).squeeze(-1)
        heads = zip(self.parent.chains, (gquery, gkey, gvalue), strict=True)
        return self.projection.from_heads(*(self._join(chain.vjp(t)) for chain, t in heads))

    def _split(self, tensor: Tensor) -> Tensor:
        return tensor if self.by_head else tensor.unflatten(0, (self.batch_shape[0], -1))

    def _join(self, tensor: Tensor) -> Tensor:
        return tensor if self.by_head else tensor.flatten(0, 1)
