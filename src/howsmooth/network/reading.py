"""The registry of rules: each operation of torch that is read has one, which says what becomes of its entries.

A rule takes the reading and the arguments of the operation, tensors of the recording as `Entries` (or as the forms of
`howsmooth.network.attention_forms`), and returns the form of the result, or None where it does not apply; the operation
then stands in the network as one that is left to automatic differentiation, under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from howsmooth.network.values import Entries, Value, Values

Form = Any
"""`Entries`, or a form of `howsmooth.network.attention_forms`."""


@dataclass
class Reading:
    """The values read so far, the place of the operation that is being read, and whether it is no attention."""

    values: Values
    place: str = ""
    plainly: bool = False

    @contextmanager
    def at(self, place: str, plainly: bool = False) -> Iterator[None]:
        """Read an operation at a place; ``plainly``: its tensors turned out to be no attention."""
        before = self.place, self.plainly
        self.place, self.plainly = place, plainly
        try:
            yield
        finally:
            self.place, self.plainly = before

    def whole(self, value: Value, shape: Sequence[int]) -> Entries:
        """A value as a tensor of a shape."""
        return Entries.of(value, shape)


Rule = Callable[..., Form]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule of operations."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def is_constant(value: Any) -> bool:
    """Whether an argument is a tensor or number that does not depend on the input."""
    return isinstance(value, Tensor | float | int)
