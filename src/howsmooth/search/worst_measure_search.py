r"""The roughest measure: positions and masses of a few atoms that attention stretches most.

For a measure μ = Σ w_i δ_{x_i} the local constant of attention in the Wasserstein distance is

.. math:: \max\big(\|D^{1/2} J D^{-1/2}\|,\ \max_i \|\partial_x\Gamma_\mu(x_i)\|\big), \qquad D = \mathrm{diag}(w),

(see `howsmooth.meanfield.local_stretch`), and every one is a lower bound of the constant of all measures on the set. It
is the norm of one matrix: that of the moving part with each atom written as two halves, which can also part. So it is
climbed like any norm, through fixed singular vectors (Danskin): the gradient of :math:`\langle u,
D^{1/2}JD^{-1/2}v\rangle` in atoms and masses at fixed u, v. Masses climb as logarithms: the roughest measures have
atoms of mass :math:`e^{-2a}, a = \|A\|R^2`, that every token attends to.

The constant of k atoms holds for long inputs, too: n tokens, n·w_i of them at x_i, have the same constant, to rounding
of n·w_i. That is why there is no n in it. Under a causal mask atoms are in order, each sees those before it and itself,
and the distance is d₂, which preserves positions. The tokens of one atom then see each other, which causal tokens at
different places do not: spread onto n tokens such a measure is a start for a search, and its value no bound for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import Count, Seed, validated
from howsmooth.attention import AttentionMap, LogitBias, as_attention_map
from howsmooth.attention.masks import Maps
from howsmooth.errors import InvalidInput
from howsmooth.meanfield import LocalConstant, Measure, local_constant
from howsmooth.meanfield.measure_attention import Past, weighted
from howsmooth.search.norm_gradient import unit
from howsmooth.sets import InputSet, Tokens
from howsmooth.sets.near_sets import Over, as_set

_RATE, _MASS_RATE = 0.1, 0.3
_JITTER = 0.05
_LIGHTEST = -300.0
"""Logarithm of the least mass: its root is what displacements are divided by."""
_LARGEST_LOGIT = 1e5
"""Beyond this float64 no longer holds the logarithms of masses beside the logits to the accuracy that J needs."""


@dataclass(frozen=True, eq=False)
class MeasureWitness:
    """A measure on the set and how much attention stretches it: a lower bound of the mean-field constant.

    Attributes:
        measure: atoms and weights; with positions under a mask.
        value: the lower end of the local constant there.
        constant: both of its parts, with vectors.
        over: the set, in plain Python.
        start: the start that won.
        history: the best value after each step.
        seed, steps, seconds, stopped: how it was found; stopped is "steps" or "interrupted".
    """

    measure: Measure
    value: float
    constant: LocalConstant
    over: dict[str, Any]
    start: str
    history: list[float]
    seed: int
    steps: int
    seconds: float
    stopped: str

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of ``value``."""
        return self.constant.lower_holds

    def tokens(self, n: int) -> Tensor:
        """n tokens distributed like the measure as nearly as they can, ``(n, d)``, in the order of the atoms.

        Every atom has at least one token, the rest go by the largest remainders of n·w_i.
        """
        weights = self.measure.weights
        if n < len(weights):
            raise InvalidInput(f"{len(weights)} atoms need at least as many tokens, got n={n}.")
        counts = (n * weights).floor().clamp(min=1)
        while counts.sum() > n:  # light atoms have been given more than their share: the heaviest pay
            counts[(counts - n * weights).masked_fill(counts <= 1, -math.inf).argmax()] -= 1
        order = (n * weights - counts).argsort(descending=True, stable=True)
        counts[order[: int(n - counts.sum())]] += 1
        return self.measure.atoms.repeat_interleave(counts.long(), dim=0)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"MeasureWitness({self.constant!r}; {self.measure!r})"


