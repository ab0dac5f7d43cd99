"""Sections that commands add to a page: to a report of `howsmooth report`, or to a page of their own.

A section is HTML without a script. It replaces an earlier section of its kind about the same map or model. Certificates
have one (measured ≤ worst found ≤ certified, every head against the radius), and rounding has one (damage by head,
predictions against actual changes, bits against damage).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from howsmooth._util.common import rounded, write_whole
from howsmooth._util.display import render
from howsmooth._util.guarantee import Guarantee
from howsmooth.certificates.ball.on_ball import Ladder
from howsmooth.errors import InvalidInput
from howsmooth.reports.drawings import Axis, Chart, heat_map
from howsmooth.reports.findings import few_digits
from howsmooth.reports.page import check_report_path
from howsmooth.rounding.allocation import frontier
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Quantisation

MARK = "<!-- more sections -->"
_POINTS, _CELLS = 1500, 20_000
"""Maximum number of points of a chart, and of cells in all maps together."""
_CLASS = {"key": "accent", "value": "middle"}


def _down(value: float) -> str:
    return rounded(value, ROUND_FLOOR, 4)


def _up(value: float) -> str:
    return rounded(value, ROUND_CEILING, 4)


_FORMATS = {"short": few_digits, "down": _down, "up": _up}
"""Formats of numbers in the tables of a section."""


def write_section(section: str, path: Path, *, kind: str, about: str, title: str) -> Path:
    """Add a section to the report at a path, or write a new page when there is none.

    Args:
        kind, about: kind and subject of the section, which replaces an earlier one. title: of a new page.
    """
    check_section_path(path)
    name = hashlib.sha256(about.encode()).hexdigest()[:12]
    begin, end = f"<!-- {kind} {name} -->", f"<!-- end of {kind} {name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else render("sections", title=title)
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        page = before + rest.split(end, 1)[1].removeprefix("\n")
    write_whole(path, page.replace(MARK, f"{begin}\n{section}\n{end}\n{MARK}", 1).encode())
    return path


def check_section_path(path: Path) -> None:
    """Refuse a path that no section can be written to, before any work is done."""
    check_report_path(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise InvalidInput(f"{path} is there and is no report of howsmooth: name another, or remove it.")


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
        headline=_certified_headline(ladder),
        about=about,
        chart=_radius_chart(ladder),
        ladder=ladder,
        below=ladder.lower_holds.words(),
        found=ladder.worst_holds.words(),
        proved=Guarantee.PROVED.words(),
        **_FORMATS,
    )


def _certified_headline(ladder: Ladder) -> str:
    """One sentence about the largest radius."""
    share, ratios = 100 * ladder.radii[-1] / ladder.norm, ladder.ratios[-1]
    return (
        f"Every token may move by {few_digits(ladder.radii[-1])} ({few_digits(share)} % of the mean token norm): no "
        f"head gets rougher than {_up(max(ratios))} times the worst found, {_up(median(ratios))} times in the median."
    )


def _radius_chart(ladder: Ladder) -> Markup:
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
                title = (
                    f"head {head} within {few_digits(share)} %: {word} {few_digits(value)} times the value at the input"
                )
                marks.append(chart.dot(share, value, title, 3, class_=class_, opacity=0.7))
    return chart.drawn("Worst found and certified against the radius, every head", marks)


def write_rounding(quantisation: Quantisation, path: Path, about: str) -> Path:
    """Add the section to the report at a path, or write a new page when there is none.

    Args:
        about: the measurement in words: the text, windows, tokens and samples.
    """
    return write_section(
        rounding_section(quantisation, about),
        path,
        kind="rounding",
        about=f"{quantisation.model}\n{quantisation.precision}",
        title=f"What may be rounded in {quantisation.model}?",
    )


def rounding_section(quantisation: Quantisation, about: str) -> str:
    """The section as HTML.

    >>> from howsmooth.rounding import quantise
    >>> quantisation = quantise("random:llama[layers=2,width=32]", length=12, windows=1)
    >>> section = rounding_section(quantisation, "1 window of <Alice>")
    >>> section.count("<svg"), "&lt;Alice&gt;" in section
    (6, True)
    """
    changes = [row for row in quantisation.rows() if row["actual"] > 0]
    shown = changes[:: -(-len(changes) // _POINTS)] if changes else []
    order = sorted(range(len(quantisation.formats)), key=lambda i: quantisation.bits[i])
    chosen = quantisation.allocation
    room = max(1, _CELLS // quantisation.scores.by_head[:, :, 0].numel())
    return render(
        "rounding",
        name=f"{quantisation.model} [{quantisation.precision}]" if quantisation.precision else quantisation.model,
        headline=_rounding_headline(quantisation),
        about=about,
        damage=quantisation.damage_name,
        totals=quantisation.totals(),
        maps=[_maps(quantisation, index) for index in order[:room]],
        not_drawn=[quantisation.formats[index].name for index in order[room:]],
        changes=_changes(shown),
        changes_shown=len(shown),
        changes_measured=len(changes),
        frontier=_frontier(quantisation),
        checks=quantisation.checks,
        layers=None if chosen is None else zip(*(chosen.by_layer(part) for part in PARTS), strict=True),
        **_FORMATS,
    )


def _rounding_headline(quantisation: Quantisation) -> str:
    """One sentence about the coarsest format."""
    _, coarsest = min(zip(quantisation.bits, quantisation.formats, strict=True), key=lambda pair: pair[0])
    key, value = (row for row in quantisation.totals() if row["format"] == coarsest.name)
    harder, easier = (key, value) if key["kl"] >= value["kl"] else (value, key)
    unit = "nats per token" if quantisation.causal else "of the sentence embedding"
    return (
        f"In {coarsest.name}, rounding all {harder['what']}s costs a predicted {quantisation.damage_name} of "
        f"{few_digits(harder['kl'])} {unit}, all {easier['what']}s {few_digits(easier['kl'])}; the {harder['what']}s "
        f"of layer {harder['most_in']} suffer most."
    )


def _maps(quantisation: Quantisation, index: int) -> dict[str, Any]:
    """The maps of keys and values in one format, on one scale."""
    damage, name = quantisation.scores.by_head[:, :, index].clamp_min(0.0), quantisation.formats[index].name
    above = damage[damage > 0]
    low, high = (float(above.quantile(0.02)), float(above.max())) if len(above) else (1.0, 1.0)
    figures = [
        heat_map(damage[:, number].tolist(), f"{part}s in {name}", quantisation.damage_name, low, high)
        for number, part in enumerate(PARTS)
    ]
    return {"format": name, "figures": figures, "low": low, "high": high}


def _changes(rows: Sequence[dict[str, Any]]) -> Markup:
    every = [row[name] for row in rows for name in ("actual", "predicted", "proved")]
    x = Axis.around((row["actual"] for row in rows), "actual change")
    chart = Chart(x, Axis.around(every, "first order, and proved bound"))
    marks = [chart.line([(x.low, x.low), (x.high, x.high)], "axis")]
    for row in rows:
        cell = f"layer {row['layer']}, head {row['head']}, {row['what']}s in {row['format']}"
        values = f"actual {few_digits(row['actual'])}, first order {few_digits(row['predicted'])}"
        title = f"{cell}: {values}, proved ≤ {rounded(row['proved'], ROUND_CEILING, 3)}"
        marks.append(chart.dot(row["actual"], row["proved"], title, 2, class_="bound", opacity=0.5))
        marks.append(chart.dot(row["actual"], row["predicted"], title, 2, class_=_CLASS[row["what"]], opacity=0.6))
    return chart.drawn("First order and proved bound against the actual change of every head", marks)


def _frontier(quantisation: Quantisation) -> Markup:
    chosen = [
        (one.bits, one.damage)
        for one in frontier(quantisation.scores.by_cache, quantisation.formats, quantisation.bits)
    ]
    uniform = list(zip(quantisation.bits, quantisation.scores.by_cache.sum((0, 1, 3)).tolist(), strict=True))
    run = [
        (check.allocation.bits, check.mean, check.name) for check in quantisation.checks if check.allocation is not None
    ]
    every = [damage for _, damage in [*chosen, *uniform]] + [damage for _, damage, _ in run]
    x = Axis.around(quantisation.bits, "bits per cached number, scales included", log=False)
    chart = Chart(x, Axis.around(every, quantisation.damage_name))
    marks = [chart.line(chosen, "chosen")]
    for (bits, damage), form in zip(uniform, quantisation.formats, strict=True):
        title = f"{form.name} everywhere: predicted {few_digits(damage)} at {bits:g} bits"
        marks += [chart.dot(bits, damage, title, 4, class_="middle"), chart.words(bits, damage, form.name)]
    for bits, damage, name in run:
        title = f"{name}, run on other windows: {few_digits(damage)} at {bits:.4g} bits"
        marks.append(chart.dot(bits, damage, title, 5, class_="bound"))
    return chart.drawn(f"Bits per number against {quantisation.damage_name}", marks)
