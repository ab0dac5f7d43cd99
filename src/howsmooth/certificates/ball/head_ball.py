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

from howsmooth.bounds.point_bounds import (
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
    top,
)
from howsmooth.bounds.three_paths import Paths, distances, mixed_pairs
from howsmooth.certificates.ball.weight_perturbation import (
    MIN_REMAINDER,
    LeaveOneOut,
    PerturbationStep,
    WeightPerturbation,
    exponential_mean,
    largest_mean,
)
from howsmooth.numerics.roundoff import gamma

_POWERS = (0.5, 0.75, 1.0)
"""Powers of the key weights to try, beside none."""
_SINKS = (1, 2, 4)
"""Numbers of sinks to bound one by one."""
_HADAMARD_LIMIT = 128
"""Maximum number of tokens for which Hadamard products are formed: n matrices of n rows a head."""
_MAX_SHIFT = 20.0
"""Shifts κ above this give no bound on a mean: its deviation on the whole ball is smaller."""
_STEPS = 30
"""Steps towards better λ and μ."""


class HeadGeometry:
    """A group of heads at the input: distances and second moments, raised by bounds on their rounding errors.

    Attributes:
        key_distances: ≥ |b_ij|. value_distances: ≥ |u_ij|. push_lengths: ≥ |t_ij|. key_radius, value_radius: bounds on
            the rounding errors of b_ij and u_ij, ``(g, n)``.
    """

    def __init__(self, group: Paths):
        self.group, n, radii, width = group, group.weights.shape[-1], group.radii, group.pull.shape[-1]
        self.gain = torch.ones_like(radii.pull) if group.pull_map is None else group.pull_map.norm(dim=(-2, -1))
        self.mean_key = group.weights @ group.pull
        longest, error = 2 * group.pull.norm(dim=-1).amax(-1, keepdim=True), 2 * radii.pull.amax(-1, keepdim=True)
        mean_error = torch.expm1(radii.weights) + gamma(n + 2 * width)  # relative to the distances
        self.key_radius = self.gain * (error + mean_error * longest) + radii.pull_map * (longest + error)
        self.key_distances = group.pull_distances(self.mean_key) + self.key_radius[..., None]
        between = distances(group.mean, group.value)
        self.value_radius = 2 * radii.value.amax(-1, keepdim=True) + mean_error * between.amax(-1)
        self.value_distances = between + self.value_radius[..., None]
        self.push_lengths = group.push_lengths() + push_radii(group)

    @cached_property
    def sinks(self) -> Tensor:
        """The tokens with the largest column sums of weights, ``(g, 4)``, or all but one of them."""
        order = self.group.weights.sum(-2).argsort(-1, descending=True)
        return order[:, : min(_SINKS[-1], order.shape[-1] - 1)]

    def centred_values(self, centres: Tensor | None = None) -> Tensor:
        """u_ij, ``(g, n, n, m)``, or values about other centres."""
        return self.group.value[:, None] - (self.group.mean if centres is None else centres)[:, :, None]

    def centred_keys(self) -> Tensor:
        """b_ij, ``(g, n, n, r)``."""
        apart, maps = self.group.pull[:, None] - self.mean_key[:, :, None], self.group.pull_map
        return apart if maps is None else apart @ maps

    def value_moment(self, weights: Tensor, centres: Tensor | None = None) -> Tensor:
        """≥ ‖Σ_j w_ij u_ij u_ijᵀ‖, ``(g, n)``."""
        group, mass = self.group, root(weights.sum(-1))
        size = root(spread_norm(weights, group.value, group.mean if centres is None else centres))
        return (size + self.value_radius * mass).square()

    def key_moment(self, weights: Tensor, centres: Tensor | None = None, radius: Tensor | None = None) -> Tensor:
        """≥ ‖Σ_j w_ij b_ij b_ijᵀ‖, ``(g, n)``."""
        group, mass = self.group, root(weights.sum(-1))
        centres, radius = (self.mean_key, self.key_radius) if centres is None or radius is None else (centres, radius)
        size = root(spread_norm(weights, group.pull, centres, group.pull_map))
        if group.pull_map is not None:  # a product of three matrices is known to within the product of their norms
            wide = root(spread_norm(weights, group.pull, centres))
            size = size + gamma(4 * group.pull.shape[-1]) ** 0.5 * self.gain * wide
        return (size + radius * mass).square()

    def key_norms(self, loads: Tensor) -> Tensor:
        """≥ ‖Σ_i loads_ij t_ij t_ijᵀ‖^½ for every key j, ``(g, n)``."""
        group, width = self.group, self.group.push.shape[-1]
        queries = mixed_pairs(loads.mT, group.push, group.push)
        off = root((loads * push_radii(group).square()).sum(-2))
        if group.push_map is not None:
            lengths = root(queries.diagonal(dim1=-2, dim2=-1).sum(-1))
            off = off + gamma(4 * width) ** 0.5 * group.push_map.norm(dim=(-2, -1)) * lengths
            queries = group.push_map.mT @ queries @ group.push_map
        return psd_norm(queries).sqrt() + off

    @cached_property
    def input_value_deviation(self) -> Tensor:
        """ℓ⁰_i, at the input."""
        return self.value_moment(self.group.upper_weights).sqrt()

    @cached_property
    def input_key_deviation(self) -> Tensor:
        """α⁰_i, at the input."""
        return self.key_moment(self.group.upper_weights).sqrt()


