"""The local constant of a measure against dense Jacobians, explicit repetition and ratios of distances.

The two-atom lower bound against a numerical search, and against local constants of the measures it speaks of.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import howsmooth as hs
from howsmooth import InvalidInput
from howsmooth.meanfield import Measure, field, local_constant, ratio, two_atom, two_atom_measure
from tests.meanfield.attention_on_measures import KINDS, build, by_hand, draw

SPLITS = hs.SelfAttention.from_bilinear(torch.tensor([[-2.0, -2.0], [1.0, -2.0]]), torch.eye(2))
"""A head that two equal atoms at (±1, 1) are rougher for when one is split than when both move: 2√2 against 2.396."""
PAIR = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])


def dense_parts(attention: hs.SelfAttention | hs.L2SelfAttention, mu: Measure) -> tuple[Tensor, Tensor]:
    """‖D^{1/2} J D^{-1/2}‖ and every ‖∂_xΓ_μ(x_i)‖ from dense autograd Jacobians of the sums written out."""
    root = mu.weights.sqrt()[:, None]
    moving = torch.func.jacrev(lambda z: root * by_hand(attention, mu, z / root, z / root))(mu.atoms * root)
    points = torch.func.jacrev(lambda p: by_hand(attention, mu, mu.atoms, p))(mu.atoms)
    size = mu.atoms.numel()
    diagonal = torch.stack([points[i, :, i] for i in range(len(mu))])
    return torch.linalg.matrix_norm(moving.reshape(size, size), 2), torch.linalg.matrix_norm(diagonal, 2)


def repeated(attention: hs.SelfAttention | hs.L2SelfAttention, mu: Measure, n: int) -> float:
    """‖J‖ of n tokens, dense, under the mask "sees τ_j ≤ τ_i" when there are positions."""
    long = mu.expand(n)
    if long.positions is not None:
        attention.logit_biases = torch.nn.ModuleList([hs.DenseBias(long.positions <= long.positions[:, None])])
    jacobian = torch.func.jacrev(attention)(long.atoms)
    return float(torch.linalg.matrix_norm(jacobian.reshape(long.atoms.numel(), -1), 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", [None, [0.2, 0.2, 0.7, 0.5]], ids=["unmasked", "causal"])
@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1e-9, 0.3, 0.7, 1e-4]], ids=["equal", "extreme"])
def test_both_parts_equal_dense_svd(kind: str, places: list[float] | None, weights: list[float]) -> None:
    attention, mu = build(kind, causal=places is not None), draw(weights, positions=places)
    moving, splitting = dense_parts(attention, mu)
    found = local_constant(attention, mu)
    assert float(found.moving) == pytest.approx(float(moving), rel=1e-12)
    assert float((found.splitting.value - splitting).abs().max()) <= 1e-12 * float(found)
    assert found.value == max(float(found.moving), float(found.splitting.value.max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(2, 4), (2, 3, 7), (2, 13, 20, 25)], ids=sum)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_explicit_repetition(kind: str, counts: tuple[int, ...], causal: bool) -> None:
    places = [0.5, 1.0, 0.5, 0.75][: len(counts)] if causal else None
    attention, mu = build(kind, causal=causal, seed=1), draw(list(counts), positions=places)
    found = local_constant(attention, mu)
    assert float(found) == pytest.approx(repeated(attention, mu, sum(counts)), rel=1e-12)


@pytest.mark.parametrize("n", [4, 6, 60])
def test_splitting_is_what_repeated_tokens_can_do_beyond_moving_together(n: int) -> None:
    mu, attention = Measure(PAIR, [0.5, 0.5]), SPLITS.in_dtype(torch.float64)
    found = local_constant(attention, mu)
    assert found.part == "splitting"
    assert float(found) == pytest.approx(repeated(attention, mu, n), rel=1e-12)
    # Single tokens cannot be split, and have the other part alone.
    assert repeated(attention, mu, 2) == pytest.approx(float(found.moving), rel=1e-12)
    assert float(found.moving) < 0.85 * float(found)


def test_three_atoms_answer_for_a_billion_tokens() -> None:
    head = hs.SelfAttention.from_bilinear(-10 * torch.eye(1), torch.eye(1))
    x = torch.tensor([[-1.0], [0.5], [1.0]])
    found = local_constant(head, Measure(x, [1e-9, 0.3, 0.7 - 1e-9]))
    # In the limit of a light first atom: heavy images move by ∂Γ(x_i)/∂x_1 = p_i(1 + (x_1 − m_i)·A x_i), P_i1 = p_i,
    # weights turn that into √(w_i/w_1); what the heavy atoms do among themselves is negligible.
    logits = -10 * x.double() @ x.double().T
    p = torch.softmax(logits + torch.tensor([1e-9, 0.3, 0.7 - 1e-9]).double().log(), dim=-1)
    mean = p @ x.double()
    push = p[1:, :1] * (1 + (x[0] - mean[1:]) * -10 * x[1:])
    expected = (torch.tensor([[0.3], [0.7]]) * push.square()).sum().sqrt() / 1e-9**0.5
    assert float(found) == pytest.approx(float(expected), rel=1e-4)
    assert found.upper <= hs.bounds.get("howsmooth.mean_field")(head, over=hs.sets.Ball(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_close_pairs_reach_each_part(causal: bool) -> None:
    attention = build("dot_product", causal=causal)
    mu = draw([1, 3, 0.2], positions=[0.5, 1.0, 0.5] if causal else None)
    found = local_constant(attention, mu)
    assert found.moving.right is not None
    assert found.splitting.right is not None
    near = mu.moved(1e-5 * found.moving.right)
    assert ratio(attention, mu, near) == pytest.approx(float(found.moving), rel=1e-3)
    near = mu.split(found.atom, 1e-5 * found.splitting.right[found.atom])
    assert ratio(attention, mu, near) == pytest.approx(float(found.splitting.value.max()), rel=1e-3)


def test_no_close_pair_passes_the_local_constant() -> None:
    generator = torch.Generator().manual_seed(0)
    attention, mu = build("dot_product", seed=3), draw([1, 3, 0.2])
    constant, largest = float(local_constant(attention, mu)), 0.0
    for _ in range(60):  # every atom becomes three, each displaced by its own
        displacement = torch.randn(9, 3, generator=generator, dtype=torch.float64)
        three = Measure(mu.atoms.repeat_interleave(3, 0), mu.weights.repeat_interleave(3) / 3)
        largest = max(largest, ratio(attention, mu, three.moved(1e-6 * displacement)))
    assert 0.2 * constant < largest <= constant * (1 + 1e-4)


def test_little_mass_moving_far_is_seen_through_points_between_the_atoms() -> None:
    head = hs.SelfAttention.from_bilinear(5 * torch.eye(1), torch.eye(1))  # Γ_μ = tanh(5x)
    mu = Measure(torch.tensor([[-1.0], [1.0]]), [0.5, 0.5])
    far = Measure(torch.tensor([[-1.0], [1.0], [-0.3]]), [0.5, 0.5 - 1e-7, 1e-7])
    stretched = ratio(head, mu, far)
    gamma = field(head, mu)(torch.tensor([[1.0], [-0.3]]))
    assert stretched == pytest.approx(float(gamma[0] - gamma[1]) / 1.3, rel=1e-3)
    assert stretched > 1.4 * float(local_constant(head, mu))  # W₂ tends to zero, the displacement does not
    between = Measure(torch.tensor([[-1.0], [1.0], [0.0]]), [0.5, 0.5 - 1e-12, 1e-12])
    assert float(local_constant(head, between)) == pytest.approx(5.0, rel=1e-6)


def test_vectors_are_displacements_of_atoms_and_images() -> None:
    attention, mu = build("l2"), draw([1e-3, 1, 2])
    found = local_constant(attention, mu).moving
    assert found.left is not None
    assert found.right is not None
    for displacement in (found.left, found.right):
        assert float((mu.weights[:, None] * displacement.square()).sum()) == pytest.approx(1, rel=1e-12)
    _, image = torch.func.jvp(lambda x: by_hand(attention, mu, x, x), (mu.atoms,), (found.right,))
    torch.testing.assert_close(image, float(found) * found.left, rtol=1e-10, atol=1e-10)


def test_many_atoms_are_measured_by_products_within_their_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(120, generator=generator, dtype=torch.float64)
    mu = Measure(torch.randn(120, 3, generator=generator, dtype=torch.float64), weights / weights.sum())
    attention = build("dot_product")
    fast = local_constant(attention, mu, rtol=1e-6)
    dense = local_constant(attention, mu, dense_limit=360)
    assert fast.moving.method == "golub-kahan"
    assert dense.moving.method == "dense"
    assert (fast.confidence, dense.confidence) == (0.99, 1.0)
    assert fast.converged
    assert fast.lower <= dense.value <= fast.upper <= fast.lower * (1 + 1e-6)


def test_the_report_names_the_larger_part() -> None:
    assert (
        repr(local_constant(SPLITS, Measure(PAIR, [0.5, 0.5])))
        == "2.828 in W₂ (≥ 2.8284, ≤ 2.8285, rounding modelled), splitting (moving whole atoms: 2.396)"
    )
    masked = local_constant(build("l2", causal=True), draw([1, 1], positions=[0.5, 1.0]))
    assert repr(masked).startswith(f"{float(masked.moving):.4g} in d₂ (≥ ")
    assert "rounding modelled), moving (splitting one atom: " in repr(masked)


def test_one_atom_is_a_token_by_itself() -> None:
    attention = build("dot_product")
    found = local_constant(attention, draw([1]))
    value = sum(attention.output_weight[h].T @ attention.value_weight[h] for h in range(2))
    assert float(found) == pytest.approx(float(torch.linalg.matrix_norm(value, 2)), rel=1e-12)
    assert float(found.splitting.value) < 1e-15


U = torch.ones(1, dtype=torch.float64)
FORMULA = {1: "2.99", 2: "12.9", 3: "48", 4: "166", 5: "547"}
MEASURED = {1: 3.069, 2: 12.996, 3: 48.07, 4: 165.85, 5: 546.95}


def head(b: float) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(-b * torch.eye(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))


def stretch(b: float, heavy: float) -> float:
    e = math.exp(2 * b)
    p = e / (e + heavy)
    return heavy**0.5 * p * (1 + 2 * (1 - p) * b)


@pytest.mark.parametrize("b", FORMULA)
def test_value_is_the_supremum_over_mass_ratios(b: int) -> None:
    found = two_atom(b, 1.0)
    best = minimize_scalar(lambda log: -stretch(b, math.exp(log)), bounds=(0, 2 * b + 4), options={"xatol": 1e-9})
    assert found.value == pytest.approx(-best.fun, rel=1e-12)
    assert found.heavy == pytest.approx(math.exp(best.x), rel=1e-5)
    assert f"{found.value:.3g}" == FORMULA[b]
    assert two_atom(b / 4, 2.0) == found  # only γR² counts


@pytest.mark.slow
@pytest.mark.parametrize("b", MEASURED)
def test_measured_supremum_is_slightly_larger_and_below_the_bound(b: int) -> None:
    best = minimize_scalar(
        lambda log: -float(local_constant(head(b), two_atom_measure(U, 1.0, math.exp(log)))),
        bounds=(0, 2 * b + 4),
        method="bounded",
    )
    assert -best.fun == pytest.approx(MEASURED[b], rel=2e-4)
    assert (
        two_atom(b, 1.0).value
        < -best.fun
        <= float(hs.bounds.get("howsmooth.mean_field")(head(b), over=hs.sets.Ball(1.0)))
    )


@pytest.mark.parametrize("b", [0.3, 1.0, 2.5])
def test_value_is_below_the_local_constant_of_its_own_measure(b: float) -> None:
    found = two_atom(b, 1.0)
    assert found.value <= float(local_constant(head(b), two_atom_measure(U, 1.0, found.heavy)))
    assert found.value >= 0.5 * (1 + b) * math.exp(b)


def test_any_matrix_with_that_eigenvalue_will_do() -> None:
    u = torch.tensor([3.0, 4.0], dtype=torch.float64)
    a = (
        torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64) @ (torch.eye(2) - torch.outer(u, u) / 25)
        - 2 * torch.outer(u, u) / 25
    )
    v = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(a @ u, -2 * u)
    found = two_atom(2.0, 1.0)
    attention = hs.SelfAttention.from_bilinear(a, v)
    pull = float((v @ u / 5).norm())
    assert found.value * pull <= float(local_constant(attention, two_atom_measure(u, 1.0, found.heavy)))


def test_an_attractive_head_is_smooth_at_the_same_measure() -> None:
    found = two_atom(3.0, 1.0)
    attracted = local_constant(head(-3.0), two_atom_measure(U, 1.0, found.heavy))
    assert float(attracted) < 0.1 * found.value


@pytest.mark.parametrize(("gamma", "radius"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_bad_arguments_are_refused(gamma: float, radius: float) -> None:
    with pytest.raises(InvalidInput, match="two atoms need"):
        two_atom(gamma, radius)
