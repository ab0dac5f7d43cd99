"""Every term of the proofs on balls, each beside the quantity that it claims to bound.

`howsmooth.certificates.ball.head_ball` for one head, `howsmooth.certificates.ball.weight_perturbation` for its rows of
weights and `howsmooth.certificates.ball.block_ball` for heads together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from evidence.juries import Example, Modules
from evidence.moved_heads import (
    At,
    Case,
    Moved,
    Quantity,
    Search,
    about,
    against,
    apart,
    drawn,
    leading,
    outer,
    pair,
    pairs,
    rare,
    sink,
    size,
)
from howsmooth.certificates.ball import block_ball, on_ball
from howsmooth.certificates.ball.block_ball import BlockBall
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.weight_perturbation import KEY_STEPS
from howsmooth.certificates.point.head_gram import HeadsAt

CASES: dict[str, Case] = {
    **{f"drawn {seed}": drawn(seed) for seed in (0, 2, 4, 5, 7, 9, 12, 13, 15, 16, 17, 20, 25, 29, 32, 43, 45, 48, 50)},
    "query shift of far tokens": apart(0.25, own=True, move=3.0),
    "query shift of a rare far token": apart(0.02, own=True),
    "keys' shift of a rare far token": apart(0.02, own=False),
    "the same, two heads": apart(0.02, own=False, heads=2),
    "rare far token": pair(0.02, gap=100.0, move=1.0),
    "two heads that look at a rare far token": pair(0.02, gap=100.0, move=1.0, heads=2),
    "equal tokens": pair(0.5, gap=0.0, move=0.01),
    "two heads at equal tokens": pair(0.5, gap=0.0, move=0.01, heads=2),
    "equal tokens of large values": pair(0.5, gap=0.0, move=0.01, value=1000.0),
    "equal tokens and one that nobody sees": pair(0.5, gap=0.0, move=0.01, seen=False),
    "equal tokens with moving queries": pair(0.5, gap=0.0, move=0.01, ask=1.0, seen=False),
    "rare far token and one that nobody sees": pair(0.02, gap=100.0, move=0.3, seen=False),
    "token between others that the query shifts": sink(own=True),
    "token between others that the keys shift": sink(own=False),
    "rare token without value": rare(),
}
"""Maps and balls; in each some term is close to the truth."""
QUICK = {
    name: CASES[name] for name in ("query shift of a rare far token", "keys' shift of a rare far token", "equal tokens")
}
"""Some of them, for tests."""
SEARCH = Search()
DIRECTIONS = 12
"""In which vectors of two coordinates are compared."""


@dataclass(frozen=True)
class Proof:
    """What the code proves of a case; ``around`` and ``block_ball`` are its modules, or altered ones."""

    case: Case
    around: ModuleType = on_ball
    block_ball: ModuleType = block_ball

    @cached_property
    def ball(self) -> HeadBall:
        """All heads are one group."""
        (ball,) = self.around.head_balls(HeadsAt(self.case.attention, self.case.x), self.case.moves)
        return ball

    @cached_property
    def block(self) -> BlockBall:
        return self.block_ball.BlockBall(self.case.attention, [self.ball])

    @cached_property
    def weights(self) -> Tensor:
        """P⁰, by definition."""
        return At(self.case, self.case.x[None]).weights[0]

    @cached_property
    def values_along(self) -> Tensor:
        """u_ij in every direction, by definition, ``(heads, i, j, directions)``."""
        at = At(self.case, self.case.x[None])
        return (about(at.weights, at.value) @ directions(self.case).mT)[0]

    @cached_property
    def own_drift(self) -> Tensor:
        """How far means move by the query's shift, ``(heads, i)``: known where β has one direction, else proved."""
        if self.case.query.shape[1] > 1:
            return self.ball.perturbation.mean_shift_by_query(self.ball.input_value_deviation)
        at, ask = At(self.case, self.case.x[None]), self.case.maps[0]
        shift = self.case.moves[:, None] * ask.norm(dim=(-2, -1))[..., None] * about(at.weights, at.key)[0, ..., 0]
        shares = torch.linspace(-1, 1, 201, dtype=torch.float64)[:, None, None, None]
        change = torch.softmax(self.weights.log() + shares * shift, -1) - self.weights
        return 1.001 * (change[..., None] * about(at.weights, at.value)).sum(-2).norm(dim=-1).amax(0)

    def kept(self, first: int) -> Tensor:
        """Which tokens are taken together, all from the first on."""
        return (torch.arange(self.case.n) >= first).double().expand(len(self.case.query), 1, -1)


