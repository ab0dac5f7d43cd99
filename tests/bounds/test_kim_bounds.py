"""Kim, Papamakarios, Mnih 2021: reference values, and what happens without each assumption."""

from __future__ import annotations

import math

import pytest
import torch
from numpy.linalg import norm
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import l2_bounds
from howsmooth.testing import dense_jacobian as dense

ONE = torch.ones(1, 1, dtype=torch.float64)
UPPER = ["kim2021.lip_inf", "kim2021.lip_2", "howsmooth.l2_lip_inf", "howsmooth.l2_lip_2"]


def measured(attention: hs.L2SelfAttention | hs.SelfAttention, x: Tensor, norm: float) -> float:
    return float(torch.linalg.matrix_norm(dense(attention, x), norm))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("n", [2, 3, 10, 1000, 10**9])
def test_phi_inverse_solves_its_equation(n: int) -> None:
    root = brentq(lambda x: math.log(x) + x + 1 - math.log(n - 1), 1e-9, 50, xtol=1e-13)
    assert l2_bounds.phi_inverse(n - 1) == pytest.approx(root, rel=1e-11)


def test_key_lemma_is_the_maximum_over_distances() -> None:
    for others in (1, 7, 99):

        def moment(d: float, others: int = others) -> float:
            return others * d * math.exp(-d) / (1 + others * math.exp(-d))

        best = minimize_scalar(lambda d: -moment(d), bounds=(0, 40), method="bounded", options={"xatol": 1e-10})
        assert -best.fun == pytest.approx(l2_bounds.phi_inverse(others), rel=1e-12)
        assert best.x == pytest.approx(1 + l2_bounds.phi_inverse(others), rel=1e-5)


@pytest.mark.parametrize(
    ("n", "value"), [(10, 5.404), (100, 11.515), (200, 13.588), (500, 16.446), (1000, 18.682), (5000, 24.061)]
)
def test_lip_inf_reference_values(n: int, value: float) -> None:
    bound = hs.bounds.get("kim2021.lip_inf")(hs.L2SelfAttention(ONE, ONE, ONE), n=n)
    assert float(bound) == pytest.approx(value, abs=5e-4)


def test_lip_2_reference_value() -> None:
    assert float(hs.bounds.get("kim2021.lip_2")(hs.L2SelfAttention(ONE, ONE, ONE), n=1000)) == pytest.approx(
        590.8, abs=0.05
    )


def test_norms_are_those_of_the_statement() -> None:
    d, heads, n = 6, 2, 5
    rows = [torch.randn(d, d, dtype=torch.float64) for _ in range(3)]
    attention = hs.L2SelfAttention(*rows, heads=heads)
    c, s = l2_bounds.phi_inverse(n - 1), 3**0.5
    wq, wv, wo = (w.numpy().T for w in rows)  # W^Q, W^V with heads side by side, and W^O, as in the paper
    heads_of = [(wq[:, :3], wv[:, :3]), (wq[:, 3:], wv[:, 3:])]
    expected_inf = (
        (4 * c + 1 / s)
        * norm(wo.T, math.inf)
        * max(norm(q, math.inf) * norm(q.T, math.inf) for q, _ in heads_of)
        * max(norm(v.T, math.inf) for _, v in heads_of)
    )
    squares = sum(norm(q, 2) ** 4 * norm(v, 2) ** 2 for q, v in heads_of)
    expected_2 = n**0.5 / s * (4 * c + 1) * squares**0.5 * norm(wo, 2)
    assert float(hs.bounds.get("kim2021.lip_inf")(attention, n=n)) == pytest.approx(float(expected_inf), rel=1e-12)
    assert float(hs.bounds.get("kim2021.lip_2")(attention, n=n)) == pytest.approx(float(expected_2), rel=1e-12)


def test_glorot_weights_show_which_norm_to_divide_by() -> None:
    n, d, heads = 288, 512, 8
    weights = [torch.nn.init.xavier_uniform_(torch.empty(d, d, dtype=torch.float64)) for _ in range(3)]
    attention = hs.L2SelfAttention(*weights, heads=heads)
    inf, two, own, own_inf = (
        float(hs.bounds.get(name)(attention, n=n))
        for name in ("kim2021.lip_inf", "kim2021.lip_2", "howsmooth.l2_lip_2", "howsmooth.l2_lip_inf")
    )
    assert inf == pytest.approx(4.1e5, rel=0.06)
    assert two == pytest.approx(416, rel=0.03)
    assert own < 26
    assert own_inf < 1300


def test_usual_form_of_lip_2_is_false() -> None:
    """With ‖W_h‖² instead of ‖W_h‖⁴ in the root: N = 2, D = H = 1, W = 10."""
    attention = hs.L2SelfAttention(10 * ONE, ONE, ONE)
    worst = max(measured(attention, column(0.0, t), 2) for t in torch.linspace(0.13, 0.15, 41).tolist())
    corrected = float(hs.bounds.get("kim2021.lip_2")(attention, n=2))
    assert worst == pytest.approx(160.16, abs=0.01)
    assert corrected == pytest.approx(298.9, abs=0.05)
    assert corrected / 10 == pytest.approx(29.89, abs=0.01)  # the usual form, five times too small
    assert corrected / 10 < worst < corrected


