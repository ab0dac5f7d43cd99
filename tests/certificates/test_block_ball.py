"""Heads on a ball together: sums of their parts stay below the bound, and a head left out or misplaced is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.certificates import draw
from howsmooth.certificates.ball import block_ball, on_ball
from howsmooth.certificates.ball.block_ball import BlockBall, Side, expected_change_seconds, over_keys, row_by_row
from howsmooth.certificates.point.enclosure import norm_of_head_sum
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.certificates.point.proved_eigenvalue import top_bounds

HEADS, ROWS, WIDTH = 3, 4, 6


def drawn(seed: int, batch: int, spread: float = 1.0) -> Side:
    """Vectors of heads of different sizes."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, HEADS, ROWS, WIDTH, generator=g).double()
    sizes = 10 ** (spread * torch.randn(batch, HEADS, 1, 1, generator=g).double())
    return Side(sizes * rows, torch.zeros(batch, HEADS, dtype=torch.float64))


def only(side: Side, heads: slice) -> Side:
    return Side(side.rows[:, heads], side.error[:, heads])


def attained(left: Tensor, right: Tensor, tries: int = 20) -> float:
    """The largest ‖Σ w x yᵀ‖ that an alternating search meets over |w| ≤ 1, for vectors ``(m, d)``."""
    worst = 0.0
    for _ in range(tries):
        signs = torch.randn(len(left)).double().sign()
        for _ in range(10):
            u, s, v = torch.linalg.svd((left * signs[:, None]).mT @ right)
            worst, signs = max(worst, float(s[0])), ((left @ u[:, 0]) * (right @ v[0])).sign()
    return worst


def reached(left: Side, right: Side, heads: slice = slice(None)) -> list[float]:
    """What is attained ÷ the bound, when that is made of some heads only."""
    bound = row_by_row(only(left, heads), only(right, heads))
    pairs = zip(left.rows.flatten(1, 2), right.rows.flatten(1, 2), strict=True)
    return [attained(*pair) / float(b) for pair, b in zip(pairs, bound, strict=True)]


def test_sums_over_heads_stay_below_their_bound_and_a_head_left_out_is_caught() -> None:
    sides = [(drawn(seed, 2), drawn(100 + seed, 2)) for seed in range(8)]
    every = [ratio for pair in sides for ratio in reached(*pair)]
    assert max(every) <= 1
    assert max(every) > 0.8
    assert max(ratio for pair in sides for ratio in reached(*pair, slice(1, None))) > 1.2


def summed(left: Side, right: Side, keys: int, seed: int) -> float:
    """‖Y ↦ [Σ_h Σ_j w u (t·y_j)]_i‖ for keys j whose vectors t belong to one query and head, for some |w|² ≤ l·m."""
    g = torch.Generator().manual_seed(seed)
    queries, width = len(left.rows), left.rows.shape[-1]
    felt = right.rows.view(keys, queries, HEADS, width)
    signs = torch.randn(queries, HEADS, keys, generator=g).double().sign()
    blocks = torch.einsum("ihj,ihjd,jihe->idje", signs, left.rows, felt)
    return float(torch.linalg.matrix_norm(blocks.reshape(queries * width, keys * width), 2))


def test_sums_over_queries_stay_below_their_bound_and_a_third_of_the_keys_is_caught() -> None:
    ratios, wrong = [], []
    for seed in range(20):
        left = drawn(seed, 2, 0.3)
        rows = torch.randn(ROWS, 2 * HEADS, 1, WIDTH, dtype=torch.float64)
        right = Side(rows, torch.zeros(ROWS, 2 * HEADS, dtype=torch.float64))
        worst = max(summed(left, right, ROWS, 50 * seed + k) for k in range(50))
        ratios.append(worst / over_keys(left, right, 2))
        third = replace(left, rows=left.rows / 3)
        wrong.append(worst / over_keys(third, right, 2))
    assert max(ratios) <= 1
    assert max(wrong) > 1


