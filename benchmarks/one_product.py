"""One product with JᵀJ, which every iterative method spends its time on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks import bare
from benchmarks.cases import Case, block_function, math_attention, random_case
from benchmarks.peers import FuncProducts
from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds
from howsmooth.jacobians.attention_operator import AttentionJacobian

Product = Callable[[], tuple[Tensor, ...]]
Report = Callable[[str], None]
OURS, FRESH, TRACED = "howsmooth", "torch.func jvp + vjp", "torch.func linearize + vjp"

TEXT = """One product with JᵀJ in float32, for the core (q, k, v) ↦ softmax(qkᵀ)v of all heads and for the whole
block with its projections. What can be prepared once is prepared beforehand for everyone: our weights P, the trace
of `linearize`, the tape of `vjp`. "Bare" rows run nothing but the eight n × n × k matrix products (and the four
projections, for the block): no way of computing the product can be faster. The error is that of JᵀJv against
torch.func in float64."""


def run(quick: bool, report: Report) -> Section:
    """Time the product at n = 1024 and, causal, at n = 2048."""
    section = Section("one_product", "One product with JᵀJ", TEXT)
    for n, causal, wanted in (
        ((128, False, 4.0), (256, True, 6.0)) if quick else ((1024, False, 4.0), (2048, True, 6.0))
    ):
        case = random_case(n, causal=causal)
        for part, contest in (("core", core), ("block", block)):
            what = f"{part}, n = {n}{', causal' if causal else ''}"
            report(what)
            products, reference = contest(case)
            table, targets = _compare(what, products, reference, wanted)
            section.tables.append(table)
            section.targets += targets
    return section


def core(case: Case) -> tuple[dict[str, Product], tuple[Tensor, ...]]:
    """Contestants for the mixing of tokens alone, and the right answer."""
    operator = hs.jacobian(case.attention, case.x)
    assert isinstance(operator, AttentionJacobian)
    mixing = operator.mixing
    point = (mixing.query, mixing.key, mixing.value)
    generator = torch.Generator().manual_seed(2)
    dquery, dkey, dvalue = (torch.randn(t.shape, generator=generator) for t in point)
    tangents = (dquery, dkey, dvalue)
    n = len(case.x)

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        if case.causal:
            scores = scores + torch.full((n, n), float("-inf"), dtype=scores.dtype).triu(1)
        return torch.softmax(scores, dim=-1) @ value

    def standard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return math_attention(query, key, value, case.causal, 1.0)

    products: dict[str, Product] = {OURS: lambda: mixing.vjp(mixing.jvp(tangents[:2], tangents[2]))}
    for label, f in (("softmax(qkᵀ)v", eager), ("SDPA math", standard)):
        products |= _func_products(label, f, point, tangents)
    products["bare products, whole batch"] = bare.whole_batch(mixing, tangents)
    products["bare products, our tiles"] = bare.in_tiles(mixing, tangents)
    reference = FuncProducts.fresh(eager, *(t.double() for t in point)).gram(*(t.double() for t in tangents))
    return products, reference


def block(case: Case) -> tuple[dict[str, Product], tuple[Tensor, ...]]:
    """Contestants for the whole attention block, and the right answer."""
    operator = hs.jacobian(case.attention, case.x)
    assert isinstance(operator, AttentionJacobian)
    v = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(2))
    products: dict[str, Product] = {OURS: lambda: (operator.rmatvec(operator.matvec(v)),)}
    for label, f in (("SelfAttention.forward", case.attention.forward), ("SDPA math", block_function(case))):
        products |= _func_products(label, f, (case.x,), (v,))
    tangents = operator.projection.into_heads(v[None])
    outer = bare.projections(operator, v)
    for name, products_of in (("whole batch", bare.whole_batch), ("our tiles", bare.in_tiles)):
        inner = products_of(operator.mixing, tangents)
        products[f"bare products, {name}"] = lambda inner=inner: (*outer(), *inner())  # type: ignore[misc]
    exact = case.double()
    reference = FuncProducts.fresh(block_function(exact), exact.x).gram(v.double())
    return products, reference


def _func_products(
    label: str, f: Callable[..., Tensor], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> dict[str, Product]:
    fresh, traced = FuncProducts.fresh(f, *point), FuncProducts.traced(f, *point)
    return {
        f"{FRESH}, {label}": lambda: fresh.gram(*tangents),
        f"{TRACED}, {label}": lambda: traced.gram(*tangents),
    }


def _compare(
    what: str, products: dict[str, Product], reference: tuple[Tensor, ...], wanted: float
) -> tuple[Table, list[Target]]:
    """Time the contestants and lay their figures beside the targets; the best of each kind of peer counts."""
    errors = {name: _error(product(), reference) for name, product in products.items() if not name.startswith("bare")}
    best = best_seconds(products, rounds=12, budget=40)
    rows = [
        [
            name,
            f"{1e3 * best[name]:.1f}",
            f"{best[name] / best[OURS]:.2f}",
            f"{errors[name]:.0e}" if name in errors else "—",
        ]
        for name in products
    ]
    fresh, traced, limit = (
        min(best[name] for name in products if name.startswith(start)) / best[OURS] for start in (FRESH, TRACED, "bare")
    )
    targets = [
        Target(
            f"JᵀJ product, {what}: faster than torch.func jvp + vjp", f"≥ {wanted:g}×", f"{fresh:.1f}×", fresh >= wanted
        ),
        Target(f"JᵀJ product, {what}: faster than torch.func linearize + vjp", "", f"{traced:.1f}×"),
        Target(f"JᵀJ product, {what}: time over the bare products", "≤ 1.25×", f"{1 / limit:.2f}×", 1 / limit <= 1.25),
    ]
    return Table(["contestant", "ms", "ratio", "error"], rows, f"**{what.capitalize()}**, 12 heads × 64"), targets


def _error(got: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> float:
    return max(float((g.double() - r).norm() / r.norm()) for g, r in zip(got, reference, strict=True))
