r"""The output error of every head under rounded keys or values: the change itself, its first order, and a proved bound.

For one query let P be the weights, v_j the values, o = Σ_j P_j v_j, all multiplied by the head's output matrix.
Rounding moves values by δv_j and logits by e_j = s̃_j − s_j; put Δ = (max e − min e)/2 over the keys the query sees.

**Values**: |õ − o| = |Σ_j P_j δv_j| ≤ Σ_j P_j |δv_j|; and over all queries ‖Õ − O‖_F ≤ ‖P‖₂ ‖δV‖_F.

**Keys, tanh form**: TV(P, P̃) ≤ tanh(Δ/2), hence |õ − o| ≤ tanh(Δ/2)·diam{v_j}.
*Proof.* P̃_j/P_j = e^{e_j}/E_P e^{e} has a ratio of at most e^{2Δ} between its largest and least value. Let A be the
event P̃ > P and p = P(A), a ≥ 1 ≥ b the means of the likelihood ratio on A and off it: pa + (1 − p)b = 1 and
a ≤ e^{2Δ}b. TV = p(a − 1) is largest for a = e^{2Δ}b: p(1 − p)(r − 1)/(pr + 1 − p), r = e^{2Δ}, whose maximum over p is
(√r − 1)/(√r + 1) = tanh(Δ/2). A difference of two distributions moves mass TV over at most the diameter. ∎

**Keys, path form**: with λ = ‖Cov_P(v)‖ and a = max e − E_P e, |õ − o| ≤ ((e^a − 1)/a) √λ sd_P(e).
*Proof.* Along P^t ∝ P e^{te}, d/dt E_t v = Cov_t(v, e), at most ‖Cov_t(v)‖^½ sd_t(e). Both are second moments about
their own means, so below those about o and E_P e; and P^t_j/P_j = e^{te_j}/E_P e^{te} ≤ e^{t(e_j − E_P e)} ≤ e^{ta} by
Jensen. So the integrand is at most e^{ta} √λ sd_P(e), and ∫₀¹ e^{ta} dt = (e^a − 1)/a. ∎
This is the cross score path of the three-path bound in the direction of the error itself; its first order is exact up
to Cauchy–Schwarz. A soft-cap only enters through e.

The least of the forms is the bound, for every query by itself. All of it is float64, whose own rounding is allowed for:
in e by the lengths of queries and keys and the biases, in a covariance by the second moments it is a difference of, and
in the change, a difference of two outputs, by 4(n + 8)ε·max|v_j|. Without the last, values that are all the same (a
text of one word) would have a bound of 0 and a change of 10⁻¹⁵.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import validated
from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import plain_map
from howsmooth.attention.masks import HIDDEN
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import cached_jacobian
from howsmooth.models import CapturedSite
from howsmooth.rounding.kv_cache import PARTS, Cache
from howsmooth.rounding.number_formats import Format

_EPS = float(torch.finfo(torch.float64).eps)
_ALLOWANCE = 1e-9
"""Relative, on bounds: thousands of float64 roundings."""
_CHUNK = 64


@dataclass(frozen=True)
class OutputErrors:
    """Per part (key, value), format and head, ``(2, formats, heads)``: root mean squares over the tokens of a window.

    Attributes:
        actual: the change of the head's output, its output matrix included.
        predicted: the same to first order.
        tanh, path: the two forms of the proved bound (of values: query by query, and ‖P‖₂‖δV‖_F).
        proved: the least of them, query by query; an upper end of ``actual`` whose guarantee is ``proved_holds``.
        size: of the output itself, ``(heads,)``.
    """

    actual: Tensor
    predicted: Tensor
    tanh: Tensor
    path: Tensor
    proved: Tensor
    size: Tensor
    proved_holds: ClassVar[Guarantee] = Guarantee.PROVED


@validated
@torch.no_grad()
def output_errors(site: CapturedSite, formats: Sequence[Format]) -> OutputErrors:
    """The three errors of a captured attention block."""
    return output_errors_at(plain_map(site.attention, "rounding"), site.x, formats, site.layer)


@validated
@torch.no_grad()
def output_errors_at(attention: AttentionMap, x: Tensor, formats: Sequence[Format], layer: int = 0) -> OutputErrors:
    """The three errors of dot-product attention at tokens ``(n, d)``.

    >>> import howsmooth as hs
    >>> from howsmooth.rounding import parse_formats
    >>> x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    >>> changes = output_errors_at(hs.SelfAttention.random(8, heads=2, mask="causal"), x, parse_formats("int8,int4"))
    >>> bool((changes.proved >= changes.actual).all()), tuple(changes.predicted.shape)
    (True, (2, 2, 2))
    """
    if not formats:
        raise InvalidInput("name at least one format.")
    cache = Cache.at(attention, x, layer)
    weights, value = cache.weights(cache.key), cache.shared(cache.value) @ cache.output
    output = weights @ value
    reach = _Reach.of(cache, weights, value, output)
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for part in PARTS:
        operator = cached_jacobian(attention, x, "keys" if part == "key" else "values", per_head=True)
        held = cache.key if part == "key" else cache.value
        for form in formats:
            moved = cache.shared(cache.rounded(part, form) - held)
            if part == "key":
                change = cache.weights(held + moved[:: cache.group]) @ value - output
                tanh, path = reach.of_keys(cache, moved)
                proved = torch.minimum(tanh, path)
            else:
                change = weights @ (moved @ cache.output)
                tanh, path = reach.of_values(moved @ cache.output)
                # the second form bounds the window, not each query
                proved = torch.where(_mean(tanh) <= _mean(path), tanh.mT, path.mT).mT
            predicted = operator.matvec(moved).double().norm(dim=-1)
            sizes = {
                "actual": change.norm(dim=-1),
                "predicted": predicted,
                "tanh": tanh,
                "path": path,
                "proved": proved,
            }
            for name, per_query in sizes.items():
                rows[name].append(_mean(per_query))
    shaped = {name: torch.stack(row).unflatten(0, (len(PARTS), len(formats))) for name, row in rows.items()}
    return OutputErrors(**shaped, size=_mean(output.norm(dim=-1)))


def _mean(per_query: Tensor) -> Tensor:
    """The root mean square over queries."""
    return per_query.square().mean(-1).sqrt()


@dataclass(frozen=True)
class _Reach:
    """The quantities of a head that the bounds share, whatever is rounded: ``(heads, n)`` and ``(heads, n, n)``."""

    weights: Tensor
    seen: Tensor
    diameter: Tensor
    spread: Tensor
    norm: Tensor
    blur: Tensor

    @classmethod
    def of(cls, cache: Cache, weights: Tensor, value: Tensor, output: Tensor) -> _Reach:
        seen = (cache.bias != HIDDEN).expand_as(weights)
        spread = torch.stack([_spread(*head) for head in zip(weights, value, output, strict=True)])
        columns, rows = weights.sum(-2).amax(-1), weights.sum(-1).amax(-1)
        blur = 4 * (weights.shape[-1] + 8) * _EPS * value.norm(dim=-1).amax(-1)[:, None]
        return cls(weights, seen, _diameters(value, seen, cache.causal), spread, (columns * rows).sqrt(), blur)

    def of_keys(self, cache: Cache, moved: Tensor) -> tuple[Tensor, Tensor]:
        """The two bounds for keys that have moved, ``(heads, n)`` each."""
        key = cache.shared(cache.key)
        error = cache.logits((key + moved)[:: cache.group]) - cache.logits(cache.key)
        query, before, after = (t.norm(dim=-1).amax(-1) for t in (cache.query, key, key + moved))
        bias = cache.bias.expand_as(error).masked_fill(self.weights == 0, 0.0).abs().amax((-2, -1))
        slack = (8 * (cache.query.shape[-1] + 8) * _EPS * (query * (before + after) + bias))[:, None]
        high = error.masked_fill(~self.seen, -torch.inf).amax(-1)
        low = error.masked_fill(~self.seen, torch.inf).amin(-1)
        blind = ~self.seen.any(-1)
        half = ((high - low) / 2).masked_fill(blind, 0.0) + slack
        centre = (self.weights * error).sum(-1, keepdim=True)
        deviation = (self.weights * (error - centre).square()).sum(-1).sqrt() + slack
        above = (high - centre.squeeze(-1)).masked_fill(blind, 0.0).clamp_min(0.0) + slack
        grown = torch.where(above > 0, torch.expm1(above) / above, 1.0)
        path = (grown * self.spread * deviation).nan_to_num(nan=torch.inf)  # ∞·0: errors of thousands on equal values
        tanh = torch.tanh(half / 2) * self.diameter
        return self._allowed(tanh) + self.blur, self._allowed(path) + self.blur

    def of_values(self, moved: Tensor) -> tuple[Tensor, Tensor]:
        """The bound for every query, and the one for all of them, spread evenly over the queries."""
        each = (self.weights @ moved.norm(dim=-1)[..., None]).squeeze(-1)
        whole = self.norm * moved.norm(dim=(-2, -1)) / moved.shape[-2] ** 0.5
        return self._allowed(each), self._allowed(whole[:, None].expand_as(each))

    def _allowed(self, bound: Tensor) -> Tensor:
        return bound * (1 + _ALLOWANCE)


def _spread(weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """√‖Cov_{P_i}(v)‖ for every query of one head, ``(n,)``: ‖C‖ ≤ ‖C²‖_F^½, above it by at most rank^¼."""
    width = value.shape[-1]
    pairs = (value[:, :, None] * value[:, None, :]).flatten(1)
    spreads = []
    for rows, centre in zip(weights.split(_CHUNK), output.split(_CHUNK), strict=True):
        second = (rows @ pairs).unflatten(-1, (width, width))
        covariance = second - centre[:, :, None] * centre[:, None, :]
        slack = 8 * _EPS * (width + weights.shape[-1]) * second.diagonal(dim1=-2, dim2=-1).sum(-1)
        spreads.append(((covariance @ covariance).norm(dim=(-2, -1)).sqrt() + slack).sqrt())
    return torch.cat(spreads)


def _diameters(value: Tensor, seen: Tensor, causal: bool) -> Tensor:
    """The diameter of the values that every query sees, ``(heads, n)``; of all values where masks are not causal."""
    apart = torch.cdist(value, value, compute_mode="donot_use_mm_for_euclid_dist")
    if not causal:
        return apart.amax((-2, -1))[:, None].expand(seen.shape[:-1])
    return apart.tril().amax(-1).cummax(-1).values
