"""What a scan takes, predicted: a law that is recovered exactly, a queue with a known end, and a real plan."""

from __future__ import annotations

import pytest

from howsmooth.scans.cost import CostLaw, duration_text, makespan, predict
from howsmooth.scans.plan import ScanOptions
from howsmooth.scans.run import prepare


@pytest.mark.parametrize("constants", [(1e-3, 2e-9, 3e-10), (0.0, 0.0, 1e-9), (5e-2, 0.0, 1e-10)])
def test_a_law_is_recovered_from_three_lengths(constants: tuple[float, float, float]) -> None:
    truth = CostLaw(constants, width=64)
    found = CostLaw.fitted([(n, truth(n)) for n in (16, 64, 256)], width=64)
    assert found(4096) == pytest.approx(truth(4096), rel=1e-6)


def test_noise_of_a_tenth_changes_what_is_predicted_by_little() -> None:
    truth = CostLaw((1e-3, 2e-8, 3e-9), width=64)
    samples = [(n, truth(n) * noise) for n, noise in ((16, 1.1), (64, 0.9), (128, 1.1), (256, 0.9))]
    assert CostLaw.fitted(samples, width=64)(512) == pytest.approx(truth(512), rel=0.3)


@pytest.mark.parametrize(
    ("units", "workers", "expected"),
    [([1.0] * 80, 64, 2.0), ([1.0] * 64, 64, 1.0), ([4, 1, 1, 1, 1], 2, 4.0), ([1, 1, 1, 1, 4], 2, 6.0), ([], 3, 0.0)],
)
def test_a_queue_ends_when_its_last_worker_does(units: list[float], workers: int, expected: float) -> None:
    assert makespan(units, workers) == expected
    assert makespan(units, workers, start=10) == expected + 10


def test_a_plan_is_predicted_from_a_clock_that_ticks_by_the_law() -> None:
    """With a clock that advances by one at every look, each read and each batch takes one: their number comes out."""
    ready = prepare(
        "random:bert[layers=2,width=16,heads=2]", None, ScanOptions(lengths=[6, 8], what="head,attention", windows=2)
    )
    ticks = iter(range(10**6))
    found = predict(ready, ready.plan, workers=1, clock=lambda: float(next(ticks)))
    assert found.cells == 2 * 2 * 2 * (2 + 1)
    assert found.seconds == pytest.approx(len(ready.plan) + found.units)
    assert found.longest == pytest.approx(1 + 4)


@pytest.mark.parametrize(("seconds", "said"), [(0.0, "0 s"), (59, "59 s"), (90, "1.5 min"), (200_000, "2.3 days")])
def test_times_are_said_duration_text(seconds: float, said: str) -> None:
    assert duration_text(seconds) == said