@dataclass(frozen=True)
class Term:
    """A bound, ``(heads, …)`` or of the whole map, and what it bounds, batch first."""

    bound: Callable[[Proof], Tensor]
    truth: Quantity

    def proved(self, proof: Proof) -> Tensor:
        """The bound; what overflowed on the way is none."""
        return self.bound(proof).detach().nan_to_num(nan=torch.inf, posinf=torch.inf)

    def worst(self, case: Case, search: Search) -> Tensor:
        """The largest truth that a search meets, entry by entry."""
        return search.worst(case, self.proved(proof_of(case)), self.truth)

    def share(self, case: Case, search: Search) -> float:
        """The largest truth ÷ bound that a search meets."""
        bound = self.proved(proof_of(case))
        return float(against(search.worst(case, bound, self.truth), bound).max())


@cache
def proof_of(case: Case) -> Proof:
    """By the code as it is; made once, for all terms."""
    return Proof(case)


def closest(term: Term, cases: dict[str, Case] = CASES, search: Search = SEARCH) -> float:
    """The largest truth ÷ bound over cases."""
    return max(term.share(case, search) for case in cases.values())


def directions(case: Case) -> Tensor:
    """Unit vectors of the output, of which there are one or two coordinates, ``(directions, out)``."""
    if len(case.output) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    angles = torch.arange(DIRECTIONS, dtype=torch.float64) * torch.pi / DIRECTIONS
    return torch.stack([angles.cos(), angles.sin()], -1)


def spread(weights: Tensor, vectors: Tensor) -> Tensor:
    """The standard deviation of vectors in any direction, row by row."""
    return size(weights.sqrt()[..., None] * about(weights, vectors))


def mean_move(change: Tensor, m: Moved, vectors: Tensor) -> Tensor:
    """How a change of the weights moves means of vectors that stay, ``(…, i, m)``."""
    return (change[..., None] * about(m.old, vectors)).sum(-2)


def moved_keys(m: Moved) -> Tensor:
    """The path of the keys with queries as they were."""
    return leading(m.new, m.there.value) - leading(m.old, m.here.value)


def still_keys(m: Moved) -> Tensor:
    """The same with values as they were."""
    return leading(m.new, m.here.value) - leading(m.old, m.here.value)


def own_change(m: Moved) -> Tensor:
    """What the query's shift does to the weights."""
    return m.perturbed(0.0) - m.old


def ends(m: Moved, number: int) -> tuple[Tensor, Tensor]:
    """The weights before and after a step: of the query's shift (0), then of the keys'."""
    if number == 0:
        return m.old, m.perturbed(0.0)
    return m.perturbed((number - 1) / KEY_STEPS), m.perturbed(number / KEY_STEPS)


def turned(m: Moved, number: int) -> Tensor:
    """What a step does to z ↦ Cov(v, z), as a map of M^½z, ``(…, i, j, m)``."""
    before, after = ends(m, number)
    mixed = (0.5 * (before + after)).sqrt().clamp_min(1e-150)
    return (leading(after, m.here.value) - leading(before, m.here.value)) / mixed[..., None]


def _step(number: int) -> dict[str, Term]:
    def loads(proof: Proof) -> Tensor:
        step = proof.ball.steps[number]
        return 2 * (step.loads[..., None] * proof.values_along.square()).sum(-2).sqrt()

    name = f"step {number}: "
    return {
        name + "mixture": Term(lambda p: p.ball.steps[number].mixture, lambda m: 0.5 * sum(ends(m, number))),
        name + "factor": Term(lambda p: 2 * p.ball.steps[number].factor, lambda m: size(turned(m, number))),
        name + "loads": Term(loads, lambda m: (turned(m, number) @ directions(m.case).mT).norm(dim=-2)),
    }


def _known_drift(proof: Proof) -> Tensor:
    """The query's own step for values of which it is known how far their mean moves."""
    ball, drift = proof.ball, proof.own_drift
    return 2 * ball.perturbation.query_step(ball.value_moment, drift, ball.hadamard_norm(drift)).factor


