"""The three-path bound: exact ingredients, the formula recomputed densely, attacks, and what breaks it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.attention_cases import KINDS, MASKS, grid, tokens
from howsmooth import models
from howsmooth.attention import AttentionMap
from howsmooth.bounds.point_bounds import (
    cross_norm,
    diagonal_norm,
    key_weights,
    largest,
    nonnegative_norm,
    psd_norm,
    three_path,
    three_path_parts,
    value_gain,
)
from howsmooth.bounds.three_paths import paths
from howsmooth.testing import dense_jacobian as dense

STEP = 47
CASES = pytest.mark.parametrize(("kind", "mask"), list(itertools.product(KINDS, MASKS)))


def query_blocks(attention: AttentionMap, x: Tensor) -> Tensor:
    """W[Σ_j S_ij(v_j − m_i)k_jᵀ]M^q_i, the derivative of each head in its query point: ``(heads, n, d_out, d)``."""
    blocks = []
    for group in paths(attention, x, reduced=False):
        maps, i = torch.cartesian_prod(torch.arange(len(group.value)), torch.arange(len(x))).unbind(1)
        blocks.append(group.query_block(maps, i).unflatten(0, (-1, len(x))))
    return torch.cat(blocks)


def sample(kind: str, mask: str) -> list[tuple[str, AttentionMap]]:
    """Every 47th map of the grid, another offset for every mask (all of the few L2 maps)."""
    return list(
        itertools.islice(grid(kind, mask), 0 if kind == "l2" else MASKS.index(mask), None, 1 if kind == "l2" else STEP)
    )


def head(attention: AttentionMap, h: int) -> AttentionMap:
    """Head h alone: the output slices of the others are zero."""
    alone = copy.deepcopy(attention)
    alone.output_weight = torch.zeros_like(attention.output_weight)
    alone.output_weight[h] = attention.output_weight[h]
    return alone


def constants(attention: AttentionMap, x: Tensor) -> Tensor:
    """σ_max of every head from the dense autograd Jacobian."""
    return torch.stack([torch.linalg.svdvals(dense(head(attention, h), x))[0] for h in range(attention.heads)])


def random_head(
    seed: int, n: int = 6, d: int = 3, scale: float = 1.0, **options: object
) -> tuple[AttentionMap, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, v, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((d, d), (d, d), (n, d)))
    return hs.SelfAttention.from_bilinear(scale * a, v, **options), x


def formula(attention: AttentionMap, x: Tensor, h: int, weights: Tensor) -> tuple[float, float, float]:
    """The three parts for head h, token by token, with derivatives of q, k and v from autograd."""
    n, w = len(x), attention.output_weight[h].T
    with_heads = lambda y: tuple(part[0, h] for part in attention.staged(y[None]))  # noqa: E731
    q, k, v = with_heads(x)
    mq, mk, mv = (
        [jacobian[i, :, i] for i in range(n)] for jacobian in torch.autograd.functional.jacobian(with_heads, x)
    )
    p = attention.weights(x)[h]
    s = p * (1 - p) if attention.weighting == "sigmoid" else p
    if attention.softcap is not None:
        s = s * (1 - torch.tanh(q @ k.T / attention.softcap) ** 2)
    mean = p @ v if attention.weighting == "softmax" else torch.zeros_like(v)
    norm = lambda matrix: float(torch.linalg.matrix_norm(matrix, 2))  # noqa: E731
    diagonal = cross = 0.0
    spread = []
    for i in range(n):
        u = (v - mean[i]) @ w.T
        diagonal = max(diagonal, norm(u.T @ torch.diag(s[i]) @ k @ mq[i]))
        spread.append(norm(u.T @ torch.diag(s[i] * weights) @ u))
    for j in range(n):
        rows = torch.stack([(s[i, j] * spread[i] / weights[j]) ** 0.5 * q[i] @ mk[j] for i in range(n)])
        cross = max(cross, norm(rows))
    return norm(p) * max(norm(w @ m) for m in mv), diagonal, cross


@pytest.mark.slow
@CASES
def test_jacobian_is_the_sum_of_its_three_paths(kind: str, mask: str) -> None:
    x = tokens()
    n = len(x)
    for name, attention in sample(kind, mask)[:3]:
        total = torch.zeros(n, attention.out_features, n, x.shape[1], dtype=torch.float64)
        for part in paths(attention, x, reduced=False):
            value = part.value_map.expand(-1, n, -1, -1)
            push = part.push[:, :, None].expand(-1, -1, n, -1)
            if part.push_map is not None:
                push = torch.einsum("gia,gjar->gijr", part.push, part.push_map)
            centred = part.value[:, None] - part.mean[:, :, None]
            total += torch.einsum("gij,gjmr->imjr", part.weights, value)
            total += torch.einsum("gij,gijm,gijr->imjr", part.slopes, centred, push)
        diagonal = query_blocks(attention, x).sum(0)
        total[torch.arange(n), :, torch.arange(n)] += diagonal
        exact = dense(attention, x)
        assert float((total.reshape(exact.shape) - exact).norm() / exact.norm()) < 1e-13, name


@pytest.mark.slow
@CASES
def test_bound_holds_for_every_head_and_block(kind: str, mask: str) -> None:
    x = tokens()
    for name, attention in sample(kind, mask):
        assert bool((three_path(attention, x) >= constants(attention, x)).all()), name
        if mask not in ("padding", "boolean", "per head", "blind rows"):  # settings refuse tokens that see nothing
            block = hs.bounds.get("howsmooth.three_path")(attention, over=x)
            assert float(block) >= float(torch.linalg.svdvals(dense(attention, x))[0]), name


@pytest.mark.slow
@CASES
def test_parts_equal_the_formula_computed_densely(kind: str, mask: str) -> None:
    x = tokens()
    name, attention = sample(kind, mask)[-1]
    parts = three_path_parts(attention, x)
    weights = torch.cat([key_weights(part) for part in paths(attention, x)])
    for h in range(attention.heads):
        for found, exact in zip(
            (parts.value[h], parts.diagonal[h], parts.cross[h]), formula(attention, x, h, weights[h]), strict=True
        ):
            # λ is lifted by the rounding of its second moments, about 1e-14 of them: 1e-7 in the root of a tiny λ.
            assert exact * (1 - 1e-12) <= float(found) <= exact * (1 + 1e-9) + 1e-6 * float(parts.total[h]), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mask": "causal", "rotary": hs.Rotary.standard(24)}, {"qk_norm": "rms"}])
def test_wide_heads_stay_within_two_percent_of_the_formula(options: dict[str, object]) -> None:
    attention = hs.SelfAttention.random(48, heads=2, dtype=torch.float64, **options)
    x = 2 * torch.randn(12, 48, dtype=torch.float64)
    weights = torch.cat([key_weights(part) for part in paths(attention, x)])
    for h, found in enumerate(three_path(attention, x)):
        exact = sum(formula(attention, x, h, weights[h]))
        assert exact <= float(found) <= 1.02 * exact


@pytest.mark.slow
def test_key_weights_are_never_far_above_the_plain_formula_and_often_far_below() -> None:
    ratios = []
    for seed in range(60):
        attention, x = random_head(seed, n=12, scale=3.0, mask="causal" if seed % 2 else None)
        (part,) = paths(attention, x)
        rest = nonnegative_norm(part.weights) * value_gain(part) + diagonal_norm(part)
        plain = rest + cross_norm(part, torch.ones_like(part.weights[..., 0]))
        ratios.append(float(three_path(attention, x) / plain))
    assert max(ratios) <= 1.02
    assert min(ratios) <= 0.8


@pytest.mark.parametrize("seed", range(8))
def test_every_choice_of_key_weights_gives_a_bound(seed: int) -> None:
    attention, x = random_head(seed, scale=2.0, mask="causal" if seed % 2 else None)
    (part,) = paths(attention, x)
    weights = torch.rand(1, len(x), dtype=torch.float64) ** 4 + 1e-3
    cross = torch.zeros(len(x), 3, len(x), 3, dtype=torch.float64)
    for i, j in itertools.product(range(len(x)), repeat=2):
        cross[i, :, j] = part.slopes[0, i, j] * torch.outer(part.value[0, j] - part.mean[0, i], part.push[0, i])
    exact = torch.linalg.matrix_norm(cross.reshape(3 * len(x), -1), 2)
    assert float(cross_norm(part, weights)) >= float(exact)


def test_bound_is_the_constant_when_logits_do_not_depend_on_tokens() -> None:
    attention, x = random_head(0, scale=0.0, mask="causal")
    assert float(three_path(attention, x)) == pytest.approx(float(constants(attention, x)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dot_product", "l2", "sigmoid"])
def test_ascent_on_the_ratio_never_passes_one(kind: str) -> None:
    make = {"dot_product": hs.SelfAttention, "sigmoid": hs.SigmoidAttention}
    best = 0.0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        d, n = 1 + seed % 3, 2 + seed % 5
        draws = [torch.randn(d, d, dtype=torch.float64, generator=generator) for _ in range(3)]
        options: dict[str, object] = {"mask": "causal" if seed % 2 else None}
        attention = hs.L2SelfAttention(*draws[:2], **options) if kind == "l2" else make[kind](*draws, **options)
        x = torch.randn(n, d, dtype=torch.float64, generator=generator).requires_grad_()
        optimiser = torch.optim.Adam([x], lr=0.1)
        for _ in range(30):
            left, values, right = torch.linalg.svd(hs.jacobian(attention, x.detach()).dense())
            u, v = left[:, 0].reshape(n, d), right[0].reshape(n, d)
            sigma = (u * torch.func.jvp(attention, (x,), (v,))[1]).sum()
            bound = three_path(attention, x)[0]
            ratio = float(values[0] / bound.detach())
            assert ratio <= 1
            best = max(best, ratio)
            optimiser.zero_grad()
            (bound.log() - sigma.log()).backward()
            optimiser.step()
    assert best > 0.75  # the attack comes close, so it would find a violation


def test_cross_path_cannot_be_left_out() -> None:
    attention = hs.SelfAttention.from_bilinear(-torch.eye(1).double(), torch.eye(1).double())
    x = torch.ones(30, 1, dtype=torch.float64)
    x[0] = -1  # everyone looks at the outlier
    parts = three_path_parts(attention, x)
    assert 1.3 * float(parts.value + parts.diagonal) < float(constants(attention, x)) <= float(parts.total)


def test_diagonal_path_cannot_be_left_out() -> None:
    attention = hs.SelfAttention.from_bilinear(torch.eye(1).double(), torch.eye(1).double())
    x = torch.tensor([[0.0], [4.0], [-4.0]], dtype=torch.float64)
    parts = three_path_parts(attention, x)
    assert float(parts.value + parts.cross) < float(constants(attention, x))


def test_mask_cannot_be_left_out() -> None:
    masked, x = random_head(0, n=10, scale=0.0, mask="causal")
    unmasked, _ = random_head(0, n=10, scale=0.0)
    assert float(three_path(unmasked, x)) < float(constants(masked, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_in_x_is_that_of_finite_differences(kind: str) -> None:
    (_, attention), x = sample(kind, "causal")[-1], tokens()
    assert torch.autograd.gradcheck(lambda y: three_path(attention, y), x.requires_grad_(), atol=1e-6)


def test_gradient_of_wide_heads_is_that_of_finite_differences() -> None:
    attention = hs.SelfAttention.random(16, dtype=torch.float64)
    x, direction = torch.randn(2, 7, 16, dtype=torch.float64)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(three_path(attention, x).sum(), x)
    h = 1e-3  # powers of matrices are taken in float32
    with torch.no_grad():
        ahead, behind = (three_path(attention, x + step * direction).sum() for step in (h, -h))
    difference = (ahead - behind) / (2 * h)
    assert float(difference) == pytest.approx(float((gradient * direction).sum()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_query_blocks_are_the_derivative_in_the_query_alone(kind: str) -> None:
    x = tokens()
    for name, attention in sample(kind, "causal")[:2]:
        _, key, value = attention.staged(x[None])

        def field(y: Tensor, attention: AttentionMap = attention, key: Tensor = key, value: Tensor = value) -> Tensor:
            query = attention.project(y[None])[0]
            for stage in attention.stages(*attention.project(x[None])[:2])[0]:
                query = stage(query)
            return (attention._weights(query, key) @ value @ attention.output_weight)[0]

        exact = torch.autograd.functional.jacobian(field, x)  # (heads, n, d_out, n, d)
        blocks = torch.stack([exact[:, i, :, i] for i in range(len(x))], dim=1)
        torch.testing.assert_close(query_blocks(attention, x), blocks, rtol=1e-12, atol=1e-12, msg=name)


def test_a_batch_gives_what_its_items_give() -> None:
    attention, x = hs.SelfAttention.random(8, heads=2, kv_heads=1, dtype=torch.float64), tokens(3)[..., :7]
    x = torch.nn.functional.pad(x, (0, 1))
    torch.testing.assert_close(three_path(attention, x), torch.stack([three_path(attention, item) for item in x]))


def test_tokens_of_another_width_are_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="5 wide"):
        three_path(hs.SelfAttention.random(4), torch.ones(3, 5))


def test_modules_without_heads_are_refused() -> None:
    class Plain(torch.nn.Module):
        kind, in_features = "plain", 4

    with pytest.raises(hs.DoesNotApply, match="needs an attention map with heads"):
        hs.bounds.get("howsmooth.three_path")(Plain(), over=torch.ones(3, 4))


@pytest.mark.parametrize("width", [3, 12, 40])
def test_psd_norm_lies_between_the_norm_and_the_promised_excess(width: int) -> None:
    factors = torch.randn(50, width, width, dtype=torch.float64)
    matrices = factors @ factors.mT * torch.logspace(-40, 40, 50, dtype=torch.float64)[:, None, None]
    matrices[0] = torch.eye(width)  # the flattest spectrum
    exact = torch.linalg.matrix_norm(matrices, 2)
    ratio = psd_norm(matrices) / exact
    assert float(ratio.min()) >= 1 - 1e-12
    assert float(ratio.max()) <= width ** (1 / 128) * (1 + 1e-3)
    assert float(psd_norm(torch.zeros(width, width, dtype=torch.float64))) < 1e-100


def test_nonnegative_norm_is_the_largest_singular_value_from_above() -> None:
    n = 150
    matrices = torch.softmax(3 * torch.randn(5, n, n, dtype=torch.float64), dim=-1)
    matrices[1] = matrices[1].tril()
    matrices[2] = torch.block_diag(matrices[2, :75, :75], 0.99 * matrices[2, :75, :75])  # hard for power iteration
    matrices[3, :, 7:] = 0  # keys that nobody sees
    matrices[4] = 0
    exact = torch.linalg.svdvals(matrices)[:, 0]
    found = nonnegative_norm(matrices)
    assert bool((found >= exact * (1 - 1e-12)).all())
    assert bool((found <= exact * 1.0011 + 1e-100).all())


def test_largest_finds_the_maximum_with_few_matrices() -> None:
    values = torch.rand(4, 500, dtype=torch.float64)
    built: list[int] = []

    def build(maps: Tensor, i: Tensor) -> Tensor:
        built.append(len(i))
        return values[maps, i, None, None]

    with torch.no_grad():
        found = largest(values * (1 + torch.rand(4, 500)), build)
    assert torch.equal(found, values.amax(1))
    assert sum(built) < 2000 * 0.75


@pytest.mark.slow
def test_long_sequences_work_and_the_bound_holds() -> None:
    attention = hs.SelfAttention.random(32, heads=2, mask="causal")
    x = torch.randn(2048, 32)
    with torch.no_grad():
        bound = three_path(attention, x)
    measured = hs.measure_heads(attention, x)
    assert bool((bound >= measured.lower).all())
    assert bool((bound <= 5 * measured.value).all())


@pytest.mark.slow
def test_real_heads_are_bounded_within_a_small_factor() -> None:
    opened = models.open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    inputs = models.attention_inputs(model, tokenizer, models.alice(), length=96)
    for layer in range(6):
        attention = hs.SelfAttention.from_transformers(model, layer)
        with torch.no_grad():
            bound = three_path(attention, inputs[layer][0])
        measured = hs.measure_heads(attention, inputs[layer][0])
        assert bool((bound >= measured.upper).all())
        assert bool((bound <= 2.7 * measured.value).all())
