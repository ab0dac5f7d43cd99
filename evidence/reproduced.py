"""The experiments of both papers as a page: `python -m evidence.reproduced [ID …]` runs them and writes the page.

What the runs said is kept in docs/evidence/reproduced.json, from which docs/reproduced.md is written between its two
marks; the gallery shows it too. Experiments that are not named stay as they are recorded, and runs that are there are
taken as they are.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from evidence.tables import FOLDER, table
from howsmooth._util.common import write_whole
from howsmooth.papers import EXPERIMENTS, Experiment, ExperimentOptions, Reproduction, reproduce
from howsmooth.papers.experiment import ExperimentSize

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproduced.md"
RECORD = FOLDER / "reproduced.json"
RUNS = ROOT / "howsmooth-output" / "reproduced"
IN_FULL = (
    *("growth-text", "recipe-variants"),
    *("growth-radius", "adversarial", "mean-field", "large-radius", "layer-norm", "masked-distance", "released-recipe"),
    *("not-lipschitz", "lip-infinity", "lip-two", "inversion"),
)
"""What was also run at the paper's size."""
BEGIN, END = "<!-- made by python -m evidence.reproduced -->", "<!-- until here -->"
COLOURS = 64
Said = dict[str, Any]
Record = dict[str, dict[str, Said]]
"""Experiment → size → what the run said."""


def runs(names: Iterable[str], in_full: Sequence[str], folder: Path) -> dict[str, list[Reproduction]]:
    """Every experiment in its quick size, and some in full."""
    made: dict[str, list[Reproduction]] = {}
    for name in names:
        sizes: tuple[ExperimentSize, ...] = ("quick", "full") if name in in_full else ("quick",)
        made[name] = [reproduce(EXPERIMENTS[name], ExperimentOptions(size), folder) for size in sizes]
        print(name, *(one.finding.verdict.value for one in made[name]), sep=": ", flush=True)
    return made


def said(run: Reproduction) -> Said:
    """What is kept of a run: all but the place of its files."""
    return {key: value for key, value in run.to_dict().items() if key != "folder"}


def overview(record: Record) -> str:
    """Verdicts in one table, with what the sizes take."""
    rows = []
    for name, sizes in record.items():
        experiment = EXPERIMENTS[name]
        full = sizes["full"]["verdict"] if "full" in sizes else f"not run: {length(experiment)}"
        rows.append([f"[{name}](#{name})", experiment.title, sizes["quick"]["verdict"], full])
    return table(["experiment", "what is shown", "quick", "full"], rows)


def length(experiment: Experiment) -> str:
    """How long the full size takes, as the command says before it starts."""
    minutes = experiment.minutes[2]
    return f"about {minutes:.0f} minutes" if minutes < 120 else f"about {minutes / 60:,.0f} hours"


def section(experiment: Experiment, sizes: Mapping[str, Said], picture: str) -> str:
    """One experiment: claim, setting, what was measured at each size, and the picture of the largest."""
    measured = [f"*{size}* ({run['rows']} rows): {plain(run['measured'])}" for size, run in sizes.items()]
    verdicts = list(dict.fromkeys(run["verdict"] for run in sizes.values()))
    return "\n\n".join(
        [
            f"### {experiment.id}",
            f"![{experiment.title}]({picture})",
            f"**Claim** ({experiment.paper}): {plain(experiment.claim)}",
            f"**Setting:** {plain(experiment.setting)}",
            *(f"**Measured,** {one}" for one in measured),
            f"**Verdict:** {'; '.join(verdicts)}.",
        ]
    )


def plain(text: str) -> str:
    r"""Text in which nothing is Markdown.

    >>> plain("‖J‖_∞ [0.1, 0.2]")
    '‖J‖\\_∞ \\[0.1, 0.2\\]'
    """
    return re.sub(r"([\\`*_$\[\]<>|])", r"\\\1", text)


def write(made: dict[str, list[Reproduction]], page: Path = PAGE, record: Path = RECORD) -> None:
    """Runs into the record, the record into the page between its marks, and the pictures beside it."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}.")
    pictures = page.parent / "images" / "reproduced"
    pictures.mkdir(parents=True, exist_ok=True)
    known: Record = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for name, done in made.items():
        known[name] = {run.options.size: said(run) for run in done}
        write_whole(pictures / f"{name}.png", few_colours(done[-1].folder / f"{name}.png"))
    known = {name: known[name] for name in EXPERIMENTS if name in known}
    write_whole(record, (json.dumps(known, indent=1, ensure_ascii=False) + "\n").encode())
    parts = [overview(known)]
    parts += [section(EXPERIMENTS[name], known[name], f"images/reproduced/{name}.png") for name in known]
    whole = f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"
    write_whole(page, whole.encode())


def few_colours(path: Path) -> bytes:
    """A picture of lines needs few colours, and then little room."""
    small = io.BytesIO()
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    write(runs(sys.argv[1:] or EXPERIMENTS, IN_FULL, RUNS))
