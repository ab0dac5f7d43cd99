"""Section 9: long inputs with tiles left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.report import Section, Table, Target
from benchmarks.timing import seconds_of
from howsmooth.models import alice, from_transformers, open_model

TEXT = """A head to a certified 1e-3 in float32, exactly and with tiles left out whose weights are all below the
threshold; both ends then allow for what is missing. First a head of SmolLM2 that reads Alice, then one causal head of
width 64 that looks at its own neighbourhood and at the first token, as trained heads do on long inputs."""

THRESHOLDS = (1e-8, 1e-7, 1e-6)


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """A trained head, and one with a prescribed pattern."""
    n, huge = (512, 2048) if quick else (8192, 131_072)
    section = Section("skipping", "9. Tiles left out", TEXT)
    report(f"SmolLM2, n = {n}")
    heads, x = trained(n)
    rows, ratios = [], []
    for name, attention in heads.items():
        report(f"{name}, n = {n}")
        exact, truth = timed(attention, x)
        for skip in THRESHOLDS:
            taken, m = timed(attention, x, skip)
            contains = bool(m.lower <= truth.value) and bool(truth.value <= m.upper)
            times = [f"{exact:.1f}", f"{taken:.1f}", f"{exact / taken:.1f}×"]
            rows.append([name, f"{skip:.0e}", *times, *_said(m, contains)])
            if bool(m.converged) and contains:
                ratios.append(exact / taken)
    best = max(ratios, default=0.0)
    section.tables.append(Table(["head", "below", "all tiles, s", "ours, s", "ratio", *_COLUMNS], rows))
    claim = f"a trained head (SmolLM2, n = {n:,}) to a certified 1e-3: faster with tiles left out"
    section.targets.append(Target(claim, "≥ 3×", f"{best:.1f}×", best >= 3))
    report(f"sink, n = {huge}")
    attention, tokens = sink(huge)
    kept: list[hs.Measurement] = []
    seconds = seconds_of(lambda: kept.append(hs.measure(attention, tokens, skip=1e-7)))
    section.tables.append(
        Table(["a sink", "s", *_COLUMNS], [[f"n = {huge:,}", f"{seconds:.0f}", *_said(kept[0], None)]])
    )
    minutes = seconds / 60
    claim = f"a head with a sink, n = {huge:,}, to a certified 1e-3"
    section.targets.append(Target(claim, "< 5 min", f"{minutes:.1f} min", minutes < 5 and bool(m.converged)))
    return section


_COLUMNS = ["left out", "ends", "converged", "contains the exact value"]


def timed(attention: hs.SelfAttention, x: Tensor, skip: float = 0.0) -> tuple[float, hs.Measurement]:
    """Seconds of a measurement to 1e-3, and the measurement."""
    found: list[hs.Measurement] = []
    return seconds_of(lambda: found.append(hs.measure(attention, x, skip=skip))), found[0]


def _said(m: hs.Measurement, contains: bool | None) -> list[str]:
    share = next((note.split(" of the tiles")[0] for note in m.notes if "of the tiles" in note), "0 %")
    ends = f"{float(m.lower.min()):.5g} … {float(m.upper.max()):.5g}"
    return [share, ends, str(bool(m.converged.all())), {True: "yes", False: "no", None: "—"}[contains]]


def trained(n: int) -> tuple[dict[str, hs.SelfAttention], Tensor]:
    """Heads of the middle layer of SmolLM2 at the tokens it sees, each by itself."""
    opened = open_model("smollm2")
    [window] = opened.windows(alice(), length=n, count=1, seed=0)
    model: Any = opened.model
    model.set_attn_implementation("sdpa")  # no n × n array
    with torch.no_grad():
        states = model(**opened.inputs(window), output_hidden_states=True, use_cache=False).hidden_states
        layer = len(model.layers) // 2
        x = model.layers[layer].input_layernorm(states[layer])[0]
    attention = from_transformers(model, layer)
    return {f"layer {layer}, head {h}": one_head(attention, h) for h in (0, 4, 8)}, x


def one_head(attention: hs.SelfAttention, h: int) -> hs.SelfAttention:
    """One head of a block."""
    shared = h * attention.kv_heads // attention.heads
    weights = attention.query_weight[h], attention.key_weight[shared], attention.value_weight[shared]
    rotary = next((stage for stage in attention.query_stages if isinstance(stage, hs.Rotary)), None)
    return hs.SelfAttention(*weights, attention.output_weight[h].T, mask="causal", rotary=rotary, scale=attention.scale)


def sink(n: int, width: int = 64, slope: float = 0.05) -> tuple[hs.SelfAttention, Tensor]:
    """Causal attention to the neighbourhood, by ALiBi, and to the first token, which every query finds again.

    Tokens hold their place, a one and a mark of the first token; queries read slope·place + 4 against that mark, which
    makes up for the distance.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator)
    x[:, 0], x[:, 1], x[:, 2] = torch.arange(n) / n, 1.0, 0.0
    x[0, 2] = 1.0
    query, key = torch.randn(2, width, width, generator=generator) / width
    query[0], key[0] = 0.0, 0.0
    query[0, 0], query[0, 1], key[0, 2] = slope * n, 4.0, 1.0
    value = torch.randn(width, width, generator=generator) / width**0.5
    bias = hs.ALiBi(torch.tensor([slope]))
    return hs.SelfAttention(query, key, value, mask="causal", logit_biases=[bias], scale=1.0), x
