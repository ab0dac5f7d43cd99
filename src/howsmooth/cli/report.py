"""`howsmooth report`: a scan as a page to show, figures for a paper, and a summary for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from howsmooth._util.common import FORMATS, distinct_files, same_file
from howsmooth.cli.options import AsJson, command, out_option, output_option
from howsmooth.cli.terminal import print_json, show, step_progress
from howsmooth.errors import InvalidInput
from howsmooth.reports import group_headline, groups, summary
from howsmooth.reports.page import check_formats, check_report_path
from howsmooth.reports.page import report as run
from howsmooth.reports.scan_groups import Group
from howsmooth.scans import salvage as salvaged

_ALL = ",".join(suffix.removeprefix(".") for suffix in FORMATS)


@command
def report(
    store: Annotated[Path, Argument(help="The store that `howsmooth scan` wrote.")],
    out: Annotated[Path | None, out_option("The page to write; by default beside the store, as .html.")] = None,
    figures: Annotated[Path | None, output_option("Also write figures into this folder; made if missing.")] = None,
    formats: Annotated[str, output_option("Formats of the figures: pdf or png,svg.", "--format")] = _ALL,
    as_summary: Annotated[bool, output_option("Also print a one-page summary.", "--summary")] = False,
    salvage: Annotated[
        bool, output_option("Of a damaged store, keep what is whole in a new one and report that.", "--salvage")
    ] = False,
    docs: Annotated[str | None, output_option("Address of the documentation, for links to the theory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a scan as one HTML file that opens offline.

    The page has the headline, every head, growth with n, the text coloured by influence, the distance to each bound, a
    table to sort, and all settings.

    Examples:
      howsmooth report scan.sqlite
      howsmooth report scan.sqlite -o report.html --summary
      howsmooth report scan.sqlite --figures figures --format pdf
      howsmooth report damaged.sqlite --salvage -o report.html
    """
    if not store.is_file():
        raise InvalidInput(f"there is no scan at {store}: make one with `howsmooth scan MODEL --out {store}`.")
    path = store.with_suffix(".html") if out is None else out
    check_report_path(path)
    distinct_files(read=[("the store", store)], written=[("the page", path)])
    wanted = check_formats(formats.split(","))
    if figures is not None:
        from howsmooth.reports import write_figures
    if figures is not None and store.suffix in wanted and same_file(store.parent, figures):
        raise InvalidInput(f"figures could overwrite the store {store}: choose another folder for them.")
    whole = None
    if salvage:
        whole = salvaged(store, path.with_name(f"{path.stem}-salvaged.sqlite"))
        typer.echo(f"howsmooth: {whole}.", err=True)
        store = whole.store
    with step_progress(2 + (figures is not None)) as begin:
        begin("reading the scan")
        scanned = groups(store)
        begin("writing the page")
        run(scanned, path, documentation=docs)
        drawn = []
        if figures is not None:
            begin("drawing")
            drawn = write_figures(scanned, figures, wanted)
    if as_json:
        saved = {} if whole is None else {"salvaged": vars(whole)}
        print_json({"report": path, "figures": drawn, "groups": facts(scanned)} | saved)
        return
    if as_summary:
        show(summary(scanned))
    else:
        for group in scanned:
            show(f"{group_headline(group)}\n")
    if drawn:
        show(f"figures: {len(drawn)} in {figures}")
    show(f"report: {path}")


def facts(scanned: Iterable[Group]) -> list[dict[str, str]]:
    """The headline of every group, with its model and text."""
    return [
        {"model": g.model, "precision": g.precision, "text": g.text, "headline": group_headline(g)} for g in scanned
    ]
