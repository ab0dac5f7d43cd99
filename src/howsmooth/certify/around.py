r"""The constant of a head on a ball around an input: the least of three proofs.

For all X with :math:`|x_j - x^0_j| \le ε_j` (0 for tokens that stay); linear queries, keys and values, any mask, bias,
grouped heads, rotary positions (other maps: `howsmooth.certify.curved`). The notation is that of
`howsmooth.bounds.neighbourhood`: logits of row i move, up to a shift of the row, by at most :math:`δ_{ij} =
ε_i|M^{q\top}_i(k_j-c_i)| + ε_j|M^{k\top}_jq_i| + ε_iε_j\|A\|`, and softmax is monotone in each logit, so its extremes
over the box are at corners: :math:`\check P_{ij} \le P_{ij} \le \hat P_{ij}`.

**Three paths** (`howsmooth.bounds.neighbourhood.three_path_ball`).

**Rows stay distributions.** The same, with second moments as maxima of :math:`\sum_jp_j|a_j|^2` over all p with
:math:`\check P_i \le p \le \hat P_i`, Σp = 1: the floor, and the rest of the mass given to the farthest first.

**From the input.** :math:`\|J\| \le \|J^0\| + \|J - J^0\|` with a proved value of the first
(`howsmooth.certify.at_point`), so that the bound tends to it as ε → 0. Let :math:`D_{ij} = \max(\hat P_{ij} - P^0_{ij},
P^0_{ij} - \check P_{ij})`, :math:`a_{ij} = W(v^0_j - o^0_i)`, :math:`b_{ij} = M^{q\top}_i(k^0_j - c_i)`, ε the largest
ε_j,
and ℓ, α as in the three paths: bounds on the standard deviations of values and keys over the ball.

- Values: :math:`\|(P-P^0)\otimes V\| \le \|D\|\,\|V\|`.
- Queries: :math:`\mathrm{Cov}_P(v,k) - \mathrm{Cov}_{P^0}(v^0,k^0) = \mathrm{Cov}_P(Vδ,k) + \mathrm{Cov}_P(v^0,Kδ) +
  \sum_j(P-P^0)_{ij}a_jb_j^\top - (o_P-o^0)(c_P-c^0)^\top`, of norm at most :math:`\|V\|εα_i + ℓ_i\|A\|ε +
  \|\sum_jD_{ij}aa^\top\|^{1/2}\|\sum_jD_{ij}bb^\top\|^{1/2} + (\sum_jD_{ij}|a_{ij}|)(\sum_jD_{ij}|b_{ij}|)`.
- Keys: row i maps :math:`z_j = t_{ij}\cdot y_j`, :math:`t_{ij} = M^{k\top}_jq_i`, to :math:`\mathrm{Cov}_{P_i}(v, z)`.
  The
  queries' own move costs :math:`\|A\|ε(\max_j\sum_i\hat P_{ij}ℓ_i^2)^{1/2}`, the values' move
  :math:`|\mathrm{Cov}_P(Vδ,z)| \le \|V\|ε(\sum_j\hat P_{ij}z_j^2)^{1/2}`. The rest does not see a shift of z; with
  :math:`z' = z - E_{P^0}z` it is :math:`\sum_j(P-P^0)_ja_jz'_j - (\sum_j(P-P^0)_ja_j)(\sum_j(P-P^0)_jz'_j)`, and by
  Cauchy–Schwarz with weights P⁰ at most :math:`λ_i^{1/2}(\sum_jP^0_{ij}z_j^2)^{1/2}`, :math:`λ_i^{1/2} =
  \|\sum_jD_{ij}^2/P^0_{ij}\,aa^\top\|^{1/2}\,(1 + (\sum_jD_{ij}^2/P^0_{ij})^{1/2})`. Squares summed over i, as in the
  three-path bound, are at most :math:`\max_j\|\sum_i ω_{ij}λ_it_{ij}t_{ij}^\top\||Y|^2` for weights ω = P⁰ or P̂. ∎
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.positions import Rotary
from howsmooth.attention.stages import Scale
from howsmooth.bounds import TokenSet, head_numbers
from howsmooth.bounds.heads import norm_rounding
from howsmooth.bounds.own.neighbourhood import softmax_ceiling, three_path_ball
from howsmooth.bounds.own.three_path import nonnegative_norm, nowhere_nan, psd_norm, push_radii, spread_norm
from howsmooth.bounds.paths import Paths, distances, mixed_pairs, paths
from howsmooth.bounds.rounding import gamma
from howsmooth.certify.at_point import Enclosure, enclose_block, enclose_heads
from howsmooth.certify.curved import curved_bound
from howsmooth.certify.rows import largest_mean
from howsmooth.checks import check_count


def enclose_heads_around(
    attention: AttentionMap, x: Tensor, moves: Tensor, here: list[Enclosure] | None = None
) -> list[Enclosure]:
    """Every head over all inputs whose token j is within ``moves[j]`` of x's; the lower end is at x.

    ``here`` are the enclosures at x itself, where they are known.
    """
    here = enclose_heads(attention, x) if here is None else here
    if _is_curved(attention):
        bounds = curved_bound(attention, x, moves).tolist()
        return [
            Enclosure(head.lower, max(upper, head.upper), "curved paths")
            for head, upper in zip(here, bounds, strict=True)
        ]
    change, rows = _bounds(attention, x, moves)
    candidates = {
        "from the input": torch.tensor([head.upper for head in here], dtype=torch.float64) + change,
        "rows stay distributions": rows,
        "three paths": three_path_ball(attention, x, float(moves.max())),
    }
    least, which = torch.stack(list(candidates.values())).min(0)
    return [
        Enclosure(head.lower, max(float(upper), head.upper), list(candidates)[int(index)])
        for head, upper, index in zip(here, least, which, strict=True)
    ]


def enclose_block_around(attention: AttentionMap, x: Tensor, moves: Tensor) -> Enclosure:
    """The whole map likewise: its own value at x plus the changes of all heads, or the sum of the heads, if less."""
    if attention.heads == 1:
        return enclose_heads_around(attention, x, moves)[0]
    heads, block = enclose_heads_around(attention, x, moves), enclose_block(attention, x)
    raised = 1 + gamma(len(heads) + 2)
    change = torch.inf if _is_curved(attention) else float(_bounds(attention, x, moves)[0].sum())
    together, apart = (block.upper + change) * raised, sum(head.upper for head in heads) * raised
    if together <= apart:
        return Enclosure(block.lower, together, "from the input")
    return Enclosure(
        block.lower, max(apart, block.upper), "sum of heads: " + ", ".join(sorted({h.method for h in heads}))
    )


def _bounds(attention: AttentionMap, x: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    """‖J − J⁰‖ and ‖J‖ on the ball for every head, ``(heads,)`` each."""
    unit = TokenSet.ball(1.0, attention.in_features)
    numbers, lost = head_numbers(attention, unit, n=len(x)), norm_rounding(attention, True)
    value, score = numbers.value + lost[0], numbers.score + lost[1]
    by_group, first = [], 0
    for group in paths(attention, x):
        heads = slice(first, first := first + len(group.value))
        ball = _Ball(group, moves.double(), value[heads], score[heads])
        by_group.append((ball.change(), ball.rows()))
    change, rows = (torch.cat(parts) for parts in zip(*by_group, strict=True))
    return change, rows


def _is_curved(attention: AttentionMap) -> bool:
    """Whether queries, keys or values are not linear, logits capped, or weights no distributions."""
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    linear = all(isinstance(stage, Scale | Rotary) for stage in stages)
    return attention.kind != "dot_product" or attention.softcap is not None or not linear


class _Ball:
    """The ingredients of the module for a group of heads, every one raised by what rounding may have done."""

    def __init__(self, group: Paths, moves: Tensor, value: Tensor, score: Tensor):
        self.group, self.value, self.score = group, value, score
        self.eps = float(moves.max())
        radii, width = group.radii, group.pull.shape[-1]
        self.gain = torch.ones_like(radii.pull) if group.pull_map is None else group.pull_map.norm(dim=(-2, -1))
        self.mean_key = group.weights @ group.pull
        away, most = 2 * group.pull.norm(dim=-1).amax(-1, keepdim=True), radii.pull.amax(-1, keepdim=True)
        self.key_radius = self.gain * (most + gamma(width) * away) + radii.pull_map * (away + most)
        self.keys_apart = group.pull_distances(self.mean_key) + self.key_radius[..., None]
        self.values_apart = distances(group.mean, group.value) + radii.value.amax(-1)[:, None, None]
        push = group.push_lengths() + push_radii(group)
        moved = moves[:, None] * self.keys_apart + moves * push + moves[:, None] * moves * score[:, None, None]
        moved = moved + radii.weights[..., None]
        self.high, self.low = softmax_ceiling(group.scores, moved), softmax_ceiling(group.scores, -moved)
        change = torch.maximum(self.high - group.weights, group.weights - self.low).clamp_min(0.0)
        self.change_of_weights = change + torch.expm1(radii.weights)[..., None] * group.weights

    def change(self) -> Tensor:
        """‖J − J⁰‖ on the ball, ``(g,)``."""
        group, d, eps, value, score = self.group, self.change_of_weights, self.eps, self.value, self.score
        norm = torch.minimum(nonnegative_norm(d), (d.sum(-1).amax(-1) * d.sum(-2).amax(-1)).sqrt())
        a_moment, b_moment = self._value_moment(d), self._key_moment(d)
        a_mean, b_mean = (d * self.values_apart).sum(-1), (d * self.keys_apart).sum(-1)
        spread, lean = self._spread(), self._lean()
        diagonal = (
            eps * (value[:, None] * lean + spread * score[:, None]) + (a_moment * b_moment).sqrt() + a_mean * b_mean
        )
        relative = torch.where(d > 0, d.square() / group.weights, 0.0)
        shifted = self._value_moment(relative) * (1 + relative.sum(-1).sqrt()).square()
        cross = self._cross(group.weights * torch.exp(group.radii.weights)[..., None] * shifted[..., None]).amax(-1)
        cross = cross + eps * value * self._cross(self.high).amax(-1)
        loads = (self.high * spread.square()[..., None]).sum(-2).amax(-1)
        bound = norm * value + diagonal.amax(-1) + cross + score * eps * loads.sqrt()
        return nowhere_nan(bound * group.allowance)

    def rows(self) -> Tensor:
        """‖J‖ on the ball, ``(g,)``."""
        norm = torch.minimum(nonnegative_norm(self.high), self.high.sum(-2).amax(-1).sqrt())
        spread, lean = self._spread(), self._lean()
        loads = self.high * spread.square()[..., None]
        cross = self._cross(loads) + self.score[:, None] * self.eps * loads.sum(-2).sqrt()
        return nowhere_nan((norm * self.value + (spread * lean).amax(-1) + cross.amax(-1)) * self.group.allowance)

    def _spread(self) -> Tensor:
        """ℓ_i: the standard deviation of values in any direction, over the ball."""
        moment = torch.minimum(
            self._value_moment(self.high), largest_mean(self.values_apart.square(), self.low, self.high)
        )
        return moment.sqrt() + self.value[:, None] * self.eps

    def _lean(self) -> Tensor:
        """α_i: that of keys as queries feel them."""
        moment = torch.minimum(self._key_moment(self.high), largest_mean(self.keys_apart.square(), self.low, self.high))
        return moment.sqrt() + self.score[:, None] * self.eps

    def _value_moment(self, weights: Tensor) -> Tensor:
        group, mass = self.group, weights.sum(-1)
        root = spread_norm(weights, group.value, group.mean).sqrt()
        return (root + group.radii.value.amax(-1, keepdim=True) * mass.sqrt()).square()

    def _key_moment(self, weights: Tensor) -> Tensor:
        group, mass = self.group, weights.sum(-1)
        root = spread_norm(weights, group.pull, self.mean_key, group.pull_map).sqrt()
        if group.pull_map is not None:  # a product of three matrices is known to within the product of their norms
            wide = spread_norm(weights, group.pull, self.mean_key).sqrt()
            root = root + gamma(4 * group.pull.shape[-1]) ** 0.5 * self.gain * wide
        return (root + self.key_radius * mass.sqrt()).square()

    def _cross(self, loads: Tensor) -> Tensor:
        """(‖Σ_i loads_ij t_ij t_ijᵀ‖)^½ for every key j, ``(g, n)``."""
        group, width = self.group, self.group.push.shape[-1]
        queries = mixed_pairs(loads.mT, group.push, group.push)
        off = (loads * push_radii(group).square()).sum(-2).sqrt()
        if group.push_map is not None:
            lengths = queries.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
            off = off + gamma(4 * width) ** 0.5 * group.push_map.norm(dim=(-2, -1)) * lengths
            queries = group.push_map.mT @ queries @ group.push_map
        return psd_norm(queries).sqrt() + off


def move_radii(n: int, radius: float, tokens: Sequence[int] | None) -> Tensor:
    """How far every token may move, ``(n,)``: all by the radius, or only those named.

    >>> move_radii(3, 0.5, [1])
    tensor([0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if tokens is None:
        return torch.full((n,), radius, dtype=torch.float64)
    moves = torch.zeros(n, dtype=torch.float64)
    for token in tokens:
        moves[check_count(token, "tokens", least=0, most=n - 1)] = radius
    return moves
