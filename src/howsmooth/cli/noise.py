"""`howsmooth noise`: how the rounding noise of low precision grows through the layers of a model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from howsmooth.cli.options import AsJson, Device, Seed, Text, command, length_option, one_length, what_option
from howsmooth.cli.terminal import print_json, right_table, show, step_progress, written
from howsmooth.models import open_model
from howsmooth.models.model_inputs import read_text
from howsmooth.rounding.activation_noise import ActivationNoise
from howsmooth.rounding.activation_noise import noise as run


@command
def noise(
    model: Annotated[str, typer.Argument(help="A named model (smollm2), a folder, a hub id, or random:KIND.")],
    precision: Annotated[str, what_option("Low precision: bf16 or fp16.")] = "bf16",
    text: Text = None,
    length: Annotated[str, length_option("Tokens of the window.")] = "64",
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict how rounding noise grows through the residual stream, beside what a run in low precision really does.

    The noise of every layer is carried on by the Jacobians of the layers behind it; the last column says whose noise
    has the largest share.

    Examples:
      howsmooth noise smollm2 --precision bf16 --length 64
      howsmooth noise minilm --precision fp16 --json
    """
    opened, tokens = open_model(model, device=device), one_length(length, minimum=2)
    with step_progress(2 + getattr(opened.model.config, "num_hidden_layers", 1)) as begin:
        begin("reading")
        words = None if text is None else read_text(text)
        found = run(opened, words, precision=precision, length=tokens, seed=seed, progress=begin)
    if as_json:
        print_json(found.rows())
    else:
        show(_table(found, f"{model} ({opened.precision}) in {precision}, {tokens} tokens"))


def _table(noise: ActivationNoise, title: str) -> Table:
    columns = ("layer", "‖h‖", "noise", "predicted", "own", "median token", "predicted ", "cosine", "most from")
    table = right_table(*columns, title=title)
    for row in noise.rows():
        names = ("size", "actual", "predicted", "local", "actual_token", "predicted_token", "cosine")
        source = "embedding" if row["source"] < 0 else f"layer {row['source']}"
        table.add_row(str(row["layer"]), *(written(row[name]) for name in names), f"{source}: {row['share']:.0%}")
    return table
