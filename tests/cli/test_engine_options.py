"""Commands by workers, scans in shards and as a plan; what cannot be is said in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evidence.scan_faults import TEXT, contents
from howsmooth.engines import Engine, choice
from howsmooth.scans import Scan
from tests.cli.command import Command

SCAN, MERGE = Command("scan"), Command("merge")
TINY = "random:bert[layers=2,width=16,heads=2]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.slow
def test_shards_by_the_command_line_are_joined_by_merge() -> None:
    whole = SCAN.json(TINY, "--length", "6,8", "--out", "whole.sqlite")
    for part in ("1/2", "2/2"):
        assert SCAN.run(TINY, "--length", "6,8", "--shard", part).exit_code == 0
    parts = sorted(Path("howsmooth-output").glob("*.sqlite"))
    assert [part.name.partition("heads-2-")[2] for part in parts] == ["1-of-2.sqlite", "2-of-2.sqlite"]
    done = MERGE.run(*parts, "--out", "all.sqlite")
    assert done.stdout == "8 cells of 1 scan(s) from 2 stores are in all.sqlite.\n"
    assert len(whole) == len(Scan.open("all.sqlite").rows) == 8
    assert contents(Path("all.sqlite")) == contents(Path("whole.sqlite"))


def test_a_plan_counts_cells_and_measures_none() -> None:
    asked = (TINY, "--length", "6,8", "--windows", 3, "--no-explain", "--jobs", 4, "--out", "a b.sqlite")
    found = SCAN.json(*asked, "--plan")
    assert (found["cells"], found["units"], found["workers"]) == (2 * 3 * 2 * 2, 12, 4)
    assert 0 < found["longest"] <= found["wall"] <= found["seconds"]
    assert found["memory"] > 10**7
    assert not list(Path().iterdir())
    lines = found["script"].splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --array=1-4" in lines
    assert f"howsmooth scan '{TINY}' --no-explain --length 6,8 --windows 3 --threads" in found["script"]
    assert "--shard slurm --out 'a b'-$SLURM_ARRAY_TASK_ID.sqlite" in found["script"]
    assert subprocess.run(["bash", "-n"], input=found["script"], text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--engine", "abacus"), "engine is processes, slurm, ray, got 'abacus'"),
        (("--partition", "gpu"), "--partition is for --engine slurm"),
        (("--engine", "ray", "--job-memory", "1GB"), "--job-memory is for --engine slurm"),
        (("--engine", "slurm", "--address", "x:1"), "--address is for --engine ray"),
        (("--engine", "slurm", "--job-memory", "much"), "is not an amount of memory"),
        (("--jobs", "0"), "--jobs"),
        (("--shard", "5/4"), "a shard is i/N with i from 1 to N, or slurm, got '5/4'"),
        (("--timeout", "0"), "--timeout"),
    ],
)
def test_what_no_engine_understands_is_refused(asked: tuple[str, ...], said: str) -> None:
    assert said in SCAN.refusal(TINY, "--length", 6, *asked)


@pytest.mark.parametrize(("engine", "module"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_extra_that_is_missing_is_named(engine: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'howsmooth[{engine}]'" in SCAN.refusal(TINY, "--length", 6, "--engine", engine)


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_no_scheduler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "there is no SLURM here" in SCAN.refusal(TINY, "--length", 6, "--engine", "slurm")


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("sinfo", "SLURM is installed here, but no scheduler answers (out of order)"),
        ("sbatch", "SLURM takes no jobs (out of order)"),
    ],
)
def test_a_scheduler_that_does_not_answer_or_takes_no_jobs_is_quoted(
    wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "srun", "sinfo", "scancel"):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{'echo out of order >&2; exit 1' if name == wrong else ':'}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert said in SCAN.refusal(TINY, "--length", 6, "--engine", "slurm", "--out", "s.sqlite")
    assert contents(Path("s.sqlite")) == {}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_where_no_cluster_is_is_named_at_once(address: str) -> None:
    said = SCAN.refusal(TINY, "--length", 6, "--engine", "ray", "--address", address)
    assert f"there is no Ray cluster at {address}" in said


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Threads in the place of every engine; those that were asked for."""
    asked: list[Engine] = []

    def executor(engine: Engine) -> ThreadPoolExecutor:
        asked.append(engine)
        return ThreadPoolExecutor(2)

    monkeypatch.setattr(choice, "_executor", executor)
    return asked


@pytest.mark.slow
def test_searches_take_an_engine(threads: list[Engine]) -> None:
    small = ("random", "--width", 4, "--heads", 1, "--length", "2,3", "--over", "ball:1", "--starts", 2, "--steps", 3)
    found = Command("worst-case").json(*small, "--jobs", 2)
    assert [cell["n"] for cell in found["cells"]] == [2, 3]
    assert all(0 < cell["lower"] <= cell["upper"] for cell in found["cells"])
    assert [(engine.kind, engine.jobs) for engine in threads] == [("processes", 2)]


def test_grids_take_an_engine_and_single_runs_do_not(threads: list[Engine]) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question. " * 60)
    tiny = (
        "--width",
        8,
        "--heads",
        1,
        "--length",
        8,
        "--batch-tokens",
        32,
        "--steps",
        2,
        "--depth",
        "1",
        "--seed",
        "0",
    )
    grid = ("--table", "--attention", "l2,dot-product", "--engine", "slurm", "--jobs", 2, "--time", 5)
    rows = Command("train").json("text.txt", *tiny, *grid, "--out", "grid")
    assert {row["attention"] for row in rows} == {"l2", "dot-product"}
    assert [(engine.kind, engine.time) for engine in threads] == [("slurm", 5)]
    assert "add --table" in Command("train").refusal("text.txt", *tiny, "--jobs", 2)


@pytest.mark.slow
def test_experiments_take_an_engine(threads: list[Engine]) -> None:
    asked = ("not-lipschitz", "--quick", "--engine", "ray", "--address", "somewhere:1")
    (made,) = Command("reproduce").json(*asked, "--out", "by-engine")["reproduced"]
    (alone,) = Command("reproduce").json("not-lipschitz", "--quick", "--out", "alone")["reproduced"]
    assert (made["verdict"], made["measured"], made["rows"]) == (alone["verdict"], alone["measured"], alone["rows"])
    assert [(engine.kind, engine.address) for engine in threads] == [("ray", "somewhere:1")]


def test_units_that_failed_are_named_and_the_command_ends_with_2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from howsmooth.scans import run, units

    def fragile(unit: units.Unit) -> Any:
        if unit.batches[0].length == 8:
            raise ArithmeticError("no such luck")
        return usual(unit)

    usual = units.measure_unit
    monkeypatch.setattr(units, "measure_unit", fragile)
    monkeypatch.setattr(run, "open_engine", lambda engine: nullcontext(ThreadPoolExecutor(1)))
    done = SCAN.run(folder, "--text", folder / TEXT, "--length", "6,8", "--jobs", 2, "--out", "s.sqlite")
    assert done.exit_code == 2
    assert "not measured: n = 8, window 0: head of layer 0: ArithmeticError: no such luck." in done.stderr
    assert {cell[3] for cell in contents(Path("s.sqlite"))} == {6}
