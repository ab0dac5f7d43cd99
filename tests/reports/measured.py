"""Real rows to report on: every head of MiniLM on Alice in Wonderland, kept as JSON beside this file.

`python tests/reports/measured.py` measures them anew.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth._util.common import rounded
from howsmooth.attention import AttentionMap
from howsmooth.bounds import CATALOGUE
from howsmooth.bounds.question_setting import setting

STORED = Path(__file__).parent / "data" / "minilm.json"
LENGTHS = (8, 16, 32, 64, 128)
WITH_ENERGIES = (8, 128)
STARTS = ("Alice was beginning", "The rabbit-hole went straight on")
CONSTANT = ("model", "model_sha256", "precision", "text", "text_sha256", "confidence", "seed", "rtol", "dtype")
FACTS = (
    *("what", "layer", "head", "length", "window", "window_start", "value", "lower", "upper", "converged", "proved"),
    *("bounds", "radius", "value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "seconds"),
)
HEAD_BOUNDS = ("howsmooth.softmax_jacobian", "howsmooth.local", "howsmooth.sqrt_n", "howsmooth.mean_field")


@dataclass
class Measured:
    """What a scan holds: rows, tokens by (model, length, window), energies by (model, layer, head, length, window)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)
    energies: dict[tuple[str, int, int, int, int], list[float]] = field(default_factory=dict)


def stored() -> Measured:
    """The rows as they were measured."""
    kept = json.loads(STORED.read_text(encoding="utf-8"))
    rows = [kept["constant"] | dict(zip(kept["facts"], row, strict=True)) for row in kept["rows"]]
    found = Measured([row | {"bounds": json.dumps(row["bounds"])} for row in rows])
    model = kept["constant"]["model"]
    for window, length, tokens in kept["tokens"]:
        found.tokens[model, length, window] = tokens
    for layer, head, length, window, energy in kept["energies"]:
        found.energies[model, layer, head, length, window] = energy
    return found


def measure_model() -> dict[str, Any]:
    """All rows of the model, in the form that is kept."""
    import hashlib

    from howsmooth.models import NAMED, alice, attention_inputs, open_model
    from howsmooth.models.attention_reader import from_transformers

    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    text = alice()
    kept: dict[str, Any] = {"rows": [], "tokens": [], "energies": []}
    values = ("minilm", NAMED["minilm"].sha256, "float32", "Alice in Wonderland")
    values += (hashlib.sha256(text.encode()).hexdigest(), 0.99, 0, 1e-3, "float32")
    kept = {"constant": dict(zip(CONSTANT, values, strict=True)) | {"howsmooth": hs.__version__}, "facts": FACTS} | kept
    for window, words in enumerate(STARTS):
        start = text.index(words)
        for length in LENGTHS:
            inputs = attention_inputs(model, tokenizer, text[start:], length)
            kept["tokens"].append((window, length, inputs.tokens))
            for layer, x in sorted(inputs.hidden.items()):
                place = {"layer": layer, "length": length, "window": window, "window_start": start}
                rows, energy = measure_layer(from_transformers(model, layer), x[0])
                kept["rows"] += [[(place | row)[fact] for fact in FACTS] for row in rows]
                if window == 0 and length in WITH_ENERGIES:
                    for head, shares in enumerate(energy.tolist()):
                        kept["energies"].append((layer, head, length, window, [round(s, 4) for s in shares]))
    return kept


def measure_layer(attention: AttentionMap, x: Tensor) -> tuple[list[dict[str, Any]], Tensor]:
    """One row per head and one for the block, and the input energies ``(heads, n)``."""
    story = hs.explain(attention, x, per_head=True, influence=False)
    block = hs.explain(attention, x, influence=False)
    where = setting(attention, over=x, n=len(x))
    per_head = {name: CATALOGUE[name].at(where, per_head=True) for name in ("howsmooth.three_path", *HEAD_BOUNDS)}
    whole = float(CATALOGUE["howsmooth.three_path"].at(where))
    rows = []
    for head in (*range(attention.heads), None):
        of, at = (block, ()) if head is None else (story, (head,))
        sink = int(story.sink.argmax()) if head is None else head
        bounds = {} if head is None else {name: above(per_head[name][head]) for name in HEAD_BOUNDS}
        rows.append(
            {
                "what": "attention" if head is None else "head",
                "head": head,
                "value": near(of.total.value[at]),
                "lower": below(of.total.lower[at]),
                "upper": above(of.total.upper[at]),
                "converged": bool(of.total.converged[at]),
                "proved": above(whole if head is None else per_head["howsmooth.three_path"][head]),
                "bounds": bounds,
                "radius": near(x.norm(dim=-1).max()),
                "value_path": near(of.value_path.value[at]),
                "score_path": near(of.score_path.value[at]),
                "value_share": near(of.value_share[at]),
                "sink": near(story.sink[sink]),
                "sink_token": int(story.sink_token[sink]),
                "entropy": near(story.entropy[sink] if head is not None else story.entropy.mean()),
                "seconds": round(of.total.seconds, 4),
            }
        )
    return rows, story.input_energy


def near(x: Tensor | float) -> float:
    """Seven digits are enough to keep."""
    return float(rounded(float(x), ROUND_HALF_EVEN, 7))


def below(x: Tensor | float) -> float:
    return float(rounded(float(x), ROUND_FLOOR, 7))


def above(x: Tensor | float) -> float | None:
    return float(rounded(float(x), ROUND_CEILING, 7)) if math.isfinite(float(x)) else None


if __name__ == "__main__":
    torch.manual_seed(0)
    content = measure_model()
    lines = [json.dumps(part, ensure_ascii=False) for part in content["rows"]]
    shares = [json.dumps(part) for part in content["energies"]]
    STORED.write_text(
        f'{{"constant": {json.dumps(content["constant"])},\n"facts": {json.dumps(content["facts"])},\n'
        f'"tokens": {json.dumps(content["tokens"], ensure_ascii=False)},\n'
        '"rows": [\n' + ",\n".join(lines) + '\n],\n"energies": [\n' + ",\n".join(shares) + "\n]}\n",
        encoding="utf-8",
    )
    print(len(lines), "rows,", STORED.stat().st_size, "bytes")
