"""`howsmooth quantise`: the effect of rounded keys and values on a model, and a choice of formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from howsmooth._util.common import distinct_files, printable, write_whole
from howsmooth.cli.options import (
    AsJson,
    Device,
    Dtype,
    Figure,
    Report,
    Resume,
    Seed,
    Text,
    command,
    default_output,
    exact_option,
    length_option,
    one_length,
    out_option,
    output_option,
    what_option,
    where_option,
)
from howsmooth.cli.terminal import complain, print_json, right_table, show, step_progress, stored, written
from howsmooth.errors import InvalidInput
from howsmooth.models.model_inputs import read_text
from howsmooth.reports.sections import check_section_path, write_rounding
from howsmooth.rounding.allocation import Allocation
from howsmooth.rounding.engine_exports import EXPORTS, check_engine
from howsmooth.rounding.number_formats import parse_formats
from howsmooth.rounding.quantisation import Quantisation
from howsmooth.rounding.quantisation import quantise as run


@command
def quantise(
    model: Annotated[str, typer.Argument(help="A named model (smollm2), a folder, a hub id, or random:KIND.")],
    formats: Annotated[str, what_option("Between commas: int8, int4\\[per=channel], fp8_e4m3, nvfp4, …")] = "int8,int4",
    budget: Annotated[float | None, what_option("Bits per cached number, scales included.")] = None,
    per: Annotated[
        Literal["model", "layer", "part", "head"],
        what_option("Unit with a format of its own; model: one for keys, one for values."),
    ] = "part",
    text: Text = None,
    length: Annotated[str, length_option("Tokens per window.")] = "128",
    windows: Annotated[int, where_option("Windows to predict on; a budget is checked on as many others.", min=1)] = 4,
    samples: Annotated[int, exact_option("Backward passes per window.", min=2)] = 24,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, out_option("Ledger (howsmooth-output/quantise-MODEL.sqlite).")] = None,
    resume: Resume = True,
    syntax: Annotated[
        str | None, output_option("Write the choice for vllm, modelopt, llama.cpp or as json.", "--for")
    ] = None,
    export: Annotated[Path | None, output_option("File of that choice (howsmooth-output/kv-MODEL.ENGINE).")] = None,
    figure: Figure = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Predict, prove and measure what rounding the KV cache does, head by head, and choose formats for a budget.

    For every layer, head, keys or values and format: the actual change of the head's output, its first order, a proved
    bound, and the predicted KL of the next token (of an encoder, which has no cache: 1 − cosine of its sentence
    embedding). With a budget also which formats to take, run on windows they were not chosen on.

    Examples:
      howsmooth quantise smollm2 --formats int8,int4,int3 --length 64 --windows 2
      howsmooth quantise smollm2 --text novel.txt --formats int8,int4,int3,int2 --budget 4.25
      howsmooth quantise smollm2 --formats fp8_e4m3,bf16 --budget 10 --per layer --for vllm
      howsmooth quantise smollm2 --formats int8,int4,int3 --budget 4.25 --report report.html
      howsmooth quantise minilm --formats "int8,int4\\[per=channel]" --json
    """
    chosen, tokens = parse_formats(formats), one_length(length, minimum=2)
    out = default_output(f"quantise-{model}", ".sqlite") if out is None else out
    if syntax is not None:
        if budget is None:
            raise InvalidInput("--for writes the choice within a budget: add --budget BITS.")
        check_engine(syntax, chosen, per)
        export = default_output(f"kv-{model}", f".{syntax.replace('.', '')}") if export is None else export
    elif export is not None:
        raise InvalidInput(f"--export needs --for with one of {', '.join(EXPORTS)}.")
    if report is not None:
        check_section_path(report)
    files = [("--out", out), ("--export", export), ("--figure", figure), ("--report", report)]
    distinct_files(read=[("--text", text)], written=files)
    words = None if text is None else read_text(text)
    with (
        stored(lambda stopped: f"windows that were done are stored in {out}; the same command resumes"),
        step_progress(windows + (windows if budget is not None else 0) + 1) as begin,
    ):
        begin("opening the model")
        quantisation = run(
            model,
            words,
            formats=formats,
            budget=budget,
            per=per,
            length=tokens,
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
        print_json(quantisation.rows())
    else:
        _print(quantisation, out)
    if figure is not None:
        from howsmooth.reports.figures import save_figure
        from howsmooth.reports.figures.quantisation_curves import quantisation_figure

        save_figure(quantisation_figure(quantisation), figure)
    if report is not None:
        source = "Alice in Wonderland" if text is None else text.name
        about = f"{source}: {windows} windows of {tokens} tokens, {samples} samples of scores in each, seed {seed}."
        write_rounding(quantisation, report, about)
        if not as_json:
            show(f"report: {report}")
    if syntax is not None and export is not None and quantisation.allocation is not None:
        content = EXPORTS[syntax](quantisation.allocation, model)
        export.parent.mkdir(parents=True, exist_ok=True)
        write_whole(export, (content + "\n").encode())
        if not as_json:
            show(f"{content}\n\nWritten to {export}.")


def _print(quantisation: Quantisation, out: Path) -> None:
    show(f"{quantisation.model} ({quantisation.precision}): rounded keys and values", style="bold")
    show(_formats_table(quantisation))
    if quantisation.checks:
        show(_checks_table(quantisation))
        assert quantisation.allocation is not None
        show(_choice_table(quantisation.allocation))
    show(f"Store: {out}")


def _formats_table(quantisation: Quantisation) -> Table:
    """Every format on all keys or all values: medians over heads, and the layer with the largest damage."""
    table = right_table(
        "format",
        "of",
        "bits",
        "proved ÷ actual",
        "first order ÷ actual",
        quantisation.damage_name,
        "± (s.e.)",
        "most in",
        left=("format", "of", "most in"),
    )
    for row in quantisation.totals():
        numbers = [written(row[name]) for name in ("proved", "predicted", "kl", "kl_error")]
        table.add_row(row["format"], f"{row['what']}s", f"{row['bits']:g}", *numbers, f"layer {row['most_in']}")
    return table


def _checks_table(quantisation: Quantisation) -> Table:
    table = right_table(
        "choice",
        "bits",
        f"predicted {quantisation.damage_name}",
        quantisation.damage_name,
        "± (s.e.)",
        "perplexity",
        left=("choice",),
        title="Run on other windows",
    )
    for check in quantisation.checks:
        made = check.allocation
        prediction = ("–", "–") if made is None else (f"{made.bits:.4g}", written(made.damage))
        perplexity = "–" if check.perplexity is None else f"{check.perplexity:.4g}"
        table.add_row(check.name, *prediction, written(check.mean), written(check.error), perplexity)
    return table


def _choice_table(allocation: Allocation) -> Table:
    table = Table("layer", "keys", "values", title="The choice")
    for layer, (key, value) in enumerate(zip(allocation.by_layer("key"), allocation.by_layer("value"), strict=True)):
        table.add_row(str(layer), ", ".join(key), ", ".join(value))
    return table