def _towards(proof: Proof) -> Tensor:
    """What `directed_change` allows in every direction, ``(heads, i, j, directions)``."""
    found = []
    for key in range(proof.case.n):
        first, others = proof.ball.directed_change(key)
        vectors = (
            proof.ball.centred_values(others.centres) @ proof.block.output_bases.mT[:, None] @ directions(proof.case).mT
        )
        second = others.size[..., None] * (others.loads[..., None] * vectors.square()).sum(-2).sqrt()
        found.append(first[..., None] * proof.values_along[..., key, :].abs() + second)
    return torch.stack(found, -2)


def _others(proof: Proof) -> Tensor:
    """How far the mean of all tokens but one may move, ``(heads, i, j)``."""
    ball, found = proof.ball, []
    for key in range(proof.case.n):
        others = ball.leave_one_out(torch.full_like(ball.group.heads, key))
        found.append(others.size * ball.value_moment(others.loads, others.centres).sqrt())
    return torch.stack(found, -1)


def without(weights: Tensor, vectors: Tensor) -> Tensor:
    """The mean of vectors over all tokens but j, ``(…, i, j, m)``; zero where there are none."""
    kept = weights[..., None, :] * (1 - torch.eye(weights.shape[-1], dtype=weights.dtype))
    return (kept / kept.sum(-1, keepdim=True).clamp_min(1e-300)) @ vectors[..., None, :, :]


PERTURBATION = {
    "query shift": Term(lambda p: p.ball.perturbation.max_query_shift, lambda m: _seen(m, m.own.abs()).amax(-1)),
    "keys' shift": Term(lambda p: p.ball.perturbation.max_key_shift, lambda m: _seen(m, m.keys_part.abs()).amax(-1)),
    "log E e^β": Term(
        lambda p: p.ball.perturbation.log_mean, lambda m: (m.old * (m.own.expm1() - m.own)).sum(-1).log1p()
    ),
    "high, query shift": Term(lambda p: p.ball.perturbation.upper(0.0) - p.weights, own_change),
    "low, query shift": Term(lambda p: p.weights - p.ball.perturbation.lower(0.0), lambda m: -own_change(m)),
    "mean, query shift": Term(
        lambda p: p.ball.perturbation.mean_shift_by_query(p.ball.input_value_deviation),
        lambda m: mean_move(own_change(m), m, m.here.value).norm(dim=-1),
    ),
    "step 0: factor, drift known": Term(_known_drift, lambda m: size(turned(m, 0))),
    **{name: term for number in range(KEY_STEPS + 1) for name, term in _step(number).items()},
}
"""Of `howsmooth.certificates.ball.weight_perturbation`."""