@validated
def worst_measure(
    attention: nn.Module,
    atoms: Count = 2,
    *,
    over: Over | None = None,
    ordered: bool | None = None,
    starts: Count = 16,
    steps: Count = 200,
    seed: Seed = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> MeasureWitness:
    """Search for the measure with at most this many atoms that attention stretches most.

    More than two atoms are reached in stages, each of up to twice as many: half of the starts are the best measures of
    the stage before with some atoms divided, the others random.

    Args:
        attention: softmax attention without positions, unmasked or causal.
        atoms: how many at most.
        over: the set of every atom: `Ball`, `Sphere` or `Normalised` of `howsmooth.sets`.
        ordered: whether atoms stand at increasing positions; by default as the mask of the attention has it.
        starts: how many climb side by side.
        steps: of every stage.
        seed: of the starts. The same seed gives the same measure.
        progress: called with the step, their number and the best value so far. Ctrl-C returns the best so far.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1))
    >>> witness = worst_measure(head, 2, over=hs.sets.Ball(1.0), starts=4, steps=100)
    >>> round(witness.value, 2)
    3.07
    """
    began = time.perf_counter()
    known = as_attention_map(attention)
    causal = known is not None and known.terms.is_causal
    where, in_order = _bounded(over), causal if ordered is None else ordered
    climbs: list[_Climb] = []
    history: list[float] = []
    stopped, sizes = "steps", _sizes(atoms)
    try:
        for size in sizes:
            climbs.append(_Climb(attention, size, where, in_order, starts, seed, climbs[-1] if climbs else None))
            for step in range(steps):
                climbs[-1].step(0.5 * (1 + math.cos(math.pi * step / steps)))
                history.append(max(float(climb.highest.max()) for climb in climbs))
                if progress is not None:
                    progress(len(history), steps * len(sizes), history[-1])
    except KeyboardInterrupt:
        if not climbs:
            raise
        stopped = "interrupted"
    candidates = [(climb, start) for climb in climbs for start in range(starts)]
    constants = [local_constant(attention, climb.measure(start)) for climb, start in candidates]
    best = max(range(len(candidates)), key=lambda i: constants[i].lower)
    climb, start = candidates[best]
    return MeasureWitness(
        measure=climb.measure(start),
        value=constants[best].lower,
        constant=constants[best],
        over=where.describe(),
        start=climb.names[start],
        history=history,
        seed=seed,
        steps=len(history),
        seconds=time.perf_counter() - began,
        stopped=stopped,
    )


def _sizes(atoms: int) -> list[int]:
    """The numbers of atoms of all stages.

    >>> _sizes(1), _sizes(3), _sizes(8)
    ([1], [2, 3], [2, 4, 8])
    """
    return [atoms] if atoms <= 2 else [*_sizes(-(-atoms // 2)), atoms]


def _bounded(over: Over | None) -> InputSet:
    """The set of every single atom; refused where atoms depend on each other."""
    region = as_set(over)
    if region.body not in ("ball", "sphere") or region.length is not None or isinstance(region, Tokens):
        raise InvalidInput("each atom needs a bounded set: give a Ball, a Sphere or a normalisation layer (over).")
    return region


class _Climb:
    """Many measures climbing side by side: coordinates z, ``(starts, atoms, r)``, and logarithms of their masses."""

    def __init__(
        self,
        attention: nn.Module,
        atoms: int,
        over: InputSet,
        ordered: bool,
        starts: int,
        seed: int,
        smaller: _Climb | None,
    ):
        self.over, self.ordered = over, ordered
        generator = torch.Generator().manual_seed(seed)
        width = getattr(as_attention_map(attention), "in_features", 1)
        over.check(atoms, width)
        z = over.coordinates(torch.stack([over.random(generator, atoms, width) for _ in range(starts)]))
        self.best = [z.clone(), torch.zeros(starts, atoms, dtype=torch.float64)]
        self.map: AttentionMap = weighted(attention, self.measure(0))[0]
        depth = min(max(4.0, 2 * _largest_logit(self.map, over.at(z))), -_LIGHTEST)
        log_mass = _random_masses(starts, atoms, depth, generator)
        self.rates = _RATE, max(_MASS_RATE, depth / 40)  # a hundred steps then suffice for the lightest atoms
        self.names = [f"random {start}, {atoms} atoms" for start in range(starts)]
        if smaller is not None:
            for start in range(starts // 2):
                z[start], log_mass[start] = smaller.divided(start, atoms, generator)
                self.names[start] = f"divided {start}, {atoms} atoms"
        self.z, self.log_mass = z.requires_grad_(), log_mass.requires_grad_()
        self.best = [self.z.detach().clone(), self.log_mass.detach().clone()]
        self.highest = torch.full((starts,), -math.inf, dtype=torch.float64)
        self.term = _Masses()
        halves = torch.arange(atoms, dtype=torch.float64).repeat_interleave(2)
        self.map = self.map.replace(logit_biases=[self.term, Past(halves)] if ordered else [self.term])
        self.left = torch.randn(starts, 2 * atoms, self.map.out_features, generator=generator, dtype=torch.float64)
        self.optimizer = torch.optim.Adam([{"params": [self.z]}, {"params": [self.log_mass]}], maximize=True)
        self.left = self._follow(rounds=8)[0]

    def divided(self, rank: int, atoms: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One of the best measures so far with some atoms divided into equal parts, which then part a little."""
        start = self.highest.argsort(descending=True, stable=True)[rank]
        z, log_mass = self.best[0][start], self.best[1][start]
        k = len(z)
        further = torch.randint(k, (atoms - k,), generator=generator)
        index = torch.cat([torch.arange(k), further]).sort().values
        parts = index.bincount(minlength=k)[index]
        moved = z[index] + _JITTER * torch.randn(atoms, z.shape[1], generator=generator, dtype=torch.float64)
        return self.over.restrict_(moved), log_mass[index] - parts.log()

    def measure(self, start: int) -> Measure:
        """The best of a start."""
        x, weights = self.over.at(self.best[0][start]), self.best[1][start].exp()
        k = len(weights)
        positions = torch.arange(1, k + 1, dtype=torch.float64) / k if self.ordered else None
        return Measure(x, weights / weights.sum(), positions)

    def step(self, rate: float) -> None:
        """One step of every start, with this share of the full step length."""
        self.left, value = self._follow()
        if not value.isfinite().any():
            raise InvalidInput("the attention logits overflow on this set: choose a smaller radius.")
        better = value.detach() > self.highest
        self.highest = torch.where(better, value.detach(), self.highest)
        for best, now in zip(self.best, (self.z, self.log_mass), strict=True):
            best[better] = now.detach()[better]
        for group, full in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = full * (0.01 + 0.99 * rate)
        self.optimizer.zero_grad()
        value.clamp(min=1e-300).log().sum().backward()
        for free in (self.z, self.log_mass):
            assert free.grad is not None
            free.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        with torch.no_grad():
            self.over.restrict_(self.z)
            self.log_mass.copy_(self.log_mass.log_softmax(-1).clamp(min=_LIGHTEST))

    def _follow(self, rounds: int = 1) -> tuple[Tensor, Tensor]:
        """Steps of the power method: the next u, and ⟨u, D^{1/2}JD^{-1/2}v⟩ with u, v fixed."""
        # Two halves of each atom are all that its mass can do.
        x = self.over.at(self.z).repeat_interleave(2, 1)
        log_mass = (self.log_mass.log_softmax(-1) - math.log(2)).repeat_interleave(2, 1)
        root = (log_mass / 2).exp()[..., None]
        self.term.weigh(log_mass)
        left = self.left
        for _ in range(rounds):
            with torch.no_grad():
                right = unit(torch.func.vjp(self.map, x)[1](root * left)[0] / root)
            image = root * torch.func.jvp(self.map, (x,), (right / root,))[1]
            left = unit(image.detach())
        return left, (left * image).flatten(1).sum(1)


def _largest_logit(attention: AttentionMap, x: Tensor) -> float:
    query, key, _ = attention.staged(x)
    largest = float((query @ key.mT).abs().max())
    if not largest <= _LARGEST_LOGIT:
        raise InvalidInput(f"logits as large as {largest:.2g} drown the masses of atoms: choose a smaller radius.")
    return largest


def _random_masses(starts: int, atoms: int, depth: float, generator: torch.Generator) -> Tensor:
    """Logarithms of masses that sum to one: of order one in the first start, down to −depth in the last."""
    depths = torch.logspace(0, math.log2(depth), starts, base=2.0, dtype=torch.float64)[:, None]
    return (-depths * torch.rand(starts, atoms, generator=generator, dtype=torch.float64)).log_softmax(-1)


class _Masses(LogitBias):
    """Key j of start s gains ln w_sj."""

    log_mass: Tensor

    def weigh(self, log_mass: Tensor) -> None:
        """Take these logarithms of masses, ``(starts, keys)``."""
        self.log_mass = log_mass

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        return self.log_mass[maps.batch][:, None, cols]
