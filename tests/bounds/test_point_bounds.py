"""Bounds at an input from other arguments: local variances, and the softmax Jacobian of Yudin et al. and of Nair."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.attention_cases import MASKS, grid, tokens
from howsmooth.attention import AttentionMap
from howsmooth.bounds import softmax_jacobian
from howsmooth.bounds.question_setting import Setting, setting
from howsmooth.testing import dense_jacobian

NAMES = (
    "howsmooth.local",
    "howsmooth.softmax_jacobian",
    "yudin2025.softmax_jacobian",
    "nair2025.softmax_half",
)
POINT = pytest.mark.parametrize("name", NAMES)


def constant(attention: AttentionMap, x: Tensor) -> float:
    jacobian = dense_jacobian(attention, x)
    return float(torch.linalg.svdvals(jacobian)[0])


def around(attention: AttentionMap, x: Tensor) -> Setting:
    """The setting at x, with gradients."""
    return replace(setting(attention, over=x.detach()), x=x)


def bilinear(seed: int, scale: float = 1.0, **options: object) -> tuple[AttentionMap, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    d, n = 1 + seed % 3, 2 + seed % 6
    a, v, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((d, d), (d, d), (n, d)))
    return hs.SelfAttention.from_bilinear(scale * a, v, mask="causal" if seed % 2 else None, **options), x


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [mask for mask in MASKS if mask not in ("padding", "boolean", "per head", "blind rows")]
)
def test_every_point_bound_holds_wherever_it_applies(mask: str) -> None:
    x = tokens()
    used = dict.fromkeys(NAMES, 0)
    for name, attention in itertools.chain(itertools.islice(grid("dot_product", mask), 0, None, 13), grid("l2", mask)):
        where = setting(attention, over=x)
        exact = constant(attention, x)
        for bound in (hs.bounds.get(entry) for entry in NAMES):
            if bound.refusal(where) is None:
                used[bound.name] += 1
                assert float(bound.at(where)) >= exact, (bound.name, name)
    assert min(used.values()) > 0


@pytest.mark.slow
@POINT
def test_ascent_on_the_ratio_never_passes_one(name: str) -> None:
    bound, best = hs.bounds.get(name), 0.0
    for seed in range(6):
        attention, x = bilinear(seed, 0.5)
        x.requires_grad_()
        optimiser = torch.optim.Adam([x], lr=0.1)
        for _ in range(30):
            left, values, right = torch.linalg.svd(hs.jacobian(attention, x.detach()).dense())
            u, v = left[:, 0].reshape(x.shape), right[0].reshape(x.shape)
            sigma = (u * torch.func.jvp(attention, (x,), (v,))[1]).sum()
            value = bound.evaluate(around(attention, x), True)[0]
            ratio = float(values[0] / value.detach())
            assert ratio <= 1
            best = max(best, ratio)
            optimiser.zero_grad()
            (value.log() - sigma.log()).backward()
            optimiser.step()
    assert best > 0.7


def test_local_equals_its_formula_computed_token_by_token() -> None:
    for seed in range(8):
        attention, x = bilinear(seed, 2.0, bias=torch.ones(1 + seed % 3, dtype=torch.float64))
        a, v, b = attention.query_weight[0], attention.value_weight[0], attention.query_bias[0]
        p = attention.weights(x)[0]
        blocks, growth = [], []
        for i in range(len(x)):
            centred = x - p[i] @ x
            covariance = centred.T @ torch.diag(p[i]) @ centred
            blocks.append(torch.linalg.matrix_norm(covariance @ a, 2))
            growth.append(1 + (a @ x[i] + b).norm() * covariance.trace().clamp_min(0).sqrt())
        exact = torch.linalg.matrix_norm(v, 2) * (max(blocks) + max(growth) * p.sum(0).max().sqrt())
        assert float(hs.bounds.get("howsmooth.local")(attention, over=x)) == pytest.approx(float(exact), rel=1e-9)


def test_local_needs_its_column_sums() -> None:
    attention = hs.SelfAttention.from_bilinear(-torch.eye(1).double(), torch.eye(1).double())
    x = torch.ones(50, 1, dtype=torch.float64)
    x[0] = -1
    columns = float(attention.weights(x)[0].sum(0).max())
    assert float(hs.bounds.get("howsmooth.local")(attention, over=x)) / columns**0.5 < constant(attention, x)


def test_nonlinear_values_are_refused_by_the_local_bound() -> None:
    bound = hs.bounds.get("howsmooth.local")
    with pytest.raises(hs.DoesNotApply, match="not cosine"):
        bound(hs.CosineAttention(*torch.eye(4).repeat(3, 1, 1)), over=torch.ones(3, 4))


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_softmax_jacobian_norms_bound_the_eigenvalues(n: int) -> None:
    p = torch.softmax(torch.linspace(0, 6, 400)[:, None] * torch.randn(400, n), dim=-1).double()
    p = p / p.sum(-1, keepdim=True)
    jacobians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    exact = torch.linalg.eigvalsh(jacobians)[:, -1]
    yudin, nair = softmax_jacobian.softmax_jacobian_norm(p), softmax_jacobian.softmax_jacobian_inf_norm(p)
    assert bool((exact <= yudin + 1e-15).all())
    assert bool((yudin <= 0.5 + 1e-15).all())
    assert bool((nair <= 0.5 + 1e-15).all())
    torch.testing.assert_close(nair, torch.linalg.matrix_norm(jacobians, float("inf")))
    torch.testing.assert_close(nair, torch.linalg.matrix_norm(jacobians, 1))
    assert bool((exact <= nair + 1e-15).all())


def test_softmax_jacobian_norm_is_reached_and_not_improvable_to_the_largest_variance() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    top = torch.linalg.eigvalsh(torch.diag(p) - torch.outer(p, p))[-1]
    assert float(softmax_jacobian.softmax_jacobian_norm(p)) == pytest.approx(float(top)) == 0.5
    assert float(top) > float((p * (1 - p)).max())


@pytest.mark.parametrize("seed", range(10))
def test_own_bound_is_never_above_yudin_and_yudin_never_above_nair(seed: int) -> None:
    attention, x = bilinear(seed, 2.0)
    own, yudin, nair = (float(hs.bounds.get(name)(attention, over=x)) for name in NAMES[1:])
    assert own <= yudin <= nair
    ball = float(hs.bounds.get("nair2025.ball")(attention, over=x))
    assert nair <= ball


def test_yudin_and_nair_equal_their_formulas() -> None:
    attention, x = bilinear(4, 2.0)
    a, v, p = attention.query_weight[0], attention.value_weight[0], attention.weights(x)[0]
    norm = torch.linalg.matrix_norm
    largest = max(float(row.sort().values[-1] * (1 - row.sort().values[-1] + row.sort().values[-2])) for row in p)
    score = float(norm(x, 2) ** 2 * norm(a, 2))
    expected = {
        "yudin2025.softmax_jacobian": float(norm(v, 2)) * (float(norm(p, 2)) + 2 * score * largest),
        "nair2025.softmax_half": float(norm(v, 2)) * (float(norm(p, 2)) + score),
    }
    for name, value in expected.items():
        assert float(hs.bounds.get(name)(attention, over=x)) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_query_bias_breaks_the_published_forms(name: str) -> None:
    attention, x = bilinear(2, 0.1)
    biased, _ = bilinear(2, 0.1, bias=torch.full((3,), 30.0, dtype=torch.float64))
    x = 0.05 * x
    assert float(hs.bounds.get(name)(attention, over=x)) < constant(biased, x)
    with pytest.raises(hs.DoesNotApply, match="queries have no bias"):
        hs.bounds.get(name)(biased, over=x)
    assert float(hs.bounds.get("howsmooth.softmax_jacobian")(biased, over=x)) >= constant(biased, x)


@pytest.mark.parametrize("name", [*NAMES[1:], "nair2025.ball"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rotary": hs.Rotary.standard(4)}, "rotary"),
        ({"softcap": 1.0}, "soft-capped"),
        ({"qk_norm": "rms"}, "linear in the tokens"),
    ],
)
def test_what_the_proofs_do_not_cover_is_refused(name: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(hs.DoesNotApply, match=why):
        hs.bounds.get(name)(hs.SelfAttention.random(4, **options), over=torch.ones(3, 4))


@pytest.mark.slow
@POINT
def test_gradient_in_x_is_that_of_finite_differences(name: str) -> None:
    attention, x = bilinear(5, 1.0)
    evaluate = hs.bounds.get(name).evaluate
    assert torch.autograd.gradcheck(lambda y: evaluate(around(attention, y), True), x.requires_grad_(), atol=1e-6)
