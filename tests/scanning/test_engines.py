"""A sample of the evidence page on engines: the same rows, and nothing lost when workers and drivers die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evidence.engines import CELLS, Content, by, disturbed, driver_killed, engines, in_shards, ray_cluster, refusal
from howsmooth.engines import Engine, EngineError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Content:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    content = by(folder, None)
    torch.set_num_threads(threads)
    assert len(content) == CELLS
    return content


def test_four_shards_are_the_whole(folder: Path, whole: Content) -> None:
    assert in_shards(folder, 4) == whole


def test_a_driver_that_is_killed_goes_on_from_its_store(folder: Path, whole: Content) -> None:
    kept, ending = driver_killed(folder, whole, Engine(jobs=1, threads=1))
    assert 0 < kept < CELLS
    assert (ending.missing, ending.differing, ending.said) == (0, 0, ())


def _survives(folder: Path, whole: Content, engine: Engine) -> None:
    if why := refusal(engine):
        pytest.skip(why)
    assert by(folder, engine) == whole
    (ending,) = disturbed(folder, whole, engine, "kill", times=1)
    assert (ending.missing, ending.differing) == (0, 0)
    assert any("its worker died" in line for line in ending.said)


def test_slurm_gives_the_same_rows_and_survives_a_kill(folder: Path, whole: Content) -> None:
    _survives(folder, whole, next(one for name, one in engines(folder, None).items() if name.startswith("SLURM")))


def test_three_nodes_of_ray_give_the_same_rows_and_survive_a_kill(folder: Path, whole: Content) -> None:
    cluster = ray_cluster()
    try:
        address = cluster.__enter__()
    except EngineError as error:
        pytest.skip(str(error))
    try:
        _survives(folder, whole, engines(folder, address)["Ray, three nodes"])
    finally:
        cluster.__exit__(None, None, None)
