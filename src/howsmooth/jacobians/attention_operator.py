"""The Jacobian of attention in closed form: block or head by head, whole or one path at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import check_finite, validated
from howsmooth.attention.attention_map import AttentionMap, Heads
from howsmooth.attention.memory_layout import pays
from howsmooth.attention.stages import Chain
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.dropped_tiles.selection import path_norms, thinned
from howsmooth.jacobians.dropped_tiles.statistics import sharp_moments, sized_mixing
from howsmooth.jacobians.evaluation_point import EvaluationPoint
from howsmooth.jacobians.function_checks import check_tokens, random_like
from howsmooth.jacobians.key_value_moments import Moments
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.product_error import Noise, WeightNorms
from howsmooth.jacobians.projection import BlockProjection, HeadProjection, Projection
from howsmooth.jacobians.softmax_products import Mixing
from howsmooth.jacobians.workspace import give_back

if TYPE_CHECKING:
    from howsmooth.jacobians.token_blocks import TokenBlocks

Path = Literal["all", "value", "score"]
DEFAULT_MEMORY = 2**29
"""Bytes of attention weights kept between products (512 MiB); beyond it they are recomputed tile by tile, and what that
needs beside them (`Mixing.beside`) is taken from it."""
MOST_BLUR = 5e-5
"""Relative error of the weights, from logits so large that rounding moves them, at which a wider dtype is needed."""
MOST_NOISE = 3e-4
"""Share of ‖Jᵀu‖ that the noise may have before a wider dtype is taken, with u = Jv/|Jv| and v random or, at the second
look, Jᵀu itself. That is a third to a half of the norm on ordinary heads: both ends leave most of 10⁻³ free."""
_LOOKS = 2


class AttentionJacobian(JacobianOperator):
    """Products with the Jacobian of an `AttentionMap` at x; build it with `attention_jacobian`.

    ``path`` keeps one of the two additive parts: "value" (weights P held fixed: the map P ⊗ WV) or "score" (values held
    fixed: what moves through the weights).
    """

    whole: AttentionJacobian | None = None
    norms: Tensor | None = None

    def __init__(
        self,
        mixing: Mixing,
        chains: tuple[Chain, ...],
        projection: Projection,
        batch_shape: torch.Size,
        rounding: Noise | None,
        path: Path = "all",
        skipped: Noise | None = None,
    ):
        self.mixing, self.chains, self.projection, self.rounding, self.path = mixing, chains, projection, rounding, path
        n = mixing.query.shape[1]
        self.batch_shape = batch_shape
        self.in_shape = torch.Size([n, projection.in_width])
        self.out_shape = torch.Size([n, projection.out_width])
        self.dtype, self.device = mixing.query.dtype, mixing.query.device
        self.method = "closed form, streamed" if mixing.streamed else "closed form"
        self.skipped = skipped
        if rounding is not None:
            self.noise = self._of_maps(rounding.along(path))
        if skipped is not None and mixing.left_out is not None:
            self.left_out = self._of_maps(skipped.along(path))
            most = float(torch.as_tensor(self.left_out).max())
            self.notes = (
                f"{100 * mixing.left_out.share:.0f} % of the tiles of attention weights were left out: the ends allow "
                f"for what is missing, of norm {most:.1e} at most",
            )
        # Errors of many roundings have no preferred direction: N^{-½} of their length lies along one, in mean square.
        # Some have more; but the certificate adds up the errors of all steps as if none cancelled, which allows for it.
        self.scatter = 1 / math.sqrt(min(self.in_size, self.out_size))

    def _of_maps(self, per_head: Tensor) -> Tensor:
        """A bound for each map from those of its heads, whose errors are stacked before the output projection."""
        parts = per_head.reshape(*self.batch_shape, -1)
        return parts.squeeze(-1) if self.by_head else torch.linalg.vector_norm(parts, dim=-1)

    @cached_property
    def blur(self) -> float:  # type: ignore[override]
        return self.mixing.blur

    @property
    def by_head(self) -> bool:
        """Whether every head is a map of its own."""
        return isinstance(self.projection, HeadProjection)

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        return self._combined(self.mixing, *self._tangents(v))

    def _tangents(self, v: Tensor) -> Heads:
        heads = self.projection.into_heads(v.to(self.dtype).reshape(-1, *self.in_shape))
        query, key, value = (chain.jvp(t) for chain, t in zip(self.chains, heads, strict=True))
        return query, key, value

    def _combined(self, mixing: Mixing, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.path == "value":
            moved = mixing.jvp(None, None, value)
        else:
            moved = mixing.jvp(query, key, None if self.path == "score" else value)
        return self.projection.combine(moved).reshape(*self.batch_shape, *self.out_shape)

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        return self._back(self.mixing, u)

    def _back(self, mixing: Mixing, u: Tensor) -> Tensor:
        grad = self.projection.distribute(u.to(self.dtype).reshape(-1, *self.out_shape))
        heads = mixing.vjp(grad, score=self.path != "value", value=self.path != "score")
        back = self.projection.from_heads(*(chain.vjp(t) for chain, t in zip(self.chains, heads, strict=True)))
        return back.reshape(*self.batch_shape, *self.in_shape)

    @full_precision
    @torch.no_grad()
    def matvec_within(self, v: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.mixing.sizes
        if sizes is None or self.norms is None:
            return super().matvec_within(v, most)
        query, key, value = self._tangents(v)
        widest = self.norms[3].to(value)[:, None, None]
        gone, lost = sizes.spared_forward((query, key, widest * value), self._for_heads(most))
        return self._combined(self.mixing.passing_by(gone), query, key, value), self._of_heads(lost)

    @full_precision
    @torch.no_grad()
    def rmatvec_within(self, u: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.mixing.sizes
        if sizes is None or self.norms is None:
            return super().rmatvec_within(u, most)
        each = u.reshape(-1, *self.out_shape)
        each = each.repeat_interleave(len(self.mixing.query) // len(each), dim=0)
        gone, lost = sizes.spared_backward(each, self.norms[:3], self._for_heads(most))
        return self._back(self.mixing.passing_by(gone), u), self._of_heads(lost)

    def _for_heads(self, most: Tensor) -> Tensor:
        """A bound for every map as one for each of its heads, whose errors add up."""
        heads = len(self.mixing.query) // max(1, self.batch_size)
        return (most.reshape(-1, 1) / heads).expand(-1, heads).reshape(-1)

    def _of_heads(self, lost: Tensor) -> Tensor:
        return lost.reshape(*self.batch_shape, -1).sum(-1)

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
        """Whether `TokenBlocks` can take the maps apart: one input, or every head a map of its own, all tiles there."""
        return (self.by_head or self.batch_size == 1) and self.mixing.left_out is None

    def token_blocks(self, rows: slice) -> TokenBlocks:
        """The blocks J_ij of some output tokens and all input tokens."""
        from howsmooth.jacobians.token_blocks import TokenBlocks

        return TokenBlocks(self, rows)

    @torch.no_grad()
    def value(self, attention: AttentionMap, x: Tensor) -> Tensor:
        """f(x) of every map, ``batch_shape + (n, width)``, from the weights that are known: x is where they are taken.

        >>> import howsmooth as hs
        >>> attention, x = hs.SelfAttention.random(8, heads=2, dtype=torch.float64), torch.ones(3, 8).double()
        >>> torch.allclose(attention_jacobian(attention, x).value(attention, x), attention(x))
        True
        """
        tokens = x.detach().reshape(-1, *x.shape[-2:])
        mixed = self.mixing.mixed_values(attention, tokens).unflatten(0, (-1, attention.heads)).to(self.dtype)
        if self.by_head:
            weight = attention.output_weight.to(mixed)
            return (mixed @ weight).reshape(*self.batch_shape, *mixed.shape[-2:-1], weight.shape[-1])
        out = self.projection.combine(mixed.flatten(0, 1))
        out = out if attention.output_bias is None else out + attention.output_bias.to(out)
        return out.reshape(*self.batch_shape, *out.shape[-2:])

    def along(self, path: Path) -> AttentionJacobian:
        """The same Jacobian restricted to one path."""
        if path not in ("all", "value", "score"):
            raise InvalidInput(f"a path is 'all', 'value' or 'score', got {path!r}.")
        part = AttentionJacobian(
            self.mixing, self.chains, self.projection, self.batch_shape, self.rounding, path, self.skipped
        )
        part.whole = None if self.whole is None else self.whole.along(path)
        part.norms = self.norms
        return part

    def rounded(self, dtype: torch.dtype) -> AttentionJacobian:
        chains, projection = tuple(chain.to(dtype) for chain in self.chains), self.projection.to(dtype)
        mixing = self.mixing.rounded(dtype)
        return AttentionJacobian(mixing, chains, projection, self.batch_shape, None, self.path).arranged()

    def arranged(self) -> AttentionJacobian:
        """The same operator with channels before tokens in memory, where that is faster (`attention.memory_layout`)."""
        if self.by_head or not pays(self.batch_shape + self.in_shape, self.dtype):
            return self
        mixing, chains = self.mixing.channels_first(), tuple(chain.channels_first() for chain in self.chains)
        return AttentionJacobian(mixing, chains, self.projection, self.batch_shape, self.rounding, self.path)

    def subset(self, index: Tensor) -> AttentionJacobian:
        maps = self.projection.maps_of(index)
        chains, projection = tuple(chain.select(maps) for chain in self.chains), self.projection.select(index)
        rounding = None if self.rounding is None else self.rounding.select(maps)
        skipped = None if self.skipped is None else self.skipped.select(maps)
        mixing = self.mixing.select(maps)
        part = AttentionJacobian(mixing, chains, projection, index.shape, rounding, self.path, skipped)
        part.whole = None if self.whole is None else self.whole.subset(index)
        part.norms = None if self.norms is None else self.norms[:, maps.cpu()]
        part.least = self.least.reshape(-1)[index.cpu()] if self.least.dim() else self.least
        part.guess = None if self.guess is None else self.guess.reshape(-1, *self.in_shape)[index]
        return part

    def without(self, gone: Tensor, memory: int) -> AttentionJacobian:
        """Without some tiles, with a bound on what goes with them."""
        mixing = self.mixing.without(gone, memory)
        assert mixing.left_out is not None
        assert self.norms is not None
        heads = 1 if self.by_head else len(mixing.query) // max(1, self.batch_size)
        query, key, value = (math.sqrt(heads) * self.norms[:3] * mixing.left_out.sizes).to(
            self.device
        )  # errors of heads add up
        skipped = Noise(query + key, value)
        thin = AttentionJacobian(
            mixing, self.chains, self.projection, self.batch_shape, self.rounding, self.path, skipped
        )
        thin.whole = self
        return thin

    def glance(self, steps: int) -> tuple[Tensor, Tensor]:
        """A lower bound on the norm of every map, from so many steps of power iteration, and where they led.

        The bounds are float64 on the CPU, the vectors ``batch_shape + in_shape``.
        """
        v = random_like(torch.empty(*self.batch_shape, *self.in_shape, dtype=self.dtype)).to(self.device)
        for _ in range(steps):
            u = self.matvec(v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True))
            v = self.rmatvec(u)
        before, after = (torch.linalg.vector_norm(t, dim=(-2, -1)).double().cpu() for t in (u, v))
        return torch.where(before > 0, after / before, 0.0), v

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
    attention: AttentionMap,
    x: Tensor,
    *,
    per_head: bool = False,
    reduced: bool = False,
    memory: int = DEFAULT_MEMORY,
    skip: float = 0.0,
) -> AttentionJacobian:
    """The Jacobian of an attention map at x, ``(n, d)`` or ``(batch, n, d)``, in closed form.

    Args:
        per_head: one map x ↦ W_h f_h(x) per head; the batch shape is then ``(heads,)`` or ``(batch, heads)``.
        reduced: with ``per_head``, work in orthonormal coordinates of each head's own subspaces: same singular values,
            shorter vectors (`lift_in` and `lift_out` lead back to tokens). For 2- and Frobenius norms.
        memory: bytes of attention weights to keep between products.
        skip: tiles of weights are left out of the products, least first, as long as the bound on what goes with them
            (`JacobianOperator.left_out`) stays below about this share of the norm; 0 leaves nothing out.

    Half precision is computed in float32; otherwise the wider dtype of x and the weights is used. Where float32 cannot
    resolve the logits to `MOST_BLUR`, or cancellation leaves more than `MOST_NOISE` of a map, float64 is taken. Logits
    that float64 cannot resolve are refused; noise is stated (`JacobianOperator.noise`).

    >>> import howsmooth as hs, torch
    >>> J = attention_jacobian(hs.SelfAttention.random(8, heads=2), torch.randn(5, 8))
    >>> J.matvec(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """
    check_tokens(x)
    if not 0 <= skip < 1:
        raise InvalidInput(f"skip is a share of the norm, at least 0 and below 1, got {skip}.")
    if x.shape[-1] != attention.in_features:
        raise InvalidInput(
            f"tokens are {x.shape[-1]} wide, but the attention takes {attention.in_features}: "
            f"x has shape {tuple(x.shape)}, expected (…, n, {attention.in_features})."
        )
    for name, tensor in attention.named_buffers():
        if tensor.is_floating_point() and not name.startswith("logit_biases"):
            check_finite(tensor, name.replace("_", " "))
    dtype = torch.promote_types(torch.promote_types(x.dtype, attention.dtype), torch.float32)
    with torch.no_grad():
        operator, sharpen = _operator(attention, x, dtype, per_head, reduced, memory, skip)
        if dtype == torch.float32 and _needs_float64(operator, sharpen):
            operator, _ = _operator(attention, x, torch.float64, per_head, reduced, memory, skip)
    if operator.blur > MOST_BLUR:
        raise InvalidInput(
            f"the attention logits are so large that {str(operator.dtype).removeprefix('torch.')} moves them by "
            f"{operator.blur:.1g}: scale the input or the weights down."
        )
    if operator.mixing.streamed:
        give_back()
    return operator


@full_precision
@torch.no_grad()
def unbounded_jacobian(attention: AttentionMap, x: Tensor, memory: int) -> AttentionJacobian:
    """The Jacobian of a block in the dtype of x, with no bound on its rounding: for who measures that otherwise."""
    tokens = x.detach().reshape(-1, *x.shape[-2:])
    attention.terms.check(x.shape[-2], attention.heads, len(tokens))
    point = EvaluationPoint.at(attention, tokens, x.dtype, errors=False)
    mixing = Mixing.at(attention, point, x.dtype, memory, moments=False)
    return AttentionJacobian(mixing, point.chains, BlockProjection.of(attention, x.dtype), x.shape[:-2], None)


def _operator(
    attention: AttentionMap,
    x: Tensor,
    dtype: torch.dtype,
    per_head: bool,
    reduced: bool,
    memory: int,
    skip: float,
) -> tuple[AttentionJacobian, Callable[[], None]]:
    """The operator, and how to bound its rounding more sharply, where that is worth some products."""
    tokens = x.detach().reshape(-1, *x.shape[-2:])
    batch, n, _ = tokens.shape
    attention.terms.check(n, attention.heads, batch)
    point = EvaluationPoint.at(attention, tokens, dtype)
    mixing = (sized_mixing if skip else Mixing.at)(attention, point, dtype, memory)
    projection: Projection
    if per_head:
        projection = HeadProjection.of(attention, batch, reduced, dtype)
        shape = torch.Size([*x.shape[:-2], attention.heads])
    else:
        projection, shape = BlockProjection.of(attention, dtype), x.shape[:-2]
    whole = operator = AttentionJacobian(mixing, point.chains, projection, shape, None).arranged()
    if skip:
        whole.norms = path_norms(attention, point)
        operator = thinned(whole, skip, memory)

    known = WeightNorms(attention, dtype)

    def bound_rounding(moments: Moments | None, together: bool = False) -> None:
        for op in (whole, operator) if skip else (whole,):  # the weights may be sharper in one of them
            seen = replace(op.mixing, moments=moments)
            op.rounding = Noise.of(attention, point, seen, by_head=per_head, known=known, together=together)
            op.noise = op._of_maps(op.rounding.along("all"))

    bound_rounding(mixing.moments)
    return operator, lambda: bound_rounding(sharp_moments(mixing) if skip else mixing.moments, together=True)


def _needs_float64(operator: AttentionJacobian, sharpen: Callable[[], None]) -> bool:
    """Whether float32 cannot resolve the logits, or leaves more noise than `MOST_NOISE` of some map."""
    if operator.blur > MOST_BLUR:
        return True
    size = (operator if operator.whole is None else operator.whole).least.to(operator.device)

    def quiet() -> bool:
        return bool((operator.noise <= MOST_NOISE * size).all())

    if quiet():
        return False
    v = random_like(torch.empty(*operator.batch_shape, *operator.in_shape, dtype=operator.dtype)).to(operator.device)
    for look in range(_LOOKS):
        moved = operator.matvec(v)
        v = operator.rmatvec(moved)
        lengths = [torch.linalg.vector_norm(t.double(), dim=(-2, -1)) for t in (moved, v)]
        size = torch.maximum(size, torch.where(lengths[0] > 0, lengths[1] / lengths[0], 0.0))
        v = (v / lengths[1].clamp_min(torch.finfo(v.dtype).tiny)[..., None, None]).to(v.dtype)
        if not quiet() and look == 0:
            sharpen()
        if quiet():
            return False
    return True
