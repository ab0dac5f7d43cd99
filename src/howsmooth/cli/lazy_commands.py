"""The commands, each imported when it is used: a list of them, and a word that is none, need neither torch nor time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from howsmooth.cli.exit_codes import OneLineErrors
from howsmooth.cli.light_help import import_help

SUMMARIES = {
    "measure": "Measure the local Lipschitz constant of an attention block and of each of its heads.",
    "bounds": "Bound the Lipschitz constant of an attention block by every theorem that applies.",
    "worst-case": "Find the least smooth input of a set, and how far the best theorem is from it.",
    "certify": "Prove how far the output of attention can move, or within which distance an image keeps its class.",
    "scan": "Measure every head (or layer, or the whole) of a model on windows of a text.",
    "merge": "Join stores that `howsmooth scan` wrote into a new one.",
    **dict.fromkeys(
        ("quantise", "quantize"),
        "Predict, prove and measure what rounding the KV cache does, head by head, and choose formats for a budget.",
    ),
    "noise": "Predict how rounding noise grows through the residual stream, beside what a run in low precision really "
    "does.",
    "report": "Write a scan as one HTML file that opens offline.",
    "compare": "Show what changed from the first to the last, map by map, and by how much at least.",
    "reproduce": "Run an experiment of the papers: its data (Parquet), its figure (PDF, PNG, SVG) and a verdict on the "
    "claim.",
    "train": "Train a character language model and report its bits per character and how smooth its attention is.",
    "models": "List the models that need no hub, with size, licence and how to get them.",
    "demo": "Scan two real models on Alice in Wonderland and write a report.",
}
"""Command → the first sentence of its help, in the order in which they are listed."""
_HIDDEN = {"quantize": "quantise"}
"""Other spellings → the command."""


def plain_flags(params: Sequence[Any]) -> list[Any]:
    """Options, of which those without a value are shown without the type of one: ``--json``, not ``--json <bool>``."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda ctx: None
    return list(params)


class PlainFlags(TyperCommand):
    """A command whose flags are shown as flags."""

    def get_params(self, ctx: Any) -> Any:
        return plain_flags(super().get_params(ctx))


class Commands(OneLineErrors):
    """All commands of `SUMMARIES`."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.commands = {name: OnDemand(name) for name in SUMMARIES}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        import_help()
        super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> Any:
        return plain_flags(super().get_params(ctx))


class OnDemand(TyperCommand):
    """A command of which only name and summary are known until it is used."""

    def __init__(self, name: str):
        self._command: Any = None
        super().__init__(name, help=SUMMARIES[name], hidden=name in _HIDDEN, rich_markup_mode="rich")

    @property
    def command(self) -> Any:
        """The command itself, from the module of its name."""
        if self._command is None:
            spelt = _HIDDEN.get(str(self.name), str(self.name)).replace("-", "_")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
            alone.command(self.name, cls=PlainFlags, hidden=self.hidden)(
                getattr(import_module(f"howsmooth.cli.{spelt}"), spelt)
            )
            self._command = get_command(alone)
        return self._command

    @property
    def params(self) -> Any:
        """Its options and arguments."""
        return self.command.params

    @params.setter
    def params(self, given: Any) -> None:
        """None of its own."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.command.make_context(*args, **options)
