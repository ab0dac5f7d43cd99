"""What an operator says about its own rounding is true, and small where nothing cancels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence import offsets
from howsmooth.jacobians import attention_jacobian, attention_operator, tiles
from howsmooth.jacobians.attention_operator import TokenBlocks
from howsmooth.jacobians.product_error import Rounding
from howsmooth.jacobians.softmax_products import EvaluationPoint
from howsmooth.numerics.spectral_norms import spectral_bound as spectral
from howsmooth.testing import by_columns, by_rows
from howsmooth.testing import dense_jacobian as autograd_jacobian


def two_clusters() -> tuple[hs.SelfAttention, Tensor]:
    """Tokens at ±100 with a spread of 0.1, each of which attends to one of the two clusters."""
    a = torch.zeros(3, 3)
    a[0, 1] = 1e3
    x = 0.1 * torch.randn(12, 3)
    x[:, 0] += torch.where(torch.arange(12) < 6, 100.0, -100.0)
    return hs.SelfAttention.from_bilinear(a, torch.eye(3)), x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", offsets.DTYPES)
@pytest.mark.parametrize("family", offsets.FAMILIES)
def test_noise_covers_what_cancellation_leaves(family: str, dtype: torch.dtype) -> None:
    for ratio in (1e2, 1e5, 1e9):
        tally = offsets.run(family, ratio, dtype, range(1))
        assert tally.beyond == tally.lower == tally.upper == 0
        assert tally.worst < 0.5
        assert tally.refused == 0 or family == "two far clusters, L2"  # its logits outgrow float64


def test_the_noise_is_needed_where_clusters_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_operator, "resolved_in_float32", lambda operator, *_: operator)
    attention, x = two_clusters()
    operator = attention_jacobian(attention, x)
    exact = autograd_jacobian(attention.in_dtype(torch.float64), x.double())
    size = torch.linalg.matrix_norm(exact, ord=2)
    error = torch.linalg.matrix_norm(by_columns(operator).double() - exact, ord=2)
    assert 100 * torch.finfo(torch.float32).eps * size < error < operator.accuracy.product


def test_float64_is_taken_where_float32_is_mostly_noise() -> None:
    attention, x = two_clusters()
    operator = attention_jacobian(attention, x)
    exact = autograd_jacobian(attention.in_dtype(torch.float64), x.double())
    assert operator.dtype == torch.float64
    assert float((by_rows(operator) - exact).norm() / exact.norm()) < 1e-8


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("n", "width", "heads"), [(16, 32, 1), (64, 64, 4), (12, 8, 2)])
def test_ordinary_heads_stay_in_float32_with_little_noise(n: int, width: int, heads: int, per_head: bool) -> None:
    x = torch.randn(n, width)
    operator = attention_jacobian(hs.SelfAttention.random(width, heads), x, per_head=per_head, reduced=per_head)
    assert operator.dtype == torch.float32
    assert (operator.accuracy.product <= 3e-4 * hs.norms.operator_norm(operator, rtol=1e-2).value).all()


def test_constants_on_all_keys_and_values_change_nothing() -> None:
    x, weights = torch.randn(8, 6), torch.randn(4, 6, 6) / 3
    plain = attention_jacobian(hs.SelfAttention(*weights), x)
    far = attention_jacobian(
        hs.SelfAttention(*weights, key_bias=torch.full((6,), 1e8), value_bias=torch.ones(6) * 1e9), x
    )
    assert far.dtype == torch.float32
    assert torch.equal(far.dense(), plain.dense())


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_l2_attention_moves_with_its_tokens(offset: float) -> None:
    torch.manual_seed(0)
    attention = hs.L2SelfAttention(torch.randn(16, 16) / 4, torch.randn(16, 16) / 4)
    x = torch.randn(40, 16) + offset
    found = hs.measure(attention, x, rtol=1e-5)
    centred = x.double() - x.double().mean(0)
    expected = torch.linalg.matrix_norm(autograd_jacobian(attention.in_dtype(torch.float64), centred), ord=2)
    assert found.lower <= expected <= found.upper
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_half_precision_with_sharper_positions_is_promoted_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi slopes of 2^(−8/3) are kept in float64; a detour through float32 would move the map by 10⁻⁸."""
    monkeypatch.setattr(attention_operator, "resolved_in_float32", lambda *_: None)
    alibi, rotary = hs.ALiBi.standard(3), hs.Rotary.standard(4)
    attention = hs.SelfAttention.random(12, 3, dtype=torch.float16, logit_biases=[alibi], rotary=rotary)
    x = torch.randn(7, 12).half()
    expected = autograd_jacobian(attention.in_dtype(torch.float64), x.double())
    found = by_columns(attention_jacobian(attention, x))
    assert found.dtype == torch.float64
    assert float((found - expected).norm() / expected.norm()) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_angles_of_half_precision_frequencies_are_exact(dtype: torch.dtype) -> None:
    rotary = hs.Rotary(torch.tensor([1.0, 0.25], dtype=dtype))
    x = torch.randn(600, 4, dtype=torch.float64)
    expected = hs.Rotary(torch.tensor([1.0, 0.25], dtype=torch.float64))(x)
    assert (rotary(x) - expected).abs().max() < 1e-3


