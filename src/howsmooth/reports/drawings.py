"""Drawings for pages without scripts: maps of cells and charts as SVG text that needs no style of its own.

Colours are those of the page (``currentColor`` and its classes), so that a drawing follows a dark theme; what a mark
means is its ``<title>``, which browsers show under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from howsmooth._util.common import rounded
from howsmooth._util.templates import visible

_LEFT, _TOP, _BOTTOM, _RIGHT = 62, 26, 46, 12
_RAMP = ((247, 239, 232), (163, 51, 10))
"""From the least to the most, as on the map of a scan."""


def element(name: str, text: str = "", title: str = "", **attributes: object) -> Markup:
    """One element with escaped attributes, text and title.

    >>> print(element("text", "a < b", x=1, text_anchor="end"))
    <text x="1" text-anchor="end">a &lt; b</text>
    """
    written = "".join(f' {key.strip("_").replace("_", "-")}="{_escaped(value)}"' for key, value in attributes.items())
    inner = f"<title>{_escaped(title)}</title>" if title else ""
    return Markup(f"<{name}{written}>{inner}{_escaped(text)}</{name}>")


def drawing(width: float, height: float, label: str, marks: Iterable[Markup]) -> Markup:
    """The marks as one picture, with a label for readers who do not see it."""
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{_escaped(label)}"'
    return Markup(f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{Markup("").join(marks)}</svg>')


def _escaped(text: object) -> Markup:
    return escape(visible(str(text)))


def ramp(t: float) -> str:
    """A colour between the least (0) and the most (1).

    >>> ramp(0.0), ramp(1.0)
    ('#f7efe8', '#a3330a')
    """
    t = min(max(t, 0.0), 1.0)
    return "#" + "".join(f"{round(a + t * (b - a)):02x}" for a, b in zip(*_RAMP, strict=True))


def heat_map(
    values: Sequence[Sequence[float]], title: str, say: Callable[[int, int], str], low: float, high: float
) -> Markup:
    """Layers down, heads across, coloured by the logarithm between two values; ``say`` has the words of a cell."""
    rows, columns = len(values), len(values[0])
    tall, wide = max(9.0, min(26.0, 420 / rows)), max(9.0, min(44.0, 400 / columns))
    span = math.log(high / low) if high > low else 1.0
    marks = [element("text", title, x=_LEFT, y=16, class_="named")]
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            share = math.log(max(value, low) / low) / span
            corner = {"x": f"{_LEFT + column * wide:.5g}", "y": f"{_TOP + row * tall:.5g}"}
            size = {"width": f"{wide - 1:.5g}", "height": f"{tall - 1:.5g}"}
            marks.append(element("rect", title=say(row, column), **corner, **size, fill=ramp(share)))
        if row % max(1, math.ceil(rows / 15)) == 0:
            y = _TOP + (row + 0.5) * tall + 4
            marks.append(element("text", f"layer {row}", x=_LEFT - 6, y=f"{y:.5g}", text_anchor="end", font_size=11))
    bottom = _TOP + rows * tall
    for column in range(0, columns, max(1, math.ceil(columns / 12))):
        x = _LEFT + (column + 0.5) * wide
        marks.append(element("text", str(column), x=f"{x:.5g}", y=bottom + 16, text_anchor="middle", font_size=11))
    marks.append(element("text", "head", x=_LEFT + columns * wide / 2, y=bottom + 34, text_anchor="middle"))
    return drawing(_LEFT + columns * wide + _RIGHT, bottom + _BOTTOM, title, marks)


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: its ends, its name, and whether it is logarithmic."""

    low: float
    high: float
    name: str
    log: bool = True

    @classmethod
    def around(cls, values: Iterable[float], name: str, log: bool = True) -> Axis:
        """Wide enough for all values; of a logarithmic one those above zero."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(known), max(known)
        if log:
            return cls(low / 1.5, high * 1.5, name, True)
        room = 0.05 * (high - low or 1.0)
        return cls(low - room, high + room, name, False)

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high one; what is beyond stands there."""
        if self.log:
            value = max(value, self.low)
            return min(math.log(value / self.low) / math.log(self.high / self.low), 1.0)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten, at most eight, with their doubles and halves where they are fewer than two; or whole steps.

        >>> Axis(0.02, 30.0, "").ticks, Axis(3.0, 9.0, "", log=False).ticks, Axis(0.7, 6.0, "").ticks
        ([0.1, 1.0, 10.0], [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 2.0, 5.0])
        """
        ends = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        first, last = math.ceil(ends[0] - 1e-9), math.floor(ends[1] + 1e-9)
        if self.log and last <= first:
            near = [digit * 10.0**power for power in range(first - 1, last + 2) for digit in (1, 2, 5)]
            return [tick for tick in near if self.low <= tick <= self.high] or [self.low, self.high]
        whole = range(first, last + 1, max(1, math.ceil((last - first + 1) / 8)))
        return [10.0**power if self.log else float(power) for power in whole] or [self.low, self.high]


@dataclass(frozen=True)
class Chart:
    """A frame with two axes; marks are placed by `at`."""

    x: Axis
    y: Axis
    width: float = 520
    height: float = 360

    def at(self, x: float, y: float) -> tuple[str, str]:
        """The place of a point."""
        across = _LEFT + self.x.share(x) * (self.width - _LEFT - _RIGHT)
        down = self.height - _BOTTOM - self.y.share(y) * (self.height - _BOTTOM - _TOP)
        return f"{across:.5g}", f"{down:.5g}"

    def line(self, points: Iterable[tuple[float, float]], class_: str) -> Markup:
        """A line through points."""
        return element("polyline", points=" ".join(",".join(self.at(*p)) for p in points), class_=class_, fill="none")

    def dot(
        self, x: float, y: float, title: str, radius: float = 2.5, class_: str = "", opacity: float = 1.0
    ) -> Markup:
        """A mark that says what it is."""
        across, down = self.at(x, y)
        return element("circle", title=title, cx=across, cy=down, r=radius, class_=class_, opacity=opacity)

    def words(self, x: float, y: float, text: str) -> Markup:
        """Words beside a point."""
        across, down = self.at(x, y)
        return element("text", text, x=across, y=down, dx=8, dy=-6, font_size=11)

    def drawn(self, label: str, marks: Iterable[Markup]) -> Markup:
        """The chart with its axes."""
        left, right, bottom = _LEFT, self.width - _RIGHT, self.height - _BOTTOM
        frame = [element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]
        for tick in self.y.ticks:
            down = self.at(self.x.low, tick)[1]
            frame.append(element("line", x1=left, x2=right, y1=down, y2=down, class_="grid"))
            said = rounded(tick, digits=3)
            frame.append(element("text", said, x=left - 8, y=down, dy=4, text_anchor="end", font_size=11))
        for tick in self.x.ticks:
            across = self.at(tick, self.y.low)[0]
            said = rounded(tick, digits=3)
            frame.append(element("text", said, x=across, y=bottom + 18, text_anchor="middle", font_size=11))
        frame.append(element("text", self.x.name, x=(left + right) / 2, y=self.height - 8, text_anchor="middle"))
        frame.append(element("text", self.y.name, x=4, y=14))
        return drawing(self.width, self.height, label, [*frame, *marks])
