"""Attention on random pairs of measures: ratios of distances against the bounds, and against local constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.meanfield import LocalConstant, Measure, local_constant, ratio

TITLE = "Do the mean-field bounds hold between measures?"
SHAPES = ("any", "negative definite", "skew", "low rank")
WAYS = ("independent", "moved", "split")
UNMASKED = ("howsmooth.mean_field", "castin2024.mean_field")
MASKED = ("howsmooth.masked_mean_field",)
STEP = 1e-5
GRAINS = 2**20
"""Masses are multiples of 1/GRAINS, hence exact: rounding them by 1e-16 would change W₂ by 1e-8."""


@dataclass
class Tally:
    """Ratios of distances over a bound."""

    pairs: int = 0
    passed: int = 0
    largest: float = 0.0

    def add(self, found: float, bound: float) -> None:
        self.pairs += 1
        self.passed += found > bound * (1 + 1e-9)
        self.largest = max(self.largest, found / bound)


@dataclass
class Count:
    """What a run found: tallies by bound and way of choosing pairs, and how far close pairs are from their limit."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    deviations: dict[str, list[float]] = field(default_factory=lambda: {"moving": [], "splitting": []})


def head(generator: torch.Generator, shape: str, width: int, strength: float, causal: bool) -> hs.SelfAttention:
    """One random head with ‖A‖ = ``strength``."""
    a, v = (torch.randn(width, width, generator=generator, dtype=torch.float64) for _ in range(2))
    if shape == "negative definite":
        a = -a @ a.T
    elif shape == "skew":
        a = a - a.T
    elif shape == "low rank":
        a = torch.outer(a[0], a[1])
    a = a * strength / torch.linalg.matrix_norm(a, 2)
    return hs.SelfAttention.from_bilinear(a, v, mask="causal" if causal else None)


def portions(generator: torch.Generator, grains: int, count: int) -> Tensor:
    """So many grains in ``count`` heaps of very unequal size, none of them empty."""
    sizes = torch.exp(2 * torch.randn(count, generator=generator, dtype=torch.float64))
    heaps = 1 + (sizes / sizes.sum() * (grains - count)).floor().long()
    heaps[-1] += grains - heaps.sum()
    return heaps


def draw(generator: torch.Generator, width: int, radius: float, masses: Tensor | None) -> Measure:
    """A random measure on the ball: 1 to 6 atoms, weights over several orders of magnitude.

    Under a mask ``masses`` are the grains at each position, and each position has 1 to 3 atoms.
    """
    heaps = [GRAINS] if masses is None else masses.tolist()
    most = 6 if masses is None else 3
    counts = [int(torch.randint(1, min(most, heap) + 1, (1,), generator=generator)) for heap in heaps]
    m = sum(counts)
    x = torch.randn(m, width, generator=generator, dtype=torch.float64)
    depth = torch.rand(m, 1, generator=generator, dtype=torch.float64) ** 0.2  # most of them near the sphere
    x = x / x.norm(dim=-1, keepdim=True) * radius * depth
    grains = torch.cat([portions(generator, heap, count) for heap, count in zip(heaps, counts, strict=True)])
    places = torch.linspace(0, 1, len(heaps), dtype=torch.float64).repeat_interleave(torch.tensor(counts))
    return Measure(x, grains / GRAINS, None if masses is None else places)


def close(measure: Measure, constant: LocalConstant, part: str) -> Measure:
    """A measure near by, in the direction that is stretched most by moving whole atoms or by splitting one."""
    if part == "moving":
        assert constant.moving.right is not None
        direction = constant.moving.right
        return measure.moved(STEP * direction / direction.norm(dim=-1).max())
    assert constant.splitting.right is not None
    # Other images move by step², which must be little against the step of an atom of small weight.
    step = STEP * float(measure.weights[constant.atom].sqrt())
    return measure.split(constant.atom, step * constant.splitting.right[constant.atom])


def pairs(
    copies: int, causal: bool, seed: int = 2024
) -> Iterator[tuple[hs.SelfAttention, str, Measure, Measure, LocalConstant]]:
    """Heads with pairs of measures: drawn independently, or the second close to the first."""
    generator = torch.Generator().manual_seed(seed + causal)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator, dtype=torch.float64))

    for index in range(copies):
        width, radius = 1 + index % 3, uniform(0.3, 2.0)
        shape = SHAPES[index % 4] if width > 1 else SHAPES[index % 2]
        attention = head(generator, shape, width, uniform(0.1, 4.0) / radius**2, causal)
        masses = portions(generator, GRAINS, 1 + index % 6) if causal else None
        mu, nu = (draw(generator, width, radius, masses) for _ in range(2))
        constant = local_constant(attention, mu)
        yield attention, "independent", mu, nu, constant
        yield attention, "moved", mu, close(mu, constant, "moving"), constant
        yield attention, "split", mu, close(mu, constant, "splitting"), constant


