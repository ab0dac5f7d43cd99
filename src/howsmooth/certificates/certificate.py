"""Results: proved ends of a Lipschitz constant, and a proved radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Certificate:
    """A proved enclosure of ‖J‖₂ of every map at an input, or over a ball around it.

    Attributes:
        lower: no larger than the largest ‖J‖₂ on the set (at the input itself). upper: no smaller than any.
            Both hold in exact arithmetic: rounding is accounted for.
        methods: which proof gave the upper end of each map.
        radius: of the ball; 0 at the input. ball: "token" (every token moves by at most the radius) or "frobenius".
        per_head: whether the maps are the heads. seconds: time taken. notes: what else to know.
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
        """Everything as plain numbers and words."""
        return {
            "lower": self.lower.tolist(),
            "upper": self.upper.tolist(),
            "methods": list(self.methods),
            "radius": self.radius,
            "ball": self.ball,
            "per_head": self.per_head,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Robustness:
    """A radius within which a network's class is proved not to change.

    Attributes:
        label: the class. predicted: the class of the network; the radius is 0 where it is another.
        radius: proved, in the norm asked for. limiting: the class that stops it from growing, None without one.
        seconds: time taken. notes: what else to know.
    """

    label: int
    predicted: int
    radius: float
    limiting: int | None
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and words."""
        return {
            "label": self.label,
            "predicted": self.predicted,
            "radius": self.radius,
            "limiting": self.limiting,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
