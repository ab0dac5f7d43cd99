"""Long inputs with tiles left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.report import Section, Table, Target
from benchmarks.timing import seconds_of
from howsmooth.jacobians.truncated_operator import truncated_jacobian
from howsmooth.models import alice, open_model
from howsmooth.models.attention_reader import from_transformers

TEXT = """A head to ends 1e-3 apart in float32, exactly and with tiles of 128 × 128 weights left out, least first, that
together may be a fifth of the norm: a few products of the whole and a rough upper bound of what is left are then
enough. First heads of SmolLM2 that read Alice, in the coordinates of their own subspaces: some that leave out most, and
some that cannot leave out much or are not told apart from their second singular value. How many can is in the next
table, of all heads of every third layer. Both ways take turns: seconds are the least of three rounds, the ratio
is the median of theirs. Then one causal head of width 64 that looks at its own neighbourhood and at the first token,
where so little is left out that both ends move by it."""

SKIP, LITTLE, ROUNDS = 0.2, 1e-4, 3
CHOSEN = ((5, 0), (13, 0), (19, 6), (25, 8), (27, 4))
"""Layers and heads of SmolLM2."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Trained heads, how many of them it is for, and one with a prescribed pattern."""
    n, shorter, huge = (512, 512, 2048) if quick else (8192, 2048, 131_072)
    section = Section("skipping", "Tiles left out", TEXT)
    report(f"SmolLM2, n = {n}")
    text = Text.read(n)
    rows, ratios = [], []
    for layer, h in CHOSEN[2:3] if quick else CHOSEN:
        name = f"layer {layer}, head {h}"
        report(f"{name}, n = {n}")
        attention, x = text.attention(layer).head(h), text.tokens(layer)
        rounds = [(timed(attention, x), timed(attention, x, SKIP)) for _ in range(ROUNDS)]
        ratio = median(exact / taken for (exact, _), (taken, _) in rounds)
        (exact, truth), (taken, m) = (min(each, key=lambda pair: pair[0]) for each in zip(*rounds, strict=True))
        contains = bool(m.lower <= truth.value) and bool(truth.value <= m.upper)
        times = [f"{exact:.1f}", f"{taken:.1f}", f"{ratio:.1f}×", f"{truth.products}"]
        rows.append([name, *times, *_said(m, contains)])
        if bool(m.converged) and contains:
            ratios.append(ratio)
    best = max(ratios, default=0.0)
    section.tables.append(Table(["head", "all tiles, s", "ours, s", "ratio", "products", *_COLUMNS], rows))
    claim = f"a trained head (SmolLM2, n = {n:,}) to ends 1e-3 apart: faster with tiles left out"
    section.targets.append(Target(claim, "≥ 3×", f"{best:.1f}×", best >= 3))
    report(f"all heads, n = {shorter}")
    shares = [share for layer in ((18,) if quick else range(0, 30, 3)) for share in shares_of(text, layer, shorter)]
    counts = [f"{sum(share >= least for share in shares)} of {len(shares)}" for least in (0.5, 0.65, 0.8)]
    section.tables.append(
        Table([f"heads, n = {shorter:,}, that leave out", "half", "65 %", "80 %"], [["SmolLM2", *counts]])
    )
    report(f"sink, n = {huge}")
    attention, tokens = sink(huge)
    kept: list[hs.Measurement] = []
    seconds = seconds_of(lambda: kept.append(hs.measure(attention, tokens, skip=LITTLE)))
    section.tables.append(
        Table(["a sink", "s", *_COLUMNS], [[f"n = {huge:,}", f"{seconds:.0f}", *_said(kept[0], None)]])
    )
    minutes = seconds / 60
    claim = f"a head with a sink, n = {huge:,}, to ends 1e-3 apart"
    section.targets.append(Target(claim, "< 5 min", f"{minutes:.1f} min", minutes < 5 and bool(kept[0].converged)))
    return section


_COLUMNS = ["left out", "ends", "converged", "all tiles needed", "contains the exact value"]


def timed(attention: hs.SelfAttention, x: Tensor, skip: float = 0.0) -> tuple[float, hs.Measurement]:
    """Seconds of a measurement to 1e-3, and the measurement."""
    found: list[hs.Measurement] = []
    return seconds_of(lambda: found.append(hs.measure_heads(attention, x, skip=skip))), found[0]


def _said(m: hs.Measurement, contains: bool | None) -> list[str]:
    share = next((note.split(" of the tiles")[0] for note in m.notes if "of the tiles" in note), "0 %")
    full = "yes" if any("with all tiles" in note for note in m.notes) else "no"
    ends = f"{float(m.lower.min()):.5g} … {float(m.upper.max()):.5g}"
    return [share, ends, str(bool(m.converged.all())), full, {True: "yes", False: "no", None: "—"}[contains]]


@dataclass(frozen=True)
class Text:
    """SmolLM2 and what enters each of its layers when it reads Alice."""

    model: Any
    states: Sequence[Tensor]

    @classmethod
    def read(cls, n: int) -> Text:
        opened = open_model("smollm2")
        [window] = opened.windows(alice(), length=n, count=1, seed=0)
        model: Any = opened.model
        model.set_attn_implementation("sdpa")  # no n × n array
        with torch.no_grad():
            return cls(model, model(**opened.inputs(window), output_hidden_states=True, use_cache=False).hidden_states)

    def attention(self, layer: int) -> hs.SelfAttention:
        """The attention of a layer."""
        attention = from_transformers(self.model, layer)
        assert isinstance(attention, hs.SelfAttention)
        return attention

    def tokens(self, layer: int) -> Tensor:
        """What it sees."""
        with torch.no_grad():
            return self.model.layers[layer].input_layernorm(self.states[layer])[0]


def shares_of(text: Text, layer: int, n: int) -> list[float]:
    """The share of tiles that each head of a layer leaves out at the first tokens of the text."""
    attention, x = text.attention(layer), text.tokens(layer)[:n]
    operators = (
        truncated_jacobian(attention.head(h), x, SKIP, per_head=True, reduced=True) for h in range(attention.heads)
    )
    return [op.dropped.share for op in operators]


def sink(n: int, width: int = 64, reach: float = 30.0, sharpness: float = 3.0) -> tuple[hs.SelfAttention, Tensor]:
    """Causal attention to the neighbourhood, some ``reach`` tokens wide, and as much to the first token.

    Tokens hold their place as cos ωi and sin ωi for random frequencies ω, so that queries and keys meet in
    Σ cos ω(i − j), and a mark of the first token, which every query finds.
    """
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.randn((width - 8) // 2, generator=generator, dtype=torch.float64) / reach
    turned = torch.arange(n, dtype=torch.float64)[:, None] * frequencies
    x = torch.randn(n, width, generator=generator)
    x[:, 8:] = torch.cat([turned.cos(), turned.sin()], dim=1)
    x[:, 0], x[:, 1] = 1.0, 0.0
    x[0, 1] = 1.0
    query, key = torch.zeros(2, width, width)
    query[8:, 8:] = sharpness * torch.eye(width - 8)
    key[8:, 8:] = torch.eye(width - 8)
    query[0, 0], key[0, 1] = sharpness * len(frequencies), 1.0
    value = torch.randn(width, width, generator=generator) / width**0.5
    return hs.SelfAttention(query, key, value, mask="causal", scale=1.0), x
