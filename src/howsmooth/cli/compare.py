"""`howsmooth compare`: scans, models or checkpoints side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Argument

from howsmooth._util.common import distinct_files
from howsmooth.cli.options import (
    AsJson,
    Device,
    Dtype,
    Figure,
    Report,
    Seed,
    Text,
    command,
    length_option,
    output_option,
    what_option,
    where_option,
)
from howsmooth.cli.terminal import BEYOND, print_json, show, step_progress
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from howsmooth.scans import Comparison, Scan

_MOST_ROWS = 20
STORES = (".sqlite", ".db")


@command
def compare(
    sources: Annotated[
        list[str],
        Argument(help="Two or more: stores of `howsmooth scan`, models, or a folder of checkpoints."),
    ],
    text: Text = None,
    length: Annotated[str, length_option("Tokens per window for models.")] = "64",
    windows: Annotated[int, where_option("Windows of each length for models.", min=1)] = 1,
    what: Annotated[str, what_option("Kinds of maps of models, as in scan.")] = "head",
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    limit: Annotated[
        float | None, output_option("Exit with 3 if a map is certainly more than this many times rougher.")
    ] = None,
    report: Report = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Show the changes from the first to the last, map by map, and by how much at least.

    Noise is not called change: a factor counts only as far as the ends of both values show it. More than two are a
    series, such as the checkpoints of a training run in their order; a folder of checkpoint-100, checkpoint-200, …
    stands for all of them.

    Examples:
      howsmooth compare before.sqlite after.sqlite --report changes.html
      howsmooth compare base-model fine-tuned-model --text novel.txt --length 64,128 --limit 2
      howsmooth compare step-100 step-200 step-300 --what head,layer --figure series.png --json
      howsmooth compare training-run --report series.html
    """
    from howsmooth.reports.comparison_page import comparison_figure, write_comparison
    from howsmooth.reports.figures import save_figure
    from howsmooth.reports.page import check_report_path
    from howsmooth.scans import compare as run
    from howsmooth.scans.compare_scans import LIMIT

    sources = [one for source in sources for one in _checkpoints(source)]
    if len(sources) < 2:
        raise InvalidInput("name at least two scans or models: the one before and the one after.")
    if report is not None:
        check_report_path(report)
    read = [("SOURCES", Path(source)) for source in sources if Path(source).is_file()]
    distinct_files(read=[*read, ("--text", text)], written=[("--report", report), ("--figure", figure)])
    options = {"lengths": length, "windows": windows, "what": what, "seed": seed, "device": device, "dtype": dtype}
    scans = []
    with step_progress(len(sources)) as begin:
        for source in sources:
            begin(source)
            scans.append(_scan(source, text, **options))
    names = None if len({*sources}) < len(sources) else [Path(source).stem or source for source in sources]
    if names is not None and len({*names}) < len(names):
        names = sources
    comparison = run(*scans, names=names, limit=LIMIT if limit is None else limit)
    if figure is not None:
        save_figure(comparison_figure(comparison), figure)
    if report is not None:
        write_comparison(comparison, report)
    if as_json:
        print_json(comparison.to_dict())
    else:
        _show(comparison, report)
    if limit is not None and comparison.rougher:
        raise typer.Exit(BEYOND)


def _checkpoints(source: str) -> list[str]:
    """The checkpoints of a training run, by their steps, when the source is a folder of them; the source otherwise."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return [source]
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.iterdir() if path.is_dir()}
    numbered = sorted((int(match[1]), str(path)) for path, match in steps.items() if match is not None)
    return [path for _, path in numbered] or [source]


def _scan(source: str, text: Path | None, **options: Any) -> Scan:
    from howsmooth.scans import Scan, scan

    if Path(source).suffix in STORES:
        if not Path(source).is_file():
            raise InvalidInput(f"there is no scan at {source}: make one with `howsmooth scan MODEL --out {source}`.")
        return Scan.open(source)
    return scan(source, text, explain=False, bounds="none", **options)


def _show(comparison: Comparison, report: Path | None) -> None:
    show(comparison.headline())
    table = Table("map", "tokens", *comparison.names, "factor", "at least", "at most", "guarantee")
    for change in comparison.changes[:_MOST_ROWS]:
        numbers = [f"{value:.4g}" for value in change.values]
        ends = [f"{end:.3g}" for end in (change.ratio, change.least, change.most)]
        strong = "bold" if change.certain > comparison.limit or change.certain < 1 / comparison.limit else None
        table.add_row(str(change.place), str(change.length), *numbers, *ends, change.guarantee.words(), style=strong)
    show(table)
    if len(comparison.changes) > _MOST_ROWS:
        show(f"and {len(comparison.changes) - _MOST_ROWS} more, which have changed less")
    if comparison.missing:
        show(f"{comparison.missing} cells are not in every scan and are left out")
    if report is not None:
        show(f"report: {report}")
