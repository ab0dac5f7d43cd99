"""`--device` and `--dtype` mean the same in every command that computes, and a device that is not here is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click import Command as Described
from typer.main import get_command

from howsmooth.cli import app
from howsmooth.models import open_model
from howsmooth.rounding.quantisation import quantise
from tests.cli.command import Command

TINY = "random:llama[layers=1,width=16,heads=2]"
WORDS = "to be or not to be, that is the question " * 20
COMMANDS: dict[str, tuple[object, ...]] = {
    "measure": ("random", "--length", 4),
    "bounds": ("random", "--over", "ball:1"),
    "worst-case": ("random", "--length", 2),
    "certify": ("random", "--length", 4),
    "scan": (TINY, "--length", 8),
    "compare": (TINY, TINY, "--length", 8),
    "quantise": (TINY, "--length", 8),
    "noise": (TINY, "--length", 8),
    "train": ("words.txt", "--steps", 1),
    "demo": (),
}
_NO_PLACE = {"merge", "models", "report", "reproduce"}
"""These read what is stored, or run experiments whose arithmetic belongs to their claim."""
_NO_DTYPE = _NO_PLACE | {"train", "demo", "noise"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text(WORDS)


def described() -> dict[str, Described]:
    group: Any = get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


def test_every_command_that_computes_has_both_options() -> None:
    flags = {name: {flag for option in one.params for flag in option.opts} for name, one in described().items()}
    assert {name for name, some in flags.items() if "--device" not in some} == _NO_PLACE
    assert {name for name, some in flags.items() if "--dtype" not in some} == _NO_DTYPE


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("device", ["nowhere", "cuda:7", "meta"])
def test_a_device_that_is_not_here_is_one_line(name: str, device: str) -> None:
    said = Command(name).refusal(*COMMANDS[name], "--device", device)
    assert "choose another, for example cpu" in said
    assert device in said


@pytest.mark.parametrize("name", ["scan", "compare", "quantise"])
def test_a_dtype_that_is_none_is_one_line(name: str) -> None:
    assert "dtype is auto, float32, float64" in Command(name).refusal(*COMMANDS[name], "--dtype", "float8")


def test_compare_rounds_the_weights_of_models() -> None:
    asked = (TINY, "random:llama[layers=1,width=16,heads=2,seed=1]", "--length", 8)
    plain, rounded = (Command("compare").json(*asked, "--dtype", dtype)["changes"] for dtype in ("auto", "bfloat16"))
    before, after = ({change["head"]: change["before"] for change in some} for some in (plain, rounded))
    assert before != after
    assert before == pytest.approx(after, rel=0.05)


def test_quantise_takes_the_model_as_it_was_asked() -> None:
    quick: dict[str, Any] = {"formats": "int4", "length": 8, "windows": 1, "samples": 2}
    rows = Command("quantise").json(
        TINY,
        "--formats",
        "int4",
        "--length",
        8,
        "--windows",
        1,
        "--samples",
        2,
        "--dtype",
        "float64",
        "--device",
        "cpu",
    )
    exact = quantise(open_model(TINY, head=True, dtype="float64"), **quick)
    assert rows == exact.rows()
    plain = quantise(TINY, **quick).rows()
    assert rows != plain
    assert [row["actual"] for row in rows] == pytest.approx([row["actual"] for row in plain], rel=1e-4)
