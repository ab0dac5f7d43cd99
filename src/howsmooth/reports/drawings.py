"""Drawings for pages without scripts: maps of cells and charts as SVG, drawn by templates.

Colours are those of the page (``currentColor`` and its classes), so that a drawing follows a dark theme. The
``<title>`` of a mark describes it; browsers show it under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from howsmooth._util.display import render
from howsmooth.reports.findings import few_digits

_LEFT, _TOP, _BOTTOM, _RIGHT = 62, 26, 46, 12
"""Margins of a chart, as in its template."""
_TICKS = 8
_RAMP = ((247, 239, 232), (163, 51, 10))
"""Colours of the smallest and the largest value, as on the map of a scan."""
Mark = dict[str, Any]


def ramp(t: float) -> str:
    """A colour between those of the smallest (0) and the largest value (1).

    >>> ramp(0.0), ramp(1.0)
    ('#f7efe8', '#a3330a')
    """
    t = min(max(t, 0.0), 1.0)
    return "#" + "".join(f"{round(a + t * (b - a)):02x}" for a, b in zip(*_RAMP, strict=True))


def heat_map(values: Sequence[Sequence[float]], title: str, quantity: str, low: float, high: float) -> Markup:
    """Layers down, heads across, coloured by the logarithm between two values."""
    span = math.log(high / low) if high > low else 1.0
    cells = [
        [(ramp(math.log(max(value, low) / low) / span), f"{quantity} {few_digits(value)}") for value in row]
        for row in values
    ]
    return Markup(render("heat_map", title=title, cells=cells))


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: its ends, its name, and whether it is logarithmic."""

    low: float
    high: float
    name: str
    log: bool = True

    @classmethod
    def around(cls, values: Iterable[float], name: str, log: bool = True) -> Axis:
        """Wide enough for all values; a logarithmic axis for all positive values."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(known), max(known)
        if log:
            return cls(low / 1.5, high * 1.5, name, True)
        room = 0.05 * (high - low or 1.0)
        return cls(low - room, high + room, name, False)

    def share(self, value: float) -> float:
        """The place of a value: 0 at the low end, 1 at the high end, values beyond clamped to it."""
        if self.log:
            value = max(value, self.low)
            return min(math.log(value / self.low) / math.log(self.high / self.low), 1.0)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """At most eight: numbers that begin with 1, 2 or 5, or powers of ten where they are too many; or integers.

        >>> Axis(0.02, 30.0, "").ticks, Axis(3.0, 9.0, "", log=False).ticks, Axis(0.7, 6.0, "").ticks
        ([0.1, 1.0, 10.0], [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 2.0, 5.0])
        """
        ends = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        whole = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
        for digits in ((1, 2, 5), (1,)):
            steps = [digit * 10.0**power for power in whole for digit in digits] if self.log else map(float, whole)
            ticks = [step for step in steps if self.low <= step <= self.high]
            if len(ticks) <= _TICKS:
                return ticks or [self.low, self.high]
        return ticks[:: math.ceil(len(ticks) / _TICKS)]


@dataclass(frozen=True)
class Chart:
    """Two axes; `at` places marks."""

    x: Axis
    y: Axis
    width: int = 520
    height: int = 360

    def at(self, x: float, y: float) -> tuple[str, str]:
        """The place of a point."""
        across = _LEFT + self.x.share(x) * (self.width - _LEFT - _RIGHT)
        down = self.height - _BOTTOM - self.y.share(y) * (self.height - _BOTTOM - _TOP)
        return f"{across:.5g}", f"{down:.5g}"

    def line(self, points: Iterable[tuple[float, float]], class_: str) -> Mark:
        """A line through points."""
        return {"points": " ".join(",".join(self.at(*point)) for point in points), "class": class_}

    def dot(self, x: float, y: float, title: str, radius: float, class_: str, opacity: float = 1.0) -> Mark:
        """A point with a title."""
        across, down = self.at(x, y)
        return {"x": across, "y": down, "title": title, "radius": radius, "class": class_, "opacity": opacity}

    def words(self, x: float, y: float, text: str) -> Mark:
        """Words beside a point."""
        across, down = self.at(x, y)
        return {"x": across, "y": down, "text": text}

    def drawn(self, label: str, marks: Iterable[Mark]) -> Markup:
        """The chart with its axes."""
        return Markup(render("chart", chart=self, label=label, marks=marks))
