"""Closed-form attention Jacobians against the dense autograd Jacobian of the readable forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence import attention_cases as cases
from evidence.jacobian_grid import compare
from howsmooth._util.common import relative_error
from howsmooth.attention import AttentionMap
from howsmooth.jacobians import attention_jacobian, tiles
from howsmooth.testing import by_columns, by_rows, dense_jacobian
from howsmooth.testing import dense_jacobian as autograd_jacobian

TOLERANCE = 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_products_equal_autograd_on_a_seventh_of_the_grid(kind: str, mask: str) -> None:
    """`make verify` goes through all of it."""
    maps = list(cases.grid(kind, mask))
    found = compare(maps[:: 7 if len(maps) > 14 else 1])
    assert found.maps >= 2
    assert found.matvec < TOLERANCE
    assert found.rmatvec < TOLERANCE
    assert found.adjoint < TOLERANCE


SAMPLE = [
    (kind, mask, *setting)
    for kind in cases.KINDS
    for mask, setting in zip(
        cases.MASKS,
        [
            (4, 2, "rotary", True, "rms qk-norm and softcap"),
            (1, 1, "alibi", False, "softcap"),
            (4, 4, "relative", True, "l2 qk-norm with gain"),
        ]
        * 3,
        strict=True,
    )
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
@pytest.mark.parametrize("tiling", ["kept", "streamed", "small tiles", "small tiles, streamed"])
def test_every_way_of_tiling_gives_the_same_jacobian(case: tuple, tiling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiling.startswith("small"):
        monkeypatch.setattr(tiles, "TILE_ROWS", 8)
        monkeypatch.setattr(tiles, "TILE_COLS", 3)
        monkeypatch.setattr(tiles, "TILE_SIZE", 24)
        monkeypatch.setattr(tiles, "BAND_SIZE", 20 if tiling.endswith("streamed") else 2**23)
    attention, x = cases.build(*case), cases.tokens()
    memory = 0 if tiling.endswith("streamed") else 2**29
    operator = attention_jacobian(attention, x, memory=memory)
    assert operator.method.endswith("streamed") == (memory == 0)
    expected = autograd_jacobian(attention, x)
    assert relative_error(by_columns(operator), expected) < TOLERANCE
    assert relative_error(by_rows(operator), expected) < TOLERANCE


def test_memory_budget_keeps_what_fits_and_recomputes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ROWS", 8)
    monkeypatch.setattr(tiles, "TILE_SIZE", 1)
    attention = cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain")
    x = cases.tokens(10).flatten(0, 1)  # enough for more weights than tokens
    beside = attention_jacobian(attention, x, memory=0).mixing.beside
    operator = attention_jacobian(attention, x, memory=2000 + beside)
    kept = [tile.weights is not None for tile in operator.mixing.tiles]
    assert any(kept)
    assert not all(kept)
    assert sum(tile.weights.nbytes for tile in operator.mixing.tiles if tile.weights is not None) <= 2000
    assert relative_error(operator.dense(), autograd_jacobian(attention, x)) < TOLERANCE


@pytest.mark.parametrize("kind", cases.KINDS)
def test_products_are_adjoint_to_each_other(kind: str) -> None:
    attention = cases.build(kind, "causal", 4, 4, "rotary", True, "rms qk-norm and softcap")
    operator = attention_jacobian(attention, cases.tokens(3))
    v = torch.randn(3, *operator.in_shape, dtype=torch.float64)
    u = torch.randn(3, *operator.out_shape, dtype=torch.float64)
    there = (u * operator.matvec(v)).sum((1, 2))
    back = (operator.rmatvec(u) * v).sum((1, 2))
    torch.testing.assert_close(there, back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_rows_by_token_blocks_are_the_rows(case: tuple) -> None:
    attention, x = cases.build(*case), cases.tokens()
    index = torch.tensor([3, 0, 7, 8, 29])
    expected = autograd_jacobian(attention, x)[index]
    operator = attention_jacobian(attention, x)
    torch.testing.assert_close(operator.rows(index).flatten(1), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.adjoint.columns(index).flatten(1), expected, rtol=1e-10, atol=1e-12)
    heads = attention_jacobian(attention, torch.stack([x, x + 1]), per_head=True)
    rows = heads.rows(index)
    assert rows.shape == (5, 2, attention.heads, *heads.in_shape)
    torch.testing.assert_close(rows[:, 0].sum(1).flatten(1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_masked_tiles_do_not_exist() -> None:
    x = torch.randn(4096, 8)
    full = attention_jacobian(hs.SelfAttention.random(8), x, memory=0).mixing.tiles
    causal = attention_jacobian(hs.SelfAttention.random(8, mask="causal"), x, memory=0).mixing.tiles
    window = attention_jacobian(hs.SelfAttention.random(8, mask=hs.SlidingWindow(64)), x, memory=0).mixing.tiles

    def area(tiles: tuple) -> int:
        return sum((t.rows.stop - t.rows.start) * (t.cols.stop - t.cols.start) for t in tiles)

    assert area(full) == 4096**2
    assert area(causal) < 0.6 * area(full)
    assert area(window) < 0.2 * area(full)


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_heads_add_up_to_the_block_and_keep_their_norm_in_reduced_coordinates(kind: str, heads: tuple) -> None:
    attention = cases.build(kind, "causal", *heads, "rotary", True, "plain")
    x = cases.tokens()
    whole = attention_jacobian(attention, x).dense()
    heads_dense = attention_jacobian(attention, x, per_head=True).dense()
    assert relative_error(heads_dense.sum(0), whole) < TOLERANCE
    reduced = attention_jacobian(attention, x, per_head=True, reduced=True)
    assert reduced.out_shape[1] <= cases.HEAD_WIDTH
    rank = min(reduced.in_size, reduced.out_size)
    singular = torch.linalg.svdvals(heads_dense)[:, :rank]
    torch.testing.assert_close(torch.linalg.svdvals(reduced.dense()), singular, rtol=1e-11, atol=1e-11)


def test_reduced_coordinates_lift_back_to_tokens() -> None:
    attention = hs.SelfAttention.random(24, heads=4, dtype=torch.float64)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    reduced = attention_jacobian(attention, x, per_head=True, reduced=True)
    plain = attention_jacobian(attention, x, per_head=True)
    assert reduced.in_shape[1] == 18 < 24
    v = torch.randn(2, 4, *reduced.in_shape, dtype=torch.float64)
    torch.testing.assert_close(reduced.lift_out(reduced.matvec(v)), plain.matvec(reduced.lift_in(v)))
    torch.testing.assert_close(reduced.lift_in(v).norm(), v.norm())
    u = torch.randn(2, 4, *reduced.out_shape, dtype=torch.float64)
    torch.testing.assert_close(reduced.lift_in(reduced.rmatvec(u)), plain.rmatvec(reduced.lift_out(u)))


@pytest.mark.parametrize("kind", cases.KINDS)
def test_value_path_and_score_path_add_up(kind: str) -> None:
    attention, x = cases.build(kind, "causal", 4, 4, "rotary", True, "plain"), cases.tokens()
    operator = attention_jacobian(attention, x)
    value, score = operator.along("value"), operator.along("score")
    assert relative_error(by_columns(value) + by_columns(score), operator.dense()) < TOLERANCE
    assert relative_error(by_rows(value) + by_rows(score), operator.dense()) < TOLERANCE
    weights = attention.weights(x)
    frozen = dense_jacobian(lambda y: _mix(attention, weights, y), x)
    assert relative_error(value.dense(), frozen) < TOLERANCE


def _mix(attention: AttentionMap, weights: Tensor, x: Tensor) -> Tensor:
    value = attention.staged(x[None])[2]
    return (weights @ value @ attention.output_weight).sum(1)[0]


@pytest.mark.parametrize("per_head", [False, True])
def test_subset_of_a_batch_is_the_operator_of_the_subset(per_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ROWS", 8)
    monkeypatch.setattr(tiles, "TILE_SIZE", 24 * 3)
    attention = cases.build("dot_product", "causal", 4, 2, "rotary", True, "rms qk-norm")
    operator = attention_jacobian(attention, cases.tokens(3), per_head=per_head, reduced=per_head)
    dense = operator.dense().reshape(-1, operator.out_size, operator.in_size)
    index = torch.tensor([0, 2, 5, 6, 11] if per_head else [0, 2])
    part = operator.subset(index)
    torch.testing.assert_close(part.dense(), dense[index], rtol=1e-12, atol=1e-12)
    again = part.subset(torch.tensor([1]))
    torch.testing.assert_close(again.dense(), dense[index[1:2]], rtol=1e-12, atol=1e-12)


def test_batch_of_inputs_equals_inputs_one_by_one() -> None:
    attention = cases.build("dot_product", "additive", 4, 2, "relative", True, "plain")
    x = cases.tokens(3)
    together = attention_jacobian(attention, x).dense()
    for item in range(3):
        torch.testing.assert_close(together[item], attention_jacobian(attention, x[item]).dense())


def test_padding_changes_nothing_but_zeros() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    padded = hs.SelfAttention.random(8, heads=2, dtype=torch.float64, mask=hs.Padding(keep))
    bare = hs.SelfAttention.random(8, heads=2, dtype=torch.float64)
    dense = attention_jacobian(padded, x).dense()
    short = attention_jacobian(bare, x[0, :4]).dense()
    torch.testing.assert_close(dense[0, : 4 * 8, : 4 * 8], short)
    assert dense[0].norm() == pytest.approx(float(short.norm()))
    torch.testing.assert_close(dense[1], attention_jacobian(bare, x[1]).dense())


def test_rows_that_see_nothing_have_output_and_derivative_zero() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    attention = hs.SelfAttention.random(4, dtype=torch.float64, mask=mask)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert attention(x)[2].abs().max() == 0
    dense = attention_jacobian(attention, x).dense().reshape(5, 4, 5, 4)
    assert dense[2].abs().max() == 0
    assert dense.isfinite().all()
    nobody = hs.SelfAttention.random(4, mask=torch.zeros(5, 5, dtype=torch.bool))
    assert float(hs.measure(nobody, x.float())) == 0


def test_one_token_is_linear() -> None:
    attention = hs.SelfAttention.random(6, heads=2, dtype=torch.float64)
    expected = torch.linalg.matrix_norm(
        attention.output_weight.flatten(0, 1).T @ attention.value_weight.flatten(0, 1), ord=2
    )
    found = hs.measure(attention, torch.randn(1, 6, dtype=torch.float64))
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_stay_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 4, dtype=dtype)
    attention = hs.SelfAttention.from_bilinear(3e3 * torch.eye(4, dtype=dtype), torch.eye(4, dtype=dtype))
    logits = attention.project(x[None])
    assert (logits[0] @ logits[1].mT).abs().max() > 1e4
    exact = hs.SelfAttention.from_bilinear(3e3 * torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    expected = torch.linalg.matrix_norm(autograd_jacobian(exact, x.double()), ord=2)
    assert float(hs.measure(attention, x)) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(("size", "dtype"), [(100.0, torch.float32), (1e3, torch.float32), (1e5, torch.float64)])
@pytest.mark.parametrize("memory", [0, 2**20])
def test_equal_tokens_of_any_size_are_as_smooth_as_their_values(size: float, dtype: torch.dtype, memory: int) -> None:
    """With equal tokens the score path vanishes and ‖J‖ = 1; logits of ±size² must not bring it back by rounding."""
    attention = hs.SelfAttention.from_bilinear(-torch.eye(1, dtype=dtype), torch.eye(1, dtype=dtype))
    found = hs.measure(attention, torch.full((3, 1), size, dtype=dtype), dense_limit=0, memory=memory)
    assert found.lower <= 1 <= found.upper
    assert float(found) == pytest.approx(1, rel=1e-3)


def test_logits_beyond_the_resolution_of_float64_are_refused() -> None:
    attention = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1))
    with pytest.raises(hs.InvalidInput, match="so large that float64 moves them"):
        hs.measure(attention, torch.tensor([[1e7], [-1e7]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    attention = hs.SelfAttention.random(16, heads=2, dtype=dtype)
    x = torch.randn(10, 16).to(dtype)
    found = hs.measure(attention, x)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(hs.measure(attention.double(), x.double())), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, x: (a, x * float("nan")), "x holds 48 NaN"),
        (lambda a, x: (a, x[:0]), "holds no numbers"),
        (lambda a, x: (a, x[:, :3]), "tokens are 3 wide, but the attention takes 8"),
        (lambda a, x: (a, x[0]), "must be"),
        (lambda a, x: (a, x.long()), "floating"),
        (lambda a, x: (_spoil(a), x), "key weight holds 1 NaN or infinite value"),
        (lambda a, x: (a, 1e30 * x), "logits are so large that float64 moves them"),
        (lambda a, x: (hs.SelfAttention.random(8, mask=torch.ones(5, 5) > 0), x), "mask has shape"),
        (lambda a, x: (hs.SelfAttention.random(8, mask=hs.Padding(torch.ones(2, 6))), x), "padding mask has shape"),
    ],
)
def test_bad_input_is_one_clear_error(change, message: str) -> None:
    attention, x = change(hs.SelfAttention.random(8, heads=2), torch.randn(6, 8))
    with pytest.raises(hs.InvalidInput, match=message):
        hs.jacobian(attention, x)


def _spoil(attention: hs.SelfAttention) -> hs.SelfAttention:
    attention.key_weight[0, 0, 0] = float("inf")
    return attention


def test_scipy_operator_has_the_same_singular_value() -> None:
    from scipy.sparse.linalg import svds

    operator = hs.jacobian(cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain"), cases.tokens())
    found = svds(operator.to_scipy(), k=1, return_singular_vectors=False, rng=0)[0]
    assert found == pytest.approx(float(torch.linalg.matrix_norm(operator.dense(), ord=2)), rel=1e-10)
    with pytest.raises(hs.InvalidInput, match="one map"):
        hs.jacobian(hs.SelfAttention.random(8), torch.randn(2, 6, 8)).to_scipy()


@pytest.mark.parametrize("memory", [0, 2**18])
def test_recomputed_weights_are_as_exact_as_kept_ones_and_need_no_float64(memory: int) -> None:
    attention = hs.SelfAttention.random(64, heads=1, mask="causal")
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(0))
    kept, streamed = attention_jacobian(attention, x), attention_jacobian(attention, x, memory=memory)
    assert streamed.mixing.streamed
    assert streamed.dtype == kept.dtype == torch.float32
    torch.testing.assert_close(
        torch.as_tensor(streamed.accuracy.product), torch.as_tensor(kept.accuracy.product), rtol=1e-6, atol=0
    )
    exact, v = attention_jacobian(attention, x.double()), torch.randn(600, 64)
    for product in ("matvec", "rmatvec"):
        off = getattr(streamed, product)(v).double() - getattr(exact, product)(v.double())
        assert float(off.norm()) <= float(streamed.accuracy.product) * float(v.norm())


def test_weights_of_large_maps_lie_in_pieces_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = hs.SelfAttention.random(8, heads=1, mask="causal"), torch.randn(700, 8)
    monkeypatch.setattr(tiles, "TILE_ROWS", 256)
    apart = attention_jacobian(attention, x)
    monkeypatch.setattr(tiles, "_PIECE", 2**19)
    together = attention_jacobian(attention, x)
    counts = []
    for operator in (apart, together):
        weights = [tile.weights for tile in operator.mixing.tiles]
        counts.append(len({each.untyped_storage().data_ptr() for each in weights if each is not None}))
    assert counts[1] < counts[0] == len(apart.mixing.tiles)
    v = torch.randn(700, 8)
    assert torch.equal(together.matvec(v), apart.matvec(v))
