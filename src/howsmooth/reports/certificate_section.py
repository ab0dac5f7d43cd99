"""The section of a report on certificates: measured ≤ worst found ≤ certified, every head against the radius."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from statistics import median

from markupsafe import Markup

from howsmooth._util.common import rounded
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.templates import render
from howsmooth.certificates.ball.radius_sweep import Ladder
from howsmooth.reports.drawings import Axis, Chart
from howsmooth.reports.sections import write_section


def write_certificates(ladder: Ladder, path: Path, name: str, about: str) -> Path:
    """Add the section to the report at a path, or write a new page when there is none.

    Args:
        name: of the map; an earlier section about it is replaced. about: the input, in words.
    """
    section = certificates_section(ladder, name, about)
    return write_section(section, path, kind="certificates", about=name, title=f"What is proved about {name}")


def certificates_section(ladder: Ladder, name: str, about: str) -> str:
    """The section as HTML.

    >>> found = Ladder((0.1,), 10.0, 5, [1.0, 2.0], [[1.5, 2.0]], [[3.0, 2.5]])
    >>> section = certificates_section(found, "a <map>", "")
    >>> section.count("<circle"), "a &lt;map&gt;" in section
    (5, True)
    """
    return render(
        "certificates",
        name=name,
        headline=_headline(ladder),
        about=about,
        chart=_chart(ladder),
        rows=_rows(ladder),
        steps=ladder.steps,
        below=ladder.lower_holds.words(),
        found=ladder.worst_holds.words(),
        proved=Guarantee.PROVED.words(),
    )


def _headline(ladder: Ladder) -> str:
    """One sentence about the largest radius."""
    share, ratios = 100 * ladder.radii[-1] / ladder.norm, ladder.ratios[-1]
    return (
        f"Every token may move by {_short(ladder.radii[-1])} ({_short(share)} % of the mean token norm): no head gets "
        f"rougher than {_up(max(ratios))} times the worst that was found, {_up(median(ratios))} times in the median."
    )


def _rows(ladder: Ladder) -> list[list[str]]:
    rungs = zip(ladder.radii, ladder.worst, ladder.certified, ladder.ratios, strict=True)
    cells = [
        (head, [str(head), _short(radius), _down(ladder.measured[head]), _down(worst), _up(upper), _up(ratio)])
        for radius, *rows in rungs
        for head, (worst, upper, ratio) in enumerate(zip(*rows, strict=True))
    ]
    return [row for _, row in sorted(cells, key=lambda cell: cell[0])]


def _chart(ladder: Ladder) -> Markup:
    shares = [100 * radius / ladder.norm for radius in ladder.radii]
    heads = [head for head, value in enumerate(ladder.measured) if value > 0]
    found, proved = (
        [[row[head] / ladder.measured[head] for head in heads] for row in rows]
        for rows in (ladder.worst, ladder.certified)
    )
    x = Axis.around(shares, "radius, in per cent of the mean token norm")
    chart = Chart(x, Axis.around([v for row in (*found, *proved) for v in row], "multiple of the value at the input"))
    marks = [chart.dot(x.low, 1.0, f"{len(heads)} heads at the input", 3, class_="middle")] if heads else []
    for rows, class_, word in ((found, "accent", "worst found ≥"), (proved, "bound", "certified ≤")):
        if heads:
            marks.append(chart.line([(s, median(row)) for s, row in zip(shares, rows, strict=True)], "chosen"))
        for share, row in zip(shares, rows, strict=True):
            for head, value in zip(heads, row, strict=True):
                title = f"head {head} within {_short(share)} %: {word} {_short(value)} times the value at the input"
                marks.append(chart.dot(share, value, title, 3, class_=class_, opacity=0.7))
    return chart.drawn("Worst found and certified against the radius, every head", marks)


def _short(value: float) -> str:
    return rounded(value, digits=3)


def _down(value: float) -> str:
    return rounded(value, ROUND_FLOOR, 4)


def _up(value: float) -> str:
    return rounded(value, ROUND_CEILING, 4)
