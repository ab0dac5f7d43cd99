"""Ends of weights where one of them is nearly 1, against decimals of fifty digits."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from evidence.ball_terms import Proof
from evidence.moved_heads import Case

MOVE = 0.05


def pair(mask: Tensor) -> Case:
    """Two tokens of width 1 with queries that stay: logits are the mask, plus 0 and 1, plus what the tokens move by."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    x, moves = torch.tensor([[0.0], [1.0]]).double(), torch.full((2,), MOVE, dtype=torch.float64)
    return Case(0 * one, one, one, one[0], x, moves, one[0], mask)


def corners(case: Case, i: int, j: int) -> list[tuple[Decimal, Decimal]]:
    """P and 1 − P of an entry where both tokens move against each other, one way and the other."""
    assert case.mask is not None
    found = []
    for sign in (-1, 1):
        logits = [Decimal(float(case.mask[i, k])) + k + (sign if k == j else -sign) * Decimal(MOVE) for k in range(2)]
        powers = [logit.exp() for logit in logits]
        found.append((powers[j] / sum(powers), powers[1 - j] / sum(powers)))
    return found


@pytest.mark.parametrize("nearly", [10.0, 30.0, 35.0, 40.0])
def test_ends_of_weights_and_of_their_products_hold_where_one_is_nearly_one(nearly: float) -> None:
    with localcontext(prec=50):
        for _ in range(20):
            case = pair(-(nearly + torch.rand(2, 2).double()) * (1 - torch.eye(2, dtype=torch.float64)))
            ball = Proof(case).ball
            low, high, (most, *_) = ball.lower_weights[0], ball.upper_weights[0], ball.weight_variances
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                for weight, rest in corners(case, i, j):
                    assert Decimal(float(low[i, j])) <= weight <= Decimal(float(high[i, j]))
                    if weight > rest:
                        assert Decimal(float(1 - high[i, j])) <= rest <= Decimal(float(1 - low[i, j]))
                    assert weight * rest <= Decimal(float(most[0, i, j]))