def count(copies: int, causal: bool) -> Count:
    """Compare every pair with the bounds on the smallest ball that holds both measures."""
    result = Count()
    for attention, way, mu, nu, constant in pairs(copies, causal):
        found, radius = ratio(attention, mu, nu), max(mu.support_radius, nu.support_radius)
        for name in MASKED if causal else UNMASKED:
            bound = float(hs.bounds.get(name)(attention, over=hs.sets.Ball(radius)))
            result.tallies.setdefault((name, way), Tally()).add(found, bound)
        if way != "independent":
            part = {"moved": "moving", "split": "splitting"}[way]
            expected = float(getattr(constant, part).value.max())
            # A derivative much smaller than the rest is only seen at steps too small for rounding.
            if expected > 0.1 * float(constant):
                result.deviations[part].append(abs(found / expected - 1))
    return result


def causal_outlier(heavy: float, strength: float, steps: int = 200, decay: float = 0.95) -> Measure:
    """The first token opposite to all others, which have ``heavy`` times its mass, spread over [0, 1].

    Positions shrink geometrically towards the first, so that few atoms stand for many tokens.
    """
    first = 1 / (1 + heavy)
    ends = first + (1 - first) * decay ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    places = torch.cat([ends.new_tensor([first]), ends])
    weights = places.diff(prepend=places.new_zeros(1))
    x = torch.ones(len(places), 1, dtype=torch.float64)
    x[0] = -1 if strength else 1
    return Measure(x, weights, places)


def misapplied(strength: float, heavy: float) -> tuple[float, float, float]:
    """The ratio of a causal head between two measures, the unmasked bound, and the masked one; A = −strength, R = 1."""
    a, one = torch.full((1, 1), -strength, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    causal, unmasked = hs.SelfAttention.from_bilinear(a, one, mask="causal"), hs.SelfAttention.from_bilinear(a, one)
    mu = causal_outlier(heavy, strength)
    nu = close(mu, local_constant(causal, mu), "moving")
    radius = max(mu.support_radius, nu.support_radius)
    return (
        ratio(causal, mu, nu),
        float(hs.bounds.get(UNMASKED[0])(unmasked, over=hs.sets.Ball(radius))),
        float(hs.bounds.get(MASKED[0])(causal, over=hs.sets.Ball(radius))),
    )


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    rows, limits = [], []
    for causal in (False, True):
        where = "causal, d₂" if causal else "unmasked, W₂"
        progress(where)
        found = count(1000, causal)
        rows += [
            [where, name, way, tally.pairs, tally.passed, f"{tally.largest:.4f}"]
            for (name, way), tally in found.tallies.items()
        ]
        limits += [
            [where, part, len(errors), f"{max(errors):.1e}"] for part, errors in found.deviations.items() if errors
        ]
    progress("unmasked bounds under a mask")
    control = [
        [f"{strength:g}", f"{heavy:.0e}", *(f"{number:.4g}" for number in misapplied(strength, heavy))]
        for strength, heavy in ((0.0, 1e3), (0.0, 1e6), (0.1, 1e4), (3.0, 1e5), (4.0, 1e6))
    ]
    return [
        "Random heads in one to three dimensions (A of any kind, negative definite, skew or of rank one; ‖A‖R² from "
        "0.1 to 4) and measures on the ball with up to 6 atoms (up to 18 under a mask) of very unequal weights. Pairs "
        "are drawn independently, or the second measure is the first with its atoms moved, or one atom split in two, "
        "in the direction of its [local constant](../theory/mean-field.md). Every ratio of distances after and before "
        "is compared with the bound on the smallest ball that holds both.",
        table(["attention", "bound", "pairs", "number", "ratio > bound", "largest ratio/bound"], rows),
        "Close pairs have the ratio that the local constant says (steps of 1e-5 for atoms that move, 1e-5·√w for an "
        "atom of weight w that is split). Counted are the pairs whose part of the constant, by moving or by splitting, "
        "is at least a tenth of it:",
        table(["attention", "part", "pairs", "largest relative difference"], limits),
        "Negative control: the unmasked bound, misapplied to causal attention, is passed (A = −γ, V = 1, R = 1; one "
        "token against a mass that is heavier by the given factor, equal tokens when γ = 0). The masked bound is not.",
        table(["γ", "heavier by", "ratio in d₂", "unmasked bound (misapplied)", "masked bound"], control),
    ]
