"""`howsmooth quantise`: what rounded keys and values do to a model, and which formats to choose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from howsmooth._util.common import check_figure_path, distinct_files, printable, write_whole
from howsmooth.cli.console import MOST_SEED, plain_json, stdout, step_progress, written
from howsmooth.cli.exit_codes import INTERRUPTED, complain, stop_word
from howsmooth.cli.options import Device, Picture, RowsAsJson, WeightDtype, command
from howsmooth.errors import InvalidInput
from howsmooth.models.text_files import read_text
from howsmooth.reports.quantisation_section import write_rounding
from howsmooth.reports.sections import check_section_path
from howsmooth.rounding.allocation import UNITS, Allocation
from howsmooth.rounding.engine_exports import EXPORTS, check_engine
from howsmooth.rounding.number_formats import parse_formats
from howsmooth.rounding.quantisation import Quantisation
from howsmooth.rounding.quantisation import quantise as run

FOLDER = Path("howsmooth-output")


@command
def quantise(
    model: Annotated[str, typer.Argument(help="A named model (smollm2), a folder, a hub id, or random:KIND.")],
    text: Annotated[Path | None, typer.Option(help="A text file (Alice in Wonderland).")] = None,
    formats: Annotated[
        str, typer.Option(help="Between commas: int8, int4\\[per=channel], fp8_e4m3, nvfp4, …")
    ] = "int8,int4",
    budget: Annotated[float | None, typer.Option(help="Bits per cached number, scales included.")] = None,
    per: Annotated[
        str, typer.Option(help="What has a format of its own: model (keys, values), layer, part, head.")
    ] = "part",
    length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 128,
    windows: Annotated[
        int, typer.Option(min=1, help="Windows to predict on; a budget is checked on as many others.")
    ] = 4,
    samples: Annotated[int, typer.Option(min=2, help="Backward passes per window.")] = 24,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of windows and samples.")] = 0,
    device: Device = None,
    dtype: WeightDtype = None,
    out: Annotated[Path | None, typer.Option(help="Ledger (howsmooth-output/quantise-MODEL.sqlite).")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Use the ledger, or begin anew.")] = True,
    export: Annotated[
        str | None, typer.Option(help="Write the choice for an engine: vllm, modelopt, llama.cpp or json.")
    ] = None,
    export_file: Annotated[Path | None, typer.Option(help="Where to (howsmooth-output/kv-MODEL.ENGINE).")] = None,
    figure: Picture = None,
    report: Annotated[
        Path | None, typer.Option(help="A page: one that `howsmooth report` wrote gets a section, else a new one.")
    ] = None,
    as_json: RowsAsJson = False,
) -> None:
    """Predict, prove and measure what rounding the KV cache does, head by head, and choose formats for a budget.

    For every layer, head, keys or values and format: the actual change of the head's output, its first order, a proved
    bound, and the predicted KL of the next token (of an encoder, which has no cache: 1 − cosine of its sentence
    embedding). With a budget also which formats to take, run on windows they were not chosen on.

    Examples:\n
      howsmooth quantise smollm2 --formats int8,int4,int3 --length 64 --windows 2\n
      howsmooth quantise smollm2 --text novel.txt --formats int8,int4,int3,int2 --budget 4.25\n
      howsmooth quantise smollm2 --formats fp8_e4m3,bf16 --budget 10 --per layer --export vllm\n
      howsmooth quantise smollm2 --formats int8,int4,int3 --budget 4.25 --report report.html\n
      howsmooth quantise minilm --formats "int8,int4\\[per=channel]" --json
    """
    chosen = parse_formats(formats)
    if per not in UNITS:
        raise InvalidInput(f"--per is {', '.join(UNITS)}, got {per!r}.")
    model_name = re.sub(r"[^A-Za-z0-9._]+", "-", model).strip("-")
    out = FOLDER / f"quantise-{model_name}.sqlite" if out is None else out
    target = None
    if export is not None:
        if budget is None:
            raise InvalidInput("--export writes what was chosen within a budget: add --budget BITS.")
        check_engine(export, chosen, per)
        target = FOLDER / f"kv-{model_name}.{export.replace('.', '')}" if export_file is None else export_file
    elif export_file is not None:
        raise InvalidInput(f"--export-file needs --export with one of {', '.join(EXPORTS)}.")
    if figure is not None:
        check_figure_path(figure)
    if report is not None:
        check_section_path(report)
    files = [("--out", out), ("--export-file", target), ("--figure", figure), ("--report", report)]
    distinct_files(read=[("--text", text)], written=files)
    words = None if text is None else read_text(text)
    with _kept(out), step_progress(windows + (windows if budget is not None else 0) + 1) as begin:
        begin("opening the model")
        quantisation = run(
            model,
            words,
            formats=formats,
            budget=budget,
            per=per,  # type: ignore[arg-type]
            length=length,
            windows=windows,
            samples=samples,
            seed=seed,
            device=device,
            dtype=dtype,
            out=out,
            resume=resume,
            progress=begin,
        )
    if not quantisation.causal:
        complain(f"note: {printable(model)} is an encoder without a KV cache: damage is 1 − cosine of its embedding.")
    if as_json:
        typer.echo(plain_json(json.dumps(quantisation.rows(), indent=2, ensure_ascii=False, allow_nan=False)))
    else:
        _print(quantisation, out)
    if figure is not None:
        from howsmooth.reports.figures import quantisation_figure, save_figure

        save_figure(quantisation_figure(quantisation), figure)
    if report is not None:
        source = "Alice in Wonderland" if text is None else text.name
        about = f"{source}: {windows} windows of {length} tokens, {samples} samples of scores in each, seed {seed}."
        write_rounding(quantisation, report, about)
        if not as_json:
            stdout().print(f"report: {report}", markup=False, soft_wrap=True)
    if target is not None and export is not None and quantisation.allocation is not None:
        content = EXPORTS[export](quantisation.allocation, model)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, (content + "\n").encode())
        if not as_json:
            stdout().print(f"{content}\n\nWritten to {target}.", markup=False, soft_wrap=True)


@contextmanager
def _kept(out: Path) -> Iterator[None]:
    """After Ctrl-C, one line that says what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        complain(f"{stop_word()}: windows that were done are kept in {out}; the same command goes on from there.")
        raise SystemExit(INTERRUPTED) from None


