"""Section 8: time to a rough input, beside Adam on Jacobians from autograd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, TokenMap, block_function, random_case
from benchmarks.report import Section, Table, Target
from howsmooth.worstcase import Ball

TEXT = """Seconds until ‖J(X)‖ of one random head of width 64 is as large as the peer gets, tokens in the ball of
radius 8, float64. Every peer is Adam with a step back into the ball, from the same random input as ours, without the
theorems' constructions on either side. Each has one dial that is set by an oracle: the peers their learning rate, ours
the number of steps. The value to reach is 99 % of the most that a peer finds at any rate in the seconds it is given.

`dense` has the Jacobian from `torch.func.jacrev` and its top singular vectors from ten warm power iterations on the
matrix, which is far quicker than a decomposition; the gradient goes back through jacrev. `power iteration` never has
the matrix: at every step it runs power iteration from a random vector to a residual of 1e-2 with products by double
backward, then differentiates ⟨u, Jv⟩. `our method` is the search of this package written with `torch.autograd.grad`
twice: vectors that follow X from step to step, one iteration each. The last table has `hs.worst_case` as it comes, with
constructions and random starts of its own: seconds to 95 % of the most it finds, and those of the first of all peers
that gets there, from any input at any rate; "> " is the longest that any of them was given, when none does."""
RADIUS = 8.0
RATES = (0.03, 0.1, 0.3)
STEPS = (25, 50, 100, 200, 400)
SHARE, FAR = 0.99, 0.95
WANTED = 10.0
PLANS = {
    64: {"dense": 30.0, "power iteration": 10.0, "our method": 10.0},
    512: {"power iteration": 30.0, "our method": 30.0},
}
"""Seconds of a peer at each learning rate."""
Trace = list[tuple[float, float]]
"""Seconds and the best value until then."""


class WarmSlope:
    """⟨u, Jv⟩ and its gradient by double backward, with u from the step before: g = Jᵀu, v = g/‖g‖, next u ∝ Jv."""

    def __init__(self, f: TokenMap, like: Tensor, seed: int = 0):
        self.f, self.u = f, _unit(torch.randn(like.shape, generator=_stream(seed), dtype=like.dtype))

    def __call__(self, x: Tensor) -> tuple[float, Tensor]:
        x, u = x.detach().requires_grad_(), self.u.requires_grad_()
        (pulled,) = torch.autograd.grad(self.f(x), x, u, create_graph=True)
        value = (pulled * _unit(pulled.detach())).sum()
        gradient, moved = torch.autograd.grad(value, [x, u])
        self.u = _unit(moved)
        return float(value.detach()), gradient


class PowerSlope:
    """The same with vectors found anew by power iteration at every step, on one graph."""

    def __init__(self, f: TokenMap, like: Tensor, rtol: float = 1e-2, most: int = 100):
        self.f, self.rtol, self.most, self.count = f, rtol, most, 0

    def __call__(self, x: Tensor) -> tuple[float, Tensor]:
        self.count += 1
        x = x.detach().requires_grad_()
        u = _unit(torch.randn(x.shape, generator=_stream(self.count), dtype=x.dtype)).requires_grad_()
        (pulled,) = torch.autograd.grad(self.f(x), x, u, create_graph=True)  # linear in u: the graph serves every u
        v = _unit(pulled.detach())
        for _ in range(self.most):
            (moved,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
            length = moved.norm()
            (w,) = torch.autograd.grad(self.f(x), x, moved / length)
            if bool((w - length * v).norm() <= self.rtol * length):
                break
            v = _unit(w)
        (pulled,) = torch.autograd.grad(self.f(x), x, moved / length, create_graph=True)
        value = (pulled * v).sum()
        return float(value.detach()), torch.autograd.grad(value, x)[0]


class DenseSlope:
    """The whole Jacobian, kept with its graph; singular vectors by power iteration on the matrix, warm."""

    def __init__(self, f: TokenMap, like: Tensor, rounds: int = 10):
        self.f, self.rounds = f, rounds
        self.v = _unit(torch.randn(like.numel(), generator=_stream(0), dtype=like.dtype))

    def __call__(self, x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_()
        jacobian = torch.func.jacrev(self.f)(x).reshape(-1, x.numel())
        with torch.no_grad():
            for _ in range(self.rounds):
                u = _unit(jacobian @ self.v)
                self.v = _unit(jacobian.mT @ u)
            u = _unit(jacobian @ self.v)
        value = u @ jacobian @ self.v
        return float(value.detach()), torch.autograd.grad(value, x)[0]


Peer = Callable[[TokenMap, Tensor], Callable[[Tensor], tuple[float, Tensor]]]
PEERS: dict[str, Peer] = {"dense": DenseSlope, "power iteration": PowerSlope, "our method": WarmSlope}


def adam(slope: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, rate: float) -> Iterator[float]:
    """Adam on ‖J(X)‖ with every token brought back into the ball; the value before each step."""
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=rate, maximize=True)
    while True:
        value, x.grad = slope(x)
        optimizer.step()
        with torch.no_grad():
            x.mul_((RADIUS / x.norm(dim=-1, keepdim=True)).clamp(max=1))
        yield value


def traced(values: Iterator[float], seconds: float) -> Trace:
    """The way up, for so many seconds and at least one step."""
    began, best, found = time.perf_counter(), 0.0, list[tuple[float, float]]()
    for value in values:
        best = max(best, value)
        found.append((time.perf_counter() - began, best))
        if found[-1][0] > seconds:
            break
    return found


def ours(case: Case, start: Tensor | None, steps: int) -> Trace:
    """The way up of `hs.worst_case`: from one input, or as it comes when there is none."""
    began, found = time.perf_counter(), list[tuple[float, float]]()

    def seen(step: int, steps: int, best: float) -> None:
        found.append((time.perf_counter() - began, best))

    alone = {} if start is None else {"start": start, "starts": 0, "constructions": False}
    hs.worst_case(case.attention, len(case.x), radius=RADIUS, steps=steps, progress=seen, **alone)  # type: ignore[arg-type]
    return found


def reached(traces: Sequence[Trace], value: float) -> float:
    """The least seconds in which one of them gets there; inf when none does."""
    return min((at for trace in traces for at, best in trace if best >= value), default=math.inf)


@dataclass(frozen=True)
class Race:
    """A peer against ours: the value to reach, and the seconds of both; ``more`` when the peer did not get there."""

    peer: str
    value: float
    theirs: float
    mine: float
    more: bool = False

    @property
    def ratio(self) -> float:
        return self.theirs / self.mine

    def row(self, name: str) -> list[str]:
        mark = "> " if self.more else ""
        return [name, f"{self.value:.4g}", f"{mark}{self.theirs:.3g}", f"{self.mine:.3g}", f"{mark}{self.ratio:.3g}×"]


def same_input(case: Case, seconds: dict[str, float], seed: int) -> tuple[list[Race], dict[str, list[Trace]]]:
    """All peers that have seconds, from one random input, and their ways up."""
    start = Ball(RADIUS).random(_stream(seed), *case.x.shape)
    f, found, ways = block_function(case), [], dict[str, list[Trace]]()
    mine = [ours(case, start, steps) for steps in STEPS]
    for name, budget in seconds.items():
        ways[name] = [traced(adam(PEERS[name](f, start), start, rate), budget) for rate in RATES]
        value = SHARE * max(trace[-1][1] for trace in ways[name])
        found.append(Race(name, value, reached(ways[name], value), reached(mine, value)))
    return found, ways


def as_it_comes(case: Case, ways: dict[str, list[Trace]]) -> Race:
    """`hs.worst_case` with its defaults to most of what it finds, against the peer that is first there, if any."""
    mine = ours(case, None, 200)
    value = FAR * mine[-1][1]
    times = {name: reached(traces, value) for name, traces in ways.items()}
    first = min(times, key=lambda name: times[name])
    if math.isfinite(times[first]):
        return Race(first, value, times[first], reached([mine], value))
    longest = max(trace[-1][0] for traces in ways.values() for trace in traces)
    return Race("none", value, longest, reached([mine], value), more=True)


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """n = 64 with all peers, n = 512 without the dense one."""
    plans = {16: dict.fromkeys(PEERS, 0.2)} if quick else PLANS
    section, last = Section("worst_case", "8. Time to a rough input", TEXT), list[list[str]]()
    columns = ["value", "theirs, s", "ours, s", "ratio"]
    for n, seconds in plans.items():
        case, rows, all_ways = random_case(n, width=64, heads=1).double(), list[list[str]](), dict[str, list[Trace]]()
        totals: dict[str, list[Race]] = {name: [] for name in seconds}
        ours(case, None, 2)  # a first call is not counted
        for seed in range(1 if quick else 2):
            report(f"n = {n}, input {seed}")
            found, ways = same_input(case, seconds, seed)
            for race in found:
                totals[race.peer].append(race)
                rows.append(race.row(f"input {seed}, {race.peer}"))
                all_ways.setdefault(race.peer, []).extend(ways[race.peer])
        if "dense" not in seconds:
            matrix, array = (n * 64) ** 2 * 8 / 2**30, n * 64 * n * n * 8 / 2**30
            text = f"dense: {matrix:.0f} GiB for J, {array:.0f} GiB for each n × n array of all its rows"
            rows.append([text, "", "", "", "cannot run"])
        section.tables.append(Table(["from the same input", *columns], rows, f"n = {n}:"))
        for name, runs in totals.items():
            ratio = sum(race.theirs for race in runs) / sum(race.mine for race in runs)
            goal, met = ("", None) if name == "our method" else (f"≥ {WANTED:g}×", ratio >= WANTED)
            section.targets.append(Target(f"same input, n = {n}: sooner than {name}", goal, f"{ratio:.3g}×", met))
        report(f"n = {n}, as it comes")
        whole = as_it_comes(case, all_ways)
        last.append(whole.row(f"n = {n}, first peer: {whole.peer}"))
        claim, measured = f"as it comes, n = {n}: sooner than all peers", whole.row("")[-1]
        section.targets.append(Target(claim, f"≥ {WANTED:g}×", measured, whole.ratio >= WANTED))
    section.tables.append(Table(["as it comes", *columns], last, "`hs.worst_case` with its defaults:"))
    return section


def _unit(t: Tensor) -> Tensor:
    return t / t.norm()


def _stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
