"""`howsmooth bounds`: every theorem that applies to one attention block, beside what is measured."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.table
import torch
import typer
from torch import Tensor

from howsmooth.bounds.bound_table import Row, Table, table, with_witness
from howsmooth.bounds.catalogue import SCOPES
from howsmooth.cli.console import print_json, print_line, show, step_progress
from howsmooth.cli.exit_codes import NOT_CONVERGED
from howsmooth.cli.options import AsJson, Figure, command, output_option, what_option, where_option
from howsmooth.cli.set_options import named_norm
from howsmooth.cli.source_options import AttentionOptions, MapAtTokens, Request
from howsmooth.errors import InvalidInput
from howsmooth.scans.scan_grammar import parse_lengths
from howsmooth.sets import TokenSet

_NOTHING_BEYOND = {
    "ball": "no input of this length in the set",
    "global": "no input of this length at all",
    "mean-field W2": "no input of any length in the set",
    "mean-field d2": "no input of any length in the set",
}
_NORM_NAMES = re.compile(r"(norm|\bln)\w*\.weight$", re.IGNORECASE)


@command
def bounds(
    request: Request,
    settings: AttentionOptions,
    radius: Annotated[float | None, where_option(help="Every token lies in the ball of this radius.")] = None,
    after: Annotated[
        str | None, where_option(help="Every token comes from this LayerNorm of SOURCE, for example h.0.ln_1.")
    ] = None,
    rms: Annotated[bool, where_option("--rms", help="--after names an RMSNorm.")] = False,
    eps: Annotated[float | None, where_option(help="Also bound all inputs whose tokens move by at most this.")] = None,
    per_head: Annotated[bool, what_option("--per-head", help="Bound every head by itself.")] = False,
    refused: Annotated[
        bool, output_option("--refused", help="Also list the bounds that do not apply, with the reason.")
    ] = False,
    figure: Figure = None,
    as_json: AsJson = False,
    latex: Annotated[bool, output_option("--latex", help="Print a LaTeX table (booktabs).")] = False,
) -> None:
    """Bound the Lipschitz constant of an attention block by every theorem that applies.

    With a radius or a LayerNorm the bounds hold for all tokens of that set; with --input or a model they are compared
    with what is measured there; with neither, at random tokens.

    Examples:
      howsmooth bounds random --width 64 --heads 4 --length 16,64,256 --radius 2
      howsmooth bounds gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --after h.0.ln_1 --length 1024
      howsmooth bounds minilm --layer 2 --length 96 --figure bounds.png
      howsmooth bounds layer.pt --heads 8 --input tokens.npy --eps 0.01 --json
    """
    if as_json and latex:
        raise InvalidInput("--json and --latex are two ways to print the same table: choose one.")
    if rms and after is None:
        raise InvalidInput("--rms says what --after names: give --after too.")
    lengths = _numbers(settings.length)
    on_set = (radius is not None or after is not None) and request.input is None and not request.names_model
    inputs_needed = not on_set and request.input is None
    settings = replace(settings, length=str(_whole(lengths[-1])) if lengths and inputs_needed else None)
    tables: list[Table] = []
    with step_progress(1 + max(1, len(lengths)) + (figure is not None)) as begin:
        begin("opening the map")
        site = request.open(settings)
        x = None if on_set else site.one_input
        lengths = lengths or [site.x.shape[-2]]
        tokens = tokens_after(site, after, rms)
        inputs = {} if x is None else {count: _first(site, _whole(count)) for count in lengths}
        if tokens is None and radius is None and x is not None and bool(x.any()):
            every = torch.cat([each.flatten(0, -2) for each in (x, *inputs.values())])
            tokens = TokenSet.around(every)  # one set for every n
        where: dict[str, Any] = {"radius": radius, "tokens": tokens, "eps": eps, "seed": site.seeds["solver"]}
        for count in lengths:
            begin(f"bounds for n = {count:.12g}")
            at: dict[str, Any] = {"n": count} if x is None else {"x": inputs[count]}
            rows = table(site.attention, per_head=per_head, **where, **at)
            drawn = figure is not None and x is None
            tables.append(_with_random_tokens(rows, per_head, where["seed"]) if drawn else rows)
        if figure is not None:
            begin("drawing")
            several = [_whole(count) for count in lengths] if len(lengths) > 1 else None
            from howsmooth.reports.figures import bounds_against_n, save_figure

            save_figure(bounds_against_n(site.attention, lengths=several, x=x, **where), figure)
    converged = all(bool(m.converged.all()) for rows in tables for m in rows.measurements.values())
    if as_json:
        facts = site.describe() | {"n": ["inf" if math.isinf(count) else int(count) for count in lengths]}
        facts |= {"input": None} if x is None else {}
        content = {
            "setting": facts,
            "headline": bounds_headline(tables[-1]),
            "tables": [rows.to_dict() for rows in tables],
        }
        print_json(content | {"converged": converged, "figure": figure})
    elif latex:
        for count, rows in zip(lengths, tables, strict=True):
            print_line(f"% {site.in_words()}, n = {count:.12g}\n{rows.to_latex()}")
    else:
        _print(site, tables, x, refused, figure)
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def bounds_headline(rows: Table) -> str:
    """The main numbers of the table in one sentence."""
    facts = []
    measured = rows.tightest("measured")
    if measured is not None:
        whose = "the block's" if measured.head is None else "the roughest head's"
        facts.append(f"at these tokens {whose} constant is {measured.written[2:]} ({_named(measured)})")
    lower, upper = rows.tightest("lower", ("ball",)), rows.tightest("upper", tuple(_NOTHING_BEYOND))
    if lower is not None and (measured is None or lower.value > measured.value):
        facts.append(f"some input in the set reaches {lower.written[2:]} ({_named(lower)})")
    if upper is not None and not upper.vacuous:
        facts.append(f"{_NOTHING_BEYOND[upper.scope]} can exceed {upper.written[2:]} ({_named(upper)})")
    sentence = "; ".join(facts) or "no bound of the 2-norm says anything here"
    return sentence[0].upper() + sentence[1:] + "."


def _with_random_tokens(rows: Table, per_head: bool, seed: int) -> Table:
    """The figure shows what random tokens of the set reach, so that the table knows it too."""
    assert rows.setting.tokens is not None
    from howsmooth.reports.figures import random_tokens

    x = random_tokens(rows.setting.tokens, seed)
    if rows.setting.count > len(x):
        return rows
    return with_witness(rows, x[: int(rows.setting.count)], "random tokens", per_head=per_head, seed=seed)


def _named(row: Row) -> str:
    return row.name if row.head is None else f"{row.name}, head {row.head}"


def _print(site: MapAtTokens, tables: Sequence[Table], x: Tensor | None, refused: bool, figure: Path | None) -> None:
    last = tables[-1]
    show(site.in_words())
    tokens = last.setting.tokens
    if x is not None:
        show(f"tokens: {site.tokens}")
    if tokens is not None:
        show(f"set: |x| ≤ {tokens.radius:.6g} ({tokens.origin})")
    show(f"\n{bounds_headline(last)}\n", style="bold")
    show(last if len(tables) == 1 else _against_n(tables))
    ratio = "ratio: to the best lower bound known where the bound holds. " if len(tables) == 1 else ""
    show(f"{ratio}≤ upper bound, ≥ lower bound, ≈ estimate.")
    if refused:
        shown = rich.table.Table("does not apply", "since it", box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for name_and_reason in sorted(last.refused.items()):
            shown.add_row(*name_and_reason)
        show(shown)
    if figure is not None:
        show(f"figure: {figure}")


def _against_n(tables: Sequence[Table]) -> rich.table.Table:
    """The values of every bound, one column for each n."""
    shown = rich.table.Table("bound", "where", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    cells: dict[tuple[int | None, float | str, str, str], dict[int, str]] = {}
    for column, rows in enumerate(tables):
        shown.add_column(f"n = {rows.setting.count:.12g}")
        for row in rows:
            cells.setdefault((row.head, row.norm, row.name, row.scope), {})[column] = row.written
    for (head, norm, name, scope), values in cells.items():
        whole = f"{name}{'' if norm == 2 else ' (∞)'}{'' if head is None else f', head {head}'}"
        shown.add_row(whole, SCOPES[scope], *(values.get(column, "–") for column in range(len(tables))))
    return shown


def _numbers(text: str | None) -> list[float]:
    """``16,32,…,256`` in rising order; inf (all measures) is the last."""
    if text is None:
        return []
    finite, _, last = text.rpartition(",")
    if last.strip() != "inf":
        return list(parse_lengths(text))
    return [*(parse_lengths(finite) if finite else ()), math.inf]


def _whole(count: float) -> int:
    if math.isinf(count):
        raise InvalidInput("--length inf is for a set without tokens and without a figure: give --radius or --after.")
    return int(count)


def _first(site: MapAtTokens, n: int) -> Tensor:
    """The tokens of an input of length n."""
    x = site.first(n)
    if n > x.shape[-2]:
        raise InvalidInput(f"--length is {n}, but there are {x.shape[-2]} tokens: choose fewer.")
    return x


def tokens_after(site: MapAtTokens, prefix: str | None, rms: bool) -> TokenSet | None:
    """The image of the normalisation named by --after."""
    if prefix is None:
        return None
    name = prefix.removesuffix(".")
    if f"{name}.weight" not in site.tensors:
        known = sorted(key.removesuffix("weight") for key in site.tensors if _NORM_NAMES.search(key))
        choices = f": choose from {', '.join(known[:8])}" if known else ""
        raise InvalidInput(f"{site.source} holds no normalisation {name + '.'!r}{choices}.")
    return named_norm(site, name, rms)
