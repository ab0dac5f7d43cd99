"""`howsmooth worst-case`: the least smooth input of a set, between what it reaches and what no input can exceed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import ROUND_FLOOR
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from howsmooth.cli.options import (
    FOLDER,
    AsJson,
    EngineOptions,
    command,
    exact_option,
    out_option,
    what_option,
    where_option,
)
from howsmooth.cli.source_options import OVER, MapAtTokens, MapOptions, layer_tokens, map_entry, norm_image
from howsmooth.cli.terminal import INTERRUPTED, NOT_CONVERGED, print_json, progress_line, show, written
from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import parse_lengths
from howsmooth.search.sandwich_search import Sandwich, sandwich
from howsmooth.sets import Around, InputSet, SetText
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.near_sets import Over

_LENGTHS = "8,16,32"


@command
def worst_case(
    options: MapOptions,
    head: Annotated[int | None, what_option("One head, counted from 0 (the whole block).", min=0)] = None,
    over: Annotated[str | None, where_option(OVER.format("The sets, with one size or several (ball:1,2)"))] = None,
    around: Annotated[Path | None, where_option("Text for --over around: search near the layer's input there.")] = None,
    norm: Annotated[Literal["2", "inf"], what_option("Norm of the Jacobian.")] = "2",
    starts: Annotated[int, exact_option("Random starts, beside the theorems' own.", min=1)] = 8,
    steps: Annotated[int, exact_option("Steps of each search.", min=1)] = 200,
    seconds: Annotated[float | None, exact_option("Time for all searches together.")] = None,
    out: Annotated[Path, out_option("Folder for witnesses and figure.")] = FOLDER,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Find the least smooth input of a set, and how far the best theorem is from it.

    For every number of tokens and every set: an input on which the attention reaches the lower bound, kept in a file
    that `howsmooth measure --witness` replays, and the smallest upper bound by a theorem. Without --over the tokens are
    those after the layer's own normalisation, or, for weights without a model, of root mean square at most one.
    Ctrl-C keeps and prints the best so far. With --jobs or --engine every start is searched by a worker, to its end.

    Examples:
      howsmooth worst-case random --width 16 --heads 2 --length 8,16,…,64 --over ball:1,2
      howsmooth worst-case minilm --layer 2 --head 0 --length 16,32 --over norm
      howsmooth worst-case minilm --layer 2 --around novel.txt --over around:1%,5% --length 64
      howsmooth worst-case gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --head 3 --over norm --seconds 60
    """
    counts = parse_lengths(options.length or _LENGTHS)
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInput(f"--seconds is a positive number of seconds, got {seconds}.")
    named = None if over is None else SetText.parse(over)
    near = named is not None and named.near_input
    if named is not None and named.form == "point":
        raise InvalidInput("a search needs a set, not a point: howsmooth measure takes one input.")
    options = _about(options, near, around)
    first = str(counts[-1] if near else 4)
    site = replace(options, length=None if options.input is not None else first).open()
    sets = _sets(site, counts, named)
    out.mkdir(parents=True, exist_ok=True)
    source = map_entry(options, site.attention)
    stem = _stem(options, source["sha256"], head, norm)
    unit = named.absolute(site.one_input)[0] / named.sizes[0] if named is not None and named.share else 1.0
    with _searching() as progress:
        cells = sandwich(
            site.attention,
            counts,
            over=sets,
            norm=math.inf if norm == "inf" else 2,
            head=head,
            starts=starts,
            steps=steps,
            seconds=seconds,
            seed=site.seeds["solver"],
            files=lambda n, over: out / f"{stem}-n{n}-{_set_name(over)}{_size_name(over, unit)}.safetensors",
            source=source,
            progress=progress,
            executor=engine.chosen(),
        )
    picture = out / f"{stem}-{_set_name(cells[0].over)}.png" if cells else None
    if picture is not None:
        from howsmooth.reports.figures import save_figure

        save_figure(cells.figure(), picture)
    if as_json:
        facts = site.describe() | {"n": list(counts), "head": head} | ({} if near else {"input": None})
        content = {"setting": facts, "cells": cells.to_dict(), "interrupted": cells.interrupted}
        print_json(content | {"figure": picture})
    else:
        _print(site, cells, head, picture)
    if cells.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not all(row["converged"] for row in cells.to_dict()):
        raise typer.Exit(NOT_CONVERGED)


