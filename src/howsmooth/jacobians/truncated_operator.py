"""Jacobians of attention without the tiles of the smallest weights, beside the exact ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth.attention.attention_map import AttentionMap
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import (
    DEFAULT_MEMORY,
    AttentionJacobian,
    Path,
    check_logits,
    dtype_of_products,
    resolved_in_float32,
)
from howsmooth.jacobians.dropped_tiles import DroppedTiles, TileSizes, sharp_moments, sized_mixing
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, random_input
from howsmooth.jacobians.product_error import PathErrors, Rounding, per_map
from howsmooth.jacobians.softmax_products import EvaluationPoint

_FIRST_SHARE, _POWER_STEPS = 0.1, 2
_WORTH, _LITTLE = 0.5, 1e-4
_SMALLER_SHARES, _MORE_TILES = (0.05, 0.1), 1.5


class _RemainingTiles(AttentionJacobian):
    """The Jacobian without the dropped tiles; its rows come from products alone."""

    _has_blocks = False


@dataclass(frozen=True, eq=False, repr=False)
class Truncated(JacobianOperator):
    """The Jacobian of an attention map without some tiles, near the exact one: ‖exact − cheap‖ ≤ error for every map.

    Its products are those of ``cheap``, and its accuracy includes ``error``. `howsmooth.norms.norm_choice` finds the
    norm of ``exact`` from it. Build it with `truncated_jacobian`.

    Attributes:
        error, lower: an upper bound on the norm of the difference, and a lower one on the norm of the exact map, of
            every map, ``batch_shape``, float64 on the CPU.
        start: approximate right singular vectors, ``batch_shape + in_shape``; None where none are known.
        sizes: bounds on every tile of the exact map.
        norms: N_q, N_k, N_v of `dropped_tiles` and ‖W_O‖, ``(4, maps)``.
        dropped: bounds on the dropped tiles.
    """

    exact: AttentionJacobian
    cheap: AttentionJacobian
    error: Tensor
    lower: Tensor
    start: Tensor | None
    sizes: TileSizes
    norms: Tensor
    dropped: DroppedTiles

    @classmethod
    def without(
        cls, exact: AttentionJacobian, dropped: Tensor, sizes: TileSizes, norms: Tensor, memory: int
    ) -> Truncated:
        """The exact operator and the one without some tiles, with a bound on their difference."""
        bounds = sizes.bounds_of(dropped, len(exact.mixing.query))
        mixing = sizes.without(exact.mixing, dropped, memory)
        cheap = _RemainingTiles(mixing, exact.chains, exact.projection, exact.batch_shape, exact.errors, exact.path)
        error = _error(exact, norms, bounds)
        return cls(exact, cheap, error, torch.zeros_like(error), None, sizes, norms, bounds)

    def __post_init__(self) -> None:
        self._take_after(self.cheap)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (
            f"{100 * self.dropped.share:.0f} % of the tiles of attention weights were left out: the ends allow "
            f"for what is missing, of norm {float(self.error.max()):.1e} at most",
        )

    @cached_property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        product = torch.as_tensor(self.cheap.accuracy.product, dtype=torch.float64).cpu() + self.error
        return replace(self.cheap.accuracy, product=product, alignment=1.0)

    def matvec(self, v: Tensor) -> Tensor:
        return self.cheap.matvec(v)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.cheap.rmatvec(u)

    @full_precision
    @torch.no_grad()
    def matvec_within(self, v: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        """J v of the exact maps with errors of at most ``limit``, and bounds on them, float64 of the batch shape."""
        query, key, value = self.exact.tangents(v)
        widest = self.norms[3].to(value)[:, None, None]
        dropped, error = self.sizes.droppable_forward((query, key, widest * value), self._for_heads(limit))
        part = replace(self.exact, mixing=self.sizes.without(self.exact.mixing, dropped))
        return part.combined(query, key, value), self._of_heads(error)

    @full_precision
    @torch.no_grad()
    def rmatvec_within(self, u: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Jᵀ u, likewise."""
        each = u.reshape(-1, *self.out_shape).repeat_interleave(self.exact.heads_per_map, dim=0)
        dropped, error = self.sizes.droppable_backward(each, self.norms[:3], self._for_heads(limit))
        part = replace(self.exact, mixing=self.sizes.without(self.exact.mixing, dropped))
        return part.rmatvec(u), self._of_heads(error)

    def _for_heads(self, limit: Tensor) -> Tensor:
        """A bound for every map as one for each of its heads, whose errors add up."""
        heads = self.exact.heads_per_map
        return (limit.reshape(-1, 1) / heads).expand(-1, heads).reshape(-1)

    def _of_heads(self, errors: Tensor) -> Tensor:
        return errors.reshape(*self.batch_shape, -1).sum(-1)

    def size(self) -> Tensor:
        return self.cheap.size() + self.error

    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor | None:
        return self.exact.value_at(f, x)

    def lift_in(self, v: Tensor) -> Tensor:
        return self.cheap.lift_in(v)

    def lift_out(self, u: Tensor) -> Tensor:
        return self.cheap.lift_out(u)

    def along(self, path: Path) -> Truncated:
        """The same operators restricted to one path."""
        exact, cheap = self.exact.along(path), self.cheap.along(path)
        error = _error(exact, self.norms, self.dropped)
        return replace(self, exact=exact, cheap=cheap, error=error, lower=torch.zeros_like(error), start=None)

    def subset(self, index: Tensor) -> Truncated:
        error, lower = (t.reshape(-1)[index.cpu()] for t in (self.error, self.lower))
        start = None if self.start is None else self.start.reshape(-1, *self.in_shape)[index]
        maps = self.exact.projection.maps_of(index).cpu()
        dropped = replace(self.dropped, bounds=self.dropped.bounds[:, maps])
        exact, cheap = self.exact.subset(index), self.cheap.subset(index)
        return Truncated(exact, cheap, error, lower, start, self.sizes.select(maps), self.norms[:, maps], dropped)


