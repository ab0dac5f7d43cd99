"""The starts of a search on an executor: the same witness for any number of workers, and nothing lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.engines import EngineError
from howsmooth.search import Witness, sandwich, worst_case_search
from howsmooth.sets import Ball

N, STARTS = 5, 3
ASKED: dict[str, Any] = {"over": Ball(1.5), "starts": STARTS, "steps": 12, "constructions": False}


@pytest.fixture
def attention() -> hs.SelfAttention:
    return hs.SelfAttention.random(6, heads=2, seed=3).to(torch.float64)


def searched(attention: hs.SelfAttention, workers: int, **more: Any) -> Witness:
    with ThreadPoolExecutor(workers) as threads:
        return hs.worst_case(attention, N, executor=threads, **ASKED | more)


def test_any_number_of_workers_finds_the_same(attention: hs.SelfAttention) -> None:
    one, three = searched(attention, 1), searched(attention, 3)
    assert torch.equal(one.x, three.x)
    assert (one.value, one.start, one.history) == (three.value, three.start, three.history)


def test_the_witness_is_the_best_of_the_starts_and_lies_in_the_set(attention: hs.SelfAttention) -> None:
    found = searched(attention, 2)
    starts = [hs.worst_case(attention, N, **ASKED | {"starts": 1, "seed": seed}) for seed in range(1)]
    dense = torch.autograd.functional.jacobian(attention, found.x).reshape(found.x.numel(), -1)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=2e-3)
    assert float(found.x.norm(dim=-1).max()) <= 1.5 * (1 + 1e-12)
    assert found.value >= (1 - 1e-9) * starts[0].value  # its first start is among these


def test_the_best_is_kept_in_a_file_and_every_start_is_told(attention: hs.SelfAttention, tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    file = tmp_path / "w.safetensors"
    found = searched(attention, 2, save=file, progress=lambda *now: told.append(now), source={"made": "here"})
    assert [now[:2] for now in told] == [(done, STARTS) for done in range(1, STARTS + 1)]
    assert told[-1][2] == found.value
    kept = Witness.load(file)
    assert (kept.value, kept.stopped, kept.source) == (found.value, found.stopped, {"made": "here"})


def test_a_start_that_fails_is_noted_and_the_others_count(
    attention: hs.SelfAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = worst_case_search.climb

    def climb(item: Any) -> Witness:
        if item[1].name.startswith("random 1"):
            raise ArithmeticError("no way up")
        return usual(item)

    monkeypatch.setattr(worst_case_search, "climb", climb)
    found = searched(attention, 2)
    assert any("random 1" in note and "no way up" in note for note in found.measurement.notes)
    monkeypatch.setattr(worst_case_search, "climb", _nowhere)
    with pytest.raises(EngineError, match="no start could be climbed"):
        searched(attention, 2)


def _nowhere(item: Any) -> Witness:
    raise ArithmeticError("no way up")


def test_ctrl_c_gives_the_best_so_far(attention: hs.SelfAttention) -> None:
    def stop(*now: Any) -> None:
        raise KeyboardInterrupt

    assert searched(attention, 1, progress=stop).stopped == "interrupted"


def test_both_ends_take_an_executor_too(attention: hs.SelfAttention) -> None:
    with ThreadPoolExecutor(2) as threads:
        (cell,) = sandwich(attention, [3], over=[hs.sets.Ball(1.0)], starts=1, steps=4, executor=threads)
    assert cell.upper is not None
    assert 0 < cell.lower <= cell.upper.value
