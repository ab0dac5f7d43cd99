"""A scan of every head of a real model, beside the usual script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import howsmooth as hs
from benchmarks.cases import Case, head_functions
from benchmarks.peers import FuncProducts, Run, power_iteration
from benchmarks.report import Section, Table, Target
from benchmarks.timing import seconds_of
from howsmooth.models import OpenModel, Targets, alice, open_model
from howsmooth.scans import scan

TEXT = """All 72 heads of all-MiniLM-L6-v2 on one window of Alice in Wonderland, in float32; the model is open before
the clock starts. `hs.scan` cuts the text, runs the model, checks every attention block against the model's own output,
measures every head to ends 1e-3 apart and keeps the rows. As it comes it also has paths, sinks, entropies and the
cheap bounds; the bare one (`explain=False, bounds="none"`) has values with their ends, still more than its peer.

The peer takes the inputs of the layers as given and runs power iteration head by head through fresh `torch.func.jvp`
and `vjp` calls, at most 300 iterations each. First by its own rule, until its residual is below 1e-3 as ours is; then
at equal error: an oracle that knows the answer stops it on each head at the error that the scan has there, or at 1e-5
where that is less, since float32 may not get lower; and last at 1e-3, a hundred times the error of the scan."""
FLOOR = 1e-5
SETTINGS: dict[str, dict[str, Any]] = {"bare": {"explain": False, "bounds": "none"}, "as it comes": {}}


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """The scan in two settings, then power iteration on the same heads."""
    n = 32 if quick else 256
    model = open_model("minilm")
    cases = layers(model, n)
    truth = exact(cases)
    seconds, rows, found = {}, [], []
    for name, options in SETTINGS.items():
        report(f"hs.scan, {name}")
        seconds[name], found = scanned(model, n, rounds=1 if quick else 3, **options)
        rows.append([f"hs.scan, {name}", f"{seconds[name]:.2f} s", "", f"{max(_errors(found, truth)):.0e}"])
    equal = [max(error, FLOOR) for error in _errors(found, truth)]
    rules: dict[str, list[float] | None] = {
        "own rule": None,
        "equal error": equal,
        "oracle at 1e-3": [1e-3] * len(truth),
    }
    ratios = {}
    for rule, errors in rules.items():
        report(f"power iteration, {rule}")
        runs = powers(cases, truth, errors)
        time, mark = sum(one.seconds for one in runs), "" if all(one.reached for one in runs) else "> "
        ratios[rule] = time / seconds["bare"]
        against = f"{mark}{ratios[rule]:.1f}× bare, {time / seconds['as it comes']:.1f}× as it comes"
        error = max(_errors([one.value for one in runs], truth))
        rows.append([f"power iteration, {rule}", f"{mark}{time:.2f} s", against, f"{error:.0e}"])
    table = Table(["72 heads", "seconds", "against the scan", "largest error"], rows, f"n = {n}:")
    section = Section("scan", "A scan of all heads of a model", TEXT, [table])
    whole, what = seconds["as it comes"], f"scan of 72 heads, n = {n}"
    section.targets = [Target(f"{what}, as it comes", "< 20 s", f"{whole:.1f} s", whole < 20)]
    section.targets += [
        Target(
            f"{what}, bare: faster than power iteration, {rule}",
            "≥ 10×" if rule == "equal error" else "",
            f"{ratio:.1f}×",
            ratio >= 10 if rule == "equal error" else None,
        )
        for rule, ratio in ratios.items()
    ]
    return section


def scanned(model: OpenModel, n: int, rounds: int, **options: Any) -> tuple[float, list[float]]:
    """The least seconds of a scan of all heads, and their values."""
    found = []
    best = min(seconds_of(lambda: found.append(scan(model, lengths=n, what="head", **options))) for _ in range(rounds))
    rows = sorted(found[0].rows, key=lambda row: (row["layer"], row["head"]))
    return best, [row["value"] for row in rows]


def layers(model: OpenModel, n: int) -> list[Case]:
    """The attention of every layer with the input it has in the window that a scan cuts."""
    (window,) = model.windows(alice(), n, 1, 0)
    sites = Targets(model, window).sites
    assert all(isinstance(site.attention, hs.SelfAttention) for site in sites)
    return [Case(site.name, site.attention, site.x) for site in sites]  # type: ignore[arg-type]


def exact(cases: Sequence[Case]) -> list[float]:
    """σ of every head in float64 to 1e-9."""
    return torch.cat([hs.measure_heads(c.double().attention, c.x.double(), rtol=1e-9).value for c in cases]).tolist()


def powers(cases: Sequence[Case], truth: Sequence[float], errors: Sequence[float] | None) -> list[Run]:
    """Power iteration on every head of every layer, until its residual or an oracle says enough."""
    heads = [(f, case.x) for case in cases for f in head_functions(case)]
    if errors is None:
        return [power_iteration(FuncProducts.fresh(f, x), x) for f, x in heads]
    return [
        power_iteration(FuncProducts.fresh(f, x), x, target, error)
        for (f, x), target, error in zip(heads, truth, errors, strict=True)
    ]


def _errors(values: Sequence[float], truth: Sequence[float]) -> list[float]:
    return [abs(value / exact - 1) for value, exact in zip(values, truth, strict=True)]
