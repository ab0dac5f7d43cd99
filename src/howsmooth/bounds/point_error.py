r"""Rounding errors of float64 on the way to a bound at an input: an error radius around each computed value.

With the unit roundoff :math:`u = 2^{-53}` and :math:`\gamma_m = mu/(1-mu)`, a sum of m products is computed to within
:math:`\gamma_m` times the sum of their absolute values (Higham 2002, *Accuracy and Stability of Numerical Algorithms*,
Lemma 3.1 and Section 3.1). Inputs and weights count as exact. From there:

* *Projections* :math:`Wx + b`: every coordinate to within :math:`\gamma_{d+1}(|W||x| + |b|)`.
* *Stages*: the error going in times the derivative between the two points, plus the rounding of the stage itself
  (`through`). The derivative moves by the error going in times the second derivative.
* *Logits*: with radii :math:`e^q, e^k`, to within :math:`\beta_{ij} = |q_i|\cdot(e^k_j + \gamma_k|k_j|) +
  e^q_i\cdot(|k_j| + e^k_j) + 4u(|s_{ij}| + |q_i\cdot k_j|)`; a soft-cap is 1-Lipschitz.
* *Weights*: softmax moves by at most :math:`e^{\pm2\beta_i}`, :math:`\beta_i = \max_j\beta_{ij}`, when its logits move
  by :math:`\beta_{ij}`; sigmoid and its derivative by :math:`e^{\pm\beta_i}`, the slope of a soft-cap c by
  :math:`e^{\pm2\beta_i/c}`. Evaluating them adds :math:`\gamma_{n+1600}`: arguments of exp beyond −745 vanish, smaller
  ones are rounded by 745u. So the true weights lie within :math:`e^{\pm\omega_i}` of the computed ones.
* *Triangular factors*: R of a d × k matrix W belongs exactly to :math:`W + E`,
  :math:`\|E\|_F \le \gamma_{8dk}\|W\|_F` (Higham, Theorem 19.4; 8 covers its small constant).

What follows from the radii is in `howsmooth.bounds.three_paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap, Rotary, UnitNorm
from howsmooth.attention.dot_product_map import _DistanceKey, _DistanceQuery
from howsmooth.attention.stages import Behind, Scale, TokenStage
from howsmooth.errors import DoesNotApply
from howsmooth.numerics.roundoff import UNIT, gamma

_EVALUATION = 1600
"""Roundings in one weight besides its sum: 745 in the argument of exp, twice, and a few in exp and the quotient."""
LARGEST_EXPONENT = 700.0
"""e^{ω} beyond which every weight that is seen is taken to be as large as weights can be."""


@dataclass(frozen=True)
class Traced:
    """Tokens on their way through the stages of a head, with what rounding may have done so far.

    Attributes:
        at: as computed, ``(g, n, k)``. error: radius of every coordinate, likewise.
        slope: ≥ the norm of the derivative of the stages, ``(g, n)``. lean: how far off that derivative may be.
    """

    at: Tensor
    error: Tensor
    slope: Tensor
    lean: Tensor

    @property
    def radius(self) -> Tensor:
        """The 2-norm of the error of each token, ``(g, n)``."""
        return self.error.norm(dim=-1)

    def map_radius(self, weight: Tensor, rounding: float) -> Tensor:
        """An error bound of derivative @ weight, ``(g, n)``, for an error ``rounding``·‖weight‖_F of the weight."""
        k = self.at.shape[-1]
        return (self.lean + self.slope * (gamma(4 * k**1.5) + rounding)) * weight.norm(dim=(-2, -1))[:, None]


def projected(attention: AttentionMap, tokens: Tensor, raw: Sequence[Tensor]) -> list[Traced]:
    """Queries, keys and values before their stages, ``(batch·heads, n, ·)``, with the rounding of the projection."""
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    biases = (attention.query_bias, attention.key_bias, attention.value_bias)
    traced = []
    for weight, bias, at in zip(weights, biases, raw, strict=True):
        sizes = tokens.abs()[:, None] @ weight.abs().mT
        sizes = attention.per_head(sizes if bias is None else sizes + bias.abs()[:, None], dim=1).flatten(0, 1)
        one = torch.ones_like(at[..., 0])
        traced.append(Traced(at, gamma(tokens.shape[-1] + 1) * sizes, one, torch.zeros_like(one)))
    return traced


def known_rounding(attention: AttentionMap) -> bool:
    """Whether `through` knows every stage of the map."""
    query, key, _ = attention.project(torch.zeros(1, 1, attention.in_features, dtype=attention.dtype))
    every = [stage for stages in attention.stages(query[0], key[0]) for stage in stages]
    return all(isinstance(stage.stage if isinstance(stage, Behind) else stage, tuple(_RULES)) for stage in every)


def through(stages: Sequence[TokenStage], traced: Traced) -> Traced:
    """The same after the stages; a stage whose rounding is not known here is refused."""
    for stage in stages:
        rule = next((rule for kind, rule in _RULES.items() if isinstance(stage, kind)), None)
        if rule is None:
            raise DoesNotApply(
                f"no bound at an input can be proved here: the rounding of {type(stage).__name__} is not known, see "
                "howsmooth.bounds.point_error."
            )
        traced = rule(traced, stage(traced.at), stage)
    return traced


def _scaled(before: Traced, after: Tensor, stage: Scale | _DistanceQuery, times: float = 1.0) -> Traced:
    factor = times * abs(stage.factor)
    lean = factor * (before.lean + 4 * UNIT * before.slope)
    return Traced(after, factor * before.error + 4 * UNIT * after.abs(), factor * before.slope, lean)


def _doubled(before: Traced, after: Tensor, stage: _DistanceQuery) -> Traced:
    """(2q, −r)/s."""
    moved = _scaled(before, after[..., :-1], stage, 2.0)
    return replace(moved, at=after, error=torch.cat([moved.error, UNIT * after[..., -1:].abs()], -1))


def _turned(before: Traced, after: Tensor, stage: Rotary) -> Traced:
    """A rotation by angles tω, each computed to within 2u|tω|."""
    places = before.at.shape[-2] if stage.positions is None else float(stage.positions.abs().max())
    rounding = gamma(8) + 2 * UNIT * places * float(stage.frequencies.abs().max())
    size = max(1.0, abs(stage.amplitude))
    pairs = len(stage.frequencies)

    def both(x: Tensor) -> Tensor:
        """|a| + |b| in the place of either coordinate of a pair."""
        shape, axis = ((pairs, 2), -1) if stage.interleaved else ((2, pairs), -2)
        pair = x[..., : 2 * pairs].abs().unflatten(-1, shape)
        return torch.cat([pair.sum(axis, keepdim=True).expand_as(pair).flatten(-2), x[..., 2 * pairs :].abs()], dim=-1)

    error = size * (both(before.error) + rounding * both(before.at))
    return Traced(after, error, size * before.slope, size * (before.lean + 2 * rounding * before.slope))


def _normed(before: Traced, after: Tensor, stage: UnitNorm) -> Traced:
    r"""c·g∘x/√(|x|²+ε): with :math:`h = (|x|^2+\varepsilon)^{-1/2}` its derivative is ≤ c·h, its second ≤ 6c·h²."""
    gain = abs(stage.length) * (1.0 if stage.gain is None else float(stage.gain.abs().max()))
    k = before.at.shape[-1]
    nearest = (before.at.norm(dim=-1) * (1 - gamma(k + 4)) - before.radius).clamp(min=0)
    steep = (nearest.square() + stage.eps).rsqrt()
    moved = torch.minimum(before.radius * steep, torch.full_like(steep, 2.0)) * gain
    bent = gain * (6 * before.radius * steep.square() + gamma(2 * k + 16) * steep)
    error, lean = moved[..., None] + gamma(k + 8) * after.abs(), before.lean * gain * steep + before.slope * bent
    return Traced(after, error, before.slope * gain * steep, lean)


def _squared(before: Traced, after: Tensor, stage: _DistanceKey) -> Traced:
    """(k, |k|²) with k the key less a centre; the derivative of the last coordinate is 2k."""
    key = after[..., :-1].abs()
    error = before.error + UNIT * key
    last = (error * (2 * key + error)).sum(-1, keepdim=True) + gamma(key.shape[-1] + 2) * after[..., -1:]
    steep = (1 + 4 * (key + error).square().sum(-1)).sqrt()
    bent = 2 * error.norm(dim=-1) + gamma(key.shape[-1] + 8) * steep
    return Traced(after, torch.cat([error, last], -1), before.slope * steep, before.lean * steep + before.slope * bent)


def _behind(before: Traced, after: Tensor, stage: Behind) -> Traced:
    """Tokens of zeros before the others, which stay so exactly."""
    first = stage.first
    moved = through([stage.stage], Traced(*(t[:, first:] for t in vars(before).values())))
    return Traced(*(torch.cat([t.new_zeros(len(t), first, *t.shape[2:]), t], dim=1) for t in vars(moved).values()))


_RULES: dict[type[TokenStage], Callable[..., Traced]] = {
    Scale: _scaled,
    Rotary: _turned,
    UnitNorm: _normed,
    _DistanceQuery: _doubled,
    _DistanceKey: _squared,
    Behind: _behind,
}
"""Kind of stage → what it does to tokens and their radii."""


def logit_radius(query: Traced, key: Traced, dots: Tensor, scores: Tensor) -> Tensor:
    """β_i: by how much any logit of a row that is seen may be off, ``(g, n)``; dots are the q·k, scores the logits."""
    width = query.at.shape[-1]
    sizes = key.at.abs()
    apart = query.at.abs() @ (key.error + gamma(width) * sizes).mT + query.error @ (sizes + key.error).mT
    apart = apart + 4 * UNIT * (scores.abs() + dots.abs())
    return apart.masked_fill(scores == float("-inf"), 0.0).amax(-1).nan_to_num(nan=torch.inf)


def weight_radii(logits: Tensor, n: int, softmax: bool, softcap: float | None) -> tuple[Tensor, Tensor]:
    """ω of the weights and of their slopes, from the radius of the logits; each ``(g, n)``."""
    weights = (2 if softmax else 1) * logits + gamma(n + _EVALUATION)
    slopes = weights if softcap is None else weights + 2 * logits / softcap + gamma(16)
    return weights.clamp(max=LARGEST_EXPONENT), slopes.clamp(max=LARGEST_EXPONENT)


@dataclass(frozen=True)
class Radii:
    """Error radii of the values in `howsmooth.bounds.three_paths.Paths`.

    Attributes:
        weights, slopes: ω, the true ones lie within e^{±ω} of those computed, ``(g, n)``.
        value, pull, push: of every vector, in the 2-norm, ``(g, n)``.
        value_map, pull_map, push_map: of every matrix, in the 2-norm, ``(g, n)``; zero where there is no matrix.
    """

    weights: Tensor
    slopes: Tensor
    value: Tensor
    pull: Tensor
    push: Tensor
    value_map: Tensor
    pull_map: Tensor
    push_map: Tensor
