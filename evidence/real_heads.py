"""The whole catalogue on real heads: GPT-2 on the set after its LayerNorm, MiniLM at real text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from safetensors.torch import load_file

from evidence.tables import table as markdown
from howsmooth.attention import AttentionMap
from howsmooth.bounds import Table, table
from howsmooth.models import alice, attention_inputs, open_model
from howsmooth.models.attention_reader import from_transformers
from howsmooth.models.weight_files import load_attention
from howsmooth.sets import Around, Ball, Normalised, Tokens
from howsmooth.sets.ellipsoid import Ellipsoid

TITLE = "Every bound on real heads"
GPT2_LENGTH, MINILM_LENGTH = 1024, 96
NEAR = 0.001
"""Radius of the neighbourhood, as a share of the mean token norm."""
GPT2_FILE = "gpt2_attention_layers_0_6_11.safetensors"


@dataclass(frozen=True)
class Layer:
    """One layer and the table of its heads."""

    name: str
    rows: Table
    seconds: float

    def per_head(self, name: str) -> list[float]:
        """The values of one bound, or "measured", over the heads."""
        return [row.value for row in self.rows if row.name == name]

    def names(self) -> list[str]:
        """Bounds of the 2-norm that apply, tightest first (by the median over heads)."""
        found = {row.name for row in self.rows if row.norm == 2}
        return sorted(found, key=lambda name: median(self.per_head(name)))


def gpt2(folder: Path, layers: tuple[int, ...] = (0, 6, 11)) -> Iterator[Layer]:
    """GPT-2 heads for all inputs of 1,024 tokens: on the ellipsoid after ln_1, and on its ball."""
    path = folder / "weights" / GPT2_FILE
    tensors = load_file(path)
    for layer in layers:
        attention = load_attention(path, f"h.{layer}.attn.", heads=12, mask="causal")
        gain, shift = tensors[f"h.{layer}.ln_1.weight"], tensors[f"h.{layer}.ln_1.bias"]
        after = Ellipsoid.layer_norm(gain, shift)
        yield _layer(f"GPT-2 layer {layer}, after ln_1", attention, n=GPT2_LENGTH, over=Normalised(after))
        yield _layer(f"GPT-2 layer {layer}, ball of ln_1", attention, n=GPT2_LENGTH, over=Ball(after.radius))


def minilm(layers: tuple[int, ...] | None = None, length: int = MINILM_LENGTH) -> Iterator[Layer]:
    """MiniLM heads at a window of Alice in Wonderland, and around it."""
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    text = alice()
    inputs = attention_inputs(model, tokenizer, text[text.index("Alice was beginning") :], length, layers)
    for layer, hidden in sorted(inputs.hidden.items()):
        x = hidden[0]
        eps = NEAR * float(x.norm(dim=-1).mean())
        yield _layer(f"MiniLM layer {layer}", from_transformers(model, layer), over=Around(x, eps, within=Tokens(x)))


def _layer(name: str, attention: AttentionMap, **where: object) -> Layer:
    start = perf_counter()
    rows = table(attention, per_head=True, seed=3, **where)  # type: ignore[arg-type]
    return Layer(name, rows, perf_counter() - start)


def _summary(layers: list[Layer], against: str) -> str:
    """Least and most over the heads of each layer: the value compared with, and every bound as a multiple of it."""
    names = list(dict.fromkeys(name for layer in layers for name in layer.names() if name != against))
    rows = []
    for layer in layers:
        base = layer.per_head(against)
        cells = [f"{min(base):.3g}–{max(base):.3g}"]
        for name in names:
            values = layer.per_head(name)
            ratios = [value / low for value, low in zip(values, base, strict=True)] if values else []
            cells.append(f"{min(ratios):.3g}–{max(ratios):.3g}" if ratios else "")
        rows.append([layer.name, *cells])
    return markdown(["heads of", f"`{against}`", *(f"`{name}`" for name in names)], rows)


def shared_folder() -> Path | None:
    """Where the GPT-2 weights are: HOWSMOOTH_SHARED, or ``shared`` beside the checkout."""
    folder = Path(os.environ.get("HOWSMOOTH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    return folder if (folder / "weights" / GPT2_FILE).is_file() else None


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    encoder = []
    for layer in minilm():
        progress(layer.name)
        encoder.append(layer)
    page = [
        f"Every cell is the least and the most over the 12 heads of a layer. The 72 heads of all-MiniLM-L6-v2 on the "
        f"first {MINILM_LENGTH} tokens of the story of Alice in Wonderland: the measured σ, then each bound as a "
        f"multiple of it. The neighbourhood is every token within {100 * NEAR:g} % of the mean token norm; "
        "sets are the ball of the largest token.",
        _summary(encoder, "measured"),
    ]
    folder = shared_folder()
    if folder is not None:
        decoder = []
        for layer in gpt2(folder):
            progress(layer.name)
            decoder.append(layer)
        page += [
            f"GPT-2 heads for all inputs of {GPT2_LENGTH:,} tokens, causal: the best lower bound by construction, then "
            "each bound as a multiple of it. `inf` overflows float64: vacuous.",
            _summary(decoder, "howsmooth.two_cluster"),
        ]
    return page
