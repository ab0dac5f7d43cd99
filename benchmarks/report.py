"""Results as data: sections of tables and targets, kept one file each, and put together into one page.

Every section is recorded by itself with its date and machine, so a run of one section leaves the others as they were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RECORDED = FOLDER / "recorded"
PAGE = FOLDER / "results.md"


@dataclass
class Table:
    """Columns and rows of text."""

    columns: list[str]
    rows: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        """As a pipe table; the first column reads as text, the others as figures.

        >>> print(Table(["way", "ms"], [["ours", "1.0"]]).markdown())
        | way | ms |
        |---|--:|
        | ours | 1.0 |
        """
        head, *body = ("| " + " | ".join(line) + " |" for line in (self.columns, *self.rows))
        text = "\n".join([head, "|---|" + "--:|" * (len(self.columns) - 1), *body])
        return f"{self.caption}\n\n{text}" if self.caption else text


@dataclass
class Target:
    """What we wanted and what was measured; ``met`` is None for a figure that has no target."""

    claim: str
    wanted: str
    measured: str
    met: bool | None = None


@dataclass
class Section:
    """One benchmark, ready to be recorded."""

    name: str
    title: str
    text: str
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    machine: str = ""
    date: str = ""

    def markdown(self, number: int | None = None) -> str:
        """As a part of the page, which gives it its number."""
        title = self.title if number is None else f"{number}. {self.title}"
        parts = [f"## {title}", f"*{self.date}: {self.machine}.*", self.text]
        return "\n\n".join([*parts, *(table.markdown() for table in self.tables)])

    def record(self, folder: Path = RECORDED) -> None:
        folder.mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Section:
        data = json.loads(path.read_text(encoding="utf-8"))
        data["tables"] = [Table(**table) for table in data["tables"]]
        data["targets"] = [Target(**target) for target in data["targets"]]
        return cls(**data)


def targets_table(sections: Sequence[Section]) -> Table:
    """The targets of all sections beside what was measured."""
    said = {True: "yes", False: "**no**", None: "—"}
    rows = [[t.claim, t.wanted or "—", t.measured, said[t.met]] for s in sections for t in s.targets]
    return Table(["claim", "target", "measured", "met"], rows)


def write_page(names: Sequence[str], folder: Path = RECORDED, page: Path = PAGE) -> None:
    """Put the recorded sections together, numbered by their places in ``names``; those not recorded are left out."""
    paths = {number: folder / f"{name}.json" for number, name in enumerate(names, 1)}
    sections = {number: Section.read(path) for number, path in paths.items() if path.exists()}
    head = """# Benchmarks

Written by `python -m benchmarks` (`make bench`). Times are the least of several rounds in which the contestants take
turns; a ratio is their time over ours, and an error is relative to a reference. Each section names its date and
machine; only times within one section can be compared."""
    parts = [section.markdown(number) for number, section in sections.items()]
    body = [head, targets_table(list(sections.values())).markdown(), *parts]
    page.write_text("\n\n".join(body) + "\n", encoding="utf-8")
