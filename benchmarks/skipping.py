"""Section 9: long inputs with tiles left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.report import Section, Table, Target
from benchmarks.timing import seconds_of
from howsmooth.models import alice, from_transformers, open_model

TEXT = """A head to a certified 1e-3 in float32, exactly and with tiles of 128 × 128 weights left out, least first, that
together may be a fifth of the norm: a few products of the whole and a rough certificate of what is left are then
enough. First heads of SmolLM2 that read Alice, in the coordinates of their own subspaces, then one causal head of width
64 that looks at its own neighbourhood and at the first token, where so little is left out that both ends move by it."""

SKIP, LITTLE = 0.2, 1e-4


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Trained heads, and one with a prescribed pattern."""
    n, huge = (512, 2048) if quick else (8192, 131_072)
    section = Section("skipping", "9. Tiles left out", TEXT)
    report(f"SmolLM2, n = {n}")
    rows, ratios = [], []
    for name, attention, x in trained(n, (15,) if quick else (5, 15, 27)):
        report(f"{name}, n = {n}")
        exact, truth = timed(attention, x)
        taken, m = timed(attention, x, SKIP)
        contains = bool(m.lower <= truth.value) and bool(truth.value <= m.upper)
        times = [f"{exact:.1f}", f"{taken:.1f}", f"{exact / taken:.1f}×", f"{truth.products}"]
        rows.append([name, *times, *_said(m, contains)])
        if bool(m.converged) and contains:
            ratios.append(exact / taken)
    best = max(ratios, default=0.0)
    section.tables.append(Table(["head", "all tiles, s", "ours, s", "ratio", "products", *_COLUMNS], rows))
    claim = f"a trained head (SmolLM2, n = {n:,}) to a certified 1e-3: faster with tiles left out"
    section.targets.append(Target(claim, "≥ 3×", f"{best:.1f}×", best >= 3))
    report(f"sink, n = {huge}")
    attention, tokens = sink(huge)
    kept: list[hs.Measurement] = []
    seconds = seconds_of(lambda: kept.append(hs.measure(attention, tokens, skip=LITTLE)))
    section.tables.append(
        Table(["a sink", "s", *_COLUMNS], [[f"n = {huge:,}", f"{seconds:.0f}", *_said(kept[0], None)]])
    )
    minutes = seconds / 60
    claim = f"a head with a sink, n = {huge:,}, to a certified 1e-3"
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


def trained(n: int, layers: Sequence[int]) -> Iterator[tuple[str, hs.SelfAttention, Tensor]]:
    """Heads of some layers of SmolLM2, each by itself, with the tokens it sees."""
    opened = open_model("smollm2")
    [window] = opened.windows(alice(), length=n, count=1, seed=0)
    model: Any = opened.model
    model.set_attn_implementation("sdpa")  # no n × n array
    with torch.no_grad():
        states = model(**opened.inputs(window), output_hidden_states=True, use_cache=False).hidden_states
    for layer in layers:
        with torch.no_grad():
            x = model.layers[layer].input_layernorm(states[layer])[0]
        attention = from_transformers(model, layer)
        for h in (0, 4, 8):
            yield f"layer {layer}, head {h}", one_head(attention, h), x


def one_head(attention: hs.SelfAttention, h: int) -> hs.SelfAttention:
    """One head of a block."""
    shared = h * attention.kv_heads // attention.heads
    weights = attention.query_weight[h], attention.key_weight[shared], attention.value_weight[shared]
    rotary = next((stage for stage in attention.query_stages if isinstance(stage, hs.Rotary)), None)
    return hs.SelfAttention(*weights, attention.output_weight[h].T, mask="causal", rotary=rotary, scale=attention.scale)


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
