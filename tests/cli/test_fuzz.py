"""A sample of the random command lines of the evidence page, and proof that a misdeed would be noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from evidence.fuzz_commands import Case, Playground, draw_case, playground
from howsmooth.cli.terminal import CODES
from howsmooth.errors import InvalidInput

SAMPLE = (*range(50, 1500, 60), 376, 455, 196, 399)
"""Every sixtieth command line; and of `demo` and `merge`, which are not among these, two each that end soon."""
MEASURE = import_module("howsmooth.cli.measure")


@pytest.fixture(scope="module")
def ground() -> Iterator[Playground]:
    with playground() as made:
        yield made


@pytest.mark.slow
def test_no_command_of_a_sample_ends_in_another_way_than_is_documented(ground: Playground) -> None:
    found = {}
    for seed in SAMPLE:
        case = draw_case(seed)
        ending, wrong = ground.run(case)
        if wrong:
            found[f"{seed}: {case}"] = (wrong, ending.err[-300:])
    assert not found


@pytest.fixture(scope="module")
def blameless(ground: Playground) -> Case:
    """A command line in which nothing is wrong."""
    case = Case(("measure", "random", "--width", "8", "--heads", "2", "--length", "4", "--json"))
    _, wrong = ground.run(case)
    assert wrong == []
    return case


def _raise() -> None:
    raise RuntimeError("nobody foresaw this")


def _write_outside() -> None:
    with (Path.cwd().parent / "stray").open("w"):
        pass


def _spoil_an_input() -> None:
    Path("inputs/words.txt").write_text("spoilt", encoding="utf-8")


def _print_an_escape() -> None:
    sys.stdout.write("\x1b[2J")


def _complain_twice() -> None:
    sys.stderr.write("a warning\n")
    raise InvalidInput("and an error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misdeed", "noticed"),
    [
        (_raise, "exit code 70"),
        (_write_outside, "wrote to"),
        (_spoil_an_input, "changed words.txt"),
        (_print_an_escape, "controls in the output"),
        (_complain_twice, "2 lines of error"),
        (lambda: sys.stdout.write("no JSON"), "--json is no JSON"),
        (lambda: sys.exit(4), "exit code 4"),
    ],
)
def test_every_misdeed_is_noticed(
    ground: Playground, blameless: Case, monkeypatch: pytest.MonkeyPatch, misdeed: Callable[[], None], noticed: str
) -> None:
    def parse(text: str) -> int:
        misdeed()
        return 2**20

    monkeypatch.setattr(MEASURE, "parse_bytes", parse)
    _, wrong = ground.run(blameless)
    assert any(word.startswith(noticed) for word in wrong), wrong


def test_the_fuzzer_and_the_help_name_the_same_codes() -> None:
    from evidence.fuzz_commands import DOCUMENTED

    assert all(f"{code} " in CODES for code in DOCUMENTED)
    assert 70 not in DOCUMENTED


def test_a_seed_always_draws_the_same_command_line() -> None:
    assert [draw_case(seed) for seed in range(200)] == [draw_case(seed) for seed in range(200)]
    assert len({draw_case(seed).args for seed in range(200)}) > 190