def _about(options: MapOptions, near: bool, around: Path | None) -> MapOptions:
    """The options with the text of --around, which a set about an input needs and another set refuses."""
    given = [("--around", around), ("--text", options.text), ("--input", options.input)]
    named = [option for option, value in given if value is not None]
    if not near and named:
        raise InvalidInput(f"{named[0]} gives an input to search near: give its distance, such as --over around:1%.")
    if len(named) > 1 and around is not None:
        raise InvalidInput("--around, --text and --input name the same thing: give one of them.")
    return options if around is None else replace(options, text=around)


def _sets(
    site: MapAtTokens, counts: Sequence[int], named: SetText | None
) -> Over | Sequence[InputSet] | Mapping[int, Sequence[InputSet]]:
    """The sets, as `howsmooth.search.sandwich` takes them."""
    if named is not None and named.near_input:
        x = site.one_input.double()
        if x.dim() != 2:
            raise InvalidInput(f"a search is near one input, but --input holds {len(x)}: store one by itself.")
        sizes = named.absolute(x)
        return {n: [Around(site.first(n).double(), eps, named.form == "around") for eps in sizes] for n in counts}
    if named is not None:
        return named.sets(norm=norm_image(site, named))
    if site.model is not None:
        return layer_tokens(site)
    width = site.attention.in_features
    return Ellipsoid.ball(width**0.5, width, "tokens of unit RMS")


def _stem(options: MapOptions, sha256: str, head: int | None, norm: str) -> str:
    """The beginning of all file names: which map, by name and hash, and which norm unless it is the usual one."""
    source = Path(options.source).stem if Path(options.source).is_file() else options.source
    words = ["worst", source, options.prefix or "", "" if options.layer is None else f"layer{options.layer}"]
    words += ["" if head is None else f"head{head}", "" if norm == "2" else norm, sha256[:6]]
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(word.strip(".") for word in words if word)).strip("-")


def _set_name(over: InputSet) -> str:
    """The kind of set in a file name."""
    facts = over.describe()
    known = {"around": "eps", "ball": "R"}
    return known.get(facts["set"]) or re.sub(r"\W+", "-", str(facts.get("origin", facts["set"])))


def _size_name(over: InputSet, unit: float) -> str:
    """R, or ε in ``unit``: 1, or the mean token norm where ε is a share of it."""
    return f"{(over.size or 0.0) / unit:.6g}" if _set_name(over) in ("eps", "R") else ""


def _print(site: MapAtTokens, cells: Sandwich, head: int | None, picture: Path | None) -> None:
    show(site.in_words() + ("" if head is None else f"; head {head}"))
    if any(cell.centre is not None for cell in cells):
        size = float(site.x.double().norm(dim=-1).mean())
        show(f"tokens: near {site.tokens}; mean norm {written(size)}")
    if not cells:
        show("nothing was found yet")
        return
    show(cells)
    show("Some input of the set reaches the lower bound: the witness. No input of the set exceeds the upper bound.")
    for cell in cells:
        show(f"witness: {cell.file}")
    if picture is not None:
        show(f"figure: {picture}")


@contextmanager
def _searching() -> Iterator[Callable[[str, float, int, float], None]]:
    """A bar on stderr with the best value so far and the time left. Silent when nobody watches."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with progress_line("opening the map", *columns) as update:

        def show(label: str, done: float, cells: int, best: float) -> None:
            reached = f": ≥ {written(best, ROUND_FLOOR)}" if best > 0 else ""
            update(description=f"{label}{reached}", completed=done, total=cells)

        yield show