class PerturbedHeads(HeadGeometry):
    """A group of heads on a ball: the weights of its rows, and means and deviations under them.

    Attributes:
        moves: ε_j. value, score: ≥ ‖V‖ and ≥ ‖A‖ of every head, ``(g,)``.
        upper_weights, lower_weights: P̂ and P̌. weight_change: D.
    """

    def __init__(self, group: Paths, moves: Tensor, value: Tensor, score: Tensor):
        super().__init__(group)
        self.moves, self.value, self.score = moves, value, score
        self.eps, radius = float(moves.max()), group.radii.weights
        both = moves[:, None] * moves * score[:, None, None]
        self.perturbation = WeightPerturbation(
            group.scores,
            group.upper_weights,
            logit_error=radius[..., None],
            query_shifts=moves[:, None] * self.key_distances,
            key_shifts=moves * self.push_lengths + both,
            query_deviation=moves * self.input_key_deviation,
        )
        self.upper_weights, self.lower_weights = self.perturbation.upper(), self.perturbation.lower()
        change = torch.maximum(self.upper_weights - group.weights, group.weights - self.lower_weights).clamp_min(0.0)
        self.weight_change = change + torch.expm1(radius)[..., None] * group.weights

    def weight_matrix_change(self, mask: Tensor) -> Tensor:
        """≥ ‖P − P⁰‖ on the columns of these tokens, ``(g, 1, n) → (g,)``."""
        d, sizes = self.weight_change * mask, self._unit_mean_shift
        rows = root((self.perturbation.upper(0.0) * mask * sizes.square()[..., None]).sum(-2).amax(-1))
        schur = root(d.sum(-1).amax(-1) * d.sum(-2).amax(-1))
        return torch.stack([nonnegative_norm(d), schur, nowhere_nan(rows)]).amin(0)

    @cached_property
    def _unit_mean_shift(self) -> Tensor:
        """≥ the shift of a mean of deviation 1, ``(g, n)``."""
        one = torch.ones_like(self.perturbation.max_key_shift)
        return self.perturbation.mean_shift_by_query(one) + self.mean_shift_by_keys(one)

    @cached_property
    def weight_variances(self) -> tuple[Tensor, Tensor, Tensor]:
        """≥ P(1 − P), ≥ its change, and ≤ 1 − P⁰, ``(g, n, n)`` each."""
        group, lower, upper = self.group, self.lower_weights, self.upper_weights
        here, ends = group.weights, torch.stack([lower * (1 - lower), upper * (1 - upper)])
        largest = torch.where((lower <= 0.5) & (upper >= 0.5), 0.25, ends.amax(0))
        product = here * (1 - here)
        shift = torch.maximum(largest - product, product - ends.amin(0)).clamp_min(0.0)
        shift = shift + 2 * torch.expm1(group.radii.weights)[..., None] * here
        return largest, shift, (1 - group.upper_weights).clamp_min(MIN_REMAINDER)  # below, shift ÷ it is beyond use

    @cached_property
    def value_deviation(self) -> Tensor:
        """ℓ_i ≥ the standard deviation of values in any direction, over the ball."""
        return self.fixed_value_deviation + self.value[:, None] * self.eps

    @cached_property
    def key_deviation(self) -> Tensor:
        """α_i ≥ that of keys in the query's coordinates."""
        return self.fixed_key_deviation + self.score[:, None] * self.eps

    @cached_property
    def fixed_value_deviation(self) -> Tensor:
        """ℓ_i of the values at the input, under all weights on the ball."""
        farthest = largest_mean(self.value_distances.square(), self.lower_weights, self.upper_weights)
        return root(torch.minimum(self.value_moment(self.upper_weights), farthest))

    @cached_property
    def fixed_key_deviation(self) -> Tensor:
        farthest = largest_mean(self.key_distances.square(), self.lower_weights, self.upper_weights)
        return root(torch.minimum(self.key_moment(self.upper_weights), farthest))

    def mean_shift_by_keys(self, deviation: Tensor) -> Tensor:
        """≥ the shift of a mean of this deviation by the keys' perturbation."""
        shift = self.perturbation.max_key_shift
        return torch.where(shift < _MAX_SHIFT, deviation * torch.sinh(shift.clamp_max(_MAX_SHIFT)), torch.inf)

    @cached_property
    def value_mean_shift(self) -> Tensor:
        """s_i ≥ |Δo_i|, the shift of the mean of the values at the input with the weights, ``(g, n)``."""
        before = self.value_moment(self.perturbation.upper(0.0)).sqrt()
        by_query = self.fixed_value_deviation * self.moves * self.fixed_key_deviation
        return self._mean_shift(self.input_value_deviation, self.fixed_value_deviation, before, by_query)

    @cached_property
    def key_mean_shift(self) -> Tensor:
        """r_i ≥ |Δc_i|, likewise for keys."""
        before = self.key_moment(self.perturbation.upper(0.0)).sqrt()
        by_query = self.moves * self.fixed_key_deviation.square()
        return self._mean_shift(self.input_key_deviation, self.fixed_key_deviation, before, by_query)

    def _mean_shift(self, here: Tensor, fixed: Tensor, before: Tensor, by_query: Tensor) -> Tensor:
        """≥ the shift of a mean with deviations at the input, on the ball, and under the query's perturbation alone."""
        by_keys = torch.minimum(self.mean_shift_by_keys(here), fixed * self.perturbation.max_key_shift)
        in_turn = self.perturbation.mean_shift_by_query(here) + self.mean_shift_by_keys(before)
        return torch.minimum(by_keys + by_query, in_turn)

    @cached_property
    def steps(self) -> list[PerturbationStep]:
        """The steps of the perturbation of all rows, for values at the input."""
        mean_shift = self.perturbation.mean_shift_by_query(self.input_value_deviation)
        own = self.perturbation.query_step(self.value_moment, mean_shift, self.hadamard_norm(mean_shift))
        return [own, *self.perturbation.key_steps(self.value_moment)]

    def hadamard_norm(self, mean_shift: Tensor) -> Tensor:
        """≥ ‖[M^½β(u − ū)]‖, ``(g, n)``, for values whose mean moves by at most ``mean_shift``."""
        mixture = self.perturbation.mixture
        if mixture.shape[-1] > _HADAMARD_LIMIT:
            return torch.full_like(mean_shift, torch.inf)
        values, keys, roots = self.centred_values(), self.centred_keys(), root(mixture)
        grams = (values @ values.mT) * (keys @ keys.mT) * (roots[..., None] * roots[..., None, :])
        trace = (mixture * (self.value_distances * self.key_distances).square()).sum(-1)
        largest = top(grams) + gamma(16 * sum(keys.shape[-2:])) * trace
        off = self.value_radius[..., None] * self.key_distances
        off = root((mixture * (off + self.key_radius[..., None] * self.value_distances).square()).sum(-1))
        return nowhere_nan(self.moves * (root(largest) + off + 0.5 * mean_shift * self.key_moment(mixture).sqrt()))

    def leave_one_out(self, keys: Tensor) -> LeaveOneOut:
        """The rows without one token of every head, ``keys (g,)``."""
        by_keys = self.mean_shift_by_keys(torch.ones_like(self.perturbation.max_key_shift))
        return LeaveOneOut.of(keys, self.group, self.moves, by_keys, self.key_radius, self.key_moment)

    def _key_weight_choices(self, loads: Tensor) -> list[Tensor]:
        """Weights τ_j ≤ 1 for every row, ``(g, 1, n)``: of the head at the input, and of these loads."""
        own = perron_weights(loads * self.value_distances.square(), loads * self.push_lengths.square())[:, None]
        here = key_weights(self.group)[:, None]
        return [weights**power for weights in (own, here) for power in _POWERS]


