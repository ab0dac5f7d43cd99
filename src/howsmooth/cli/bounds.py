"""`howsmooth bounds`: every theorem that applies to one attention block, beside what is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import rich.box
import rich.table
import torch
import typer
from torch import Tensor

from howsmooth.bounds.bound_table import BoundRow, Table, table, with_witness
from howsmooth.bounds.catalogue import SCOPES
from howsmooth.cli.networks import bound_source, is_network
from howsmooth.cli.options import AsJson, Figure, command, output_option, what_option, where_option
from howsmooth.cli.source_options import OVER, MapAtTokens, MapOptions, norm_image
from howsmooth.cli.terminal import NOT_CONVERGED, print_json, print_line, show, step_progress
from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import parse_lengths
from howsmooth.sets import Around, InputSet, Point, SetText, Tokens

_NOTHING_BEYOND = {
    "ball": "no input of this length in the set",
    "global": "no input of this length at all",
    "mean-field W2": "no input of any length in the set",
    "mean-field d2": "no input of any length in the set",
}


@command
def bounds(
    options: MapOptions,
    over: Annotated[str, where_option(OVER.format("The set of inputs"))] = "point",
    per_head: Annotated[bool, what_option("Bound every head by itself.", "--per-head")] = False,
    refused: Annotated[
        bool, output_option("Also list the bounds that do not apply, with the reason.", "--refused")
    ] = False,
    whole: Annotated[bool, what_option("The product bound on a whole model, node by node.", "--whole")] = False,
    figure: Figure = None,
    as_json: AsJson = False,
    latex: Annotated[bool, output_option("Print a LaTeX table (booktabs).", "--latex")] = False,
) -> None:
    """Bound the Lipschitz constant of an attention block by every theorem that applies.

    With --over ball, sphere or norm the bounds hold for all tokens of that set; with --input or a model they are
    compared with the measurement there; by default, at random tokens.

    Examples:
      howsmooth bounds random --width 64 --heads 4 --length 16,64,256 --over ball:2
      howsmooth bounds gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --over norm:h.0.ln_1 --length 1024
      howsmooth bounds minilm --layer 2 --length 96 --figure bounds.png
      howsmooth bounds minilm --whole --length 96
      howsmooth bounds net.onnx --over ball:2
      howsmooth bounds layer.pt --heads 8 --input tokens.npy --over around:0.01 --json
    """
    if as_json and latex:
        raise InvalidInput("--json and --latex are two ways to print the same table: choose one.")
    if is_network(options) or whole:
        if latex or figure is not None or per_head or refused:
            raise InvalidInput("a whole network has one product bound: leave --latex, --figure and the like out.")
        bound_source(options, over, as_json)
        return
    named = SetText.parse(over)
    if len(named.sizes) > 1:
        raise InvalidInput(f"bounds are for one set at a time: give one size in --over, got {over!r}.")
    lengths = _numbers(options.length)
    on_set = not named.near_input and options.input is None and not options.names_model
    inputs_needed = not on_set and options.input is None
    options = replace(options, length=str(_whole(lengths[-1])) if lengths and inputs_needed else None)
    tables: list[Table] = []
    with step_progress(1 + max(1, len(lengths)) + (figure is not None)) as begin:
        begin("opening the map")
        site = options.open()
        x = None if on_set else site.one_input
        lengths = lengths or [site.x.shape[-2]]
        inputs = {} if x is None else {count: _first(site, _whole(count)) for count in lengths}
        region, seed = _region(site, named, [] if x is None else [x, *inputs.values()]), site.seeds["solver"]
        for count in lengths:
            begin(f"bounds for n = {count:.12g}")
            near = region if x is None else _at(named, inputs[count], x, region)
            rows = table(site.attention, n=count, over=near, per_head=per_head, seed=seed)
            drawn = figure is not None and x is None
            tables.append(_with_random_tokens(rows, per_head, seed) if drawn else rows)
        if figure is not None:
            begin("drawing")
            several = [_whole(count) for count in lengths] if len(lengths) > 1 else None
            from howsmooth.reports.figures import bounds_against_n, save_figure

            shown = region if x is None else _at(named, x, x, region)
            save_figure(bounds_against_n(site.attention, lengths=several, over=shown, seed=seed), figure)
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


def _region(site: MapAtTokens, named: SetText, inputs: Sequence[Tensor]) -> InputSet:
    """The set of --over; for one about an input the set of all its tokens, the same for every n."""
    if not named.near_input:
        return named.sets(norm=norm_image(site, named))[0]
    every = torch.cat([x.flatten(0, -2) for x in inputs])
    return Around(every, named.absolute(inputs[0])[0]) if named.sizes else Tokens(every)


def _at(named: SetText, x: Tensor, whole: Tensor, region: InputSet) -> InputSet:
    """The set of --over at an input; a share is one of the mean token norm of the whole input."""
    if named.sizes and named.near_input:
        return Around(x, named.absolute(whole)[0], named.form == "around", within=region)
    return Point(x, within=region)


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
    from howsmooth.reports.figures.bound_curves import boundary_tokens

    x = boundary_tokens(rows.setting.tokens, seed)
    if rows.setting.count > len(x):
        return rows
    return with_witness(rows, x[: int(rows.setting.count)], "random tokens", per_head=per_head, seed=seed)


def _named(row: BoundRow) -> str:
    which = row.name if row.head is None else f"{row.name}, head {row.head}"
    return f"{which}; {row.guarantee.words()}"


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
    shown = rich.table.Table("bound", "where", "guarantee", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    cells: dict[tuple[int | None, float | str, str, str, str], dict[int, str]] = {}
    for column, rows in enumerate(tables):
        shown.add_column(f"n = {rows.setting.count:.12g}")
        for row in rows:
            key = (row.head, row.norm, row.name, row.scope, row.guarantee.words())
            cells.setdefault(key, {})[column] = row.written
    for (head, norm, name, scope, guarantee), values in cells.items():
        whole = f"{name}{'' if norm == 2 else ' (∞)'}{'' if head is None else f', head {head}'}"
        shown.add_row(whole, SCOPES[scope], guarantee, *(values.get(column, "–") for column in range(len(tables))))
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
        raise InvalidInput("--length inf is for a set without an input and without a figure: give --over ball:2.")
    return int(count)


def _first(site: MapAtTokens, n: int) -> Tensor:
    """The tokens of an input of length n."""
    x = site.first(n)
    if n > x.shape[-2]:
        raise InvalidInput(f"--length is {n}, but there are {x.shape[-2]} tokens: choose fewer.")
    return x
