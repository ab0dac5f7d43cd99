"""`howsmooth worst-case`: the least smooth input of a set, between what it reaches and what no input can exceed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import ROUND_FLOOR
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from howsmooth.cli.bounds import tokens_after
from howsmooth.cli.console import print_json, progress_line, show, written
from howsmooth.cli.engine_options import EngineOptions
from howsmooth.cli.exit_codes import INTERRUPTED, NOT_CONVERGED
from howsmooth.cli.options import FOLDER, AsJson, command, exact_option, out_option, what_option, where_option
from howsmooth.cli.replay import remember
from howsmooth.cli.set_options import layer_tokens, positive_numbers
from howsmooth.cli.source_options import AttentionOptions, MapAtTokens, Request
from howsmooth.errors import InvalidInput
from howsmooth.scans.scan_grammar import parse_lengths
from howsmooth.search.sandwich_result import Sandwich, size_of
from howsmooth.search.sandwich_search import sandwich
from howsmooth.sets import InputSet, TokenSet

_LENGTHS = "8,16,32"
_AT_THE_LAYER = "layer"


@command
def worst_case(
    request: Request,
    settings: AttentionOptions,
    head: Annotated[int | None, what_option(min=0, help="One head, counted from 0 (the whole block).")] = None,
    radius: Annotated[
        str | None,
        where_option(help="Tokens lie in balls of these radii, for example 1,2,5; layer: after its normalisation."),
    ] = None,
    after: Annotated[
        str | None, where_option(help="Tokens come from this LayerNorm of SOURCE, for example h.0.ln_1.")
    ] = None,
    rms: Annotated[bool, where_option("--rms", help="--after names an RMSNorm.")] = False,
    around: Annotated[Path | None, where_option(help="Search near what the layer sees of this text.")] = None,
    eps: Annotated[
        str | None, where_option(help="How far tokens may move there, as shares of their mean norm: 0.01,0.05.")
    ] = None,
    norm: Annotated[Literal["2", "inf"], what_option(help="Norm of the Jacobian.")] = "2",
    starts: Annotated[int, exact_option(min=1, help="Random starts, beside the theorems' own.")] = 8,
    steps: Annotated[int, exact_option(min=1, help="Steps of each search.")] = 200,
    seconds: Annotated[float | None, exact_option(help="Time for all searches together.")] = None,
    out: Annotated[Path, out_option(help="Folder for witnesses and figure.")] = FOLDER,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Find the least smooth input of a set, and how far the best theorem is from it.

    For every number of tokens and every set: an input on which the attention reaches the lower bound, kept in a file
    that `howsmooth measure --witness` replays, and the smallest proved upper bound. Without --radius the tokens are
    those after the layer's own normalisation, or, for weights without a model, of root mean square at most one.
    Ctrl-C keeps and prints the best so far. With --jobs or --engine every start is searched by a worker, to its end.

    Examples:
      howsmooth worst-case random --width 16 --heads 2 --length 8,16,…,64 --radius 1,2
      howsmooth worst-case minilm --layer 2 --head 0 --length 16,32 --radius layer
      howsmooth worst-case minilm --layer 2 --around novel.txt --eps 0.01,0.05 --length 64
      howsmooth worst-case gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --head 3 --radius layer --seconds 60
    """
    counts = parse_lengths(settings.length or _LENGTHS)
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInput(f"--seconds is a positive number of seconds, got {seconds}.")
    request, shares = _neighbourhood(request, radius, after, around, eps)
    if rms and after is None:
        raise InvalidInput("--rms says what --after names: give --after too.")
    radii = None if radius in (None, _AT_THE_LAYER) else positive_numbers(str(radius), "--radius")
    first = str(counts[-1] if shares else 4)
    settings = replace(settings, length=None if request.input is not None else first)
    site = request.open(settings)
    where = _where(site, request, counts, radii, after, rms, shares, radius == _AT_THE_LAYER)
    out.mkdir(parents=True, exist_ok=True)
    source = remember(request, settings, site.attention)
    stem, unit = _stem(request, source["sha256"], head, norm), where["eps"][0] / shares[0] if shares else 1.0
    with _searching() as progress:
        cells = sandwich(
            site.attention,
            counts,
            **where,
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
        facts = site.describe() | {"n": list(counts), "head": head} | ({} if shares else {"input": None})
        content = {"setting": facts, "cells": cells.to_dict(), "interrupted": cells.interrupted}
        print_json(content | {"figure": picture})
    else:
        _print(site, cells, head, picture)
    if cells.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not all(row["converged"] for row in cells.to_dict()):
        raise typer.Exit(NOT_CONVERGED)


def _neighbourhood(
    request: Request, radius: str | None, after: str | None, around: Path | None, eps: str | None
) -> tuple[Request, list[float]]:
    """The request with the text of --around, and the shares of --eps; none when the set is another one."""
    given = [name for name, value in (("--radius", radius), ("--after", after), ("--eps", eps)) if value is not None]
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} name two different sets: choose one.")
    if eps is None:
        for option, value in (("--around", around), ("--text", request.text), ("--input", request.input)):
            if value is not None:
                raise InvalidInput(f"{option} says where to search, but not how near: give --eps, for example 0.01.")
        return request, []
    if around is not None:
        if request.text is not None or request.input is not None:
            raise InvalidInput("--around, --text and --input name the same thing: give one of them.")
        request = replace(request, text=around)
    return request, positive_numbers(eps, "--eps")


def _where(
    site: MapAtTokens,
    request: Request,
    counts: Sequence[int],
    radii: list[float] | None,
    after: str | None,
    rms: bool,
    shares: list[float],
    at_the_layer: bool,
) -> dict[str, Any]:
    """The sets, as `howsmooth.search.sandwich` takes them."""
    if shares:
        x = site.one_input.double()
        if x.dim() != 2:
            raise InvalidInput(f"a search goes on near one input, but --input holds {len(x)}: store one by itself.")
        eps = [share * float(x.norm(dim=-1).mean()) for share in shares]
        return {"around": {n: site.first(n).double() for n in counts}, "eps": eps}
    if radii is not None:
        return {"radii": radii}
    if after is not None:
        return {"over": tokens_after(site, after, rms)}
    if at_the_layer or site.model is not None:
        return {"over": layer_tokens(site, request)}
    width = site.attention.in_features
    return {"over": TokenSet.ball(width**0.5, width, "tokens of unit RMS")}


def _stem(request: Request, sha256: str, head: int | None, norm: str) -> str:
    """The beginning of all file names: which map, by name and hash, and which norm unless it is the usual one."""
    source = Path(request.source).stem if Path(request.source).is_file() else request.source
    words = ["worst", source, request.prefix or "", "" if request.layer is None else f"layer{request.layer}"]
    words += ["" if head is None else f"head{head}", "" if norm == "2" else norm, sha256[:6]]
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(word.strip(".") for word in words if word)).strip("-")


def _set_name(over: InputSet) -> str:
    """The kind of set in a file name."""
    said = over.describe()
    known = {"neighbourhood": "eps", "ball": "R"}
    return known.get(said["set"]) or re.sub(r"\W+", "-", str(said.get("origin", said["set"])))


def _size_name(over: InputSet, unit: float) -> str:
    """R, or ε as a share of the mean token norm, ``unit``."""
    return f"{(size_of(over) or 0.0) / unit:.6g}" if _set_name(over) in ("eps", "R") else ""


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
