"""Every upper bound of the catalogue against gradient ascent, and false bounds that the same ascent breaks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.ascent import ROUNDING, Case, Free, ascend, exact, ratios
from evidence.bound_cases import SCOPES, Draw, coordinates, kinds, places, stream
from evidence.tables import table
from howsmooth.bounds import CATALOGUE, Bound, Setting, l2_bounds
from howsmooth.sets.ellipsoid import Ellipsoid

TITLE = "Upper bounds under gradient ascent"


@dataclass
class Record:
    """What the attack on one bound has found."""

    maximisations: int = 0
    violations: int = 0
    largest: float = 0.0
    where: str = ""

    def add(self, found: Tensor, case: Case) -> None:
        """Ratios measured/bound of the starts of a case."""
        assert bool(found.isfinite().all()), f"{case.where}: {found}"
        self.maximisations += len(found)
        self.violations += int((found > 1 + ROUNDING).sum())
        if float(found.max()) > self.largest:
            self.largest, self.where = float(found.max()), case.where


def upper_bounds() -> list[Bound]:
    """What is to be attacked by climbing; that of the largest token has an attack of its own in the tests."""
    return [bound for bound in CATALOGUE.values() if bound.side == "upper" and bound.norm != "token"]


@dataclass(frozen=True)
class Effort:
    """At least so many maximisations for every bound and place, from so many starts at a time, in so many steps."""

    least: int = 300
    starts: int = 15
    steps: int = 100
    patience: int = 3000
    """Cases refused in a row after which a bound counts as left without cases."""


FULL = Effort()


def attack(
    bounds: Iterable[Bound], effort: Effort = FULL, progress: Callable[[str], None] = print
) -> dict[str, Record]:
    """Maximisations of measured/bound for every bound at each of its places.

    A bound that does not depend on what is free is closest to the largest norm, so that one ascent serves all such
    bounds; bounds at a point and bounds of all weights are climbed one by one.
    """
    bounds = list(bounds)
    records = {bound.name: Record() for bound in bounds}
    for place in SCOPES:
        here = [bound for bound in bounds if place in places(bound)]
        if place == "free":
            groups = [[bound] for bound in here]
        else:
            groups = [[bound for bound in here if bound.norm == norm] for norm in sorted({b.norm for b in here})]
        for group in groups:
            missing = {bound.name: effort.least for bound in group}
            for case in cases_for(place, group, missing, effort):
                _climb(case, group, place == "free", effort.steps, missing, records)
                progress(f"{place}, {group[0].name}{' and others' * (len(group) > 1)}: {max(missing.values())} to go")
    return records


def _climb(
    case: Case, group: list[Bound], alone: bool, steps: int, missing: dict[str, int], records: dict[str, Record]
) -> None:
    # A bound that is climbed along is evaluated start by start in every step, hence fewer of them.
    free = ascend(case, group[0] if alone else None, group[0].norm, steps * 3 // 5 if alone else steps)
    measured = exact(case, free, group[0].norm)
    for bound in taking(group, case):
        records[bound.name].add(ratios(case, free, bound, measured), case)
        missing[bound.name] -= case.starts


def taking(group: Iterable[Bound], case: Case) -> list[Bound]:
    """The bounds whose assumptions hold in a case."""
    where = case.setting({name: value[0] for name, value in case.start.items()})
    return [bound for bound in group if bound.refusal(where) is None]


def cases_for(place: str, group: list[Bound], missing: dict[str, int], effort: Effort) -> Iterator[Case]:
    """Cases that some bound with maximisations missing takes, until none is missing."""
    names = sorted({kind for bound in group for kind in kinds(bound)})
    refused = 0
    for case in stream(names, place, effort.starts):
        wanting = {bound.name for bound in group if missing[bound.name] > 0}
        if not wanting:
            return
        if any(bound.name in wanting for bound in taking(group, case)):
            refused = 0
            yield case
        else:
            refused += 1
            assert refused < effort.patience, f"no case is drawn ({place}) that {', '.join(sorted(wanting))} take"


Claims = Iterator[tuple[Case, Tensor]]


@dataclass(frozen=True)
class Control:
    """A false bound: cases, each with what the bound claims there."""

    words: str
    norm: float
    claims: Callable[[], Claims]


def disprove(control: Control, most: int | None = None) -> Record:
    """The attack on a false bound, on all its cases or the first few."""
    record = Record()
    for case, claimed in itertools.islice(control.claims(), most):
        record.add(exact(case, ascend(case, None, control.norm), control.norm) / claimed, case)
    return record


def unmasked_constant_under_a_mask(name: str) -> Claims:
    """Nine causal maps of width 2 with 20 starts each; the bound is told that there is no mask."""
    for number in range(9):
        draw = Draw(number)
        n, radius, strength = draw.pick(8, 16, 24), draw.between(0.3, 1.5), draw.between(0.05, 2.0)
        score = strength * draw.square(draw.pick("random", "skew", "negative definite", "low rank"), 2)
        masked, unmasked = (_head(score, mask) for mask in ("causal", None))
        tokens = Ellipsoid.ball(radius, 2)
        case = Case(f"n={n}", {"z": coordinates(draw, n, 2, 20)}, masked, tokens)
        yield case, hs.bounds.get(name).at(Setting(unmasked({}), n, tokens))


def half_the_radius() -> Claims:
    """The √n bound for a ball of half the radius that tokens have."""
    head = _head(-torch.eye(1, dtype=torch.float64), None)
    for n in (64, 100):
        case = Case(f"n={n}", {"z": coordinates(Draw(n), n, 1, 12)}, head, Ellipsoid.ball(1.5, 1))
        yield case, hs.bounds.get("howsmooth.sqrt_n")(head({}), n=n, over=hs.sets.Ball(0.75))


def _head(score: Tensor, mask: str | None) -> Callable[[Free], nn.Module]:
    identity = torch.eye(len(score), dtype=torch.float64)
    return lambda _: hs.SelfAttention.from_bilinear(score, identity, mask=mask)


def wrong_power() -> Claims:
    """Lip₂ of L2 attention with ‖W_h‖² instead of ‖W_h‖⁴ in the root, at N = 2, D = H = 1, W = 10."""
    n, weight = 2, 10.0
    claimed = torch.tensor(n**0.5 * (4 * l2_bounds.phi_inverse(n - 1) + 1) * weight, dtype=torch.float64)
    yield _l2_case(weight, n, 0.1), claimed


def tied_bound_on_l2(weight: float, size: float, **broken: object) -> Claims:
    """Lip_∞ of proper L2 attention claimed for one whose definition is ``broken``."""
    n, one = 3, torch.ones(1, 1, 1, dtype=torch.float64)
    claimed = l2_bounds.lip_inf(weight * one, one, one, n)
    yield _l2_case(weight, n, size, **broken), claimed


def _l2_case(weight: float, n: int, size: float, **options: object) -> Case:
    """Tokens 0, b, −b and others from 0.1 to 10 times ``size``, free; all weights but W are one."""
    draw, one = Draw(n), torch.ones(1, 1, dtype=torch.float64)
    z = size * torch.tensor([draw.between(0.1, 10) for _ in range(12)], dtype=torch.float64)[:, None, None]
    start = {"z": z * (torch.tensor([0.0, 1.0, -1.0])[:n, None] + 0.1 * draw.normal(12, n, 1))}
    return Case(f"W={weight:g}", start, lambda _: hs.L2SelfAttention(weight * one, one, **options))  # type: ignore[arg-type]


CONTROLS = [
    *(
        Control(
            f"`{name}`, for unmasked attention, under a causal mask", 2, partial(unmasked_constant_under_a_mask, name)
        )
        for name in ("howsmooth.mean_field", "castin2024.mean_field")
    ),
    Control("`howsmooth.sqrt_n` with half the radius", 2, half_the_radius),
    Control("Lip₂ of L2 attention with ‖W_h‖² in the root, W = 10", 2, wrong_power),
    Control(
        "`kim2021.lip_inf` with W^Q ≠ W^K",
        math.inf,
        partial(tied_bound_on_l2, 1.0, 10.0, key=torch.full((1, 1), 0.5, dtype=torch.float64)),
    ),
    Control(
        "`kim2021.lip_inf` without the factor A_h", math.inf, partial(tied_bound_on_l2, 0.1, 10.0, value_factor=False)
    ),
    Control(
        "`kim2021.lip_inf` with a token hidden from itself",
        math.inf,
        partial(tied_bound_on_l2, 1.0, 3.0, mask=~torch.eye(3, dtype=torch.bool)),
    ),
]


def _ratio(value: float) -> str:
    """Four digits, or how little is missing to one."""
    return f"1 − {1 - value:.0e}" if 0.99995 <= value < 1 else f"{value:.4f}"


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    found = attack(upper_bounds(), progress=progress)
    rows = [
        [
            f"`{name}`",
            hs.bounds.catalogue.SCOPES[CATALOGUE[name].scope],
            r.maximisations,
            r.violations,
            _ratio(r.largest),
            r.where,
        ]
        for name, r in sorted(found.items())
    ]
    controls = []
    for control in CONTROLS:
        progress(control.words)
        r = disprove(control)
        controls.append([control.words, r.maximisations, r.violations, _ratio(r.largest)])
    return [
        "Each maximisation is one start of gradient ascent on measured/bound, run to its end. Free are the tokens "
        "(within the set or neighbourhood the bound is for), the masses of atoms for bounds on measures, and the "
        "weights before the output matrix in part of the cases on sets and in all for bounds that hold everywhere. "
        "Starts are random or the constructions of the lower bounds. The measured value is the norm of the dense "
        "float64 autograd Jacobian; for measures that of D^½ J D^-½ with every atom in two halves, which is the "
        "local constant in the Wasserstein distance. A violation is a ratio above "
        f"1 + {ROUNDING:g}. Shapes on sets are n = 2 to 64 and d = 1 to 8, up to 12 atoms, and n·d ≤ 48 elsewhere.",
        table(["bound", "holds", "maximisations", "violations", "largest measured/bound", "where"], rows),
        "Negative controls: bounds that are known to be false, under the same ascent.",
        table(["false bound", "maximisations", "violations", "largest measured/bound"], controls),
    ]
