"""`howsmooth demo`: the main job on two real models and a real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.console import NOT_CONVERGED, print_json, set_threads, stdout
from howsmooth.cli.report import facts
from howsmooth.cli.scan import FOLDER, keeping


@dataclass(frozen=True)
class Part:
    """One model of the demo and how far it is read."""

    model: str
    lengths: str


PARTS = (Part("minilm", "16,32,64,128"), Part("smollm2", "16,32,64"))
"""An encoder and a causal language model; together below three minutes on two cores."""
WHAT = "heads,attention"


def demo(
    models: Annotated[str, typer.Option(help="Which of them: minilm, smollm2.")] = "minilm,smollm2",
    lengths: Annotated[str | None, typer.Option(help="Tokens per window, for example 16,64 (each its own).")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the store and the report; made if missing.")] = FOLDER,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep what an earlier demo has measured, or measure anew.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Scan two real models on Alice in Wonderland and write a report.

    MiniLM is an encoder, SmolLM2 a causal language model with weights rounded to 4 bits. Every head and every attention
    block is measured at several lengths. Prints a summary and writes one HTML page that opens offline.

    Examples:\n
      howsmooth demo\n
      howsmooth demo --models minilm --lengths 8,16,…,256 --output alice
    """
    from howsmooth.models import NAMED
    from howsmooth.reporting import groups, summary, write_report
    from howsmooth.scanning import Scan, scan

    set_threads(threads)
    wanted = chosen(models)
    store, page = output / "demo.sqlite", output / "demo.html"
    scans = []
    for part in wanted:
        asked = part.lengths if lengths is None else lengths
        with keeping(store) as progress:
            scans.append(scan(part.model, lengths=asked, what=WHAT, out=store, resume=resume, progress=progress))
    found = Scan.joined(scans)
    write_report(found, page)
    if as_json:
        print_json({"groups": facts(groups(found)), "cells": len(found), "store": str(store), "report": str(page)})
    else:
        out = stdout()
        for part in wanted:
            out.print(f"{part.model}: {NAMED[part.model].description}.", markup=False, soft_wrap=True)
        out.print()
        out.print(summary(found))
        out.print(
            "σ is the local Lipschitz constant: how far the output moves, at most, per small move of the input. Layers "
            "and heads count from 0. Every lower end is always true, every upper end with probability 99 %; bounds are "
            "proved."
        )
        out.print(f"\nStore: {store}", markup=False, soft_wrap=True)
        out.print(f"Report: {page} (open it in a browser)", markup=False, soft_wrap=True, style="bold")
    if not all(row["converged"] for row in found.rows):
        raise typer.Exit(NOT_CONVERGED)


def chosen(models: str) -> list[Part]:
    """The parts of the demo that are wanted.

    >>> [part.model for part in chosen("smollm2")]
    ['smollm2']
    """
    by_name = {part.model: part for part in PARTS}
    names = [name.strip() for name in models.split(",") if name.strip()]
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(
                f"the demo has {' and '.join(by_name)}, not {name!r}: other models go through `howsmooth scan`."
            )
    return [by_name[name] for name in dict.fromkeys(names)]
