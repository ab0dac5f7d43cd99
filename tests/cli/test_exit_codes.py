"""A command ends with a code that means one thing, one line that says why, and keeps its work when it is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from howsmooth.cli import app, main, terminal
from howsmooth.cli.terminal import CODES
from howsmooth.cli.train import described
from howsmooth.papers.training.run_files import TrainingStatus
from tests.cli.command import Command

pytestmark = pytest.mark.usefixtures("usual_signals")
MEASURE, TRAIN = Command("measure"), Command("train")
MEASURING, TRAINING = (import_module(f"howsmooth.cli.{name}") for name in ("measure", "train"))
BACKTRACE = (
    "expected a tensor\nException raised from apply (most recent call first):\n" + "frame #0: c10::Error\n" * 300
)
ALLOCATION = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
TINY = ("--width", 8, "--heads", 2, "--length", 8, "--batch-tokens", 32, "--steps", 40, "--warmup", 1)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    """A measurement in which something raises this."""

    def fail(text: str) -> int:
        raise error

    monkeypatch.setattr(MEASURING, "parse_bytes", fail)
    return MEASURE.run("random", "--length", 4)


def test_an_error_that_nobody_foresaw_has_a_code_of_its_own_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = failing(monkeypatch, RuntimeError(BACKTRACE))
    assert done.exit_code == 70
    (line,) = done.stderr.splitlines()
    assert line.startswith("howsmooth: unexpected RuntimeError: expected a tensor (")
    assert len(line) < 200


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def test_what_is_no_exception_does_not_end_as_a_result_that_did_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    done = failing(monkeypatch, Panic("index out of bounds\nstack backtrace: …"))
    assert done.exit_code == 70
    (line,) = done.stderr.splitlines()
    assert line.startswith("howsmooth: unexpected Panic: index out of bounds (")


def test_lines_of_errors_are_cut_to_a_screenful(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = failing(monkeypatch, ValueError("x" * 200_000)).stderr.splitlines()
    assert len(line) <= 1000


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "does not fit in memory: lower --length or --width or --memory, or take"),
        (RuntimeError(ALLOCATION + "51200000000 bytes. Error code 12"), "(51.2 GB more were asked for): lower"),
        (OSError(12, "Cannot allocate memory"), "does not fit in memory"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB"),
            "does not fit in memory (2.00 GiB more were asked for): lower --length",
        ),
        (RuntimeError("numel: integer multiplication overflow"), "beyond what any machine can hold"),
        (OverflowError("Python int too large to convert to C long"), "beyond what any machine can hold"),
        (ValueError("embedded null byte"), "NUL"),
    ],
)
def test_what_does_not_fit_is_a_wrong_request_that_says_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    done = failing(monkeypatch, error)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_debug_shows_where_without_passing_escapes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> int:
        raise RuntimeError("\x1b]52;c;cHduZWQ=\x1b\\")

    monkeypatch.setattr(MEASURING, "parse_bytes", fail)
    done = MEASURE.run("random", "--debug")
    assert done.exit_code == 70
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("measure", "random", "--length", 100_000_000),
        ("measure", "random", "--length", 99_999_999_999_999_999_999),
        ("measure", "random", "--width", 10**9),
        ("bounds", "random", "--width", 10**9, "--length", 4, "--over", "ball:1"),
        ("measure", "random", "--seed", 99_999_999_999_999_999_999),
        ("measure", "random", "--seed", -1),
        ("measure", "random", "--threads", 1_000_000),
        ("worst-case", "random", "--threads", 1_000_000),
        ("report", "."),
        ("report", ""),
        ("train", "text.txt", "--width", 99_999_999_999_999_999_999),
        ("train", "text.txt", "--width", 2**20),
        ("train", "text.txt", "--depth", 99_999_999_999_999_999_999),
        ("train", "text.txt", "--seed", 99_999_999_999_999_999_999),
        ("train", "text.txt", "--batch-tokens", 2**28, "--length", 2**20),
        ("train", "text.txt", "--table", "--seeds", 99_999_999_999_999_999_999),
    ],
    ids=lambda args: " ".join(map(str, args)),
)
def test_absurd_sizes_are_refused_before_any_work(
    args: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 100, encoding="utf-8")
    command, *rest = args
    assert "unexpected" not in Command(str(command)).refusal(*rest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "word"),
    [("SIGTERM", 143, "terminated"), ("SIGHUP", 129, "terminal closed"), ("SIGINT", 130, "interrupted")],
)
def test_a_run_that_is_stopped_keeps_its_work_and_says_so(
    name: str, code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 100, encoding="utf-8")

    def stopped(now: TrainingStatus) -> str:
        if now.step == 10:
            os.kill(os.getpid(), getattr(signal, name))
        return described(now)

    with monkeypatch.context() as patched:
        patched.setattr(TRAINING, "described", stopped)
        done = TRAIN.run("text.txt", *TINY, "--out", "run", "--report-every", 5)
    assert done.exit_code == code, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"howsmooth: {word}: 1")
    assert "steps are kept in run" in line
    assert TRAIN.run("text.txt", *TINY, "--out", "run", "--report-every", 5, "--resume").exit_code == 0


def test_sigterm_before_any_work_is_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(text: str) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1

    monkeypatch.setattr(MEASURING, "parse_bytes", stop)
    done = MEASURE.run("random", "--length", 4)
    assert (done.exit_code, done.stdout, done.stderr) == (143, "", "howsmooth: terminated\n")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, terminal._AGAIN])  # on a busy machine that may be over in the hook
@pytest.mark.parametrize(
    ("name", "code", "word"),
    [("SIGTERM", 143, "terminated"), ("SIGHUP", 129, "terminal closed"), ("SIGINT", 130, "interrupted")],
)
def test_a_stop_during_a_finaliser_is_not_lost(
    name: str, code: int, word: str, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), getattr(signal, name))
            for _ in range(3):  # the handler runs, and raises, at the latest here
                pass

    def work(text: str) -> int:
        Finalised()
        for _ in range(1000):  # until the stop is given again, from another thread
            time.sleep(0.01)
        return 2**20

    hook = sys.unraisablehook
    monkeypatch.setattr(terminal, "_AGAIN", wait)
    monkeypatch.setattr(MEASURING, "parse_bytes", work)
    done = MEASURE.run("random", "--length", 4)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"howsmooth: {word}\n")
    assert sys.unraisablehook is hook


def test_an_interrupt_before_the_command_has_begun_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_group", interrupted)  # as typer makes the commands
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "howsmooth: interrupted\n")


def test_an_ignored_hang_up_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_up(text: str) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 2**20

    monkeypatch.setattr(MEASURING, "parse_bytes", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert MEASURE.run("random", "--length", 4).exit_code == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(content: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(MEASURING, "print_json", closed)
    assert MEASURE.run("random", "--length", 4, "--json").exit_code == 141


def test_the_help_names_every_code() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert all(f"{code} " in CODES for code in (0, 1, 2, 70, 129, 130, 141, 143))
    assert "70 an unexpected error" in shown


def test_the_help_ends_with_the_glossary() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert f"{project['urls']['Documentation']}/glossary/" in shown.strip().splitlines()[-1]
