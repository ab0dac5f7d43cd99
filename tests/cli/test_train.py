"""`howsmooth train` trains, prints what the library returns, and says in one line what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from howsmooth.cli.terminal import OneLineErrors
from howsmooth.cli.train import default_folder, described, train
from howsmooth.papers.training import Corpus, TrainingSettings
from howsmooth.papers.training import train as run_training
from howsmooth.papers.training.run_files import TrainingCheckpoint, TrainingStatus

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False)
app.command()(train)
app.callback()(lambda: None)
TINY = ("--width", 8, "--heads", 2, "--length", 8, "--batch-tokens", 32, "--steps", 6, "--warmup", 1)
PROGRAM = """
import typer
from howsmooth.cli.terminal import OneLineErrors
from howsmooth.cli.train import train
app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False)
app.command()(train)
app.callback()(lambda: None)
app(prog_name="howsmooth")
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, args)])


def printed(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*args: object) -> str:
    """The one line on stderr of a command that must be refused."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("howsmooth: ")
    return line


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be, or not to be: that is the question.\n\n" * 30, encoding="utf-8")
    return path


def test_json_is_what_the_library_returns(text: Path) -> None:
    found = printed(text, *TINY, "--attention", "l2", "--depth", 1, "--out", "run")
    settings = TrainingSettings(attention="l2", depth=1, width=8, heads=2, length=8, batch_tokens=32, steps=6, warmup=1)
    expected = run_training(Corpus.read(text), settings).to_dict()
    assert found.pop("folder") == "run"
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dot-product", "l2-untied", "contractive-inf", "contractive-2"])
def test_the_summary_says_bits_split_and_bound(text: Path, attention: str) -> None:
    result = run(text, *TINY, "--attention", attention, "--out", "run")
    assert result.exit_code == 0, result.output
    assert "Bits per character" in result.stdout
    assert "first 90% of the text to train" in result.stdout
    assert ("no Lipschitz bound" in result.stdout) == (attention == "l2-untied")
    assert ("after its LayerNorm" in result.stdout) == (attention == "dot-product")
    assert TrainingCheckpoint.load(Path("run/checkpoint.safetensors")).step == 6


def test_a_run_has_a_folder_of_its_own_and_goes_on_only_when_asked(text: Path) -> None:
    run(text, *TINY)
    assert (default_folder(text, "dot-product-depth2-seed0") / "run.sqlite").is_file()
    assert "continue it with --resume" in refusal(text, *TINY)
    assert run(text, *TINY, "--resume").exit_code == 0
    assert "width 8 ≠ 16" in refusal(text, *TINY, "--width", 16, "--resume")


@pytest.mark.parametrize("lengths", ["chunks", "curriculum"])
def test_other_lengths_train_too(text: Path, lengths: str) -> None:
    assert printed(text, *TINY, "--pieces", lengths)["settings"]["lengths"] == lengths


@pytest.mark.slow
def test_the_table_compares_kinds_over_depths(text: Path) -> None:
    options = (*TINY, "--table", "--attention", "l2,contractive-2,contractive-inf", "--depth", "1,2", "--seeds", 1)
    result = run(text, *options, "--out", "grid")
    assert result.exit_code == 0, result.output
    for word in ("l2", "contractive-2", "depth 1", "depth 2", "6 of 6 cells"):
        assert word in result.stdout
    rows = printed(text, *options, "--out", "grid")
    assert [(row["attention"], row["depth"]) for row in rows] == [
        (kind, depth) for depth in (1, 2) for kind in ("l2", "contractive-2", "contractive-inf")
    ]


def test_wrong_requests_are_refused_in_one_line(text: Path) -> None:
    assert "no file or folder" in refusal("missing.txt")
    assert "attention is dot-product" in refusal(text, "--attention", "magic")
    assert "whole number" in refusal(text, "--depth", "2,4")
    assert "whole pieces" in refusal(text, "--length", 48)
    assert "no known constant below one" in refusal(text, "--attention", "l2", "--blocks", "contractive")
    assert "fewer than a length" in refusal(text, "--length", 4096, "--batch-tokens", 4096)
    assert not Path("howsmooth-output").exists() or not list(Path("howsmooth-output").glob("*/checkpoint*"))


def test_a_run_that_diverges_exits_with_code_one(text: Path) -> None:
    result = run(text, *TINY, "--rate", 1e30, "--warmup", 0, "--clip", 0, "--schedule", "fixed")
    assert result.exit_code == 1
    assert "Diverged" in result.stdout


def test_the_line_of_progress_says_it_all() -> None:
    line = described(TrainingStatus(30, 90, 2.5, 0.9, 10.0, 6.0))
    assert line == "step 30/90 · 2.500 bits · bound 0.9 · 10.0 steps/s · 0:06 left"
    assert "bound" not in described(TrainingStatus(30, 90, 2.5, None, 10.0, 6.0))


@pytest.mark.slow
@pytest.mark.usefixtures("usual_signals")
def test_control_c_saves_and_says_how_to_go_on(text: Path, tmp_path: Path) -> None:
    options = [*TINY, "--steps", 100_000, "--save-every", 100_000, "--report-every", 10, "--out", "run"]
    command = [sys.executable, "-c", PROGRAM, "train", str(text), *map(str, options)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rows = tmp_path / "run" / "run.sqlite"
    while not (rows.exists() and b"step 10" in rows.read_bytes()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    step = TrainingCheckpoint.load(tmp_path / "run" / "checkpoint.safetensors").step
    assert process.returncode == 130
    assert said == (
        f"howsmooth: interrupted: {step} steps are kept in run; the same command with --resume goes on from there.\n"
    )


def test_gradient_steps_are_bounded_on_all_inputs(text: Path) -> None:
    result = run(text, *TINY, "--attention", "gradient-step", "--out", "run")
    assert "largest Lipschitz bound of a block in the 2-norm" in result.stdout
