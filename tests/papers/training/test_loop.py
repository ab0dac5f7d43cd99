"""Runs learn, go on bit by bit where they were, survive being stopped, and say what is wrong."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth._util.ledger import Ledger
from howsmooth.errors import InvalidInput
from howsmooth.papers.training import Corpus, Intervals, TrainingSettings, load_model, train
from howsmooth.papers.training.loop import TrainingStopped, bits_per_character, locked, nats
from howsmooth.papers.training.model import CharacterModel
from howsmooth.papers.training.run_files import (
    CHECKPOINT,
    LEDGER,
    RESULT,
    TrainingCheckpoint,
    TrainingResult,
    TrainingStatus,
)
from howsmooth.papers.training.text_batches import validation
from tests.papers.training.training_process import EVERY_STEP, TrainingProcess

TEXT = "to be, or not to be: that is the question.\n\nwhether 'tis nobler in the mind to suffer\n\n" * 30
CORPUS = Corpus.split(TEXT)
TINY = TrainingSettings(depth=1, width=16, heads=2, length=8, batch_tokens=64, steps=40, warmup=5, rate=3e-3)
OFTEN = Intervals(report=5, validate=20, validate_on=200, save=10)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as in the processes: sums are the same bit by bit then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finish(folder: Path, settings: TrainingSettings, output: pytest.CaptureFixture[str]) -> None:
    """Begin or continue a run in this process."""
    steps = list[int]()
    train(CORPUS, settings, folder, resume=True, intervals=EVERY_STEP, progress=lambda now: steps.append(now.step))
    assert not output.readouterr().err
    assert steps[-1] == settings.steps


def read(folder: Path) -> dict[str, Any]:
    with Ledger.reading(folder / LEDGER) as ledger:
        return ledger.read_json()


def content(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]], dict[str, Any]]:
    """All that a finished run holds, every bit of it but the time it took."""
    tensors = {k: v.numpy().tobytes() for k, v in TrainingCheckpoint.load(folder / CHECKPOINT).tensors.items()}
    items = read(folder)
    result = items.pop(RESULT)
    rows = list(items.values())
    for row in [*rows, result]:
        row.pop("seconds")
    return tensors, rows, result


def test_a_run_learns_and_keeps_its_numbers(tmp_path: Path) -> None:
    told: list[TrainingStatus] = []
    result = train(CORPUS, replace(TINY, steps=150), tmp_path / "run", intervals=OFTEN, progress=told.append)
    assert result.valid_bits is not None
    assert result.valid_bits < 3.3 < math.log2(CORPUS.symbols)
    assert [row["step"] for row in result.rows] == list(range(5, 151, 5))
    assert ["valid_bits" in row for row in result.rows[:4]] == [False, False, False, True]
    assert result == TrainingResult.read(tmp_path / "run")
    assert told[-1].step == told[-1].steps == 150
    assert told[-1].seconds_left == 0
    model, checkpoint = load_model(tmp_path / "run")
    assert checkpoint.alphabet == CORPUS.alphabet
    assert bits_per_character(model, validation(CORPUS, "fixed", 8)) == result.valid_bits


def test_bits_per_character_are_those_of_the_softmax_written_out(tmp_path: Path) -> None:
    train(CORPUS, TINY, tmp_path)
    model, _ = load_model(tmp_path)
    batch = validation(CORPUS, "chunks", 8)
    logits = model(batch.inputs, batch.positions(), batch.seen()).detach().double()
    chosen = logits.gather(2, batch.targets[..., None])[..., 0] - logits.exp().sum(-1).log()
    assert bits_per_character(model, batch) == pytest.approx(float(-chosen.mean()) / math.log(2), rel=1e-6)


@pytest.mark.parametrize("lengths", ["fixed", "chunks"])
def test_batches_go_to_where_the_model_is(lengths: Any) -> None:
    batch = validation(CORPUS, lengths, 8)
    model = CharacterModel(TINY, CORPUS.symbols).to("meta")
    assert nats(model, batch).device.type == "meta"


def test_a_run_says_where_it_cannot_compute(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the device 'nowhere' cannot be used"):
        train(CORPUS, TINY, tmp_path / "run", device="nowhere")
    assert not (tmp_path / "run").exists()
    assert train(CORPUS, TINY, device="cpu").valid_bits == train(CORPUS, TINY).valid_bits


@pytest.mark.parametrize("lengths", ["fixed", "chunks", "curriculum"])
def test_training_leaves_the_random_numbers_of_others_alone_and_depends_on_none(lengths: str) -> None:
    settings = replace(TINY, lengths=lengths, steps=10, dropout=0.1)  # type: ignore[arg-type]
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = train(CORPUS, settings)
    assert torch.equal(torch.rand(2), expected)
    assert train(CORPUS, settings).valid_bits == first.valid_bits
    assert train(CORPUS, replace(settings, seed=1)).valid_bits != first.valid_bits


@pytest.mark.slow
@pytest.mark.usefixtures("usual_signals", "one_thread")
def test_a_killed_an_interrupted_and_an_undisturbed_run_are_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Warm-started norms, dropout and the curriculum all carry something from step to step.
    settings = replace(TINY, attention="contractive-2", blocks="pre-norm", lengths="curriculum", dropout=0.1)
    killed = tmp_path / "killed"
    run = TrainingProcess(CORPUS, settings, killed, pause=0.02)
    finish(tmp_path / "whole", settings, capfd)
    run.wait_for(17)
    run.process.kill()
    run.end()
    assert TrainingCheckpoint.load(killed / CHECKPOINT).step >= 10  # at most the steps since the last one are lost
    run = TrainingProcess(CORPUS, settings, killed, pause=0.02)
    run.wait_for(25)
    os.kill(run.process.pid or 0, signal.SIGINT)
    code, said = run.end()
    assert code == 130
    step = TrainingCheckpoint.load(killed / CHECKPOINT).step
    assert 25 <= step < 40
    assert said.strip() == f"stopped after {step} steps"
    finish(killed, settings, capfd)
    assert content(killed) == content(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_full_disk_is_said_in_one_line_and_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "full"
    finish(whole, TINY, capfd)
    size = (whole / CHECKPOINT).stat().st_size
    code, said = TrainingProcess(CORPUS, TINY, folder, most_bytes=size // 2).end()
    assert code == 2
    (line,) = said.splitlines()
    assert "cannot write" in line
    assert "--resume" in line
    assert not (folder / CHECKPOINT).exists()
    finish(folder, TINY, capfd)
    assert content(folder) == content(whole)


@pytest.mark.usefixtures("usual_signals")
def test_a_second_control_c_stops_at_once_and_the_first_saves(tmp_path: Path) -> None:
    def press(status: TrainingStatus) -> None:
        if status.step == 10:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingStopped) as stopped:
        train(CORPUS, TINY, tmp_path, intervals=OFTEN, progress=press)
    assert TrainingCheckpoint.load(tmp_path / CHECKPOINT).step == stopped.value.step
    assert signal.getsignal(signal.SIGINT) is before

    def press_twice(status: TrainingStatus) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(CORPUS, TINY, tmp_path, resume=True, intervals=OFTEN, progress=press_twice)
    assert train(CORPUS, TINY, tmp_path, resume=True, intervals=OFTEN).diverged is None


def test_a_folder_in_use_other_settings_and_another_text_are_refused(tmp_path: Path) -> None:
    train(CORPUS, TINY, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InvalidInput, match="holds a run already"):
        train(CORPUS, TINY, tmp_path)
    with pytest.raises(InvalidInput, match=r"rate 0\.003 ≠ 0\.1"):
        train(CORPUS, replace(TINY, rate=0.1), tmp_path, resume=True)
    with pytest.raises(InvalidInput, match="another text"):
        train(Corpus.split(TEXT[1:]), TINY, tmp_path, resume=True)
    with locked(tmp_path), pytest.raises(InvalidInput, match="another process"):
        train(CORPUS, TINY, tmp_path, resume=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_damaged_checkpoint_stops_the_run_and_is_not_overwritten(tmp_path: Path) -> None:
    train(CORPUS, TINY, tmp_path)
    with closing(sqlite3.connect(tmp_path / LEDGER)) as db, db:
        db.execute(f"DELETE FROM items WHERE item = '{RESULT}'")
    content = bytearray((tmp_path / CHECKPOINT).read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / CHECKPOINT).write_bytes(content)
    rows = (tmp_path / LEDGER).read_bytes()
    with pytest.raises(InvalidInput, match="damaged"):
        train(CORPUS, TINY, tmp_path, resume=True)
    assert (tmp_path / CHECKPOINT).read_bytes() == bytes(content)
    assert (tmp_path / LEDGER).read_bytes() == rows


def test_a_finished_run_is_returned_as_it_is(tmp_path: Path) -> None:
    first = train(CORPUS, TINY, tmp_path)
    at = time.perf_counter()
    assert train(CORPUS, TINY, tmp_path, resume=True) == first
    assert time.perf_counter() - at < 1


def test_a_run_that_diverges_says_when(tmp_path: Path) -> None:
    settings = replace(TINY, rate=1e30, warmup=0, clip=0.0, schedule="fixed")
    result = train(CORPUS, settings, tmp_path)
    assert result.diverged is not None
    assert result.diverged < 40
    assert (result.valid_bits, result.bound) == (None, None)
    assert read(tmp_path)[RESULT]["diverged"] == result.diverged