@pytest.mark.parametrize(("t", "value"), [(1.0, 1.889), (10.0, 89.89), (100.0, 8889.9)])
def test_dot_product_attention_is_not_lipschitz(t: float, value: float) -> None:
    head = hs.SelfAttention.from_bilinear(ONE, ONE)
    found = measured(head, l2_bounds.not_lipschitz_witness(9, t), math.inf)
    assert found == pytest.approx(value, rel=5e-4)
    assert found >= (1 + t**2 * 8 / 9) * (1 - 1e-12)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_witness_refuses_even_and_tiny_counts(n: int) -> None:
    with pytest.raises(hs.InvalidInput, match="odd number of tokens"):
        l2_bounds.not_lipschitz_witness(n, 1.0)


def untied(b: float) -> tuple[hs.L2SelfAttention, Tensor]:
    return hs.L2SelfAttention(ONE, ONE, ONE, key=ONE / 2), column(100 * b, 202 * b, 198 * b)


def self_hidden(b: float) -> tuple[hs.L2SelfAttention, Tensor]:
    return hs.L2SelfAttention(ONE, ONE, ONE, mask=~torch.eye(3, dtype=torch.bool)), column(0.0, b, -b)


def self_disfavoured(b: float) -> tuple[hs.L2SelfAttention, Tensor]:
    bias = -2 * b**2 * torch.eye(3, dtype=torch.float64)
    return hs.L2SelfAttention(ONE, ONE, ONE, mask=bias), column(0.0, b, -b)


def no_value_factor(b: float) -> tuple[hs.L2SelfAttention, Tensor]:
    """Each head averages the coordinate that it does not look at, which nothing bounds."""
    two = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [1.0, b**2], [2.0, 0.0]], dtype=torch.float64)
    return hs.L2SelfAttention(two, two.flip(0), two, heads=2, value_factor=False), x


BROKEN = {
    "share their weights": untied,
    "every token sees itself": self_hidden,
    "nothing is added to the logits": self_disfavoured,
    "values carry the factor": no_value_factor,
}


@pytest.mark.parametrize("name", UPPER)
@pytest.mark.parametrize("sentence", BROKEN)
def test_without_an_assumption_the_bound_refuses_and_is_false(name: str, sentence: str) -> None:
    bound, (attention, x) = hs.bounds.get(name), BROKEN[sentence](100.0)
    with pytest.raises(hs.DoesNotApply, match=sentence):
        bound(attention, n=len(x))
    sound = hs.L2SelfAttention(
        attention.query_weight.flatten(0, 1), attention.plain_value.flatten(0, 1), heads=attention.heads
    )
    assert measured(attention, x, bound.norm) > 10 * float(bound(sound, n=len(x)))


@pytest.mark.parametrize(("b", "apart", "hidden"), [(1.0, 5.0, 3.0), (10.0, 599.0, 399.0), (100.0, 59999.0, 39999.0)])
def test_untied_and_self_hidden_reference_values(b: float, apart: float, hidden: float) -> None:
    assert measured(*untied(b), math.inf) == pytest.approx(apart, rel=1e-9)
    assert measured(*self_hidden(b), math.inf) == pytest.approx(hidden, rel=1e-9)


@pytest.mark.parametrize("name", UPPER)
def test_no_bound_holds_for_every_n(name: str) -> None:
    attention, bound = hs.L2SelfAttention(ONE, ONE, ONE), hs.bounds.get(name)
    with pytest.raises(hs.DoesNotApply, match="n is finite"):
        bound(attention, n=math.inf)
    assert measured(attention, l2_bounds.tight_input(201), bound.norm) > float(bound(attention, n=3))


@pytest.mark.parametrize("name", UPPER)
def test_other_attention_is_refused(name: str) -> None:
    with pytest.raises(hs.DoesNotApply, match="is for l2 attention"):
        hs.bounds.get(name)(hs.SelfAttention.from_bilinear(ONE, ONE), n=4)


def test_masks_of_zeros_and_minus_infinity_only_hide() -> None:
    bias = torch.zeros(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -math.inf)
    hidden = hs.bounds.get("kim2021.lip_2")(hs.L2SelfAttention(ONE, ONE, mask=bias), n=4)
    assert hidden == hs.bounds.get("kim2021.lip_2")(hs.L2SelfAttention(ONE, ONE, mask="causal"), n=4)


def test_plain_value_keeps_the_weights_without_the_factor() -> None:
    query, value = torch.randn(2, 4, 4, dtype=torch.float64)
    attention = hs.L2SelfAttention(query, value, heads=2)
    assert torch.equal(attention.plain_value.flatten(0, 1), value)
    tied = query.reshape(2, 2, 4)
    factor = tied.mT @ tied / 2**0.5
    assert torch.allclose(attention.plain_value @ factor, attention.value_weight, rtol=1e-13)
