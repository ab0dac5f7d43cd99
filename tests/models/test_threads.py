"""The same numbers in threads as one after the other, whether they share a model or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.models import alice, capture, open_model, target
from howsmooth.models.attention_reader import from_transformers
from tests.models.tiny import TINY

THREADS = 6


@pytest.fixture(autouse=True)
def _hurried_switches() -> Iterator[None]:
    """Threads that take turns a thousand times more often than usual meet in the middle of everything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any], calls: int = THREADS) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(work, range(calls)))


def values(scan: Any) -> list[float]:
    return [row["value"] for row in scan.rows]


@pytest.mark.slow
def test_scans_of_one_model_in_threads_equal_scans_in_turn() -> None:
    opened = open_model("random:bert[layers=2,width=32]")

    def work(seed: int) -> list[float]:
        return values(hs.scan(opened, alice(), lengths=12, seed=seed, explain=False, bounds="none"))

    in_turn = [work(seed) for seed in range(THREADS)]
    assert together(work) == in_turn
    assert opened.model.config._attn_implementation == "eager"


@pytest.mark.slow
def test_scans_of_own_models_in_threads_equal_scans_in_turn(tmp_path: Path) -> None:
    TINY["gpt2"].build().float().save_pretrained(tmp_path)

    def work(number: int) -> list[Any]:
        opened = open_model(str(tmp_path)) if number % 2 else open_model(f"random:llama[width=32,seed={number}]")
        ids = torch.arange(3, 15)[None]
        found = [float(hs.measure(site.attention, site.x)) for site in capture(opened.model, {"input_ids": ids})]
        return [opened.sha256, *found]

    in_turn = [work(number) for number in range(THREADS)]
    assert together(work) == in_turn


def test_random_models_in_threads_have_the_weights_of_their_seeds() -> None:
    def work(seed: int) -> str:
        return open_model(f"random:gpt2[layers=1,width=32,seed={seed}]").sha256

    in_turn = [work(seed) for seed in range(2 * THREADS)]
    assert together(work, 2 * THREADS) == in_turn


def test_maps_and_functions_of_one_model_are_read_and_run_in_threads() -> None:
    opened = open_model("random:qwen3[layers=2,width=32]")
    windows = opened.windows(alice(), 10, count=THREADS)

    def work(number: int) -> list[torch.Tensor]:
        f, x = target(opened, ("residual", "layer", "mlp")[number % 3], 1, windows[number])
        assert callable(f)
        return [f(x), from_transformers(opened.model, number % 2)(x)]

    in_turn = [work(number) for number in range(THREADS)]
    for found, expected in zip(together(work), in_turn, strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
