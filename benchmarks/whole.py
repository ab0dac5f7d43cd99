"""Whole layers and whole models, against torch.func and the bare matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.bare import all_of, in_tiles, prepared, projections
from benchmarks.peers import FuncProducts
from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds, seconds_of
from benchmarks.worker import in_process
from howsmooth.attention.memory_layout import to_preferred_layout
from howsmooth.jacobians import JacobianOperator
from howsmooth.jacobians.algebra import Product, Sum
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.jacobians.tokenwise import Matrix, TokenwiseJacobian
from howsmooth.models import Targets, alice, open_model
from howsmooth.network.composed_jacobian import ComposedJacobian

TEXT = """A JᵀJ product with the Jacobian of a whole layer in float32, at the tokens it sees when the model reads
Alice. `linearize` + `vjp` closures are traced beforehand. "Bare" runs the matrix products of the layer alone, those of
attention tile by tile: what lies between them (normalisations, activations, weights times tangents) is left out. Then
a whole model to ends 1e-3 apart, from the tokens on: with closed forms, comparison with the model's output
included, and as `torch.func` would have it, its tracing included; the least of two rounds. Autograd is asked once for
each layer of a model: "first" is a measurement that does so. Last the memory of a process that measures all of
SmolLM2."""


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Layers, models, memory."""
    section = Section("whole", "Whole layers and models", TEXT)
    opened = {name: open_model(name) for name in (("minilm",) if quick else ("minilm", "smollm2"))}
    lengths = (64,) if quick else (128, 512)
    rows = []
    for name, model in opened.items():
        for n in lengths:
            report(f"a layer of {name}, n = {n}")
            [window] = model.windows(alice(), length=n, count=1, seed=0)
            row, target = layer(name, n, Targets(model, window), rounds=3 if quick else 15)
            rows.append(row)
            section.targets.append(target)
    columns = ["JᵀJ product of a layer", "ours, ms", "linearize + vjp, ms", "ratio", "bare, ms", "ours ÷ bare"]
    section.tables.append(Table(columns, rows))
    rows = []
    for name, model in opened.items():
        n = lengths[0]
        report(f"all of {name}, n = {n}")
        [window] = model.windows(alice(), length=n, count=1, seed=0)
        row, target = enclosed(name, n, lambda: Targets(model, window), 5 if name == "minilm" else 4)  # noqa: B023
        rows.append(row)
        section.targets.append(target)
    columns = ["a model to ends 1e-3 apart", "first, s", "ours, s", "torch.func, s", "ratio", "ours", "torch.func's"]
    section.tables.append(Table(columns, rows))
    if not quick:
        report("all of smollm2, n = 2048, in a process of its own")
        found = in_process(task="model", n=2048, causal=True, threads=torch.get_num_threads())
        peak = found["peak"] / 2**30
        section.targets.append(
            Target("hs.measure, all of SmolLM2, n = 2,048: peak memory", "< 6 GiB", f"{peak:.2f} GiB", peak < 6)
        )
        ends = f"{found['value']:.4g} ({found['lower']:.5g} … {found['upper']:.5g})"
        row = ["smollm2, n = 2,048", f"{found['seconds']:.0f}", f"{peak:.2f}", str(found["products"]), ends]
        section.tables.append(Table(["a model in one process", "s", "peak, GiB", "products", "value"], [row]))
    return section


def layer(name: str, n: int, targets: Targets, rounds: int) -> tuple[list[str], Target]:
    """One layer in the middle of the model."""
    f, x = targets.get("layer", targets.layers // 2)
    operator = hs.jacobian(f, x)
    assert isinstance(operator, ComposedJacobian)
    traced = FuncProducts.traced(f.function, x)  # type: ignore[union-attr]
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    products = bare_products(operator, v)
    best = best_seconds(
        {
            "ours": lambda: operator.rmatvec(operator.matvec(v)),
            "traced": lambda: traced.gram(v),
            "bare": lambda: [product() for product in products],
        },
        rounds,
    )
    ours, peer, bare = (1e3 * best[key] for key in ("ours", "traced", "bare"))
    cells = [f"{ours:.1f}", f"{peer:.1f}", f"{peer / ours:.2f}×", f"{bare:.1f}", f"{ours / bare:.2f}×"]
    target = Target(
        f"JᵀJ product of a layer of {name}, n = {n}: against linearize + vjp, and over its bare products",
        "≥ 3× or ≤ 1.3×",
        f"{peer / ours:.2f}×, {ours / bare:.2f}×",
        peer / ours >= 3 or ours / bare <= 1.3,
    )
    return [f"{name}, n = {n}", *cells], target


def enclosed(name: str, n: int, read: Callable[[], Targets], least: float) -> tuple[list[str], Target]:
    """The whole model to ends 1e-3 apart, in closed form and through torch.func, each time as if read anew."""
    found: dict[str, Any] = {}

    def seconds(way: str) -> float:
        f, x = read().get("model")
        part = f if way == "ours" else f.function  # type: ignore[union-attr]
        return seconds_of(lambda: found.update({way: hs.measure(part, x)}))

    first = seconds("ours")
    rounds = [(seconds("ours"), seconds("torch.func")) for _ in range(2)]
    ours, theirs = (min(each) for each in zip(*rounds, strict=True))
    ratio = theirs / ours
    row = [f"{name}, n = {n}", f"{first:.2f}", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.1f}×"]
    ends = [f"{float(m.lower):.5g} … {float(m.upper):.5g}, {m.products} products" for m in found.values()]
    claim = f"value with both ends of all of {name}, n = {n}: faster than torch.func"
    return [*row, *ends], Target(claim, f"≥ {least:.0f}×", f"{ratio:.1f}×", ratio >= least)


def bare_products(operator: JacobianOperator, v: Tensor) -> list[Callable[[], object]]:
    """The matrix products of a composition, both ways, on vectors of the right shapes."""
    if isinstance(operator, Product | Sum):
        return [product for part in operator.parts for product in bare_products(part, v)]
    if isinstance(operator, AttentionJacobian):
        tangents = tuple(torch.randn_like(t) for t in (operator.mixing.query, operator.mixing.key))
        given = (*tangents, torch.randn_like(operator.mixing.value))
        return [projections(operator, v), in_tiles(operator.mixing, given)]  # type: ignore[arg-type]
    if not isinstance(operator, TokenwiseJacobian):
        return []
    weights = [link.weight for link in operator.chain.links if isinstance(link, Matrix)]
    return [both_ways(weight, len(v)) for weight in weights]


def both_ways(weight: Tensor, n: int) -> Callable[[], object]:
    """W v and Wᵀu of n tokens."""
    v, u = to_preferred_layout(torch.randn(n, weight.shape[1])), to_preferred_layout(torch.randn(n, weight.shape[0]))
    return all_of([prepared(v, weight.mT), prepared(u, weight)])
