"""Results: ends of a Lipschitz constant, and a proved radius."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any

from torch import Tensor

from howsmooth._util.common import rounded
from howsmooth._util.display import card
from howsmooth._util.guarantee import Guarantee, with_guarantees

_SHOWN = 8
"""Maximum number of heads that a text shows."""


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """An enclosure of ‖J‖₂ of every map at an input, or over a ball around it, with a proved upper end.

    Attributes:
        lower: ≤ the maximum of ‖J‖₂ over the set, found at the input itself. upper: ≥ that maximum; it holds in exact
            arithmetic, rounding included.
        methods: the proof of the upper end of each map.
        radius: of the ball; 0 at the input. ball: "token" (every token moves by at most the radius) or "frobenius".
        per_head: whether the maps are the heads. seconds: time taken. notes: further remarks.
        lower_holds: the guarantee of the lower ends: PROVED as the upper ends are, or MODELLED where a map is too
            large for a proof from below and its lower end is that of `howsmooth.measure`.

    >>> import torch, howsmooth as hs
    >>> hs.certify(hs.SelfAttention.from_bilinear(torch.eye(2), torch.eye(2)), torch.eye(2))  # doctest: +ELLIPSIS
    ‖J‖₂ at the input: ≥ 1..., ≤ 1..., proved (cholesky, ... s)
    """

    lower: Tensor
    upper: Tensor
    methods: tuple[str, ...]
    radius: float
    ball: str
    per_head: bool
    seconds: float
    notes: tuple[str, ...] = ()
    lower_holds: Guarantee = Guarantee.PROVED

    @property
    def upper_holds(self) -> Guarantee:
        """The guarantee of the upper ends."""
        return Guarantee.PROVED

    @property
    def ratio(self) -> Tensor:
        """Upper over lower end."""
        return self.upper / self.lower

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers and strings."""
        return _plain(self)

    def ends(self, index: int = 0) -> str:
        """Both ends of one map with their guarantees, rounded outwards."""
        lower, upper = (float(end.reshape(-1)[index]) for end in (self.lower, self.upper))
        below, above = f"≥ {rounded(lower, ROUND_FLOOR)}", f"≤ {rounded(upper, ROUND_CEILING)}"
        return with_guarantees(below, above, self.lower_holds, self.upper_holds)

    def __repr__(self) -> str:
        if not self.per_head:
            return f"{self._name}: {self.ends()} ({self.methods[0]}, {self.seconds:.2g} s)"
        heads = [f"head {head}: {self.ends(head)} ({method})" for head, method in enumerate(self.methods[:_SHOWN])]
        more = len(self.methods) - _SHOWN
        return "\n".join([f"{self._name}, {self.seconds:.2g} s", *heads, *[f"… {more} more heads"] * (more > 0)])

    def _repr_html_(self) -> str:
        names = [f"head {head}" if self.per_head else "block" for head in range(len(self.methods))]
        facts = [(name, f"{self.ends(number)} ({self.methods[number]})") for number, name in enumerate(names)]
        return card(self._name, facts, self.notes)

    @property
    def _name(self) -> str:
        if not self.radius:
            return "‖J‖₂ at the input"
        near = {"token": "every token within", "frobenius": "all tokens together within"}.get(self.ball, "a box within")
        return f"maximum of ‖J‖₂ with {near} {rounded(self.radius, digits=4)} of the input"


@dataclass(frozen=True, repr=False)
class Robustness:
    """A radius within which a network's class is proved not to change.

    Attributes:
        label: the class. predicted: the network's class; the radius is 0 where it differs from the label.
        radius: proved, in the requested norm. limiting: the class that limits it, None without one.
        seconds: time taken. notes: further remarks.

    >>> Robustness(3, 3, 0.01234567, 5, 0.2)
    class 3 does not change within radius 0.012345, proved (limited by class 5, 0.2 s)
    """

    label: int
    predicted: int
    radius: float
    limiting: int | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def radius_holds(self) -> Guarantee:
        """The guarantee of the radius."""
        return Guarantee.PROVED

    def __repr__(self) -> str:
        limit = "" if self.limiting is None else f"limited by class {self.limiting}, "
        return f"{self._name} ({limit}{self.seconds:.2g} s)"

    def _repr_html_(self) -> str:
        limit = "none" if self.limiting is None else str(self.limiting)
        facts = [("predicted class", str(self.predicted)), ("limited by class", limit)]
        return card(self._name, facts, self.notes)

    @property
    def _name(self) -> str:
        radius = rounded(self.radius, ROUND_FLOOR)
        return f"class {self.label} does not change within radius {radius}, {self.radius_holds.words()}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers and strings."""
        return _plain(self)


def _plain(result: Certificate | Robustness) -> dict[str, Any]:
    """The fields of a result and its guarantees, tensors and tuples as lists."""
    holds = {
        name: getattr(result, name) for name in ("lower_holds", "upper_holds", "radius_holds") if hasattr(result, name)
    }
    return {name: _plain_value(value) for name, value in (vars(result) | holds).items()}


def _plain_value(value: Any) -> Any:
    match value:
        case Guarantee():
            return value.name.lower()
        case Tensor():
            return value.tolist()
        case tuple():
            return list(value)
        case _:
            return value
