"""`howsmooth noise`: how the rounding noise of low precision grows through the layers of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from howsmooth.cli.console import MOST_SEED, plain_json, stdout, step_progress, written
from howsmooth.cli.options import Device, RowsAsJson, command
from howsmooth.errors import InvalidInput
from howsmooth.models import alice, open_model
from howsmooth.models.input_files import read_text
from howsmooth.rounding.activation_noise import DTYPES, ActivationNoise, rounding_noise
from howsmooth.rounding.rounded_model import check_text_model


@command
def noise(
    model: Annotated[str, typer.Argument(help="A named model (smollm2), a folder, a hub id, or random:KIND.")],
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    text: Annotated[Path | None, typer.Option(help="A text file (Alice in Wonderland).")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the window.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of where the window begins.")] = 0,
    device: Device = None,
    as_json: RowsAsJson = False,
) -> None:
    """Predict how rounding noise grows through the residual stream, beside what a run in low precision really does.

    The noise of every layer is carried on by the Jacobians of the layers behind it; the last column says whose noise
    has the largest share.

    Examples:\n
      howsmooth noise smollm2 --dtype bf16 --length 64\n
      howsmooth noise minilm --dtype fp16 --json
    """
    if dtype not in DTYPES:
        raise InvalidInput(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}.")
    words = alice() if text is None else read_text(text)
    opened = open_model(model, device=device)
    check_text_model(opened.model)
    [window] = opened.windows(words, length, 1, seed)
    with step_progress(2 + getattr(opened.model.config, "num_hidden_layers", 1)) as begin:
        begin("reading")
        measured_noise = rounding_noise(opened, window, dtype, begin)
    if as_json:
        typer.echo(plain_json(json.dumps(measured_noise.rows(), indent=2, allow_nan=False)))
    else:
        stdout().print(_table(measured_noise, f"{model} ({opened.precision}) in {dtype}, {length} tokens"))


def _table(noise: ActivationNoise, title: str) -> Table:
    table = Table(title=title)
    for head in ("layer", "‖h‖", "noise", "predicted", "own", "median token", "predicted ", "cosine", "most from"):
        table.add_column(head, justify="right")
    for row in noise.rows():
        names = ("size", "actual", "predicted", "local", "actual_token", "predicted_token", "cosine")
        source = "embedding" if row["source"] < 0 else f"layer {row['source']}"
        table.add_row(str(row["layer"]), *(written(row[name]) for name in names), f"{source}: {row['share']:.0%}")
    return table
