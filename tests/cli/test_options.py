"""One meaning per flag, help in panels without ranges, and a function of Python for every command."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from typer.core import TyperOption
from typer.main import get_command
from typer.testing import CliRunner

import howsmooth as hs
from howsmooth.cli import app
from howsmooth.cli.program import COMMANDS, DETAILS, ENGINE, PANELS

WITHOUT_VERB = {"demo", "models", "quantize"}
"""A tour of the others, a list, and a second spelling."""


def options() -> Iterator[tuple[str, TyperOption]]:
    """Every option of every command."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from ((name, option) for option in command.params if isinstance(option, TyperOption))


def test_a_flag_takes_the_same_values_in_every_command() -> None:
    kinds: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, option in options():
        names = "flag" if option.is_flag else "choice" if option.type_descriptor.is_choice else option.bare_type()
        for flag in option.opts:
            kinds[flag][re.sub(r"list\[(.*)\]", r"\1", names), option.metavar].append(command)
    several = {flag: dict(found) for flag, found in kinds.items() if len(found) > 1}
    assert not several


def test_a_flag_stands_in_the_same_panel_in_every_command() -> None:
    panels = defaultdict(set)
    for _, option in options():
        panels[option.opts[0]].add(option.rich_help_panel)
    train = {"--attention", "--heads", "--steps", "--width", "--window"}
    assert all(found <= {*PANELS} for found in panels.values()), "give every option a panel: where_option(…), …"
    assert {flag for flag, found in panels.items() if len(found) > 1} <= train


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", ["80", "120"])
def test_help_is_in_panels_and_shows_no_range(name: str, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    brief, full = (CliRunner().invoke(app, [name, option]).stdout for option in ("--help", "--help-all"))
    for shown in (brief, full):
        assert "Usage" in shown
        assert not re.search(r"<=|>=|range|bool", shown)
        assert max(map(len, shown.splitlines())) <= int(width)
    assert ENGINE not in brief
    assert DETAILS not in brief
    assert f"{name} --help-all" in " ".join(brief.split())
    every = {option.opts[0] for command, option in options() if command == name}
    assert every == {flag for flag in every if re.search(rf"{flag}\b", full)}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - WITHOUT_VERB))
def test_every_command_has_its_function(name: str) -> None:
    verb = hs.bounds.table if name == "bounds" else getattr(hs, name.replace("-", "_"))
    assert callable(verb)
