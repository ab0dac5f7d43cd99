"""The numbers of the theory pages, computed again to their printed digits."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from evidence import lower_bounds
from evidence.reference_values import ONE, Reference, l2_infinity_row, references
from howsmooth.bounds import get
from howsmooth.meanfield import two_atom

FAST = [reference for reference in references() if not reference.slow]


@pytest.mark.parametrize("reference", FAST, ids=lambda reference: reference.line)
def test_the_printed_digits_are_reproduced(reference: Reference) -> None:
    value = reference.compute()
    assert reference.agrees(value), f"printed {reference.printed}, computed {value}"


def test_a_wrong_digit_is_noticed() -> None:
    reference = Reference("", "48.0", float)
    assert reference.agrees(48.04)
    assert not reference.agrees(48.06)


def test_the_row_sum_in_closed_form_is_the_row_of_the_jacobian() -> None:
    x = torch.randn(7, dtype=torch.float64)
    dense = hs.jacobian(hs.L2SelfAttention(ONE, ONE), x[:, None]).dense()
    assert float(l2_infinity_row(x)) == pytest.approx(float(dense.reshape(7, 7)[0].abs().sum()), rel=1e-12)


@pytest.mark.parametrize("b", [0.5, 1.0, 3.0, 5.0])
def test_the_two_atom_entry_finds_the_supremum_of_the_closed_form(b: float) -> None:
    entry = float(get("howsmooth.two_atom")(hs.SelfAttention.from_bilinear(-b * ONE, ONE), over=hs.sets.Ball(1.0)))
    assert entry == pytest.approx(two_atom(b, 1.0).value, rel=1e-4)
    assert entry <= two_atom(b, 1.0).value


@pytest.mark.parametrize("case", list(lower_bounds.cases((10, 1000))), ids=str)
@pytest.mark.parametrize("name", lower_bounds.ENTRIES)
def test_lower_bounds_are_below_their_own_construction(case: lower_bounds.Case, name: str) -> None:
    assert not case.bound(name) > case.measured(name) * (1 + 1e-9)
