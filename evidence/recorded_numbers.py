"""Numbers that changes of the code must leave as they are: some hundred results of every kind, from fixed inputs.

``python -m evidence.recorded_numbers`` compares all of them, bit by bit, with ``tests/data/recorded_numbers.json``;
``--write`` writes that file anew. On another processor or with another torch sums round otherwise: there the tests
allow for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "recorded_numbers.json"
TEXT = (
    "The river ran high that spring, and nobody who lived beside it slept well. Before the bridge was built there had "
    "been a ferry, and before the ferry a ford that horses knew better than men. "
) * 12
Numbers = Iterator[tuple[str, Any]]


def tokens(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(count: int, d: int, seed: int) -> list[Tensor]:
    return list(torch.randn(count, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / d**0.5)


def maps() -> dict[str, Any]:
    """One map of every kind."""
    w = weights(4, 8, seed=1)
    return {
        "plain": hs.SelfAttention(*w, heads=2),
        "causal": hs.SelfAttention(*w, heads=2, mask="causal"),
        "window": hs.SelfAttention(*w, heads=4, mask=hs.SlidingWindow(3)),
        "grouped": hs.SelfAttention(w[0], w[1][:4], w[2][:4], w[3], heads=2, kv_heads=1, mask="causal"),
        "softcap": hs.SelfAttention(*w, heads=2, softcap=2.0),
        "alibi": hs.SelfAttention(*w, heads=2, mask="causal", logit_biases=[hs.ALiBi.standard(2)]),
        "sigmoid": hs.SigmoidAttention(*w, heads=2),
        "cosine": hs.CosineAttention(*w, heads=2),
        "l2": hs.L2SelfAttention(*w[:3], heads=2),
        "lipschitz norm": hs.LipschitzNormAttention(*w, heads=2),
        "gradient step": hs.GradientStepAttention(w[0], tokens(5, 8, seed=2), 0.1),
    }


def ends(name: str, m: Any) -> Numbers:
    yield from ((f"{name}: {end}", getattr(m, end)) for end in ("value", "lower", "upper"))


def measured() -> Numbers:
    """`measure`, of every kind of map, norm and precision; functions and layers."""
    for name, attention in maps().items():
        for norm in (2, 1, float("inf"), "fro", "token"):
            yield from ends(f"measure {name}, norm {norm}", hs.measure(attention, tokens(7, 8), norm=norm))
        yield f"relative condition of {name}", hs.measure(attention, tokens(7, 8)).relative
    for n, d in ((5, 16), (40, 16), (90, 24)):
        for dtype in (torch.float32, torch.float64):
            attention = hs.SelfAttention.random(d, heads=4, mask="causal", seed=n, dtype=dtype)
            x = tokens(n, d, seed=n, dtype=dtype)
            yield from ends(f"measure {n} × {d} {dtype}", hs.measure(attention, x))
            yield from ends(f"heads {n} × {d} {dtype}", hs.measure_heads(attention, x))
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    fill(layer)
    yield from ends("encoder layer", hs.measure(lambda x: layer(x[None])[0], tokens(6, 8)))
    yield from ends("sine", hs.measure(torch.sin, tokens(6, 8)))


def fill(module: nn.Module, seed: int = 5) -> None:
    """Weights that depend on nothing but a seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(drawn / max(parameter.shape[-1], 1) ** 0.5)


def explained() -> Numbers:
    """Paths, sinks, influence; tables of bounds."""
    attention, x = maps()["causal"], tokens(9, 8, seed=3)
    explanation = hs.explain(attention, x, per_head=True)
    for name in ("total", "value_path", "score_path"):
        yield from ends(f"explain, {name}", getattr(explanation, name))
    for name in ("value_share", "sink", "entropy", "input_energy"):
        yield f"explain, {name}", getattr(explanation, name)
    yield "influence", hs.token_influence(attention, x)
    for name in ("plain", "causal", "l2", "sigmoid", "cosine"):
        for row in hs.bounds.table(maps()[name], over=x):
            yield f"bound on {name}, {row.name}, {row.norm}", row.value


