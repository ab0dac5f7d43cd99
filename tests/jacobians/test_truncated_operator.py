"""Tiles left out, against the dense truth: the bound on what is missing, the ends, and what happens without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import attention_jacobian, dropped_tiles, truncated_operator
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.truncated_operator import Truncated, truncated_jacobian
from howsmooth.norms import operator_norm

N, D = 48, 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_tiles, "FINE_TILE", 8)


def case(sharpness: float, mask: str | None, seed: int = 0, heads: int = 2) -> tuple[hs.SelfAttention, Tensor]:
    """Six clusters of eight neighbours: tiles between clusters hold next to nothing once queries are sharp."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, D, generator=generator, dtype=torch.float64)
    x = centres.repeat_interleave(8, 0) + 0.2 * torch.randn(N, D, generator=generator, dtype=torch.float64)
    attention = hs.SelfAttention.random(D, heads=heads, seed=seed, mask=mask, dtype=torch.float64)
    one = torch.eye(D, dtype=torch.float64)
    return hs.SelfAttention(
        sharpness * one,
        one,
        attention.value_weight.flatten(0, 1),
        attention.output_weight.flatten(0, 1).T,
        heads=heads,
        mask=mask,
    ), x


def missing(op: JacobianOperator, exact: JacobianOperator) -> Tensor:
    return torch.linalg.matrix_norm(op.dense() - exact.dense(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [1e-3, 0.1, 0.9])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_missing_is_within_the_bound(mask: str | None, skip: float, per_head: bool) -> None:
    for seed in range(3):
        attention, x = case(6.0, mask, seed)
        exact = attention_jacobian(attention, x, per_head=per_head)
        op = truncated_jacobian(attention, x, skip, per_head=per_head)
        gone = missing(op, exact)
        assert bool((gone <= torch.as_tensor(op.error) + 1e-12).all())
        assert op.dropped.share > 0
        for path in ("value", "score"):
            apart = missing(op.along(path), exact.along(path))
            assert bool((apart <= torch.as_tensor(op.along(path).error) + 1e-12).all())


@pytest.mark.parametrize("per_head", [False, True])
def test_products_of_a_subset_are_as_partial_as_those_of_all(per_head: bool) -> None:
    attention, x = case(12.0, "causal")
    x = x if per_head else torch.stack([x, x.flip(0), x.roll(8, 0)])
    whole = truncated_jacobian(attention, x, 1e-2, per_head=per_head)
    index = torch.tensor([1]) if per_head else torch.tensor([0, 2])
    part = whole.subset(index)
    v, u = (torch.randn(*whole.batch_shape, *shape).double() for shape in (whole.in_shape, whole.out_shape))
    most = torch.full(whole.batch_shape, 0.05, dtype=torch.float64)
    for name, vector in (("matvec", v), ("rmatvec", u)):
        of_all, lost = getattr(whole, f"{name}_within")(vector, most)
        of_part, also_lost = getattr(part, f"{name}_within")(vector[index], most[index])
        assert bool((also_lost > 0).all()), "nothing was spared"
        torch.testing.assert_close(also_lost, lost[index])
        torch.testing.assert_close(of_part, of_all[index])
        apart = torch.linalg.vector_norm(of_part - getattr(part.exact, name)(vector[index]), dim=(-2, -1))
        assert bool((apart > 0).all())
        assert bool((apart <= also_lost).all())


def test_tiles_are_left_out_and_counted() -> None:
    attention, x = case(12.0, "causal")
    op = truncated_jacobian(attention, x, 1e-2)
    assert 0.5 < op.dropped.share < 1
    left, every = (sum(tile.size for tile in each.mixing.tiles) for each in (op.cheap, op.exact))
    assert left == pytest.approx((1 - op.dropped.share) * every)
    assert float(torch.as_tensor(op.error)) <= 1e-2 * float(hs.measure(attention, x))
    assert op.notes[0].startswith(f"{100 * op.dropped.share:.0f} % of the tiles of attention weights")


def test_less_is_left_out_where_little_more_is_left_then(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = case(12.0, "causal")
    careful = truncated_jacobian(attention, x, 0.5)
    monkeypatch.setattr(truncated_operator, "_SMALLER_SHARES", ())
    greedy = truncated_jacobian(attention, x, 0.5)
    missing_of = [float(torch.as_tensor(op.error)) for op in (careful, greedy)]
    left = [sum(tile.size for tile in op.cheap.mixing.tiles) for op in (careful, greedy)]
    assert missing_of[0] < missing_of[1]
    assert left[1] <= left[0] <= 1.5 * left[1]


def test_where_few_tiles_could_go_only_so_little_goes_that_the_ends_may_move_by_it() -> None:
    attention, x = case(6.0, "causal")
    op = truncated_jacobian(attention, x, 1e-2)
    assert 0 < op.dropped.share < 0.5
    assert float(torch.as_tensor(op.error)) <= 1e-4 * float(hs.measure(attention, x))


def test_the_bound_is_not_far_from_what_is_missing() -> None:
    attention, x = case(6.0, None, heads=1)
    exact, op = attention_jacobian(attention, x), truncated_jacobian(attention, x, 0.5)
    gone, bound = float(missing(op, exact)), float(torch.as_tensor(op.error))
    assert 0 < gone <= bound <= 300 * gone


@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2, 3]])
def test_the_bound_is_attained_where_all_weights_are_equal(rows: list[int]) -> None:
    """Queries and keys of zero: what goes with a tile is its weights times the values, and of rank one."""
    zero, one = torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    attention, x = hs.SelfAttention(zero, zero, one, one), torch.randn(16, 2, dtype=torch.float64)
    whole = truncated_jacobian(attention, x, 0.9)
    gone = torch.zeros(whole.sizes.sizes.shape[1], dtype=torch.bool)
    gone[rows] = True
    thin = Truncated.without(whole.exact, gone, whole.sizes, whole.norms, 2**20)
    bound, lost = float(thin.error), float(missing(thin, attention_jacobian(attention, x)))
    assert 0.99 * bound < lost < bound


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("skip", [1e-6, 1e-2, 0.3, 0.9])
def test_ends_contain_the_exact_norm(skip: float, dtype: torch.dtype) -> None:
    for seed in range(3):
        attention, x = case(6.0, "causal", seed)
        truth = float(torch.linalg.matrix_norm(attention_jacobian(attention, x).dense(), 2))
        found = [
            hs.measure(attention.in_dtype(dtype), x.to(dtype), skip=skip, dense_limit=limit) for limit in (1, 10_000)
        ]
        for m in found:
            assert float(m.lower) <= truth <= float(m.upper)
            assert any("tiles of attention weights were left out" in note for note in m.notes)
        assert bool(found[0].converged)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1, float("inf"), "fro"])
