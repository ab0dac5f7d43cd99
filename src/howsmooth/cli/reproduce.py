"""`howsmooth reproduce`: the experiments of both papers, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from howsmooth._util.validation import check_one_of
from howsmooth.cli.options import (
    AsJson,
    EngineOptions,
    Resume,
    command,
    engine_option,
    exact_option,
    out_option,
    what_option,
    where_option,
)
from howsmooth.cli.terminal import print_json, progress_line, show, stderr
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from howsmooth.engines import Engine
    from howsmooth.papers import Experiment, ExperimentOptions, Reproduction

LONG = 120.0
"""Minutes above which a run needs --yes."""


@command
def reproduce(
    experiment: Annotated[str | None, typer.Argument(metavar="[ID]", help="An experiment (all are listed).")] = None,
    all_of_them: Annotated[bool, what_option("Every experiment, one after the other.", "--all")] = False,
    quick: Annotated[bool, exact_option("A small version, minutes in all.", "--quick")] = False,
    full: Annotated[bool, exact_option("The paper's size, as far as it fits one machine.", "--full")] = False,
    model: Annotated[list[str] | None, what_option("Other models than the experiment's own (may repeat).")] = None,
    text: Annotated[Path | None, where_option("A text instead of that of the experiment.")] = None,
    out: Annotated[Path, out_option("Folder for data, figures and verdicts.")] = Path("reproduced"),
    resume: Resume = True,
    yes: Annotated[bool, engine_option("Start even what takes hours.", "--yes")] = False,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the papers: its data (Parquet), its figure (PDF, PNG, SVG) and a verdict on the claim.

    Examples:
      howsmooth reproduce
      howsmooth reproduce lip-infinity --quick
      howsmooth reproduce growth-text --model bert-base-uncased --model gpt2
      howsmooth reproduce --all --quick
      howsmooth reproduce growth-text --full --yes --engine ray --address head-node:6379
    """
    from howsmooth.models.model_inputs import read_text
    from howsmooth.papers import EXPERIMENTS, ExperimentOptions

    if experiment is None and not all_of_them:
        _list(list(EXPERIMENTS.values()), as_json)
        return
    if quick and full:
        raise InvalidInput("choose --quick or --full, not both.")
    if experiment is not None and all_of_them:
        raise InvalidInput("name one experiment or ask for --all, not both.")
    size: Any = "quick" if quick else "full" if full else "normal"
    asked = ExperimentOptions(size, tuple(model or ()), None if text is None else read_text(text))
    if experiment is not None:
        check_one_of(experiment, EXPERIMENTS, "the experiment")
    wanted = list(EXPERIMENTS.values()) if experiment is None else [EXPERIMENTS[experiment]]
    for one in wanted:
        one.check(asked)
    chosen = engine.chosen()
    _warn(wanted, asked, yes)
    made = []
    for one in wanted:
        made.append(_run(one, asked, out, resume, chosen))
        if not as_json:
            _show(made[-1])
    if as_json:
        print_json({"reproduced": [reproduction.to_dict() for reproduction in made]})


def _list(experiments: list[Experiment], as_json: bool) -> None:
    if as_json:
        facts = ("id", "paper", "title", "claim", "setting")
        print_json({"experiments": [{name: getattr(one, name) for name in facts} for one in experiments]})
        return
    table = Table("id", "what is shown", "claim", "minutes: quick, normal, full")
    for one in experiments:
        table.add_row(one.id, one.title, one.claim, ", ".join(f"{minutes:g}" for minutes in one.minutes))
    show(table)
    show("Run one with: howsmooth reproduce ID [--quick | --full]")


def _warn(wanted: list[Experiment], asked: ExperimentOptions, yes: bool) -> None:
    minutes = sum(asked.pick(*one.minutes) for one in wanted)
    if minutes > 1:
        stderr().print(f"About {_time(minutes)} on two cores.")
    if minutes > LONG and not yes:
        raise InvalidInput(f"this takes about {_time(minutes)}: ask for it with --yes, or for --quick.")


def _time(minutes: float) -> str:
    hours, days = minutes / 60, minutes / 1440
    if minutes < LONG:
        return f"{minutes:.0f} minutes"
    return f"{hours:.0f} hours" if days < 2 else f"{hours:,.0f} hours ({days:.0f} days)"


def _run(
    experiment: Experiment, asked: ExperimentOptions, out: Path, resume: bool, engine: Engine | None
) -> Reproduction:
    from howsmooth.papers import reproduce as run

    with progress_line(experiment.id, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as update:
        progress = lambda done, total: update(completed=done, total=total)  # noqa: E731
        return run(experiment, asked, out, resume=resume, progress=progress, executor=engine)


def _show(made: Reproduction) -> None:
    show(
        f"{made.experiment.id}: {made.experiment.title}",
        f"  Claim: {made.experiment.claim}",
        f"  Paper: {made.experiment.paper}",
        f"  Setting: {made.experiment.setting} Size: {made.options.size}.",
        f"  Measured: {made.finding.measured}",
        f"  Verdict: {made.finding.verdict.value}",
        f"  Files: {made.folder}\n",
    )
