"""Results: proved ends of a Lipschitz constant, and a proved radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Certificate:
    """A proved enclosure of ‖J‖₂ of every map at an input, or over a ball around it.

    Attributes:
        lower: ≤ the maximum of ‖J‖₂ over the set (proved at the input itself). upper: ≥ that maximum.
            Both hold in exact arithmetic: rounding is accounted for.
        methods: the proof of the upper end of each map.
        radius: of the ball; 0 at the input. ball: "token" (every token moves by at most the radius) or "frobenius".
        per_head: whether the maps are the heads. seconds: time taken. notes: further remarks.
    """

    lower: Tensor
    upper: Tensor
    methods: tuple[str, ...]
    radius: float
    ball: str
    per_head: bool
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> Tensor:
        """Upper over lower end."""
        return self.upper / self.lower

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers and strings."""
        return _plain(self)


@dataclass(frozen=True)
class Robustness:
    """A radius within which a network's class is proved not to change.

    Attributes:
        label: the class. predicted: the network's class; the radius is 0 where it differs from the label.
        radius: proved, in the requested norm. limiting: the class that limits it, None without one.
        seconds: time taken. notes: further remarks.
    """

    label: int
    predicted: int
    radius: float
    limiting: int | None
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers and strings."""
        return _plain(self)


def _plain(result: Certificate | Robustness) -> dict[str, Any]:
    """The fields of a result, tensors and tuples as lists."""
    fields = vars(result)
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return fields | lists | {name: value.tolist() for name, value in fields.items() if isinstance(value, Tensor)}