def _print(quantisation: Quantisation, out: Path) -> None:
    console = stdout()
    console.print(
        f"{quantisation.model} ({quantisation.precision}): rounded keys and values", markup=False, style="bold"
    )
    console.print(_formats_table(quantisation))
    if quantisation.checks:
        console.print(_checks_table(quantisation))
        assert quantisation.allocation is not None
        console.print(_choice_table(quantisation.allocation))
    console.print(f"Store: {out}", markup=False, soft_wrap=True)


def _formats_table(quantisation: Quantisation) -> Table:
    """Every format on all keys or all values: medians over heads, and the layer that suffers most."""
    table = Table()
    for head in (
        "format",
        "of",
        "bits",
        "proved ÷ actual",
        "first order ÷ actual",
        quantisation.damage_name,
        "± (s.e.)",
        "most in",
    ):
        table.add_column(head, justify="left" if head in ("format", "of", "most in") else "right")
    for row in quantisation.totals():
        numbers = [written(row[name]) for name in ("proved", "predicted", "kl", "kl_error")]
        table.add_row(row["format"], f"{row['what']}s", f"{row['bits']:g}", *numbers, f"layer {row['most_in']}")
    return table


def _checks_table(quantisation: Quantisation) -> Table:
    table = Table(title="Run on other windows")
    for head in (
        "choice",
        "bits",
        f"predicted {quantisation.damage_name}",
        quantisation.damage_name,
        "± (s.e.)",
        "perplexity",
    ):
        table.add_column(head, justify="left" if head == "choice" else "right")
    for check in quantisation.checks:
        made = check.allocation
        said = ("–", "–") if made is None else (f"{made.bits:.4g}", written(made.damage))
        perplexity = "–" if check.perplexity is None else f"{check.perplexity:.4g}"
        table.add_row(check.name, *said, written(check.mean), written(check.error), perplexity)
    return table


def _choice_table(allocation: Allocation) -> Table:
    table = Table(title="The choice")
    for head in ("layer", "keys", "values"):
        table.add_column(head)
    for layer, (key, value) in enumerate(zip(allocation.by_layer("key"), allocation.by_layer("value"), strict=True)):
        table.add_row(str(layer), ", ".join(key), ", ".join(value))
    return table
