"""Sets around an input: which tokens move and how far, the first tokens, boxes."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.sets import Around, Ball, Box, Point

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_only_the_named_tokens_move() -> None:
    over = Around(X, 0.5, moving=[0, 2])
    assert over.moves.tolist() == [0.5, 0, 0.5, 0]
    moved = over.project_(X + 1)
    assert torch.equal(moved[[1, 3]], X[[1, 3]])
    assert (moved - X).norm(dim=-1)[[0, 2]].tolist() == pytest.approx([0.5, 0.5])
    attention = hs.SelfAttention.random(3)
    found = hs.worst_case(attention, over=over, starts=2, steps=10)
    assert over.excess(found.x) < 1e-12
    with pytest.raises(InvalidInput, match="moving"):
        Around(X, 0.5, moving=[4])


def test_the_first_tokens_keep_everything_else() -> None:
    near = Around(X, 0.5, per_token=False, moving=[1, 3], within=Ball(9.0)).first(2)
    assert (near.length, near.moving, near.per_token, near.eps) == (2, [1], False, 0.5)
    assert near.ellipsoid(3).radius == 9.0  # type: ignore[union-attr]
    assert Point(X).first(2).eps is None
    assert Ball(1.0).first(2).size == 1.0
    with pytest.raises(InvalidInput, match="the input has 4: ask for fewer"):
        Point(X).first(5)


def test_a_box_is_certified_on_the_balls_that_hold_it() -> None:
    attention, half = hs.SelfAttention.random(3, mask="causal"), torch.rand(4, 3).double() / 100
    box = Box(X - half, X + half)
    corner = torch.maximum(box.upper - box.x, box.x - box.lower)
    assert bool((box.moves >= corner.norm(dim=-1)).all())
    proof = hs.certify(attention, box)
    ball = hs.certify(attention, Around(box.x, float(box.moves.max())))
    assert proof.lower <= proof.upper <= ball.upper
    assert proof.ball == "box"
    found = hs.worst_case(attention, over=box, starts=2, steps=20)
    assert box.excess(found.x) == 0
    assert found.value <= float(proof.upper)
    rows = hs.bounds.table(attention, over=box)
    assert all(row.value >= found.value * (1 - 1e-9) for row in rows if row.kind == "upper" and row.scope != "point")


def test_boxes_that_are_empty_or_of_other_shapes_are_refused() -> None:
    for lower, upper in ((X + 1, X), (X, X[:2]), (X[None], X[None])):
        with pytest.raises(InvalidInput, match="a box needs lower ≤ upper"):
            Box(lower, upper)


def test_certify_takes_no_set_without_an_input_and_no_ball_without_a_label() -> None:
    attention = hs.SelfAttention.random(3)
    with pytest.raises(InvalidInput):
        hs.certify(attention, Ball(1.0))  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="per_token=…, moving=…"):
        hs.certify(attention, X, ball="frobenius")  # type: ignore[call-overload]
    assert torch.equal(hs.certify(attention, X).upper, hs.certify(attention, over=Point(X)).upper)
