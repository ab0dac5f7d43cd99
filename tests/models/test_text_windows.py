"""A tokenizer that gives up is one sentence, whatever language it is written in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evidence.scan_faults import make_model
from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.models.model_inputs import Panic, token_ids, without_panic
from tests.cli.command import Command

ENDLESS = {"type": "Split", "pattern": {"Regex": "(w+w+)+$"}, "behavior": "Isolated", "invert": False}
"""A pattern that looks at a row of n letters in 2ⁿ ways."""
TEXT = "w" * 5000 + "!"


@pytest.fixture(scope="module")
def panicking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose tokenizer cannot read `TEXT`, which lies beside it."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": ENDLESS}), encoding="utf-8")
    (folder / "row.txt").write_text(TEXT, encoding="utf-8")
    return folder


def test_a_panic_is_refused_in_one_sentence_without_its_report(
    panicking: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = open_model(str(panicking))
    assert model.processor("w1").input_ids  # other texts are read
    with pytest.raises(Panic, match=r"the tokenizer gave up \(Onig: Regex search error.*\): take another text"):
        model.windows(TEXT, 8, 1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["scan", "measure", "certify"])
def test_a_command_ends_as_documented(panicking: Path, tmp_path: Path, command: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = Command(command).refusal(panicking, "--text", panicking / "row.txt", "--length", 8)
    assert "the tokenizer gave up" in line


def test_an_error_of_a_tokenizer_is_a_fault_of_the_text_or_the_model() -> None:
    def broken(text: str) -> Any:
        raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")

    with pytest.raises(InvalidInput, match=r"cannot read this text .*Missing .UNK. token"):
        token_ids(broken, "a")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_stop_and_a_lack_of_memory_go_through(stop: type[BaseException]) -> None:
    def stopped(text: str) -> Any:
        raise stop

    with pytest.raises(stop):
        token_ids(stopped, "a")


def test_what_others_say_meanwhile_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    without_panic(lambda: os.write(2, b"one\n"))
    os.write(2, b"two\n")
    assert capfd.readouterr().err == "one\ntwo\n"
