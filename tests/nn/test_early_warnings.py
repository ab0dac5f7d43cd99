"""A small sample of the experiment behind docs/evidence/early-warnings.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evidence import early_warnings
from evidence.early_warnings import BASE, SIGNALS, Run, corpus, judge, train


def made_up(seed: int, rising: bool) -> Run:
    """σ jumps at step 150 of a rising run that diverges at 200; nothing else moves but by a hair, in all alike."""
    steps = list(range(0, 200, 5))
    values = {name: [1 + 1e-3 * math.sin(step) for step in steps] for name in SIGNALS}
    if rising:
        values["σ"] = [10.0 if step >= 150 else value for step, value in zip(steps, values["σ"], strict=True)]
    return Run(seed, rising, 200 if rising else None, steps, values)


def test_a_signal_that_jumps_is_the_one_that_warns() -> None:
    seeds = range(4)
    verdicts = judge([made_up(s, False) for s in seeds], [made_up(s, True) for s in seeds])
    by_name = {verdict.signal: verdict for verdict in verdicts}
    assert by_name["σ"].leads == (50, 50, 50, 50)
    assert all(by_name[name].leads == (None,) * 4 for name in SIGNALS if name != "σ")
    assert not any(verdict.false_alarms for verdict in verdicts)


def test_one_loud_steady_run_is_one_false_alarm() -> None:
    steady = [made_up(seed, False) for seed in range(4)]
    steady[2].values["loss"][30] = 5.0
    verdict = next(v for v in judge(steady, [made_up(s, True) for s in range(4)]) if v.signal == "loss")
    assert verdict.false_alarms == 1


@pytest.mark.slow
def test_raising_the_rate_makes_the_loss_run_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_warnings, "STEADY", 20)
    monkeypatch.setattr(early_warnings, "GROWTH", 1.2)
    monkeypatch.setattr(early_warnings, "EVERY", 20)
    run = train(0, True, corpus(), replace(BASE, depth=1, width=16), most=100)
    assert run.diverged is not None
    assert all(len(values) == len(run.steps) > 0 for values in run.values.values())
    assert all(math.isfinite(value) for values in run.values.values() for value in values)