class HeadBall(PerturbedHeads):
    """The Jacobian of a group of heads on a ball, and its change from the input."""

    def norm(self) -> Tensor:
        """≥ ‖J‖ on the ball, ``(g,)``."""
        norm = torch.minimum(nonnegative_norm(self.upper_weights), self.upper_weights.sum(-2).amax(-1).sqrt())
        diagonal = (self.value_deviation * self.key_deviation).amax(-1)
        from_input = diagonal_norm(self.group) + self.query_block_change.amax(-1)
        bound = norm * self.value + torch.minimum(diagonal, from_input) + self.key_path_norm()
        return nowhere_nan(bound * self.group.allowance)

    @cached_property
    def change(self) -> Tensor:
        """≥ ‖J − J⁰‖ on the ball, ``(g,)``."""
        values, keys, queries = self.block_changes
        columns = values.norm(dim=-2) + self.key_norms(keys.square()) + queries.norm(dim=-2)
        blocks, own, found = values + keys * self.push_lengths + queries, self.query_block_change, []
        for count in (0, *(c for c in _SINKS if c <= self.sinks.shape[-1])):
            sinks = torch.zeros_like(columns, dtype=torch.bool).scatter(-1, self.sinks[:, :count], True)
            mask = (~sinks)[:, None].to(columns)
            rest = torch.minimum(self.value_and_key_change(mask), nonnegative_norm(blocks * mask))
            parts = torch.where(sinks, columns, 0.0), torch.where(sinks, own, 0.0)
            others = rest[:, None], own.masked_fill(sinks, 0.0).amax(-1, keepdim=True)
            found.append(norm_of_partitioned_sum(*(torch.cat(pair, -1) for pair in zip(parts, others, strict=True))))
        return nowhere_nan(torch.stack(found).amin(0) * self.group.allowance)

    def value_and_key_change(self, mask: Tensor) -> Tensor:
        """≥ the change of the value and key paths for inputs of these tokens, ``(g, 1, n) → (g,)``."""
        loads = self.upper_weights * mask * self.value_deviation.square()[..., None]
        queries = self.score * self.eps * root(loads.sum(-2).amax(-1))
        return self.weight_matrix_change(mask) * self.value + self.key_path_change(mask) + queries

    @cached_property
    def block_changes(self) -> tuple[Tensor, Tensor, Tensor]:
        """≥ the changes of value blocks, of key blocks ÷ |t_ij|, and of these by the queries' move, ``(g, n, n)``."""
        d, upper, (largest, shift, remainder) = self.weight_change, self.upper_weights, self.weight_variances
        others = self.mean_shift_by_keys(self.input_value_deviation)[..., None] / remainder.sqrt()
        by_query = self.fixed_value_deviation * self.moves * self.fixed_key_deviation
        others = others + by_query[..., None] / (1 - upper).clamp_min(MIN_REMAINDER)
        others = torch.minimum(others, self._other_mean_shift(remainder))
        plain = d * self.value_distances + upper * self.value_mean_shift[..., None]
        sharper = shift * self.value_distances / remainder + largest * others
        moved = torch.where(sharper < plain, sharper, plain)  # the sharper one is no number where a weight is 1
        for keys in self.sinks.unbind(-1):
            at, apart = keys[:, None, None].expand(-1, moved.shape[-2], 1), self.leave_one_out(keys)
            mean = (
                largest.gather(-1, at) * (apart.size * self.value_moment(apart.loads, apart.centres).sqrt())[..., None]
            )
            smaller = (shift * self.value_distances / remainder).gather(-1, at) + mean
            moved = moved.scatter(-1, at, torch.fmin(moved.gather(-1, at), smaller))
        known, unknown = self.query_move_terms
        own = 2 * largest * self.value[:, None, None] * self.eps
        return d * self.value[:, None, None], moved + own, known * self.value_distances + unknown

    def _other_mean_shift(self, remainder: Tensor) -> Tensor:
        """≥ the shift of the mean value of all tokens but j, by the steps of `weight_perturbation`."""
        before = self.perturbation.upper(0.0)
        by_keys = self.mean_shift_by_keys(self.value_moment(before).sqrt())[..., None]
        by_query = self.input_value_deviation * self.perturbation.query_deviation
        by_query = by_query * exponential_mean(2 * self.perturbation.max_query_shift)
        return by_keys / (1 - before).clamp_min(MIN_REMAINDER).sqrt() + by_query[..., None] / remainder

    @cached_property
    def query_move_terms(self) -> tuple[Tensor, Tensor]:
        """Bounds on the key blocks' change by the queries' move, ``(g, n, n)``: a multiple of u_ij, and a norm."""
        turn = self.score[:, None, None] * self.eps
        own = 2 * self.weight_variances[0] * self.value[:, None, None] * self.eps
        return turn * self.upper_weights, turn * (self.upper_weights * self.value_mean_shift[..., None] + own)

    def directed_change(self, key: int) -> tuple[Tensor, LeaveOneOut]:
        """Bounds on the change of the blocks of one key, values fixed, ÷ t_ij.

        The first, ``(g, n)``, is a multiple of u_ij; the second adds Σ_l λ_il^½ (v_l − c_i) ξ_l with its loads λ,
        points c and bound on |ξ|.
        """
        largest, shift, remainder = (part[..., key] for part in self.weight_variances)
        others = self.leave_one_out(torch.full_like(self.group.heads, key))
        sharper, spread = shift / remainder, largest * others.size
        change, upper, before = self.weight_change[..., key], self.upper_weights[..., key], self.perturbation.upper(0.0)
        plain = upper * self._unit_mean_shift
        apart, whole = self.value_distances[..., key], self.value_moment(before).sqrt()
        away = self.value_moment(others.loads, others.centres).sqrt()
        less = sharper * apart + spread * away < change * apart + plain * whole
        pick = less[..., None]
        loads, centres = torch.where(pick, others.loads, before), torch.where(pick, others.centres, self.group.mean)
        return torch.where(less, sharper, change), LeaveOneOut(loads, centres, torch.where(less, spread, plain))

    @cached_property
    def query_block_change(self) -> Tensor:
        """≥ the change of the block of every query, ``(g, n)``."""
        d, eps, value, score = self.weight_change, self.eps, self.value[:, None], self.score[:, None]
        odds = _positive(self.key_distances) / _positive(self.value_distances)
        products = [self.value_moment(d * w) * self.key_moment(d / w) for w in (odds**p for p in (0.0, 0.5, 1.0))]
        apart = root(torch.stack(products).amin(0)) + self.value_mean_shift * self.key_mean_shift
        steps = torch.stack([step.factor * self.key_moment(step.mixture).sqrt() for step in self.steps]).sum(0)
        return eps * (value * self.key_deviation + self.fixed_value_deviation * score) + torch.minimum(apart, 2 * steps)

    def key_path_change(self, mask: Tensor) -> Tensor:
        """≥ the change of the key path for inputs of these tokens, queries fixed, ``(g, 1, n) → (g,)``."""
        d, upper = self.weight_change * mask, self.upper_weights * mask
        weighted = [nonnegative_norm(d * self.value_distances * self.push_lengths)]
        near = _positive(self.value_distances).rsqrt()
        for keys in (*self._key_weight_choices(d), torch.ones_like(d)):
            for weights in (keys.expand_as(d), keys * near):
                loads = self.value_moment(d * weights)[..., None] / weights
                weighted.append(self.key_norms(d * loads).amax(-1))
        values = self.value[:, None] * self.eps
        moved = self.key_norms(upper * values[..., None] ** 2).amax(-1)
        apart = moved + self.mean_term_norm(mask)
        together = self.key_norms(upper * (values + self.value_mean_shift)[..., None] ** 2).amax(-1)
        plain = torch.stack(weighted).amin(0) + torch.minimum(apart, together)
        return torch.minimum(plain, moved + self.key_path_change_by_steps(mask))

    def key_path_change_by_steps(self, mask: Tensor) -> Tensor:
        """≥ the change of the key path, queries and values fixed, by the steps of `weight_perturbation`."""
        steps = (self.key_norms(step.mixture * mask * (2 * step.factor)[..., None] ** 2) for step in self.steps)
        return torch.stack([step.amax(-1) for step in steps]).sum(0)

    def mean_term_norm(self, mask: Tensor) -> Tensor:
        """≥ ‖Y ↦ [Δo_i Σ_j P_ij t_ij·y_j]_i‖ for inputs of these tokens, ``(g, 1, n) → (g,)``."""
        group, mean_shift = self.group, self.value_mean_shift[..., None]
        if group.push_map is not None:
            return torch.full_like(self.value, torch.inf)
        weights, push = group.weights * mask * mean_shift, group.push
        trace = (weights.square().sum(-1) * self.push_lengths[..., 0].square()).sum(-1)  # from above, for its rounding
        gram = (weights @ weights.mT) * (push @ push.mT)
        largest = top(gram) + gamma(16 * sum(push.shape[1:])) * trace
        off = torch.expm1(group.radii.weights)[..., None] * self.push_lengths + push_radii(group)
        return (
            root(largest)
            + nonnegative_norm(weights * off)
            + nonnegative_norm(self.weight_change * mask * mean_shift * self.push_lengths)
        )

    def key_path_norm(self) -> Tensor:
        """≥ the norm of the key path on the ball, ``(g,)``."""
        upper, found = self.upper_weights, []
        moved = 2 * self.value[:, None] * self.eps + self.value_mean_shift
        for weights in (torch.ones_like(upper), *self._key_weight_choices(upper)):
            spread = self.value_moment(upper * weights).sqrt()
            spread = spread + moved * root((upper * weights).sum(-1).clamp_max(1.0))
            loads = upper * torch.minimum(spread, self.value_deviation).square()[..., None] / weights
            found.append((self.key_norms(loads) + self.score[:, None] * self.eps * root(loads.sum(-2))).amax(-1))
        return torch.stack(found).amin(0)