def test_noise_follows_paths_subsets_adjoints_and_blocks() -> None:
    operator = attention_jacobian(hs.SelfAttention.random(8, 2), torch.randn(3, 5, 8), per_head=True)
    noise = _tensor(operator.accuracy.product)
    assert noise.shape == operator.batch_shape
    assert noise.dtype == torch.float64
    assert (noise > 0).all()
    parts = [_tensor(operator.along(path).accuracy.product) for path in ("value", "score")]  # type: ignore[arg-type]
    assert torch.allclose(parts[0] + parts[1], noise)
    chosen = operator.subset(torch.tensor([1, 4]))
    assert torch.equal(_tensor(chosen.accuracy.product), noise.flatten()[[1, 4]])
    assert torch.equal(_tensor(operator.adjoint.accuracy.product), noise)
    blocks = TokenBlocks(operator.subset(torch.tensor([0, 1])), slice(0, 2))
    assert _tensor(blocks.accuracy.product).expand(blocks.batch_shape)[0, 1, 3] == noise[0, 1]
    block = attention_jacobian(hs.SelfAttention.random(8, 2), torch.randn(3, 5, 8))
    assert _tensor(block.accuracy.product).shape == (3,)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_noise_scales_with_the_values(scale: float) -> None:
    x, weights = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 4, 4, dtype=torch.float64)
    plain = attention_jacobian(hs.SelfAttention(*weights), x).accuracy.product
    scaled = attention_jacobian(hs.SelfAttention(*weights[:2], scale * weights[2], weights[3]), x).accuracy.product
    assert float(scaled) == pytest.approx(scale * float(plain), rel=1e-6)


def test_values_of_denormal_size_are_computed_in_float64() -> None:
    tiny = hs.SelfAttention.from_bilinear(torch.eye(2), 1e-39 * torch.eye(2))
    x = torch.randn(30, 2)
    operator = attention_jacobian(tiny, x)
    expected = torch.linalg.matrix_norm(autograd_jacobian(tiny.in_dtype(torch.float64), x.double()), ord=2)
    assert operator.dtype == torch.float64
    assert float(torch.linalg.matrix_norm(operator.dense(), ord=2)) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("shape", [(3, 5, 9), (9, 4), (1, 1), (2, 6, 6)])
def test_the_bound_on_a_matrix_is_above_its_norm_by_little(shape: tuple[int, ...]) -> None:
    for scale in (1e-30, 1.0, 1e30):
        matrix = scale * torch.randn(shape)
        exact = torch.linalg.matrix_norm(matrix.double(), ord=2)
        bound = spectral(matrix)
        assert (bound >= exact * (1 - 1e-6)).all()
        assert (bound <= exact * min(shape[-2:]) ** 0.125 * (1 + 1e-6)).all()
    assert float(spectral(torch.zeros(2, 2))) == 0


def _tensor(noise: Tensor | float) -> Tensor:
    return torch.as_tensor(noise)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_sums_over_many_tiles_are_as_good_as_their_chains_are_short(
    mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, width = 1024, 8
    attention = hs.SelfAttention.random(width, mask=mask)
    x = 3 + torch.rand(n, width, generator=torch.Generator().manual_seed(0))  # of one sign: nothing cancels in a sum
    broad = attention_jacobian(attention, x)
    monkeypatch.setattr(tiles, "TILE_ROWS", 32)
    monkeypatch.setattr(tiles, "TILE_COLS", 32)
    narrow = attention_jacobian(attention, x)
    exact = attention_jacobian(attention.in_dtype(torch.float64), x.double())
    assert broad.mixing.chain >= n
    side = 32 if mask is None else 8  # under a mask tiles have a quarter of the rows
    assert narrow.mixing.chain == side + n // side
    assert float(narrow.accuracy.product) < float(broad.accuracy.product)
    for v in (x / x.norm(), torch.randn_like(x) / n**0.5):
        for op in (broad, narrow):
            for ours, theirs in ((op.matvec(v), exact.matvec(v)), (op.rmatvec(v), exact.rmatvec(v))):
                assert float((ours - theirs).norm() / v.norm()) < 0.5 * float(op.accuracy.product)


@pytest.mark.parametrize("shape", [(3, 5, 90), (140, 130), (2, 300, 200), (700, 900)])
def test_bounds_on_norms_of_weights_are_true_and_near(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in (torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) * 1e-20):
        exact = torch.linalg.matrix_norm(weight.double(), 2)
        found = spectral(weight)
        assert bool((found >= exact * (1 - 1e-5)).all())
        assert bool((found <= 1.25 * exact).all())
    assert float(spectral(torch.zeros(shape)).max()) == 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_heads_taken_together_are_bounded_more_sharply_and_still_truly(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_operator, "resolved_in_float32", lambda operator, *_: operator)
    width, n = 64, 16
    generator = torch.Generator().manual_seed(0)
    shared = width * kv_heads // heads
    weights = [torch.randn(rows, width, generator=generator) / 8 for rows in (width, shared, shared, width)]
    attention = hs.SelfAttention(*weights, heads=heads, kv_heads=kv_heads)
    x = torch.randn(n, width, generator=generator)
    exact = attention_jacobian(attention.in_dtype(torch.float64), x.double())
    point = EvaluationPoint.at(attention, x[None], torch.float32)
    operator = attention_jacobian(attention, x)
    plain, together = (
        Rounding(point).path_errors(operator.mixing, by_head=False, together=sharp) for sharp in (False, True)
    )
    for path in ("value", "score"):
        before, after = (float(noise.along(path).norm()) for noise in (plain, together))
        error = torch.linalg.matrix_norm(operator.along(path).dense().double() - exact.along(path).dense(), 2)
        assert float(error) < 0.5 * after
        assert after < (0.8 if kv_heads == heads else 1.0) * before
