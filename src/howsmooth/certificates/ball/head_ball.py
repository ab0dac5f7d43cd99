"""The Jacobian of heads with linear queries, keys and values on a ball, and its change from the input.

Notation: |x_j − x⁰_j| ≤ ε_j, ε their maximum, A the matrix of the logits, t_ij = M^kᵀ_j q⁰_i, b_ij = M^qᵀ_i(k⁰_j −
c_i), u_ij = W(v⁰_j − o⁰_i); P̌ ≤ P ≤ P̂ and |P − P⁰| ≤ D entry by entry; ℓ_i and α_i bound the standard deviations of
values and of keys in the query's coordinates; s_i ≥ |Δo_i| and r_i ≥ |Δc_i| bound the shifts of their means. Every
ingredient is raised by a bound on its rounding error (`howsmooth.bounds.point_error`).

Proof: docs/theory/certificates-ball.md, section "One head".
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from howsmooth.bounds.own.three_path import (
    TINY,
    diagonal_norm,
    key_weights,
    nonnegative_norm,
    nowhere_nan,
    perron_weights,
    psd_norm,
    push_radii,
    root,
    spread_norm,
)
from howsmooth.bounds.point_error import gamma
from howsmooth.bounds.three_paths import Paths, distances, mixed_pairs
from howsmooth.certificates.ball.leave_one_out import LEFT, Others
from howsmooth.certificates.ball.norm_of_partitioned_sum import norm_apart
from howsmooth.certificates.ball.weight_boxes import largest_mean
from howsmooth.certificates.ball.weight_perturbation import Step, Tilts, exponential_mean
from howsmooth.certificates.point.proved_eigenvalue import largest_eigenvalues

_POWERS = (0.5, 0.75, 1.0)
"""Of the key weights that are tried, beside none."""
_SINKS = (1, 2, 4)
"""How many of the tokens that are looked at most are taken one by one."""
_TWISTED = 128
"""Most tokens for which the Hadamard products of `weight_perturbation` are formed: n matrices of n rows a head."""
_LARGE = 20.0
"""A tilt by which no mean is followed: its deviation on the whole ball is less."""


class HeadBall:
    """A group of heads on a ball, every ingredient of the module raised by what rounding may have done."""

    def __init__(self, group: Paths, moves: Tensor, value: Tensor, score: Tensor):
        self.group, self.moves, self.value, self.score = group, moves, value, score
        self.eps = float(moves.max())
        radii, width = group.radii, group.pull.shape[-1]
        self.gain = torch.ones_like(radii.pull) if group.pull_map is None else group.pull_map.norm(dim=(-2, -1))
        self.mean_key = group.weights @ group.pull
        away, most = 2 * group.pull.norm(dim=-1).amax(-1, keepdim=True), 2 * radii.pull.amax(-1, keepdim=True)
        wrong = torch.expm1(radii.weights) + gamma(len(moves) + 2 * width)  # of a mean, relative to the distances
        self.key_radius = self.gain * (most + wrong * away) + radii.pull_map * (away + most)
        self.keys_apart = group.pull_distances(self.mean_key) + self.key_radius[..., None]
        far = distances(group.mean, group.value)
        self.value_radius = 2 * radii.value.amax(-1, keepdim=True) + wrong * far.amax(-1)
        self.values_apart = far + self.value_radius[..., None]
        self.push = group.push_lengths() + push_radii(group)
        both = moves[:, None] * moves * score[:, None, None]
        own, keys = moves[:, None] * self.keys_apart, moves * self.push + both
        off, lean = radii.weights[..., None], moves * self._here_lean
        self.tilts = Tilts(group.scores, group.upper_weights, off, own, keys, lean)
        self.high, self.low = self.tilts.high(), self.tilts.low()
        change = torch.maximum(self.high - group.weights, group.weights - self.low).clamp_min(0.0)
        self.change_of_weights = change + torch.expm1(radii.weights)[..., None] * group.weights
        self.tilt = self.tilts.tilt

    def change(self) -> Tensor:
        """‖J − J⁰‖ on the ball, ``(g,)``."""
        values, keys, queries = self.blocks_change
        columns = values.norm(dim=-2) + self._cross(keys.square()) + queries.norm(dim=-2)
        blocks, own, found = values + keys * self.push + queries, self._diagonal_change, []
        for count in (0, *(c for c in _SINKS if c <= self.sinks.shape[-1])):
            sinks = torch.zeros_like(columns, dtype=torch.bool).scatter(-1, self.sinks[:, :count], True)
            kept = (~sinks)[:, None].to(columns)
            rest = torch.minimum(self._tokens_change(kept), nonnegative_norm(blocks * kept))
            parts = torch.where(sinks, columns, 0.0), torch.where(sinks, own, 0.0)
            others = rest[:, None], own.masked_fill(sinks, 0.0).amax(-1, keepdim=True)
            found.append(norm_apart(*(torch.cat(pair, -1) for pair in zip(parts, others, strict=True))))
        return nowhere_nan(torch.stack(found).amin(0) * self.group.allowance)

    @cached_property
    def sinks(self) -> Tensor:
        """The tokens that are looked at most, ``(g, 4)``, or all but one of them."""
        order = self.group.weights.sum(-2).argsort(-1, descending=True)
        return order[:, : min(_SINKS[-1], order.shape[-1] - 1)]

    def others(self, keys: Tensor) -> Others:
        """All tokens but one of every head, ``keys (g,)``."""
        tilted = self._tilted(torch.ones_like(self.tilt))
        return Others.than(keys, self.group, self.moves, tilted, self.key_radius, self._key_moment)

    def _tokens_change(self, kept: Tensor) -> Tensor:
        """How far the paths of values and keys can move for inputs of these tokens, ``(g, 1, n) → (g,)``."""
        d, high = self.change_of_weights * kept, self.high * kept
        norm = self.weights_move(kept)
        queries = self.score * self.eps * root((high * self.spread.square()[..., None]).sum(-2).amax(-1))
        return norm * self.value + self._cross_change(d, high, self.group.weights * kept, kept) + queries

    def weights_move(self, kept: Tensor) -> Tensor:
        """≥ ‖P − P⁰‖ on the columns of these tokens, ``(g, 1, n) → (g,)``."""
        d, one = self.change_of_weights * kept, torch.ones_like(self.tilt)
        sizes = self.tilts.own_move(one) + self._tilted(one)
        rows = root((self.tilts.high(0.0) * kept * sizes.square()[..., None]).sum(-2).amax(-1))
        schur = root(d.sum(-1).amax(-1) * d.sum(-2).amax(-1))
        return torch.stack([nonnegative_norm(d), schur, nowhere_nan(rows)]).amin(0)

    @cached_property
    def blocks_change(self) -> tuple[Tensor, Tensor, Tensor]:
        """How far the blocks of values and keys can move, key by key, ``(g, n, n)`` each; in the second: times t_ij."""
        d, high, (most, shift, left) = self.change_of_weights, self.high, self.products
        others = self._tilted(self._here_spread)[..., None] / left.sqrt()
        others = others + (self._still_spread * self.moves * self._still_lean)[..., None] / (1 - high).clamp_min(LEFT)
        others = torch.minimum(others, self._others_move(left))
        plain = d * self.values_apart + high * self.drift[..., None]
        sharper = shift * self.values_apart / left + most * others
        moved = torch.where(sharper < plain, sharper, plain)  # the sharper one is no number where a weight is 1
        for keys in self.sinks.unbind(-1):
            at, apart = keys[:, None, None].expand(-1, moved.shape[-2], 1), self.others(keys)
            mean = most.gather(-1, at) * (apart.size * self._value_moment(apart.loads, apart.centres).sqrt())[..., None]
            least = (shift * self.values_apart / left).gather(-1, at) + mean
            moved = moved.scatter(-1, at, torch.fmin(moved.gather(-1, at), least))
        known, unknown = self.asked_change
        own = 2 * most * self.value[:, None, None] * self.eps
        return d * self.value[:, None, None], moved + own, known * self.values_apart + unknown

    @cached_property
    def asked_change(self) -> tuple[Tensor, Tensor]:
        """What the queries' own move does in the blocks of the keys, ``(g, n, n)`` each: the first times u_ij at most,
        and besides no more than the second in any direction."""
        turn, own = self.score[:, None, None] * self.eps, 2 * self.products[0] * self.value[:, None, None] * self.eps
        return turn * self.high, turn * (self.high * self.drift[..., None] + own)

    @cached_property
    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        """The largest P(1 − P), its largest change, and the smallest 1 − P⁰, ``(g, n, n)`` each."""
        group, low, high = self.group, self.low, self.high
        here, ends = group.weights, torch.stack([low * (1 - low), high * (1 - high)])
        most = torch.where((low <= 0.5) & (high >= 0.5), 0.25, ends.amax(0))
        product = here * (1 - here)
        shift = torch.maximum(most - product, product - ends.amin(0)).clamp_min(0.0)
        shift = shift + 2 * torch.expm1(group.radii.weights)[..., None] * here
        return most, shift, (1 - group.upper_weights).clamp_min(LEFT)  # where it is less, shift ÷ left is beyond use

    def directed_change(self, key: int) -> tuple[Tensor, Others]:
        r"""Where the blocks of one key can move, values fixed: times :math:`t_{ij}`, at most the first, ``(g, n)``,
        along :math:`u_{ij}`, and besides :math:`\sum_lλ_{il}^{1/2}(v_l-c_i)ξ_l` with the loads λ, the points c and the
        bound on |ξ| of the second (`howsmooth.certificates.ball.leave_one_out`)."""
        most, shift, left = (part[..., key] for part in self.products)
        others = self.others(torch.full_like(self.group.heads, key))
        sharper, spread = shift / left, most * others.size
        change, high, before = self.change_of_weights[..., key], self.high[..., key], self.tilts.high(0.0)
        one = torch.ones_like(self.tilt)
        plain = high * (self._tilted(one) + self.tilts.own_move(one))
        apart, whole = self.values_apart[..., key], self._value_moment(before).sqrt()
        away = self._value_moment(others.loads, others.centres).sqrt()
        less = sharper * apart + spread * away < change * apart + plain * whole
        pick = less[..., None]
        loads, centres = torch.where(pick, others.loads, before), torch.where(pick, others.centres, self.group.mean)
        return torch.where(less, sharper, change), Others(loads, centres, torch.where(less, spread, plain))

    def _others_move(self, left: Tensor) -> Tensor:
        """How far the mean value of all tokens but j can move, by the bounds of `weight_perturbation` in turn."""
        before = self.tilts.high(0.0)
        keys = self._tilted(self._value_moment(before).sqrt())[..., None] / (1 - before).clamp_min(LEFT).sqrt()
        own = self._here_spread * self.tilts.lean * exponential_mean(2 * self.tilts.most)
        return keys + own[..., None] / left

    def rows(self) -> Tensor:
        """‖J‖ on the ball, ``(g,)``."""
        norm = torch.minimum(nonnegative_norm(self.high), self.high.sum(-2).amax(-1).sqrt())
        diagonal = (self.spread * self.lean).amax(-1)
        from_input = diagonal_norm(self.group) + self._diagonal_change.amax(-1)
        bound = norm * self.value + torch.minimum(diagonal, from_input) + self._cross_on_ball()
        return nowhere_nan(bound * self.group.allowance)

    @cached_property
    def spread(self) -> Tensor:
        """ℓ_i: the standard deviation of values in any direction, over the ball."""
        return self._still_spread + self.value[:, None] * self.eps

    @cached_property
    def lean(self) -> Tensor:
        """α_i: that of keys as queries feel them."""
        return self._still_lean + self.score[:, None] * self.eps

    @cached_property
    def _still_spread(self) -> Tensor:
        """ℓ_i of the values at the input, under all weights on the ball."""
        farthest = largest_mean(self.values_apart.square(), self.low, self.high)
        return root(torch.minimum(self._value_moment(self.high), farthest))

    @cached_property
    def _still_lean(self) -> Tensor:
        farthest = largest_mean(self.keys_apart.square(), self.low, self.high)
        return root(torch.minimum(self._key_moment(self.high), farthest))

    @cached_property
    def _here_spread(self) -> Tensor:
        """ℓ⁰_i: that at the input."""
        return self._value_moment(self.group.upper_weights).sqrt()

    @cached_property
    def _here_lean(self) -> Tensor:
        """α⁰_i, likewise of keys."""
        return self._key_moment(self.group.upper_weights).sqrt()

    @cached_property
    def steps(self) -> list[Step]:
        """The tilts of all rows, for values at the input."""
        drift = self.tilts.own_move(self._here_spread)
        own = self.tilts.own_step(self._value_moment, drift, self._twisted(drift))
        return [own, *self.tilts.key_steps(self._value_moment)]

    def _twisted(self, drift: Tensor) -> Tensor:
        """≥ ‖[M^½β(u − ū)]‖ of `howsmooth.certificates.ball.weight_perturbation`, ``(g, n)``."""
        mixed = self.tilts.mixed
        if mixed.shape[-1] > _TWISTED:
            return torch.full_like(drift, torch.inf)
        values, keys, roots = self.apart(), self.pulled(), root(mixed)
        grams = (values @ values.mT) * (keys @ keys.mT) * (roots[..., None] * roots[..., None, :])
        trace = (mixed * (self.values_apart * self.keys_apart).square()).sum(-1)
        top = largest_eigenvalues(grams) + gamma(16 * sum(keys.shape[-2:])) * trace
        off = self.value_radius[..., None] * self.keys_apart
        off = root((mixed * (off + self.key_radius[..., None] * self.values_apart).square()).sum(-1))
        return nowhere_nan(self.moves * (root(top) + off + 0.5 * drift * self._key_moment(mixed).sqrt()))

    def apart(self, centres: Tensor | None = None) -> Tensor:
        """u_ij, ``(g, n, n, m)``; about other centres, when they are given."""
        return self.group.value[:, None] - (self.group.mean if centres is None else centres)[:, :, None]

    def pulled(self) -> Tensor:
        """b_ij, ``(g, n, n, r)``."""
        apart, maps = self.group.pull[:, None] - self.mean_key[:, :, None], self.group.pull_map
        return apart if maps is None else apart @ maps

    @cached_property
    def drift(self) -> Tensor:
        """s_i ≥ |Δo_i|: how far the mean of the values at the input can move with the weights, ``(g, n)``."""
        tilted = torch.minimum(self._tilted(self._here_spread), self._still_spread * self.tilt)
        plain = tilted + self._still_spread * self.moves * self._still_lean
        own = self.tilts.own_move(self._here_spread)
        return torch.minimum(plain, own + self._tilted(self._value_moment(self.tilts.high(0.0)).sqrt()))

    @cached_property
    def _key_drift(self) -> Tensor:
        """r_i ≥ |Δc_i|, likewise for keys."""
        tilted = torch.minimum(self._tilted(self._here_lean), self._still_lean * self.tilt)
        plain = tilted + self.moves * self._still_lean.square()
        own = self.tilts.own_move(self._here_lean)
        return torch.minimum(plain, own + self._tilted(self._key_moment(self.tilts.high(0.0)).sqrt()))

    def _tilted(self, deviation: Tensor) -> Tensor:
        """How far keys that move can shift a mean, from its deviation at the input."""
        return torch.where(self.tilt < _LARGE, deviation * torch.sinh(self.tilt.clamp_max(_LARGE)), torch.inf)

    @cached_property
    def _diagonal_change(self) -> Tensor:
        """How far the block of every query can move, ``(g, n)``."""
        d, eps, value, score = self.change_of_weights, self.eps, self.value[:, None], self.score[:, None]
        odds = _bounded(self.keys_apart) / _bounded(self.values_apart)
        products = [self._value_moment(d * w) * self._key_moment(d / w) for w in (odds**p for p in (0.0, 0.5, 1.0))]
        apart = root(torch.stack(products).amin(0)) + self.drift * self._key_drift
        steps = torch.stack([step.factor * self._key_moment(step.mixed).sqrt() for step in self.steps]).sum(0)
        return eps * (value * self.lean + self._still_spread * score) + torch.minimum(apart, 2 * steps)

    def _cross_change(self, d: Tensor, high: Tensor, here: Tensor, kept: Tensor) -> Tensor:
        """How far the path of the keys can move, queries fixed, ``(g,)``."""
        weighted, near = [nonnegative_norm(d * self.values_apart * self.push)], _bounded(self.values_apart).rsqrt()
        for keys in (*self._key_weights(d), torch.ones_like(d)):
            for weights in (keys.expand_as(d), keys * near):
                loads = self._value_moment(d * weights)[..., None] / weights
                weighted.append(self._cross(d * loads).amax(-1))
        values = self.value[:, None] * self.eps
        apart = self._cross(high * values[..., None] ** 2).amax(-1) + self._mean_change(d, here)
        together = self._cross(high * (values + self.drift)[..., None] ** 2).amax(-1)
        plain = torch.stack(weighted).amin(0) + torch.minimum(apart, together)
        return torch.minimum(plain, self._cross(high * values[..., None] ** 2).amax(-1) + self._stepped(kept))

    def _stepped(self, kept: Tensor) -> Tensor:
        """The same, values fixed too, by the steps of `howsmooth.certificates.ball.weight_perturbation`."""
        steps = (self._cross(step.mixed * kept * (2 * step.factor)[..., None] ** 2) for step in self.steps)
        return torch.stack([step.amax(-1) for step in steps]).sum(0)

    def _mean_change(self, d: Tensor, here: Tensor) -> Tensor:
        """‖Y ↦ [Δo_i Σ_j P_ij t_ij·y_j]_i‖, ``(g,)``."""
        group, drift = self.group, self.drift[..., None]
        if group.push_map is not None:
            return torch.full_like(self.value, torch.inf)
        weights, push = here * drift, group.push
        size = (weights.square().sum(-1) * self.push[..., 0].square()).sum(-1)  # ≥ the trace, which rounding goes by
        gram = (weights @ weights.mT) * (push @ push.mT)
        top = largest_eigenvalues(gram) + gamma(16 * sum(push.shape[1:])) * size
        off = torch.expm1(group.radii.weights)[..., None] * self.push + push_radii(group)
        return root(top) + nonnegative_norm(weights * off) + nonnegative_norm(d * drift * self.push)

    def _cross_on_ball(self) -> Tensor:
        """The path of the keys on the ball, ``(g,)``."""
        high, found = self.high, []
        moved = 2 * self.value[:, None] * self.eps + self.drift
        for weights in (torch.ones_like(high), *self._key_weights(high)):
            spread = self._value_moment(high * weights).sqrt()
            spread = spread + moved * root((high * weights).sum(-1).clamp_max(1.0))
            loads = high * torch.minimum(spread, self.spread).square()[..., None] / weights
            found.append((self._cross(loads) + self.score[:, None] * self.eps * root(loads.sum(-2))).amax(-1))
        return torch.stack(found).amin(0)

    def _key_weights(self, loads: Tensor) -> list[Tensor]:
        """Weights τ_j ≤ 1 for every row to try, ``(g, 1, n)``: of the head at the input, and of these loads."""
        own = perron_weights(loads * self.values_apart.square(), loads * self.push.square())[:, None]
        here = key_weights(self.group)[:, None]
        return [weights**power for weights in (own, here) for power in _POWERS]

    def _value_moment(self, weights: Tensor, centres: Tensor | None = None) -> Tensor:
        group, mass = self.group, root(weights.sum(-1))
        size = root(spread_norm(weights, group.value, group.mean if centres is None else centres))
        return (size + self.value_radius * mass).square()

    def _key_moment(self, weights: Tensor, centres: Tensor | None = None, radius: Tensor | None = None) -> Tensor:
        group, mass = self.group, root(weights.sum(-1))
        centres, radius = (self.mean_key, self.key_radius) if centres is None or radius is None else (centres, radius)
        size = root(spread_norm(weights, group.pull, centres, group.pull_map))
        if group.pull_map is not None:  # a product of three matrices is known to within the product of their norms
            wide = root(spread_norm(weights, group.pull, centres))
            size = size + gamma(4 * group.pull.shape[-1]) ** 0.5 * self.gain * wide
        return (size + radius * mass).square()

    def _cross(self, loads: Tensor) -> Tensor:
        """(‖Σ_i loads_ij t_ij t_ijᵀ‖)^½ for every key j, ``(g, n)``."""
        group, width = self.group, self.group.push.shape[-1]
        queries = mixed_pairs(loads.mT, group.push, group.push)
        off = root((loads * push_radii(group).square()).sum(-2))
        if group.push_map is not None:
            lengths = root(queries.diagonal(dim1=-2, dim2=-1).sum(-1))
            off = off + gamma(4 * width) ** 0.5 * group.push_map.norm(dim=(-2, -1)) * lengths
            queries = group.push_map.mT @ queries @ group.push_map
        return psd_norm(queries).sqrt() + off


def _bounded(distances: Tensor) -> Tensor:
    """Distances kept away from zero, to divide by."""
    return distances + 1e-3 * distances.amax(-1, keepdim=True) + TINY
