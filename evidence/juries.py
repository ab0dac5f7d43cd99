"""Numbers that proofs give for examples, beside the largest truths that a search met, to judge changed proofs by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from evidence.changes import Mutant, altered, unaltered
from evidence.moved_heads import against

OUTCOMES = ("caught", "any proves", "not smaller", "smaller")
SMALL = 1e-6
"""What a term may lose, or be, without being counted: the allowances for rounding are far below."""
ROUNDING = 1e-9
"""By how much a truth in float64 may pass a bound that it attains."""
Modules = Mapping[str, ModuleType]


@dataclass(frozen=True)
class Example:
    """Terms of a proof for one map or network, by name, in the order in which they are compared.

    Attributes:
        proved: what modules, as they are or changed, claim. truths: what each claim is to be above, entry by entry.
    """

    label: str
    proved: Callable[[Modules], Iterator[tuple[str, Tensor]]]
    truths: Mapping[str, Tensor]

    def terms(self, modules: Modules) -> Iterator[tuple[str, Tensor]]:
        """The claims; what overflowed on the way is none."""
        for name, bound in self.proved(modules):
            yield name, bound.detach().nan_to_num(nan=torch.inf, posinf=torch.inf)

    def shares(self) -> dict[str, float]:
        """The largest truth ÷ bound of every term, by the code as it is."""
        return {name: float(against(self.truths[name], bound).max()) for name, bound in self.terms(unaltered())}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    ``outcome`` is "caught" (some truth is above the changed term, or nothing is computed at all), "any proves" (what is
    changed is a choice of which each gives a proof; not tried), "not smaller" (no term of any case is smaller than
    before: the proof is as good or looser) or "smaller".
    """

    mutant: Mutant
    outcome: str
    by: str


class Jury:
    """Examples with what the code as it is proves of them, to judge many mutants by."""

    def __init__(self, examples: Iterable[Example]):
        self.examples = {example.label: example for example in examples}
        self.caught = Counter(dict.fromkeys(self.examples, 0))
        modules = unaltered()
        self.known = {label: dict(example.terms(modules)) for label, example in self.examples.items()}
        for label, terms in self.known.items():
            for name, bound in terms.items():
                if bool((against(self.examples[label].truths[name], bound) > 1 + ROUNDING).any()):
                    raise AssertionError(f"the proof as it is fails: {name} ({label}).")

    def verdict(self, mutant: Mutant) -> Verdict:
        """Examples that caught most so far go first."""
        smaller, least = "", 1 - SMALL
        try:
            with altered(mutant) as modules:
                for label, _ in self.caught.most_common():
                    for name, changed in self.examples[label].terms(modules):
                        bound, truth = self.known[label][name], self.examples[label].truths[name]
                        if bool((against(truth, changed) > 1 + ROUNDING).any()):
                            self.caught[label] += 1
                            return Verdict(mutant, "caught", f"{name} ({label})")
                        counted = (bound > SMALL) & bound.isfinite()
                        left = float((changed / bound)[counted].min()) if bool(counted.any()) else 1.0
                        if left < least:
                            smaller, least = f"{name} ({label}): {left:.2g} of it", left
        except Exception as error:  # whatever it is, nothing is proved
            return Verdict(mutant, "caught", type(error).__name__)
        return Verdict(mutant, "smaller" if smaller else "not smaller", smaller)


def agreement(found: Tensor, right: Tensor) -> Tensor:
    """One where a number is the right one up to rounding and zero elsewhere: a term for values that are no bounds."""
    scale = right.abs().amax().clamp_min(SMALL)
    return ((found.detach() - right).abs() <= 1e-9 * scale).to(torch.float64)


def largest(rows: Tensor) -> Tensor:
    """The largest of a batch, entry by entry; where a truth is no number there is none."""
    return rows.detach().nan_to_num(nan=0.0).amax(0)
