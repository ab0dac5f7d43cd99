"""The arithmetic of a large model, and the queue that it is put through."""

from __future__ import annotations

import pytest

from evidence.queues import Large, Run, measured_rate, replayed
from howsmooth.scans import makespan


def test_the_arithmetic_of_the_page() -> None:
    model = Large()
    assert model.layer == pytest.approx(60 * 6 * 32768**2 * 8192 / 1e12)
    assert model.reading == pytest.approx((2 * 7e10 * 32768 + 80 * 4 * 32768**2 * 8192) / 1e12)
    assert (len(model.units(1, 1)), len(model.units(10, 2))) == (80, 400)


def test_units_that_do_not_vary_are_replayed_as_they_are() -> None:
    units = [3.0, 1.0, 2.0, 2.0]
    assert set(replayed(units, [1.0], 2, start=5.0)) == {makespan(units, 2, start=5.0)}


def test_the_spread_of_units_is_about_the_mean_of_their_kind() -> None:
    run = Run(((8, 1), (8, 1), (16, 1)), (1.0, 3.0, 10.0), 11.0)
    assert run.spread == [0.5, 1.5, 1.0]
    assert run.replayed == 11.0


def test_the_rate_of_a_core_counts_products() -> None:
    rate, products = measured_rate(n=16, width=8, heads=2)
    assert rate > 0
    assert products > 0