def _positive(distances: Tensor) -> Tensor:
    """Distances raised above zero, as divisors."""
    return distances + 1e-3 * distances.amax(-1, keepdim=True) + TINY


def norm_of_partitioned_sum(columns: Tensor, blocks: Tensor) -> Tensor:
    """≥ ‖K + Q‖ from c and q, ``(…, parts) → (…)``.

    If K maps inputs of part k to at most c_k times their length and Q, diagonal in the parts, to at most q_k times,
    then ‖K + Q‖ ≤ ½(λ + μ + Σ_k c_k²/(μ − q_k²/λ)) for all λ > 0 and μ > max_k q_k²/λ. Proof:
    docs/theory/certificates-ball.md, section "The norm of a partitioned sum".

    >>> columns, blocks = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([[2.0, 2.0], [0.0, 2.0]])
    >>> norm_of_partitioned_sum(columns.double(), blocks.double())
    tensor([7.0000, 6.7082], dtype=torch.float64)
    """
    plain = columns.norm(dim=-1) + blocks.amax(-1)
    unit = plain.detach().clamp_min(TINY)[..., None]
    c, q = columns / unit, blocks / unit
    level, mu = _levels(c.detach(), q.detach())
    minimum = 0.5 * (level + mu)[..., 0] + 0.5 * (c.square() / (mu - q.square() / level)).sum(-1)
    return torch.fmin(plain, unit[..., 0] * minimum) * (1 + gamma(16 * (1 + columns.shape[-1])))


def _levels(c: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """λ and μ, ``(…, 1)``; they count as constants, where the bound has the right derivative."""
    a = _unit(c + q)
    for _ in range(_STEPS):
        a = _unit(c + q.square() * a / _length(q * a))
    level = _length(q * a)
    steep = q.square() / level
    minimum = steep.amax(-1, keepdim=True) * (1 + 1e-9) + TINY
    return level, torch.maximum((c + steep * a).norm(dim=-1, keepdim=True), minimum)


def _length(vectors: Tensor) -> Tensor:
    return vectors.norm(dim=-1, keepdim=True).clamp_min(1e-150)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / _length(vectors)
