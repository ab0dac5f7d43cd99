"""The three-path bound near an input: weights in the corner of a box, ascent inside the ball, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.bounds.neighbourhood import softmax_ceiling, three_path_ball
from howsmooth.bounds.point_bounds import three_path, value_gain
from howsmooth.bounds.three_paths import paths

HIDDEN = -float("inf")


def case(seed: int) -> tuple[AttentionMap, Tensor, float]:
    """A small head, tokens, and an eps of up to half the largest token; masks, biases and rotary positions in turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    d, n = 1 + seed % 3, 2 + seed % 7
    options: dict[str, object] = {"mask": (None, "causal", draw(n, n))[seed % 3]}
    if seed % 4 == 1:
        options |= {"query_bias": draw(d), "key_bias": 5 * draw(d), "value_bias": draw(d)}
    if seed % 4 == 2 and d > 1:
        options["rotary"] = hs.Rotary.standard(2)
    attention = hs.SelfAttention(draw(d, d), draw(d, d), draw(d, d), draw(2, d), **options)
    x = draw(n, d)
    share = float(torch.rand((), generator=generator)) ** 2 / 2
    return attention, x, share * float(x.norm(dim=-1).max())


def ascend(attention: AttentionMap, x: Tensor, eps: float, steps: int = 40) -> float:
    """The largest σ_max found inside the ball by projected gradient ascent through fixed singular vectors."""
    best, y = 0.0, x.clone()
    for step in range(steps):
        left, values, right = torch.linalg.svd(hs.jacobian(attention, y).dense())
        best = max(best, float(values[0]))
        u, v = left[:, 0].reshape(len(x), -1), right[0].reshape(x.shape)
        gradient = torch.func.grad(lambda z, u=u, v=v: (u * torch.func.jvp(attention, (z,), (v,))[1]).sum())(y)
        ahead = y + 2 * eps / (1 + step) ** 0.5 * gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        moved = ahead - x
        y = x + moved * (eps / moved.norm(dim=-1, keepdim=True).clamp_min(eps))
    return best


@pytest.mark.slow
def test_ascent_inside_the_ball_never_passes_the_bound() -> None:
    ratios = []
    for seed in range(18):
        attention, x, eps = case(seed)
        ratios.append(ascend(attention, x, eps) / float(three_path_ball(attention, x, eps)))
    assert max(ratios) <= 1
    assert max(ratios) > 0.8  # the attack comes close


@pytest.mark.slow
def test_value_at_the_centre_is_no_bound_on_the_ball() -> None:
    passed = 0
    for seed in range(6):
        attention, x, eps = case(seed)
        passed += ascend(attention, x, eps, steps=15) > float(three_path(attention, x))
    assert passed > 0


@pytest.mark.parametrize("seed", range(12))
def test_bound_at_zero_is_the_formula_and_grows_with_eps(seed: int) -> None:
    attention, x, _ = case(seed)
    values = [float(three_path_ball(attention, x, eps)) for eps in (0.0, 1e-9, 0.1, 0.2, 5.0)]
    assert values == sorted(values)
    assert values[0] >= float(three_path(attention, x))
    (part,) = paths(attention, x)
    p, mean, value = part.weights[0], part.mean[0], part.value[0]
    push = torch.stack(
        [part.push[0] if part.push_map is None else part.push[0] @ part.push_map[0, j] for j in range(len(x))]
    )
    spread, lean = [], []
    for i in range(len(x)):
        pull = part.pull[0] - p[i] @ part.pull[0]
        pull = pull if part.pull_map is None else pull @ part.pull_map[0, i]
        spread.append(torch.linalg.matrix_norm(p[i].sqrt()[:, None] * (value - mean[i]), 2))
        lean.append(torch.linalg.matrix_norm(p[i].sqrt()[:, None] * pull, 2))
    spreads = torch.stack(spread)
    cross = max(torch.linalg.matrix_norm((p[:, j].sqrt() * spreads)[:, None] * push[j], 2) for j in range(len(x)))
    exact = torch.linalg.matrix_norm(p, 2) * value_gain(part)[0] + (spreads * torch.stack(lean)).max() + cross
    assert values[0] == pytest.approx(max(float(exact), float(three_path(attention, x))), rel=1e-5)


def test_a_huge_eps_gives_a_finite_bound_that_grows_no_faster_than_eps_cubed() -> None:
    attention, x, _ = case(0)
    values = [float(three_path_ball(attention, x, eps)) for eps in (1e6, 1e7)]
    assert 0 < values[1] < 1e3 * values[0]


@pytest.mark.parametrize("seed", range(10))
def test_softmax_ceiling_is_the_largest_value_over_the_corners(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(4, dtype=torch.float64, generator=generator)
    radius = 2 * torch.rand(4, dtype=torch.float64, generator=generator)
    if seed % 2:
        scores[1] = HIDDEN
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    best = torch.softmax(scores + corners * radius, dim=-1).amax(0)
    found = softmax_ceiling(scores, radius)
    torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-15)
    exponential = (torch.softmax(scores, -1) * torch.exp(radius + radius.max())).clamp(max=1.0)
    assert bool((found <= exponential * (1 + 1e-14)).all())
    assert bool((found < 0.9 * exponential).any())


def test_softmax_ceiling_knows_hidden_from_unlikely() -> None:
    scores = torch.tensor([0.0, -2000.0, HIDDEN], dtype=torch.float64)
    still, moved = (softmax_ceiling(scores, torch.full((3,), r, dtype=torch.float64)) for r in (0.0, 1500.0))
    assert still.tolist() == [1.0, 0.0, 0.0]
    assert moved.tolist() == [1.0, 1.0, 0.0]


def test_softmax_ceiling_survives_a_row_that_sees_nothing_and_huge_radii() -> None:
    scores = torch.tensor([[HIDDEN, HIDDEN], [0.0, HIDDEN], [1.0, 2.0]], dtype=torch.float64)
    found = softmax_ceiling(scores, torch.full((3, 2), 1e300, dtype=torch.float64))
    assert found.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]


def test_key_biases_change_nothing() -> None:
    attention, x, eps = case(1)
    assert attention.key_bias is not None
    with_bias = three_path_ball(attention, x, eps)
    attention.key_bias = torch.zeros_like(attention.key_bias)
    torch.testing.assert_close(three_path_ball(attention, x, eps), with_bias, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_grouped_heads_with_rotary_positions_are_covered() -> None:
    attention = hs.SelfAttention.random(
        12, heads=3, kv_heads=1, dtype=torch.float64, mask="causal", rotary=hs.Rotary.standard(4)
    )
    x = torch.randn(5, 12, dtype=torch.float64)
    bound = hs.bounds.get("howsmooth.three_path_ball")(attention, over=hs.sets.Around(x, 0.2))
    assert ascend(attention, x, 0.2) <= float(bound)


@pytest.mark.parametrize(
    ("options", "why"), [({"softcap": 2.0}, "soft-capped"), ({"qk_norm": "rms"}, "linear in the tokens")]
)
def test_what_the_proof_does_not_cover_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(hs.DoesNotApply, match=why):
        hs.bounds.get("howsmooth.three_path_ball")(
            hs.SelfAttention.random(4, **options), over=hs.sets.Around(torch.ones(3, 4), 0.1)
        )


def test_eps_must_be_given() -> None:
    with pytest.raises(hs.DoesNotApply, match="needs a neighbourhood"):
        hs.bounds.get("howsmooth.three_path_ball")(hs.SelfAttention.random(4), over=torch.ones(3, 4))
