"""Weights evaluated once with the sizes of their tiles, against the plain way and against every tile by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention.attention_map import AttentionMap
from howsmooth.jacobians import attention_jacobian, dropped_tiles
from howsmooth.jacobians.dropped_tiles import sharp_moments, sized_mixing
from howsmooth.jacobians.softmax_products import EvaluationPoint, Mixing
from howsmooth.jacobians.truncated_operator import truncated_jacobian

N, D, SIDE = 43, 6, 8
MEMORY = 2**29


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_tiles, "FINE_TILE", SIDE)


def maps() -> Iterator[AttentionMap]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(4)]
    yield hs.SelfAttention(*weights, heads=2)
    yield hs.SelfAttention(*weights, heads=2, mask="causal")
    yield hs.SelfAttention(*weights, heads=3, mask=hs.SlidingWindow(11))
    yield hs.SelfAttention(*weights, softcap=2.0, mask="causal")
    yield hs.SigmoidAttention(*weights, heads=2)


def point(attention: AttentionMap, dtype: torch.dtype = torch.float64) -> EvaluationPoint:
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return EvaluationPoint.at(attention, x, dtype)


@pytest.mark.parametrize("memory", [0, 3000, MEMORY])
def test_the_products_are_those_of_the_plain_way(memory: int) -> None:
    for attention in maps():
        at = point(attention)
        plain, (sized, _) = (
            Mixing.at(at, MEMORY),
            sized_mixing(at, memory),
        )
        torch.testing.assert_close(sized.output, plain.output)
        dquery, dkey, dvalue = (torch.randn_like(t) for t in (plain.query, plain.key, plain.value))
        torch.testing.assert_close(sized.jvp((dquery, dkey), dvalue), plain.jvp((dquery, dkey), dvalue))
        for ours, theirs in zip(sized.vjp(dvalue), plain.vjp(dvalue), strict=True):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(sized.column_sums(), plain.column_sums())


def test_moments_are_those_of_the_plain_way_and_squares_of_weights_are_bounded() -> None:
    for attention in maps():
        at = point(attention)
        plain = Mixing.at(at, MEMORY)
        sized, _ = sized_mixing(at, MEMORY)
        assert plain.moments is not None
        assert sized.moments is not None
        sharp = sharp_moments(sized)
        for name in ("key", "value", "value_spread", "sink"):
            torch.testing.assert_close(getattr(sized.moments, name), getattr(plain.moments, name))
        torch.testing.assert_close(sharp.key_spread, plain.moments.key_spread)
        for name in ("lone_value", "lone_spread", "lone"):
            known, bound = getattr(plain.moments, name), getattr(sized.moments, name)
            torch.testing.assert_close(getattr(sharp, name), known)
            assert bool((bound >= known * (1 - 1e-6) - 1e-12).all())


def test_the_spread_of_keys_is_that_of_the_plain_way_where_all_tiles_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_tiles, "_WEIGHTY", 0.0)
    for attention in maps():
        at = point(attention)
        plain = Mixing.at(at, MEMORY)
        sized, _ = sized_mixing(at, MEMORY)
        assert plain.moments is not None
        assert sized.moments is not None
        torch.testing.assert_close(sized.moments.key_spread, plain.moments.key_spread)


def key_spreads(attention: AttentionMap, x: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The spreads of keys about their means, in float64 from all weights one by one, and as they come with sizes."""
    at = EvaluationPoint.at(attention, x[None], dtype)
    plain, (sized, _) = Mixing.at(replace(at, dtype=torch.float64), MEMORY), sized_mixing(at, MEMORY)
    weights = torch.zeros(len(plain.query), len(x), len(x), dtype=torch.float64)
    for tile in plain.tiles:
        weights[tile.maps, tile.rows, tile.cols] = plain.weights_of(tile)[0]
    apart = plain.key[:, None] - (weights @ plain.key)[:, :, None]  # (maps, queries, keys, width)
    assert sized.moments is not None
    return (weights * apart.square().sum(-1)).sum(-1).sqrt(), sized.moments.key_spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, "causal", hs.SlidingWindow(19)])
@pytest.mark.parametrize("length", [0.3, 1.0, 10.0])
def test_spreads_of_keys_are_never_too_small(
    length: float, mask: str | hs.SlidingWindow | None, dtype: torch.dtype
) -> None:
    """Tiles that weigh little are bounded, not summed: with even weights, with sharp ones and with huge logits."""
    looser = 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(4)]
        x = length * torch.randn(16 * SIDE + 3, D, generator=generator, dtype=torch.float64)
        truth, bound = key_spreads(hs.SelfAttention(*weights, heads=2, mask=mask), x, dtype)
        assert bool((bound >= truth * (1 - 1e-6) - 1e-9).all())
        looser += int((bound > 1.01 * truth + 1e-6).sum())
    assert looser or isinstance(mask, hs.SlidingWindow)  # nineteen tokens lie in few tiles, none of them light