def certified() -> Numbers:
    """Certificates at points, on balls, and of networks."""
    x = tokens(6, 8, seed=4)
    for name in ("plain", "causal", "softcap", "l2", "sigmoid"):
        for radius in (0.0, 0.01, 0.1):
            for per_head in (False, True):
                found = hs.certify(maps()[name], hs.sets.Around(x, radius), per_head=per_head)
                yield f"certify {name} by {radius}, {per_head}: lower", found.lower
                yield f"certify {name} by {radius}, {per_head}: upper", found.upper
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    network = _classifier(layer)
    for norm in (1, 2, float("inf")):
        yield f"radius, norm {norm}", hs.certify(network, x, int(network(x).argmax()), norm=norm).radius


def _classifier(layer: nn.Module) -> nn.Module:
    from howsmooth.certificates import SequenceClassifier

    network = SequenceClassifier([layer], nn.Linear(8, 3)).double().eval()
    fill(network)
    return network


def searched() -> Numbers:
    """Worst cases, in balls and around an input; growth in n."""
    for name in ("plain", "causal", "l2"):
        for seed in (0, 1):
            witness = hs.worst_case(maps()[name], 5, over=hs.sets.Ball(1.5), starts=2, steps=20, seed=seed)
            yield from ends(f"worst case of {name}, seed {seed}", witness.measurement)
    fit = hs.growth([[2.0, 2.1], [2.9, 3.0], [4.1, 4.0]], [8, 16, 32], resamples=200)
    yield "exponent", fit.exponent


def of_models() -> Numbers:
    """Scans, rounded caches and noise of a real model and of a random one."""
    from howsmooth.rounding import quantise

    with tempfile.TemporaryDirectory():
        what = ["head", "attention", "layer"]
        scanned = hs.scan("minilm", TEXT, lengths=[16, 24], windows=2, layers=[0, 3], what=what)
        for row in scanned.rows:
            place = [row[key] for key in ("what", "layer", "head", "length", "window")]
            yield f"scan {place}", [row[end] for end in ("value", "lower", "upper", "relative")]
        found = quantise("random:gpt2", TEXT, formats="int8,int4", budget=6.0, length=16, windows=2, samples=4)
        yield "quantise", list(numbers_in([found.totals(), found.rows()]))


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of a JSON value but those of time."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if "seconds" not in key:
                yield from numbers_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


SECTIONS: dict[str, Callable[[], Numbers]] = {
    "measured": measured,
    "explained": explained,
    "certified": certified,
    "searched": searched,
    "models": of_models,
}


def flat(value: Any) -> list[str]:
    """The numbers of a result, in hexadecimal, so that nothing is rounded."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    return [float(number).hex() for number in tensor.detach().double().flatten()]


def recorded(section: str) -> dict[str, list[str]]:
    """Name → numbers of a section."""
    return {name: flat(value) for name, value in SECTIONS[section]() if value is not None}


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    found = {section: recorded(section) for section in SECTIONS}
    count = sum(len(numbers) for part in found.values() for numbers in part.values())
    if "--write" in arguments:
        RECORD.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        print(f"{count} numbers written")
        return 0
    before = json.loads(RECORD.read_text(encoding="utf-8"))
    changed = [
        f"{section}: {name}"
        for section, part in found.items()
        for name, numbers in part.items()
        if before[section].get(name) != numbers
    ]
    gone = [f"{section}: {name}" for section, part in before.items() for name in part if name not in found[section]]
    print(*(f"changed: {name}" for name in changed), *(f"gone: {name}" for name in gone), sep="\n")
    print(f"{count} numbers, {len(changed)} results changed, {len(gone)} gone")
    return int(bool(changed or gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
