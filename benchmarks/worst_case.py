"""Time to a rough input, beside Adam on Jacobians from autograd."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, TokenMap, block_function, random_case
from benchmarks.report import Section, Table, Target
from howsmooth.sets import Ball

TEXT = """Seconds until ‖J(X)‖ of one random head of width 64 has a given value, tokens in the ball of radius 8, in
float64. Every peer is Adam with a step back into the ball, from the same random input as ours, without the theorems'
constructions on either side. Each has dials that an oracle sets anew for every value: the peers their learning rate,
constant or falling along a cosine over a number of steps; ours the number of steps. Values are shares of the most that
a peer finds in the seconds it is given: near its end every ascent is slow, so that a single share would say what one
likes. A target counts as met when it is met at every share, and from every input.

`dense` has the Jacobian from `torch.func.jacrev` and its top singular vectors from ten warm power iterations on the
matrix, which is far quicker than a decomposition; the gradient goes back through jacrev. `power iteration` never has
the matrix: at every step it runs power iteration from a random vector to a residual of 1e-2 with products by double
backward, then differentiates ⟨u, Jv⟩. `our method` is the search of this package written with `torch.autograd.grad`
twice: vectors that follow X from step to step, one iteration each. The last table has `hs.worst_case` as it comes, with
constructions and random starts of its own: seconds to 95 % of the most it finds, and those of the first of all peers
that gets there, from any input with any dials; "> " is the time that each of them had, when none does."""
RADIUS = 8.0
DIALS: tuple[tuple[float, int | None], ...] = ((0.1, None), (0.3, None), (0.1, 100), (0.1, 400), (0.3, 100), (0.3, 400))
"""Learning rates of the peers, each constant or falling over so many steps."""
STEPS = (25, 50, 100, 200, 400)
SHARES, FAR = (0.5, 0.75, 0.9, 0.95, 0.99), 0.95
WANTED = 10.0
PLANS = {
    64: {"dense": 20.0, "power iteration": 10.0, "our method": 10.0},
    512: {"power iteration": 30.0, "our method": 30.0},
}
"""Most seconds of a peer with each setting of its dials."""
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


def adam(
    slope: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, rate: float, steps: int | None = None
) -> Iterator[float]:
    """Adam on ‖J(X)‖ with every token brought back into the ball; the value before each step.

    The rate is constant, or with a number of steps falls to a hundredth along a cosine.
    """
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=rate, maximize=True)
    falls = steps and torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, rate / 100)
    for _ in itertools.count() if steps is None else range(steps):
        value, x.grad = slope(x)
        optimizer.step()
        if falls:
            falls.step()
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
    hs.worst_case(case.attention, len(case.x), over=hs.sets.Ball(RADIUS), steps=steps, progress=seen, **alone)  # type: ignore[arg-type]
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

    @property
    def written(self) -> str:
        mark = "> " if self.more else ""
        return f"{mark}{self.theirs:.3g} / {self.mine:.3g} = {mark}{self.ratio:.3g}×"


def same_input(case: Case, seconds: dict[str, float], seed: int) -> tuple[list[Race], dict[str, list[Trace]]]:
    """All peers that have seconds, from one random input, to every share of their best; and their ways up."""
    start = Ball(RADIUS).random(_stream(seed), *case.x.shape)
    f, found, ways = block_function(case), [], dict[str, list[Trace]]()
    mine = [ours(case, start, steps) for steps in STEPS]
    for name, budget in seconds.items():
        ways[name] = [traced(adam(PEERS[name](f, start), start, *dials), budget) for dials in DIALS]
        most = max(trace[-1][1] for trace in ways[name])
        for value in (share * most for share in SHARES):
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
    given = min(max(trace[-1][0] for trace in traces) for traces in ways.values())
    return Race("none", value, given, reached([mine], value), more=True)


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """n = 64 with all peers, n = 512 without the dense one."""
    plans = {16: dict.fromkeys(PEERS, 0.1)} if quick else PLANS
    section, last = Section("worst_case", "Time to a rough input", TEXT), list[list[str]]()
    for n, seconds in plans.items():
        case, rows, every = random_case(n, width=64, heads=1).double(), list[list[str]](), dict[str, list[Trace]]()
        ratios: dict[str, list[float]] = {name: [] for name in seconds}
        ours(case, None, 2)  # a first call is not counted
        for seed in range(2 if n == 64 else 1):
            report(f"n = {n}, input {seed}")
            found, ways = same_input(case, seconds, seed)
            for name in seconds:
                races = [race for race in found if race.peer == name]
                ratios[name] += [race.ratio for race in races]
                rows.append([f"{name}, input {seed}", f"{races[-1].value:.4g}", *(race.written for race in races)])
                every.setdefault(name, []).extend(ways[name])
        if "dense" not in seconds:
            matrix, array = (n * 64) ** 2 * 8 / 2**30, n * 64 * n * n * 8 / 2**30
            text = f"dense cannot run: {matrix:.0f} GiB for J, {array:.0f} GiB for each n × n array of all its rows"
            rows.append([text, *[""] * (1 + len(SHARES))])
        shares = [f"{100 * share:g} %" for share in SHARES]
        caption = f"n = {n}, seconds of the peer / ours:"
        section.tables.append(Table(["from the same input", f"{shares[-1]} is", *shares], rows, caption))
        for name, seen in ratios.items():
            claim, measured = f"same input, n = {n}: sooner than {name}", f"{min(seen):.3g}–{max(seen):.3g}×"
            section.targets.append(Target(claim, f"≥ {WANTED:g}×", measured, min(seen) >= WANTED))
        report(f"n = {n}, as it comes")
        whole = as_it_comes(case, every)
        last.append([f"n = {n}", f"{whole.value:.4g}", whole.peer, whole.written])
        claim, measured = f"as it comes, n = {n}: sooner than all peers", whole.written.partition("= ")[2]
        section.targets.append(Target(claim, f"≥ {WANTED:g}×", measured, whole.ratio >= WANTED))
    columns = ["as it comes", "value", "first peer", "seconds of the peer / ours"]
    section.tables.append(Table(columns, last, "`hs.worst_case` with its defaults:"))
    return section


def _unit(t: Tensor) -> Tensor:
    return t / t.norm()


def _stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
