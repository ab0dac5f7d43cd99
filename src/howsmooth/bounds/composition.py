r"""Whole stacks of layers: the chain rule multiplies constants, a residual adds one.

.. math:: \mathrm{Lip}(g\circ f) \le \mathrm{Lip}(g)\,\mathrm{Lip}(f), \qquad
          \mathrm{Lip}(x + f(x)) \le 1 + \mathrm{Lip}(f).

Both are reached by linear maps, and both are far from reached by real layers: the product over a model is a true bound
and says by its own size why it is of no use. `Stack.vacuous` names the culprit.

Every factor bounds the Jacobian of its stage at all points the stage can be fed with: attention behind a normalisation
is bounded on the image of that normalisation. With variance floors the product bounds the Jacobian at every input for
which each normalisation sees tokens of at least that variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput


def residual(lip: float) -> float:
    """x ↦ x + f(x): 1 + Lip(f), reached by f(x) = Lip·x.

    >>> residual(2.5)
    3.5
    """
    return 1 + lip


def chain(lips: Iterable[float]) -> float:
    """f_k ∘ … ∘ f_1: the product of the constants.

    >>> chain([2.0, 0.5, 3.0])
    3.0
    """
    return math.prod(lips)


@dataclass(frozen=True)
class Stage:
    """One factor of the product.

    Attributes:
        name: "layer 0: attention"; what stands before the colon groups stages into layers.
        log10: of its constant (−∞ for a constant map).
        scope: where the constant holds.
        note: how it was found.
        kind: "normalisation", "attention", "MLP", "residual" or "map".
        branch: the stages inside a residual or a sum. lengths: of each branch of a sum. skips: how often x itself is
            added.

    >>> Stage.of("double", 2.0).log10
    0.301...
    >>> round(10 ** Stage.around("skip", [Stage.of("double", 2.0)]).log10, 6)
    3.0
    """

    name: str
    log10: float
    scope: str = "everywhere"
    note: str = ""
    kind: str = "map"
    branch: tuple[Stage, ...] = ()
    lengths: tuple[int, ...] = ()
    skips: int = 1

    @classmethod
    @validated
    def of(cls, name: str, lip: float, scope: str = "everywhere", note: str = "", kind: str = "map") -> Stage:
        """A stage with that constant."""
        if not lip >= 0:
            raise InvalidInput(f"a Lipschitz constant is not negative, got {lip} for {name!r}.")
        return cls(name, math.log10(lip) if lip > 0 else -math.inf, scope, note, kind)

    @classmethod
    @validated
    def around(cls, name: str, branch: Iterable[Stage]) -> Stage:
        """x + branch(x)."""
        return cls.summed(name, [list(branch)], 1)

    @classmethod
    def summed(cls, name: str, branches: Sequence[Sequence[Stage]], skips: int) -> Stage:
        """A sum of branches, and of x as often as it skips them: constants of branches add up."""
        inside = [sum(stage.log10 for stage in branch) for branch in branches] + [0.0] * skips
        largest = max(inside, default=-math.inf)
        total = largest
        if math.isfinite(largest):
            total += math.log10(sum(10 ** (one - largest) for one in inside))
        note = "1 + the product of its branch" if skips and len(branches) == 1 else "sum over its branches"
        flat = tuple(stage for branch in branches for stage in branch)
        return cls(name, total, "as its branch", note, "residual", flat, tuple(map(len, branches)), skips)

    def leaves(self) -> Iterator[Stage]:
        """The stage itself, or what its branch consists of."""
        return (leaf for stage in self.branch for leaf in stage.leaves()) if self.branch else iter([self])

    def with_one(self, chosen: Callable[[Stage], bool]) -> Stage:
        """The same with every chosen leaf replaced by a map of constant 1."""
        if self.branch:
            every = iter([stage.with_one(chosen) for stage in self.branch])
            return Stage.summed(self.name, [list(islice(every, length)) for length in self.lengths], self.skips)
        return replace(self, log10=0.0) if chosen(self) else self


@dataclass(frozen=True)
class Stack:
    """A composition of stages and the product bound on it.

    >>> norm = Stage.of("layer 0: norm", 1e6, kind="normalisation")
    >>> print(Stack((Stage.around("layer 0: skip", [norm, Stage.of("layer 0: MLP", 99.0, kind="MLP")]),)))
    stage               log10  scope          note
    layer 0: skip       8.00   as its branch  1 + the product of its branch
      layer 0: norm     6.00   everywhere
      layer 0: MLP      2.00   everywhere
    total               8.00                  upper bound, rounding modelled
    10^8.0: 1 normalisation contributes 6.0 of the 8.0 digits; with constant 1 instead the bound would be 10^2.0
    """

    stages: tuple[Stage, ...]

    @property
    def guarantee(self) -> Guarantee:
        """Of the total: theorems evaluated and multiplied in float64, without rounding upward."""
        return Guarantee.MODELLED

    @property
    def log10(self) -> float:
        """log10 of the bound on the whole stack; the bound itself may be too large for a float."""
        return sum(stage.log10 for stage in self.stages)

    @property
    def leaves(self) -> tuple[Stage, ...]:
        """Every stage that is not a residual, in order."""
        return tuple(leaf for stage in self.stages for leaf in stage.leaves())

    def contribution(self, chosen: Callable[[Stage], bool]) -> float:
        """By how many digits the total would fall, had the chosen leaves constant 1."""
        return self.log10 - sum(stage.with_one(chosen).log10 for stage in self.stages)

    @property
    def kinds(self) -> dict[str, float]:
        """The contribution of each kind of stage, largest first; inside residuals they need not add up to the total."""
        names = dict.fromkeys(leaf.kind for leaf in self.leaves)
        digits = {name: self.contribution(lambda leaf, name=name: leaf.kind == name) for name in names}  # type: ignore[misc]
        return dict(sorted(digits.items(), key=lambda item: -item[1]))

    @property
    def worst(self) -> Stage:
        """The stage that contributes most."""
        return max(self.leaves, key=lambda stage: self.contribution(lambda leaf: leaf is stage))

    @property
    def layers(self) -> dict[str, float]:
        """log10 of each layer: of all stages with the same name before the colon."""
        digits: dict[str, float] = {}
        for stage in self.stages:
            name = stage.name.partition(":")[0]
            digits[name] = digits.get(name, 0.0) + stage.log10
        return digits

    @property
    def vacuous(self) -> str:
        """How large the bound is and what makes it so, by number."""
        if math.isinf(self.log10):
            return "0: a stage is constant" if self.log10 < 0 else "infinite: a stage has no finite constant"
        kind, digits = next(iter(self.kinds.items()))
        count = sum(leaf.kind == kind for leaf in self.leaves)
        verb = f"{kind} contributes" if count == 1 else f"{kind}s contribute"
        return (
            f"10^{self.log10:.1f}: {count} {verb} {digits:.1f} of the {self.log10:.1f} digits; "
            f"with constant 1 instead the bound would be 10^{self.log10 - digits:.1f}"
        )

    def __str__(self) -> str:
        total = ("total", f"{self.log10:.2f}", "", f"upper bound, {self.guarantee.words()}")
        rows = [("stage", "log10", "scope", "note"), *_rows(self.stages), total]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        widths[0] += 2
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([*(line.rstrip() for line in lines), self.vacuous])

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers and strings."""
        stages = [asdict(stage) for stage in self.stages]
        facts = {"log10": self.log10, "guarantee": self.guarantee.name.lower(), "worst": self.worst.name}
        return facts | {"vacuous": self.vacuous, "stages": stages}


def _rows(stages: Iterable[Stage], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    for stage in stages:
        yield "  " * depth + stage.name, f"{stage.log10:.2f}", stage.scope, stage.note
        yield from _rows(stage.branch, depth + 1)