def _error(exact: AttentionJacobian, norms: Tensor, dropped: DroppedTiles) -> Tensor:
    """A bound on the norm of the dropped part along the path of the operator; the errors of heads add up."""
    query, key, value = math.sqrt(exact.heads_per_map) * norms[:3] * dropped.bounds
    return exact.of_maps(PathErrors(query + key, value).along(exact.path))


@full_precision
def truncated_jacobian(
    attention: AttentionMap,
    x: Tensor,
    skip: float,
    *,
    per_head: bool = False,
    reduced: bool = False,
    memory: int = DEFAULT_MEMORY,
) -> Truncated:
    """The Jacobian of an attention map at x without its smallest tiles, beside the exact one.

    Args:
        skip: the tiles of smallest weight are dropped as long as the bound on their part of the map stays below about
            this share of the norm.
        per_head, reduced, memory: as in `attention_jacobian`.
    """
    if not 0 <= skip < 1:
        raise InvalidInput(f"skip is a share of the norm, at least 0 and below 1, got {skip}.")
    dtype = dtype_of_products(attention, x)

    def build(dtype: torch.dtype) -> tuple[Truncated, Rounding]:
        point = EvaluationPoint.at(attention, x, dtype)
        mixing, sizes = sized_mixing(point, memory)
        exact = AttentionJacobian.of(point, mixing, x.shape[:-2], per_head, reduced)
        operator = _truncated(exact, sizes, path_norms(point), skip, memory)
        rounding = Rounding(point)
        # Fewer tiles make shorter sums: the bounds are sharper without the dropped ones.
        exact, cheap = operator.exact.bounded(rounding), operator.cheap.bounded(rounding)
        return replace(operator, exact=exact, cheap=cheap), rounding

    with torch.no_grad():
        operator, rounding = build(dtype)
        if dtype == torch.float32:
            moments = cache(partial(sharp_moments, operator.exact.mixing))

            def sharpened(one: AttentionJacobian = operator.cheap) -> AttentionJacobian:
                return one.bounded(rounding, moments(), together=True)

            cheap = resolved_in_float32(operator.cheap, sharpened, operator.lower)
            if cheap is None:
                operator = build(torch.float64)[0]
            elif cheap is not operator.cheap:
                operator = replace(operator, exact=sharpened(operator.exact), cheap=cheap)
    check_logits(operator.cheap)
    return operator


def path_norms(point: EvaluationPoint) -> Tensor:
    """N_q, N_k, N_v of `dropped_tiles` and ‖W_O‖, ``(4, maps)``: exact norms of the projections."""
    attention = point.attention
    norms = [torch.linalg.matrix_norm(weight.double(), 2) for weight in attention.input_weights]
    norms = [per_map(norm, size, attention) * size for norm, size in zip(norms, point.sizes, strict=True)]
    out = per_map(torch.linalg.matrix_norm(attention.output_weight.double(), 2), norms[2], attention)
    return torch.stack([*norms[:2], norms[2] * out, out]).cpu()


def _truncated(exact: AttentionJacobian, sizes: TileSizes, norms: Tensor, skip: float, memory: int) -> Truncated:
    """The Jacobian without the smallest tiles: those that together are at most about ``skip`` of its norm.

    Where these are few, products without them are no cheaper, and only so few are dropped that both ends may move by
    their size. The norm is bounded from below by a few products without the tiles within a tenth of the bound for all.
    """
    maps, path = len(exact.mixing.query), norms[:3]
    every = (path * sizes.bounds_of(torch.ones(sizes.sizes.shape[1], dtype=torch.bool), maps).bounds).sum(0)
    rough = Truncated.without(exact, sizes.smallest_within(path, _FIRST_SHARE * every), sizes, norms, memory)
    lower, start = power_iteration(rough.cheap, _POWER_STEPS)
    budget = rough._for_heads(lower)
    dropped = _smallest_for_norm(sizes, path, budget, skip)
    if bool(dropped.double().mean() < _WORTH):
        dropped = sizes.smallest_within(path, min(skip, _LITTLE) * budget)
    del rough
    return replace(Truncated.without(exact, dropped, sizes, norms, memory), lower=lower, start=start)


def _smallest_for_norm(sizes: TileSizes, norms: Tensor, budget: Tensor, skip: float) -> Tensor:
    """The tiles within a share of the norms, or a smaller one where few more remain: the bound is sharper then."""
    dropped = sizes.smallest_within(norms, skip * budget)
    for share in (share for share in _SMALLER_SHARES if share < skip):
        fewer = sizes.smallest_within(norms, share * budget)
        if (~fewer).sum() <= _MORE_TILES * (~dropped).sum() and fewer.double().mean() >= _WORTH:
            return fewer
    return dropped


def power_iteration(operator: JacobianOperator, steps: int) -> tuple[Tensor, Tensor]:
    """A lower bound on the norm of every map, float64 on the CPU, and the vectors reached, after some steps."""
    v = random_input(operator)
    for _ in range(steps):
        u = operator.matvec(v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True))
        v = operator.rmatvec(u)
    before, after = (torch.linalg.vector_norm(t, dim=(-2, -1)).double().cpu() for t in (u, v))
    return torch.where(before > 0, after / before, 0.0), v