HEAD = {
    "high": Term(lambda p: p.ball.upper_weights - p.weights, lambda m: m.shift),
    "low": Term(lambda p: p.weights - p.ball.lower_weights, lambda m: -m.shift),
    "change of weights": Term(lambda p: p.ball.weight_change, lambda m: m.shift.abs()),
    "largest P(1 − P)": Term(lambda p: p.ball.weight_variances[0], lambda m: m.new * (1 - m.new)),
    "change of P(1 − P)": Term(
        lambda p: p.ball.weight_variances[1], lambda m: (m.new * (1 - m.new) - m.old * (1 - m.old)).abs()
    ),
    "drift": Term(lambda p: p.ball.value_mean_shift, lambda m: mean_move(m.shift, m, m.here.value).norm(dim=-1)),
    "key drift": Term(lambda p: p.ball.key_mean_shift, lambda m: mean_move(m.shift, m, m.here.pull).norm(dim=-1)),
    "still spread": Term(lambda p: p.ball.fixed_value_deviation, lambda m: spread(m.new, m.here.value)),
    "still lean": Term(lambda p: p.ball.fixed_key_deviation, lambda m: spread(m.new, m.here.pull)),
    "spread": Term(lambda p: p.ball.value_deviation, lambda m: spread(m.new, m.there.value)),
    "lean": Term(lambda p: p.ball.key_deviation, lambda m: spread(m.new, m.there.pull)),
    "query blocks": Term(lambda p: p.ball.query_block_change, lambda m: size(m.query_change)),
    "value blocks": Term(
        lambda p: p.ball.block_changes[0], lambda m: m.shift.abs() * size(m.here.value_map)[:, None, None]
    ),
    "key blocks": Term(lambda p: p.ball.block_changes[1], lambda m: moved_keys(m).norm(dim=-1)),
    "key blocks, moved queries": Term(
        lambda p: p.ball.block_changes[2], lambda m: leading(m.new, m.there.value).norm(dim=-1) * m.turn.norm(dim=-1)
    ),
    "mean of all others": Term(
        _others, lambda m: (without(m.new, m.here.value) - without(m.old, m.here.value)).norm(dim=-1)
    ),
    "directed change": Term(_towards, lambda m: (still_keys(m) @ directions(m.case).mT).abs()),
    "path of the keys": Term(
        lambda p: p.ball.key_path_change(p.kept(0)), lambda m: pairs(outer(moved_keys(m), m.here.felt))
    ),
    "path of the keys but the first": Term(
        lambda p: p.ball.key_path_change(p.kept(1)), lambda m: pairs(outer(moved_keys(m), m.here.felt), 1)
    ),
    "path of the keys, values still": Term(
        lambda p: p.ball.key_path_change_by_steps(p.kept(0)), lambda m: pairs(outer(still_keys(m), m.here.felt))
    ),
    "path of the keys but the first, values still": Term(
        lambda p: p.ball.key_path_change_by_steps(p.kept(1)), lambda m: pairs(outer(still_keys(m), m.here.felt), 1)
    ),
    "move of the means": Term(
        lambda p: p.ball.mean_term_norm(p.kept(0)),
        lambda m: pairs(outer(m.new[..., None] * mean_move(m.shift, m, m.here.value)[..., None, :], m.here.felt)),
    ),
    "values and keys": Term(lambda p: p.ball.value_and_key_change(p.kept(0)), lambda m: pairs(m.value_and_key_change)),
    "values and keys but the first": Term(
        lambda p: p.ball.value_and_key_change(p.kept(1)), lambda m: pairs(m.value_and_key_change, 1)
    ),
    "path of the keys on the ball": Term(
        lambda p: p.ball.key_path_norm(), lambda m: pairs(outer(leading(m.new, m.there.value), m.there.felt))
    ),
    "change": Term(lambda p: p.ball.change, lambda m: pairs(m.jacobian_change)),
    "rows": Term(lambda p: p.ball.norm(), lambda m: pairs(m.jacobian)),
}
"""Of `howsmooth.certificates.ball.head_ball`."""

BLOCK = {
    "queries": Term(lambda p: p.block.query_change(), lambda m: size(m.query_change.sum(1))),
    "values and keys": Term(lambda p: _rest(p, 0), lambda m: pairs(m.value_and_key_change.sum(1))),
    "values and keys but the first": Term(lambda p: _rest(p, 1), lambda m: pairs(m.value_and_key_change.sum(1), 1)),
    "moved queries": Term(
        lambda p: _number(p.block.query_move_change(torch.arange(p.case.n))),
        lambda m: pairs(outer(leading(m.new, m.there.value), m.turn).sum(1)),
    ),
    "one token": Term(
        lambda p: torch.stack([_number(p.block.one_token_change(key)) for key in range(p.case.n)]),
        lambda m: torch.stack([pairs(m.value_and_key_change.sum(1), j, j + 1) for j in range(m.case.n)], -1),
    ),
    "change": Term(lambda p: _number(p.block.change()), lambda m: pairs(m.jacobian_change.sum(1))),
}
"""Of `howsmooth.certificates.ball.block_ball`, where heads count together."""


def _seen(m: Moved, entries: Tensor) -> Tensor:
    return entries.masked_fill(m.old == 0, 0.0)


def _rest(proof: Proof, first: int) -> Tensor:
    return _number(proof.block.other_tokens_change(torch.arange(first, proof.case.n)))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def examples(terms: dict[str, Term], cases: dict[str, Case] = CASES) -> list[Example]:
    """Terms of every case, with the largest truths that a search meets."""
    return [_example(label, case, terms) for label, case in cases.items()]


def _example(label: str, case: Case, terms: dict[str, Term]) -> Example:
    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        proof = Proof(case, modules["certificates.ball.on_ball"], modules["certificates.ball.block_ball"])
        return ((name, term.bound(proof)) for name, term in terms.items())

    return Example(label, proved, {name: term.worst(case, SEARCH) for name, term in terms.items()})
