"""`howsmooth demo`: the main job on a real model and a real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.cli.console import (
    NOT_CONVERGED,
    lower_bound,
    print_json,
    set_threads,
    stdout,
    step_progress,
    upper_bound,
    written,
)
from howsmooth.cli.pictures import draw_head
from howsmooth.explaining import Explanation, explain
from howsmooth.figures import heads_heatmap, new_figure, save_figure
from howsmooth.measuring import measure
from howsmooth.norms import Measurement

MODEL = "minilm"
_WINDOW_START = "Alice was beginning"
_FIGURE = "demo.png"


@dataclass(frozen=True)
class Layer:
    """One layer of the model as measured."""

    number: int
    attention: AttentionMap
    x: Tensor
    block: Measurement
    heads: Explanation

    @property
    def roughest(self) -> int:
        """The head with the largest local Lipschitz constant."""
        return int(self.heads.total.value.argmax())

    def followers(self, head: int) -> int:
        """How many tokens look most at the sink of this head."""
        favourite = self.attention.weights(self.x)[head].argmax(-1)
        return int((favourite == self.heads.sink_token[head]).sum())


def demo(
    length: Annotated[int, typer.Option(min=4, max=512, help="Tokens of text, special ones included.")] = 128,
    output: Annotated[Path, typer.Option(help="Folder for the picture; made if missing.")] = Path("howsmooth-output"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure every head of a real model, MiniLM, on Alice in Wonderland.

    Prints one row per layer, one sentence about the roughest head, and writes a picture.

    Examples:\n
      howsmooth demo\n
      howsmooth demo --length 256 --output pictures
    """
    from howsmooth.models import NAMED

    set_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    tokens, layers = measure_model(length)
    worst = max(layers, key=lambda layer: float(layer.heads.total.value.max()))
    sentence = headline(worst, tokens)
    path = output / _FIGURE
    _draw(layers, worst, tokens, path)
    converged = all(bool(m.converged.all()) for layer in layers for m in (layer.block, layer.heads.total))
    if as_json:
        print_json(_as_json(layers, tokens, sentence, converged, path))
    else:
        out = stdout()
        out.print(f"Model: {NAMED[MODEL].description}.", markup=False)
        out.print(f"Text: the first {length} tokens of the story of Alice in Wonderland, special tokens included.\n")
        out.print(_table(layers, tokens))
        out.print(
            "Layers and heads count from 0. A block is all heads of a layer with its output projection, without "
            "residual and LayerNorm. The true σ lies above the lower bound always, and below the upper bound with "
            "probability 99 % (for each by itself); the path shares are those of the top singular direction.\n"
        )
        out.print(sentence, markup=False, style="bold", soft_wrap=True)
        out.print(f"\nPicture: {path}", markup=False)
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def measure_model(length: int) -> tuple[list[str], list[Layer]]:
    """All layers of the demo model on a window of text, and the tokens of the window."""
    from howsmooth.models import alice, attention_inputs, from_transformers, load

    layers = []
    with step_progress(8) as begin:
        begin("loading the model")
        model, tokenizer = load(MODEL)
        text = alice()
        begin("reading the text")
        inputs = attention_inputs(model, tokenizer, text[text.index(_WINDOW_START) :], length)
        for number, x in sorted(inputs.hidden.items()):
            begin(f"layer {number}")
            attention = from_transformers(model, number)
            block = measure(attention, x[0])
            heads = explain(attention, x[0], per_head=True, influence=False)
            layers.append(Layer(number, attention, x[0], block, heads))
    return inputs.tokens, layers


def headline(layer: Layer, tokens: Sequence[str]) -> str:
    """The roughest head of a layer in one plain sentence."""
    head = layer.roughest
    total, sink = layer.heads.total, int(layer.heads.sink_token[head])
    share = float(layer.heads.value_share[head])
    # A sink explains a rough value path; beside a rough score path it is only a fact.
    paths = (
        f"{100 * share:.0f} % of it is the value path:"
        if share >= 0.5
        else f"{100 - 100 * share:.0f} % of it is the score path;"
    )
    return (
        f"Roughest: layer {layer.number} head {head}: moving the input by a small ε moves the output by up to "
        f"{written(float(total.value[head]))} ε ({lower_bound(total, (head,))}, {upper_bound(total, (head,))}); "
        f"{paths} {layer.followers(head)} of {len(tokens)} tokens attend most to "
        f"{tokens[sink]!r} at position {sink}."
    )


def _table(layers: Sequence[Layer], tokens: Sequence[str]) -> Table:
    table = Table(
        "layer",
        "block σ (estimate)",
        "lower bound",
        "upper bound",
        "roughest head, σ (estimate)",
        "value / score",
        "its sink, seen most by",
    )
    for layer in layers:
        head = layer.roughest
        share, sink = float(layer.heads.value_share[head]), int(layer.heads.sink_token[head])
        table.add_row(
            str(layer.number),
            written(float(layer.block.value)),
            lower_bound(layer.block),
            upper_bound(layer.block),
            f"{head}, {written(float(layer.heads.total.value[head]))}",
            f"{100 * share:.0f} % / {100 * (1 - share):.0f} %",
            f"{tokens[sink]} {layer.followers(head)}/{len(tokens)}",
        )
    return table


def _draw(layers: Sequence[Layer], worst: Layer, tokens: Sequence[str], path: Path) -> None:
    figure, (left, right) = new_figure(2, 7.6, 6.4)
    heads_heatmap(
        torch.stack([layer.heads.total.value for layer in layers]),
        layers=[str(layer.number) for layer in layers],
        title="MiniLM on Alice in Wonderland: how rough is each head?",
        ax=left,
    )
    name = f"Layer {worst.number} head {worst.roughest}"
    draw_head(worst.attention, worst.x, worst.roughest, worst.heads.total, tokens, name, right)
    save_figure(figure, path)


def _as_json(
    layers: Sequence[Layer], tokens: Sequence[str], sentence: str, converged: bool, path: Path
) -> dict[str, Any]:
    return {
        "model": MODEL,
        "n": len(tokens),
        "tokens": list(tokens),
        "layers": [
            {
                "layer": layer.number,
                "block": layer.block.to_dict(),
                "heads": layer.heads.total.to_dict(),
                "roughest_head": layer.roughest,
                "value_share": float(layer.heads.value_share[layer.roughest]),
                "sink_token": int(layer.heads.sink_token[layer.roughest]),
                "sink": float(layer.heads.sink[layer.roughest]),
            }
            for layer in layers
        ],
        "headline": sentence,
        "converged": converged,
        "figure": str(path),
    }