def opposed() -> tuple[hs.SelfAttention, Tensor]:
    """One tile of keys that every query looks at, and five light ones on the other side of the origin."""
    x = torch.zeros(6 * SIDE, D, dtype=torch.float64)
    x[:, 0], x[:SIDE, 0], x[:, 1] = -0.2, 1.0, 1.0
    x[:, 2:] = 1e-3 * torch.randn(len(x), D - 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query = torch.zeros(D, D, dtype=torch.float64)
    query[0, 1] = 2.5
    one = torch.eye(D, dtype=torch.float64)
    return hs.SelfAttention(query, one, one, scale=1.0), x


def test_the_bound_on_light_keys_cannot_be_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: with half of what is said of the keys that were not summed, spreads are too small."""
    truth, bound = key_spreads(*opposed())
    assert bool((bound >= truth).all())
    assert bool((bound > 1.001 * truth).any())
    whole = dropped_tiles._TileSums._sum_keys

    def halved(self: dropped_tiles._TileSums, m: int, rows: slice, *rest: list[Tensor]) -> None:
        whole(self, m, rows, *rest)  # type: ignore[arg-type]
        self.seen.keys_apart[m, rows] /= 2

    monkeypatch.setattr(dropped_tiles._TileSums, "_sum_keys", halved)
    truth, bound = key_spreads(*opposed())
    assert bool((bound < truth * (1 - 1e-3)).any())


def dense_sizes(mixing: Mixing, out: Tensor, m: int, rows: slice, cols: slice) -> tuple[float, float, float]:
    """The exact norms of the map of a tile in dq, dk and dv, whose weights are taken one by one."""
    whole = torch.zeros(2, N, N, dtype=torch.float64)
    for tile in mixing.tiles:
        if tile.maps.start == m:
            whole[:, tile.rows, tile.cols] = torch.cat(mixing.weights_of(tile))
    weights, slopes = whole[:, rows, cols]
    centre = mixing.output[m, rows] if mixing.softmax else torch.zeros_like(mixing.output[m, rows])
    apart = (mixing.value[m, cols] - centre[:, None]) @ out  # (rows, cols, width)
    in_query = torch.einsum("ij,jk,ijw->iwk", slopes, mixing.key[m, cols], apart)
    in_key = torch.einsum("ij,ik,ijw->iwjk", slopes, mixing.query[m, rows], apart)
    return (
        float(torch.linalg.matrix_norm(in_query, 2).max()),
        float(torch.linalg.matrix_norm(in_key.flatten(2).flatten(0, 1), 2)),
        float(torch.linalg.matrix_norm(weights, 2)),
    )


def test_every_tile_is_within_its_sizes_and_they_are_not_far_off() -> None:
    for attention in maps():
        mixing, sizes = sized_mixing(point(attention), MEMORY)
        ratios = []
        for (m, i, j), bound in zip(sizes.places.T.tolist(), sizes.sizes.T, strict=True):
            rows, cols = (slice(SIDE * b, min(SIDE * (b + 1), N)) for b in (i, j))
            exact = dense_sizes(mixing, attention.output_weight[m % attention.heads], m, rows, cols)
            assert all(size <= float(b) * (1 + 1e-9) + 1e-12 for size, b in zip(exact, bound, strict=True))
            ratios += [float(b) / size for size, b in zip(exact, bound, strict=True) if size > 1e-6]
        assert sorted(ratios)[len(ratios) // 2] < 8


def shares_of_sizes(attention: AttentionMap, x: Tensor) -> Tensor:
    """The exact norms of all tiles in float64, divided by their sizes from a pass in float32, ``(tiles, 3)``."""
    at = EvaluationPoint.at(attention, x[None], torch.float64)
    exact, _ = sized_mixing(at, MEMORY)
    sizes = sized_mixing(replace(at, dtype=torch.float32), MEMORY)[1]
    norms = []
    for m, i, j in sizes.places.T.tolist():
        rows, cols = (slice(SIDE * b, min(SIDE * (b + 1), N)) for b in (i, j))
        norms.append(dense_sizes(exact, attention.output_weight[m % attention.heads], m, rows, cols))
    least = 1e-30  # a weight that float32 rounds to zero
    return torch.tensor(norms, dtype=torch.float64) / (dropped_tiles._OF_SUMS * sizes.sizes.T + least)


@pytest.mark.parametrize("mask", [None, "causal", hs.SlidingWindow(19)])
@pytest.mark.parametrize("length", [0.3, 1.0, 4.0])
def test_sizes_in_float32_are_never_too_small_and_half_of_them_would_be(
    length: float, mask: str | hs.SlidingWindow | None
) -> None:
    """With even weights, sharp ones and huge logits; the second half is the negative control."""
    shares = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(4)]
        x = length * torch.randn(N, D, generator=generator, dtype=torch.float64)
        shares.append(shares_of_sizes(hs.SelfAttention(*weights, heads=2, mask=mask), x))
    largest = torch.cat(shares).amax(0)
    assert bool((largest <= 1).all())
    assert bool((2 * largest > 1).all())


def test_tiles_cover_what_a_mask_leaves() -> None:
    for attention in maps():
        mixing, sizes = sized_mixing(point(attention), MEMORY)
        assert sum(sizes.counts) == sizes.sizes.shape[1]
        nothing = torch.zeros(sizes.sizes.shape[1], dtype=torch.bool)
        assert sum(t.size for t in sizes.without(mixing, nothing, MEMORY).tiles) == sum(t.size for t in mixing.tiles)
        assert not sizes.without(mixing, ~nothing, MEMORY).tiles


def spread(seed: int, mask: str | None = "causal") -> tuple[hs.SelfAttention, Tensor]:
    """Attention to clusters of neighbours, and tokens of these clusters."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(6, D, generator=generator, dtype=torch.float64)
    x = centres.repeat_interleave(SIDE, 0) + 0.1 * torch.randn(6 * SIDE, D, generator=generator, dtype=torch.float64)
    one, value = torch.eye(D, dtype=torch.float64), torch.randn(D, D, generator=generator, dtype=torch.float64)
    return hs.SelfAttention(2 * one, one, value, heads=2, mask=mask), x


@pytest.mark.parametrize("share", [1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_product_loses_no_more_than_it_says_and_is_allowed(share: float, per_head: bool) -> None:
    passed = 0
    for seed in range(4):
        attention, x = spread(seed)
        exact = attention_jacobian(attention, x, per_head=per_head)
        whole = truncated_jacobian(attention, x, 1e-3, per_head=per_head)
        v = torch.randn(*exact.batch_shape, *x.shape, generator=torch.Generator().manual_seed(seed)).double()
        v[..., 8:, :] = 0  # as singular vectors do, it lives on few tokens
        for path in ("all", "value", "score"):
            ways = (
                (exact.along(path).matvec(v), whole.along(path).matvec_within),
                (exact.along(path).rmatvec(v), whole.along(path).rmatvec_within),
            )
            for truth, way in ways:
                most = share * torch.linalg.vector_norm(truth, dim=(-2, -1))
                found, bound = way(v, most)
                lost = torch.linalg.vector_norm(found - truth, dim=(-2, -1))
                assert bool((lost <= bound + 1e-12).all())
                assert bool((bound <= most).all())
                passed += int((lost > 1e-13).sum())
    assert passed


def test_an_understated_size_is_caught() -> None:
    """A negative control: sizes a hundredth of what they are, and a product loses more than it says."""
    attention, x = spread(0)
    exact = attention_jacobian(attention, x)
    whole = truncated_jacobian(attention, x, 1e-3)
    whole.sizes.sizes.mul_(1e-2)
    v = torch.ones_like(x)
    for truth, way in ((exact.matvec(v), whole.matvec_within), (exact.rmatvec(v), whole.rmatvec_within)):
        found, bound = way(v, 0.1 * torch.linalg.vector_norm(truth))
        assert float(torch.linalg.vector_norm(found - truth)) > float(bound)


def test_weights_that_do_not_fit_are_recomputed_from_sharp_logits() -> None:
    attention = hs.SelfAttention.random(D, mask="causal")
    x = 30 * torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    kept, streamed = (truncated_jacobian(attention, x, 1e-6, memory=memory).cheap for memory in (MEMORY, 0))
    assert streamed.mixing.streamed
    assert streamed.accuracy.point == kept.accuracy.point
    torch.testing.assert_close(torch.as_tensor(streamed.accuracy.product), torch.as_tensor(kept.accuracy.product))
    torch.testing.assert_close(streamed.matvec(x), kept.matvec(x), rtol=1e-5, atol=1e-4)
