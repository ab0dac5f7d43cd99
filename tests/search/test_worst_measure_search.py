"""The search over measures: two-atom suprema, dense oracles, upper bounds, explicit repetition."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, local_constant
from howsmooth.search.worst_measure_search import MeasureWitness, worst_measure
from howsmooth.sets import Around, Normalised, Sphere, Tokens
from tests.meanfield.attention_on_measures import KINDS, build, by_hand

SUPREMA = {1: 3.069, 2: 12.996, 3: 48.07, 4: 165.85, 5: 546.95}
"""Two atoms, A = −γI, V = 1, b = γR²."""
TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]])


def head(b: float, width: int = 1, **options: object) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(-b * torch.eye(width), torch.eye(width), **options)


def dense(attention: hs.SelfAttention | hs.L2SelfAttention, mu: Measure) -> float:
    """The local constant from the dense autograd Jacobian of sums written out, every atom in two halves."""
    places = None if mu.positions is None else mu.positions.repeat_interleave(2)
    halves = Measure(mu.atoms.repeat_interleave(2, 0), mu.weights.repeat_interleave(2) / 2, places)
    root = halves.weights.sqrt()[:, None]
    jacobian = torch.func.jacrev(lambda z: root * by_hand(attention, halves, z / root, z / root))(halves.atoms * root)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, halves.atoms.numel()), 2))


@pytest.mark.parametrize("b", SUPREMA)
@pytest.mark.slow
def test_two_atom_suprema_are_reached_by_search_alone(b: int) -> None:
    found = worst_measure(head(b), 2, over=hs.sets.Ball(1.0), starts=8, steps=100)
    assert found.value == pytest.approx(SUPREMA[b], rel=1e-3)
    assert found.value <= float(hs.bounds.get("howsmooth.mean_field")(head(b), over=hs.sets.Ball(1.0)))
    assert found.start.startswith("random")
    light = float(found.measure.weights.min())
    assert 0.1 < light * math.exp(2 * b) < 1  # the mass of the light atom is of the order of e^{−2b}


@pytest.mark.slow
@pytest.mark.parametrize(("b", "atoms"), [(1, 4), (3, 3), (5, 4)])
def test_more_atoms_add_nothing_where_all_directions_are_alike(b: int, atoms: int) -> None:
    found = worst_measure(head(b / 4, width=2), atoms, over=hs.sets.Ball(2.0), starts=8, steps=100)
    assert found.value == pytest.approx(SUPREMA[b], rel=1e-3)
    assert found.value <= float(hs.bounds.get("howsmooth.mean_field")(head(b / 4, width=2), over=hs.sets.Ball(2.0)))


@pytest.mark.slow
def test_three_atoms_are_rougher_than_two_where_attention_turns() -> None:
    identity = torch.eye(2, dtype=torch.float64)
    turning = hs.SelfAttention(3 * 2**0.5 * TURN.double(), identity, identity)  # A = 3·TURN
    two, three = (worst_measure(turning, atoms, over=hs.sets.Ball(1.0), starts=12, steps=100) for atoms in (2, 3))
    assert two.value == pytest.approx(8.144, rel=1e-3)
    assert three.value > 1.03 * two.value
    assert dense(turning, three.measure) == pytest.approx(three.value, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.slow
def test_values_are_those_of_the_dense_jacobian_and_above_random_measures(kind: str, causal: bool) -> None:
    attention = build(kind, causal=causal)
    found = worst_measure(attention, 3, over=hs.sets.Ball(1.5), starts=6, steps=40)
    truth = dense(attention, found.measure)
    assert float(local_constant(attention, found.measure)) == pytest.approx(truth, rel=1e-9)
    assert found.value <= truth * (1 + 1e-12)  # the lower end: masses of 1e-13 leave room for rounding
    assert found.measure.support_radius <= 1.5 * (1 + 1e-12)
    assert (found.measure.positions is not None) == causal
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(1, 4) / 3 if causal else None
    for _ in range(20):
        x = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        weights = torch.rand(3, generator=generator, dtype=torch.float64)
        other = Measure(1.5 * x / x.norm(dim=-1, keepdim=True), weights / weights.sum(), places)
        assert float(local_constant(attention, other)) < found.value


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_no_search_passes_the_mean_field_bound(seed: int) -> None:
    attention = build("dot_product", seed=seed)
    found = worst_measure(attention, 3, over=hs.sets.Ball(0.5), starts=6, steps=60)
    bound = float(hs.bounds.get("howsmooth.mean_field")(attention, over=hs.sets.Ball(0.5)))
    assert found.value <= bound


@pytest.mark.slow
def test_the_running_mean_of_two_atoms_is_as_rough_as_its_matrix() -> None:
    mean = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), torch.eye(1), mask="causal")

    def norm(w: float) -> float:  # the first atom, of mass w, sees itself, the second sees both
        return float(torch.linalg.matrix_norm(torch.tensor([[1, 0], [math.sqrt(w * (1 - w)), 1 - w]]), 2))

    best = -minimize_scalar(lambda w: -norm(w), bounds=(0, 1), method="bounded").fun
    two, eight = (worst_measure(mean, atoms, over=hs.sets.Ball(1.0), starts=6, steps=100) for atoms in (2, 8))
    assert two.value == pytest.approx(best, rel=1e-5)
    assert two.value == pytest.approx(2 / math.sqrt(3), rel=1e-5)
    # Above 1, which the unmasked bound says for A = 0, and below 2, which the masked one says.
    unmasked = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), torch.eye(1))
    assert float(hs.bounds.get("howsmooth.mean_field")(unmasked, over=hs.sets.Ball(1.0))) == 1 < two.value
    assert (
        1.2 * two.value
        < eight.value
        < float(hs.bounds.get("howsmooth.masked_mean_field")(mean, over=hs.sets.Ball(1.0)))
    )


@pytest.mark.slow
def test_causal_attention_gains_with_every_further_atom_below_its_bound() -> None:
    causal = head(3, mask="causal")
    two, four = (worst_measure(causal, atoms, over=hs.sets.Ball(1.0), starts=6, steps=100) for atoms in (2, 4))
    limit = math.exp(3) * math.sqrt(1 + 6 + 12)  # of one light token before many, as n → ∞
    assert SUPREMA[3] <= two.value * (1 + 1e-3)
    assert 1.3 * two.value < four.value < limit
    assert float(four.measure.weights[0]) < 1e-3  # the light atom comes first
    assert four.value <= float(hs.bounds.get("howsmooth.masked_mean_field")(causal, over=hs.sets.Ball(1.0)))


@pytest.mark.slow
def test_more_atoms_never_end_below_fewer() -> None:
    attention = build("dot_product", seed=4)
    values = [worst_measure(attention, atoms, over=hs.sets.Ball(2.0), starts=6, steps=40).value for atoms in (1, 2, 4)]
    assert values[1] <= values[2]  # four atoms come by way of two
    assert values[0] < values[1]


def test_one_atom_has_the_norm_of_the_values() -> None:
    found = worst_measure(build("dot_product"), 1, over=hs.sets.Ball(1.0), starts=2, steps=5)
    attention = build("dot_product")
    value = sum(attention.output_weight[h].T @ attention.value_weight[h] for h in range(2))
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(value, 2)), rel=1e-9)


@pytest.mark.slow
def test_tokens_spread_like_the_measure_are_as_rough() -> None:
    one = worst_measure(head(1), 2, over=hs.sets.Ball(1.0), starts=4, steps=100)
    bound = hs.bounds.get("howsmooth.unified")
    for n, share in ((2, 0.5), (30, 0.99), (400, 0.999)):
        x = one.tokens(n)
        assert x.shape == (n, 1)
        value = float(hs.measure(head(1).double(), x, rtol=1e-9))
        assert share * one.value <= value <= float(bound(head(1), n=n, over=hs.sets.Ball(1.0)))


def witness(weights: list[float], causal: bool = False) -> MeasureWitness:
    """A witness with these weights, its atoms 0, 1, 2, …"""
    k = len(weights)
    places = torch.arange(1, k + 1) / k if causal else None
    mu = Measure(torch.arange(k, dtype=torch.float64)[:, None], weights, places)
    constant = local_constant(head(1, mask="causal" if causal else None), mu)
    return MeasureWitness(mu, constant.lower, constant, {}, "given", [], 0, 0, 0.0, "steps")


@pytest.mark.parametrize(
    ("weights", "n", "counts"),
    [
        ([0.25, 0.75], 4, [1, 3]),
        ([0.25, 0.75], 8, [2, 6]),
        ([1e-9, 1 - 1e-9], 5, [1, 4]),
        ([1e-9, 1e-9, 1 - 2e-9], 3, [1, 1, 1]),
        ([0.3, 0.3, 0.4], 4, [1, 1, 2]),
        ([0.4, 0.4, 0.1, 0.1], 5, [1, 2, 1, 1]),
        ([1.0], 3, [3]),
    ],
)
def test_every_atom_has_tokens_and_the_rest_go_by_mass(weights: list[float], n: int, counts: list[int]) -> None:
    x = witness(weights).tokens(n)
    assert x.flatten().long().bincount().tolist() == counts


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_as_many_as_asked_for_and_in_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = (10 * torch.randn(6, generator=generator, dtype=torch.float64)).softmax(0)
    found = witness(weights.tolist(), causal=True)
    for n in (6, 7, 20, 1000):
        x = found.tokens(n).flatten()
        assert len(x) == n
        assert bool((x.diff() >= 0).all())
        counts = x.long().bincount()
        assert int(counts.min()) >= 1
        # No atom has more than its share by a token, unless it has but one; light ones are paid for by the others.
        assert bool(((counts - n * weights < 1) | (counts == 1)).all())


def test_fewer_tokens_than_atoms_are_refused() -> None:
    with pytest.raises(InvalidInput, match="2 atoms need at least as many tokens, got n=1"):
        witness([0.5, 0.5]).tokens(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "over", [Sphere(1.5), Normalised(nn.LayerNorm(3)), nn.RMSNorm(3)], ids=lambda o: type(o).__name__
)
def test_atoms_stay_in_the_set(over: Sphere | Normalised | nn.Module) -> None:
    found = worst_measure(build("dot_product"), 3, over=over, starts=3, steps=20)
    shown = Normalised(over) if isinstance(over, nn.Module) else over
    assert shown.excess(found.measure.atoms) < 1e-12
    assert found.over == shown.describe()
    if isinstance(over, Sphere):
        assert float((found.measure.atoms.norm(dim=-1) - 1.5).abs().max()) < 1e-12


@pytest.mark.slow
def test_a_layer_norm_is_searched_below_the_bound_of_its_ball() -> None:
    attention, layer = build("dot_product"), nn.LayerNorm(3)
    found = worst_measure(attention, 2, over=layer, starts=4, steps=60)
    assert found.value <= float(hs.bounds.get("howsmooth.mean_field")(attention, over=hs.sets.Ball(3**0.5)))


def same(one: MeasureWitness, other: MeasureWitness) -> bool:
    return torch.equal(one.measure.atoms, other.measure.atoms) and torch.equal(
        one.measure.weights, other.measure.weights
    )


@pytest.mark.slow
def test_the_seed_fixes_the_measure() -> None:
    first, again, other = (
        worst_measure(head(1), 3, over=hs.sets.Ball(1.0), starts=3, steps=10, seed=seed) for seed in (0, 0, 1)
    )
    assert same(first, again)
    assert first.history == again.history
    assert not same(first, other)


def test_history_rises_to_the_value_and_progress_sees_it() -> None:
    seen: list[tuple[int, int, float]] = []
    found = worst_measure(
        head(2), 3, over=hs.sets.Ball(1.0), starts=3, steps=10, progress=lambda *state: seen.append(state)
    )
    assert [step for step, _, _ in seen] == list(range(1, 21))  # two stages
    assert {steps for _, steps, _ in seen} == {20}
    assert [best for _, _, best in seen] == found.history == sorted(found.history)
    assert found.history[-1] <= found.value * (1 + 1e-12)
    assert (found.steps, found.stopped, found.seed) == (20, "steps", 0)
    assert float(found) == found.value
    assert "in W₂" in repr(found)


@pytest.mark.slow
def test_ctrl_c_returns_the_best_so_far() -> None:
    def interrupt(step: int, steps: int, best: float) -> None:
        if step == 15:
            raise KeyboardInterrupt

    found = worst_measure(head(2), 2, over=hs.sets.Ball(1.0), starts=3, steps=50, progress=interrupt)
    whole = worst_measure(head(2), 2, over=hs.sets.Ball(1.0), starts=3, steps=50)
    assert (found.stopped, found.steps) == ("interrupted", 15)
    assert found.history == whole.history[:15]
    assert found.history[-1] <= found.value * (1 + 1e-12) <= whole.value * (1 + 1e-9)


def test_the_attention_is_left_as_it_was() -> None:
    attention = head(1, mask="causal")
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    worst_measure(attention, 2, over=hs.sets.Ball(1.0), starts=2, steps=2)
    assert len(attention.logit_biases) == 1
    assert isinstance(attention.logit_biases[0], hs.Causal)
    assert all(torch.equal(before[name], tensor) for name, tensor in attention.state_dict().items())
    assert attention.dtype == torch.float32


@pytest.mark.slow
def test_half_precision_weights_are_searched_in_float64() -> None:
    found = worst_measure(head(1).half(), 2, over=hs.sets.Ball(1.0), starts=3, steps=60)
    assert found.value == pytest.approx(SUPREMA[1], rel=1e-2)
    assert found.measure.atoms.dtype == torch.float64


@pytest.mark.slow
def test_steep_heads_are_searched_among_very_light_atoms() -> None:
    found = worst_measure(head(30), 2, over=hs.sets.Ball(1.0), starts=8, steps=150)
    assert float(found.measure.weights.min()) < 1e-20
    assert found.value == pytest.approx(hs.meanfield.two_atom(30, 1.0).value, rel=1e-2)
    assert found.value <= float(hs.bounds.get("howsmooth.mean_field")(head(30).double(), over=hs.sets.Ball(1.0)))


def x(*shape: int) -> Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "each atom needs a bounded set"),
        ({"over": Around(x(2, 3), 0.1)}, "each atom needs a bounded set"),
        ({"over": Tokens(torch.eye(3))}, "each atom needs a bounded set"),
        ({"over": nn.LayerNorm(5)}, "tokens of width 5, but the map takes 3"),
        ({"radius": 1.0}, "takes no argument 'radius'"),
        ({"over": hs.sets.Ball(1.0), "atoms": 0}, "atoms must be at least 1, got 0"),
        ({"over": hs.sets.Ball(1.0), "starts": 0}, "starts must be at least 1, got 0"),
        ({"over": hs.sets.Ball(1.0), "steps": 0}, "steps must be at least 1, got 0"),
        ({"over": hs.sets.Ball(1.0), "ordered": True}, "the attention is not causal"),
        ({"over": hs.sets.Ball(1e4)}, "drown the masses of atoms: choose a smaller radius"),
        ({"over": hs.sets.Ball(1e200)}, "drown the masses of atoms: choose a smaller radius"),
    ],
)
def test_searches_without_an_answer_are_refused(options: dict, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        worst_measure(build("dot_product"), **options)


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (nn.Linear(3, 3), "a measure needs an attention map, got Linear"),
        (hs.SigmoidAttention(*torch.eye(3).repeat(3, 1, 1)), "sigmoid attention is no average"),
        (
            hs.SelfAttention(*torch.eye(4).repeat(3, 1, 1), rotary=hs.Rotary(torch.ones(2))),
            "rotary positions count tokens",
        ),
        (hs.SelfAttention(*torch.full((3, 3, 3), math.inf)), "finite"),
    ],
)
def test_maps_that_are_none_of_measures_are_refused(attention: nn.Module, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        worst_measure(attention, 2, over=hs.sets.Ball(1.0))


def test_a_single_point_as_a_set_gives_the_norm_of_the_values() -> None:
    found = worst_measure(head(1), 2, over=hs.sets.Ball(0.0), starts=2, steps=3)
    assert found.value == pytest.approx(1.0, rel=1e-9)
    assert not bool(found.measure.atoms.any())