def test_heads_that_share_nothing_count_by_the_largest_and_equal_ones_add_up() -> None:
    eye, none = torch.eye(4, dtype=torch.float64).view(1, 2, 2, 4), torch.zeros(1, 2, dtype=torch.float64)
    sizes = torch.tensor([1.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
    assert float(row_by_row(Side(sizes * eye, none), Side(eye, none))) == pytest.approx(3.0, rel=2e-3)
    same = eye[:, :1].expand(-1, 2, -1, -1)
    assert float(row_by_row(Side(sizes * same, none), Side(same, none))) == pytest.approx(4.0, rel=2e-3)


def test_proved_norms_are_never_below_the_eigenvalues_whatever_the_guess() -> None:
    rows = torch.randn(5, 7, 4, dtype=torch.float64)
    true = torch.linalg.matrix_norm(rows, 2).square()
    for share in (0.0, 0.5, 0.999, 1.0):
        bound = top_bounds(rows, share * true)
        assert bool((bound >= true).all() and (bound <= 1.0041 * true).all())


def block(seed: int) -> tuple[hs.AttentionMap, Tensor, float]:
    """The first map from this seed on that has several heads."""
    while (found := draw(seed))[0].heads == 1:
        seed += 1000
    attention, x, radius = found
    return attention, x, min(radius, 0.05 * float(x.norm(dim=-1).mean()))


def rebuilt(ball: BlockBall) -> Tensor:
    """The Jacobian at the input from the vectors of all heads, ``(n·d_out, n·d)``."""
    weights, n = ball._joined("group.weights"), ball.n
    push = ball._pushes.expand(n, -1, -1, -1)
    values = ball._value_maps.rows[0].mT / ball.eps @ ball.value_bases.mT
    blocks = torch.einsum("hij,hde->idje", weights, values)
    blocks = blocks + torch.einsum("hij,ihjd,jihe->idje", weights, ball._centred_values, push)
    own = torch.einsum("hij,ihjd,ihje->ide", weights, ball._centred_values, ball._centred_keys)
    for i in range(n):
        blocks[i, :, i] += own[i]
    return blocks.reshape(n * blocks.shape[1], -1)


@pytest.mark.parametrize("name", ["none", "output_bases", "query_bases", "key_bases", "value_bases"])
def test_vectors_of_all_heads_make_up_the_jacobian_and_bases_of_the_wrong_head_do_not(name: str) -> None:
    for seed in range(6):
        attention, x, radius = block(seed)
        ball = BlockBall(attention, on_ball.head_balls(HeadsAt(attention, x), on_ball.move_radii(len(x), radius, None)))
        true = torch.autograd.functional.jacobian(attention, x).reshape(-1, x.numel())
        if name == "none":
            torch.testing.assert_close(rebuilt(ball), true, rtol=1e-10, atol=1e-12)
        elif attention.kv_heads > 1 or name in ("output_bases", "query_bases"):
            setattr(ball, name, getattr(ball, name).roll(1, 0))
            assert float((rebuilt(ball) - true).norm()) > 1e-2 * float(true.norm())


def moved_jacobian(attention: hs.AttentionMap, x: Tensor, radius: float, steps: int = 8) -> float:
    """The largest ‖J − J⁰‖ that an ascent inside the ball meets."""
    here, worst = torch.autograd.functional.jacobian(attention, x).reshape(-1, x.numel()), 0.0
    move = torch.randn_like(x)
    for _ in range(steps):
        at = (x + radius * move / move.norm(dim=-1, keepdim=True).clamp_min(1e-300)).requires_grad_()
        there = torch.autograd.functional.jacobian(attention, at, create_graph=True).reshape(-1, x.numel())
        size = torch.linalg.matrix_norm(there - here, 2)
        (move,) = torch.autograd.grad(size, at)
        worst = max(worst, float(size.detach()))
    return worst


@pytest.mark.parametrize("seed", range(8))
def test_no_jacobian_inside_a_ball_is_farther_from_that_at_the_input_than_proved(seed: int) -> None:
    attention, x, radius = block(seed)
    moves = on_ball.move_radii(len(x), radius, None)
    balls = on_ball.head_balls(HeadsAt(attention, x), moves)
    change = BlockBall(attention, balls).change()
    assert moved_jacobian(attention, x, radius) <= change < torch.inf
    assert on_ball._block_change(balls, HeadsAt(attention, x)) <= change


def small(seed: int, still: bool) -> tuple[hs.SelfAttention, Tensor]:
    """Two heads of width 1, on which the bound is near the truth; queries that stay leave values and keys alone."""
    torch.manual_seed(seed)
    query, key, value, output = (torch.block_diag(*torch.randn(2, 1, 1).double()) for _ in range(4))
    value = value / value.abs().amax()
    bias = 3 * torch.randn(2).double() if still else None
    attention = hs.SelfAttention(0 * query if still else query, key, value, output, heads=2, query_bias=bias)
    return attention, torch.randn(4, 2).double()


@pytest.mark.parametrize(
    ("home", "path", "still"),
    [(BlockBall, "query_change", False), (BlockBall, "_value_sum_norm", False), (block_ball, "over_keys", True)],
)
def test_a_dropped_path_is_caught(home: object, path: str, still: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = small(0 if still else 1, still)
    balls = on_ball.head_balls(HeadsAt(attention, x), on_ball.move_radii(4, 0.01, None))
    worst = max(moved_jacobian(attention, x, 0.01, 12) for _ in range(4))
    assert worst <= BlockBall(attention, balls).change() < torch.inf
    nothing = torch.zeros(4 if path == "query_change" else (), dtype=torch.float64)
    monkeypatch.setattr(home, path, lambda *_: nothing)
    assert BlockBall(attention, balls).change() < worst


def test_a_block_of_heads_that_share_nothing_moves_less_far_than_heads_that_only_write_apart() -> None:
    """Nine times the same head, each on a part of the tokens of its own."""
    weights = [torch.block_diag(*[m] * 9) for m in torch.randn(4, 2, 2, dtype=torch.float64)]
    attention, x = hs.SelfAttention(*weights, heads=9), torch.randn(5, 2, dtype=torch.float64).repeat(1, 9)
    balls = on_ball.head_balls(HeadsAt(attention, x), on_ball.move_radii(5, 0.01, None))
    alone = torch.cat([ball.change for ball in balls])
    together = BlockBall(attention, balls).change()
    assert together <= 2 * float(alone.amax())
    assert norm_of_head_sum(attention, alone.tolist()) == pytest.approx(3 * float(alone.amax()), rel=1e-6)


def test_what_is_not_done_is_not_announced() -> None:
    attention = hs.SelfAttention.random(8, heads=2)
    assert 0 < expected_change_seconds(attention, 10) < expected_change_seconds(attention, 20)
    assert expected_change_seconds(hs.SelfAttention.random(8), 10) == 0  # one head is no block
    assert expected_change_seconds(attention, 2000) == 0  # its heads are added up
