"""Fields and images of measures against sums written out and against explicit repetition; what is refused.

Measures: what they hold, and what they refuse.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, field, local_constant, push
from howsmooth.meanfield.measure_attention import LogMass, Past
from tests.meanfield.attention_on_measures import KINDS, build, by_hand, draw

PLACES = [0.25, 0.25, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", [None, PLACES], ids=["unmasked", "causal"])
def test_image_equals_the_sums_written_out(kind: str, places: list[float] | None) -> None:
    attention, mu = build(kind, causal=places is not None), draw([1e-6, 1, 2, 5, 0.1], positions=places)
    image = push(attention, mu)
    torch.testing.assert_close(image.atoms, by_hand(attention, mu, mu.atoms, mu.atoms), rtol=1e-12, atol=1e-12)
    assert torch.equal(image.weights, mu.weights)
    assert (image.positions is None) == (places is None)


@pytest.mark.parametrize("kind", KINDS)
def test_image_equals_that_of_repeated_tokens(kind: str) -> None:
    attention, mu = build(kind), draw([1, 2, 4])
    tokens = attention(mu.expand(7).atoms)
    torch.testing.assert_close(push(attention, mu).expand(7).atoms, tokens, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention_of_tokens_is_that_of_their_measure(kind: str) -> None:
    attention, x = build(kind, causal=True), torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(push(attention, Measure.of_tokens(x)).atoms, attention(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_field_is_defined_between_the_atoms(kind: str) -> None:
    attention, mu, points = build(kind), draw([1, 3, 2]), torch.randn(600, 3, dtype=torch.float64)
    torch.testing.assert_close(
        field(attention, mu)(points), by_hand(attention, mu, mu.atoms, points), rtol=1e-12, atol=1e-12
    )


def test_masked_field_sees_the_atoms_up_to_its_position() -> None:
    causal, plain = (build("dot_product", causal=masked) for masked in (True, False))
    mu, points = draw([1, 3, 2, 1], positions=[0.25, 0.5, 0.5, 1.0]), torch.randn(3, 3, dtype=torch.float64)
    found = field(causal, mu)(points, torch.tensor([0.3, 0.5, 1.0]))
    for i, seen in enumerate([1, 3, 4]):
        part = Measure(mu.atoms[:seen], mu.weights[:seen] / mu.weights[:seen].sum())
        torch.testing.assert_close(found[i : i + 1], field(plain, part)(points[i : i + 1]))


def test_field_can_be_differentiated() -> None:
    attention, mu = build("dot_product"), draw([1, 3, 2])
    derivative = torch.func.jacrev(lambda p: field(attention, mu)(p[None])[0])(mu.atoms[0])
    expected = torch.func.jacrev(lambda p: by_hand(attention, mu, mu.atoms, p[None])[0])(mu.atoms[0])
    torch.testing.assert_close(derivative, expected, rtol=1e-12, atol=1e-12)


def test_order_of_atoms_does_not_matter() -> None:
    attention, mu = build("l2", causal=True), draw([1e-6, 1, 2, 5, 0.1], positions=PLACES)
    order = torch.tensor([3, 0, 4, 2, 1])
    assert mu.positions is not None
    shuffled = Measure(mu.atoms[order], mu.weights[order], mu.positions[order])
    torch.testing.assert_close(push(attention, shuffled).atoms, push(attention, mu).atoms[order])
    assert float(local_constant(attention, shuffled)) == pytest.approx(float(local_constant(attention, mu)), rel=1e-12)


def test_biases_soft_caps_and_shared_keys_are_kept() -> None:
    attention = hs.SelfAttention.random(
        4, heads=2, kv_heads=1, dtype=torch.float64, softcap=1.0, query_bias=torch.ones(4), qk_norm="rms"
    )
    mu = draw([2, 3, 5], width=4)
    torch.testing.assert_close(push(attention, mu).expand(10).atoms, attention(mu.expand(10).atoms))


def test_torch_multihead_attention_is_taken_as_it_is() -> None:
    module = nn.MultiheadAttention(4, 2).eval().double()
    mu = draw([1, 1, 2], width=4)
    tokens = mu.expand(4).atoms
    expected = module(tokens, tokens, tokens)[0].detach()
    torch.testing.assert_close(push(module, mu).expand(4).atoms, expected)


def test_the_map_that_was_given_is_left_as_it_was() -> None:
    attention = hs.SelfAttention.random(3, mask="causal")
    push(attention, draw([1, 2], positions=[0.5, 1.0]))
    assert [type(term) for term in attention.terms] == [hs.Causal]
    assert attention.dtype == torch.float32


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (hs.SelfAttention.random(4, rotary=hs.Rotary.standard(4)), "rotary positions count tokens"),
        (hs.SelfAttention.random(4, logit_biases=[hs.ALiBi.standard(1)]), "has ALiBi"),
        (hs.SelfAttention.random(4, mask="causal", logit_biases=[hs.ALiBi.standard(1)]), "has Causal, ALiBi"),
        (hs.SelfAttention.random(4, mask=hs.SlidingWindow(2)), "has SlidingWindow"),
        (hs.SelfAttention.random(4, mask=torch.tensor([[True, True], [False, False]])), "has DenseBias"),
        (hs.SelfAttention.random(4, mask="causal"), "causal attention needs positions"),
        (hs.SigmoidAttention.random(4), "no average over its keys"),
        (hs.SelfAttention.random(5), "atoms are 4 wide, but the attention takes 5"),
        (nn.Linear(4, 4), "needs an attention map, got Linear"),
        (hs.SelfAttention(*torch.full((3, 4, 4), math.inf)), "weight query_weight holds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_that_measures_cannot_be_put_into_is_refused(attention: nn.Module, message: str) -> None:
    mu = draw([1, 2], width=4)
    for call in (push, field, local_constant):
        with pytest.raises(InvalidInput, match=message):
            call(attention, mu)


def test_positions_without_a_mask_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the attention is not causal"):
        push(hs.SelfAttention.random(3), draw([1, 2], positions=[0.5, 1.0]))


def test_a_point_that_sees_nothing_is_refused() -> None:
    gamma = field(build("dot_product", causal=True), draw([1, 2], positions=[0.5, 1.0]))
    assert gamma(torch.zeros(1, 3), torch.tensor([0.5])).shape == (1, 3)
    with pytest.raises(InvalidInput, match=r"position 0.4 sees nothing: the first atom is at 0.5"):
        gamma(torch.zeros(2, 3), torch.tensor([0.5, 0.4]))


@pytest.mark.parametrize(
    ("points", "positions", "message"),
    [
        (torch.zeros(2, 2), None, r"points of shape \(q, 3\)"),
        (torch.zeros(3), None, r"points of shape \(q, 3\)"),
        (torch.zeros(0, 3), None, "which holds no numbers"),
        (torch.full((1, 3), math.inf), None, "points holds 3"),
        (torch.zeros(1, 3), torch.ones(1), "has no positions"),
    ],
)
def test_bad_points_are_refused(points: torch.Tensor, positions: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        field(build("dot_product"), draw([1, 2]))(points, positions)


def test_masked_fields_need_as_many_positions_as_points() -> None:
    gamma = field(build("dot_product", causal=True), draw([1, 2], positions=[0.5, 1.0]))
    with pytest.raises(InvalidInput, match="needs the position of each point"):
        gamma(torch.zeros(1, 3))
    with pytest.raises(InvalidInput, match="2 points need as many positions"):
        gamma(torch.zeros(2, 3), torch.ones(1))


@pytest.mark.parametrize(
    ("term", "what"), [(LogMass(torch.ones(2)), "2 weights"), (Past(torch.ones(2)), "2 positions")]
)
def test_logit_terms_of_another_measure_do_not_fit(term: nn.Module, what: str) -> None:
    attention = hs.SelfAttention.random(3, logit_biases=[term])
    with pytest.raises(InvalidInput, match=f"the measure has {what}, but the input has 3 tokens"):
        attention(torch.zeros(3, 3))


TWO = torch.tensor([[3.0, 4.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("atoms", "weights", "positions", "message"),
    [
        (TWO, [0.5, 0.4], None, "sum to 0.9"),
        (TWO, [0.5, 0.5 + 2e-9], None, "must sum to one"),
        (TWO, [1.5, -0.5], None, "no negative weights, but one of these is -0.5"),
        (TWO, [math.nan, 1.0], None, "weights of a measure holds 1 NaN"),
        (TWO, [math.inf, 1.0], None, "weights of a measure holds 1 NaN or infinite"),
        (TWO, [1.0], None, "one weight for each of its 2 atoms"),
        (TWO, [[0.5, 0.5]], None, "weights must be a torch.Tensor or a sequence"),
        (TWO[0], [0.5, 0.5], None, r"atoms of shape \(m, d\)"),
        (torch.zeros(0, 2), [], None, "at least one"),
        (torch.tensor([[math.nan], [0.0]]), [0.5, 0.5], None, "atoms holds 1 NaN"),
        (TWO, [0.5, 0.5], [0.5], "one position for each of its 2 atoms"),
        (TWO, [0.5, 0.5], [0.5, 2.0], r"lie in \[0, 1\]"),
        (TWO, [0.5, 0.5], [0.5, math.nan], "positions of a measure holds 1 NaN"),
    ],
)
def test_bad_measures_are_refused_in_one_sentence(
    atoms: torch.Tensor, weights: list[float], positions: list[float] | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Measure(atoms, weights, positions)
    assert "\n" not in str(caught.value)


def test_weights_that_nearly_sum_to_one_are_kept_as_given() -> None:
    assert Measure(TWO, [0.5, 0.5 + 5e-10]).weights.tolist() == [0.5, 0.5 + 5e-10]


def test_atoms_without_mass_are_dropped_with_their_positions() -> None:
    measure = Measure(TWO, [0.0, 1.0], [0.25, 0.5])
    assert measure.atoms.tolist() == [[1.0, 0.0]]
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.5]


def test_everything_is_float64() -> None:
    measure = Measure(TWO.int(), torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
    assert measure.positions is not None
    assert {part.dtype for part in (measure.atoms, measure.weights, measure.positions)} == {torch.float64}


def test_tokens_stand_at_i_over_n() -> None:
    measure = Measure.of_tokens(torch.zeros(4, 1))
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert Measure.empirical(torch.zeros(4, 1)).positions is None
    with pytest.raises(InvalidInput, match="at least one"):
        Measure.of_tokens(torch.zeros(0, 1))


def test_support_radius_is_the_largest_norm() -> None:
    assert Measure(TWO, [1e-9, 1 - 1e-9]).support_radius == 5.0


def test_expansion_repeats_atoms_and_positions() -> None:
    measure = Measure(TWO, [1 / 3, 2 / 3], [0.5, 1.0]).expand(6)
    assert measure.atoms[:, 0].tolist() == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert measure.positions is not None
    assert measure.positions.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(InvalidInput, match="not multiples of 1/5"):
        Measure(TWO, [1 / 3, 2 / 3]).expand(5)


def test_splitting_keeps_mass_and_mean() -> None:
    measure = Measure(TWO, [0.25, 0.75], [0.5, 1.0])
    halves = measure.split(1, torch.tensor([0.0, 2.0]))
    assert halves.atoms.tolist() == [[3.0, 4.0], [1.0, 2.0], [1.0, -2.0]]
    assert halves.weights.tolist() == [0.25, 0.375, 0.375]
    assert halves.positions is not None
    assert halves.positions.tolist() == [0.5, 1.0, 1.0]
    assert measure.weights.tolist() == [0.25, 0.75]


def test_moving_needs_a_displacement_for_each_atom() -> None:
    assert Measure(TWO, [0.5, 0.5]).moved(torch.ones(2, 2)).atoms.tolist() == [[4.0, 5.0], [2.0, 1.0]]
    with pytest.raises(InvalidInput, match="cannot move"):
        Measure(TWO, [0.5, 0.5]).moved(torch.ones(2))