def test_ends_of_other_norms_contain_theirs(norm: float | str) -> None:
    attention, x = case(6.0, "causal")
    exact = hs.measure(attention, x, norm=norm)
    m = hs.measure(attention, x, norm=norm, skip=1e-2)
    assert bool(m.lower <= exact.value)
    assert bool(exact.value <= m.upper)


@pytest.mark.slow
def test_without_the_allowance_an_end_is_wrong() -> None:
    """A negative control: the same run, as if nothing had been left out."""
    wrong = 0
    for seed in range(8):
        attention, x = case(2.0, "causal", seed)
        truth = float(torch.linalg.matrix_norm(attention_jacobian(attention, x).dense(), 2))
        op = truncated_jacobian(attention, x, 0.9)
        m = operator_norm(op, dense_limit=1, rtol=1e-5)
        assert float(m.lower) <= truth <= float(m.upper)
        bare = operator_norm(op.cheap, dense_limit=1, rtol=1e-5)
        wrong += not float(bare.lower) <= truth <= float(bare.upper)
    assert wrong


def test_a_threshold_below_every_weight_leaves_nothing_out() -> None:
    attention, x = case(1.0, None)
    exact = hs.measure(attention, x, dense_limit=1)
    m = hs.measure(attention, x, skip=1e-300, dense_limit=1)
    torch.testing.assert_close(m.value, exact.value)
    assert float(m.upper) <= 1.001 * float(m.lower)


def test_heads_each_leave_out_their_own() -> None:
    attention, x = case(6.0, "causal")
    exact = attention_jacobian(attention, x, per_head=True)
    m = hs.measure_heads(attention, x, skip=0.1, dense_limit=1)
    truth = torch.linalg.matrix_norm(exact.dense(), 2)
    assert bool((m.lower <= truth).all())
    assert bool((truth <= m.upper).all())


@pytest.mark.parametrize("skip", [-1e-3, 1.0, float("nan")])
def test_what_is_no_weight_is_refused(skip: float) -> None:
    attention, x = case(1.0, None)
    with pytest.raises(InvalidInput, match="skip"):
        hs.measure(attention, x, skip=skip)


def test_only_attention_has_tiles() -> None:
    with pytest.raises(InvalidInput, match="only the Jacobian of an attention map in x has tiles to skip"):
        hs.measure(torch.sin, torch.zeros(2, 3), skip=1e-4)
