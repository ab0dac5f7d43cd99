"""A sample of the evidence pages on engines: the same rows, and nothing lost when workers, nodes and drivers die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence import engine_faults
from evidence.clusters import Nodes, ray_cluster, slurm_cluster
from evidence.engines import CELLS, Content, by, driver_killed, in_shards
from howsmooth.engines import Engine, EngineError, open_engine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Content:
    """The rows of one fresh process: this one may have been left in another state by the tests before."""
    content = by(folder, Engine(jobs=1, threads=1))
    assert len(content) == CELLS
    return content


def test_four_shards_are_the_whole(folder: Path) -> None:
    assert in_shards(folder, 4) == by(folder, None)


def test_a_driver_that_is_killed_goes_on_from_its_store(folder: Path, whole: Content) -> None:
    kept, ending = driver_killed(folder, whole, Engine(jobs=1, threads=1))
    assert 0 < kept < CELLS
    assert (ending.missing, ending.differing, ending.said) == (0, 0, ())


def _survives(faults: Path, engine: Engine, kind: str, nodes: Nodes | None = None) -> None:
    """A worker, or a node, that is lost while cells that cost nothing are collected."""
    nothing_happened = engine_faults.expected(faults)
    with open_engine(engine) as executor:
        ending = engine_faults.disturbed(faults, nothing_happened, executor, kind, 0.1, nodes)
    assert (ending.missing, ending.differing) == (0, 0)
    assert any("tried again: its worker died" in line for line in ending.said)


def test_slurm_gives_the_same_rows_and_survives_a_kill(folder: Path, whole: Content, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="--engine slurm needs submitit: pip install 'howsmooth[slurm]'")
    with ExitStack() as opened:
        _or_skip(opened, slurm_cluster)
        engine = Engine("slurm", jobs=1, memory=3000, folder=tmp_path / "jobs")
        assert by(folder, engine) == whole
        _survives(tmp_path, replace(engine, jobs=2, memory=1000), "kill")


def test_three_nodes_of_ray_give_the_same_rows_and_one_may_be_lost(
    folder: Path, whole: Content, tmp_path: Path
) -> None:
    with ExitStack() as opened:
        nodes = _or_skip(opened, partial(ray_cluster, nodes=2))  # and a head
        engine = Engine("ray", address=nodes.address)
        assert by(folder, engine) == whole
        _survives(tmp_path, engine, "node", nodes)


def _or_skip(opened: ExitStack, cluster: Callable[[], Any]) -> Any:
    try:
        return opened.enter_context(cluster())
    except EngineError as error:
        pytest.skip(str(error))
