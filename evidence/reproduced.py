"""The experiments of both papers as a page: `python -m evidence.reproduced` runs them and writes docs/reproduced.md.

Runs that are there are taken as they are. Only what stands between the two marks of the page is written anew.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from evidence.tables import table
from howsmooth.papers import EXPERIMENTS, Asked, Experiment, Reproduction, reproduce
from howsmooth.papers.experiment import Size
from howsmooth.small import write_whole

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproduced.md"
RUNS = ROOT / "howsmooth-output" / "reproduced"
IN_FULL = (
    *("mean-field", "large-radius", "masked-distance", "released-recipe"),
    *("not-lipschitz", "lip-infinity", "lip-two", "inversion"),
)
"""What was also run at the paper's size."""
BEGIN, END = "<!-- made by python -m evidence.reproduced -->", "<!-- until here -->"
COLOURS = 64


def runs(names: Iterable[str], in_full: Sequence[str], folder: Path) -> dict[str, list[Reproduction]]:
    """Every experiment in its quick size, and some in full."""
    made: dict[str, list[Reproduction]] = {}
    for name in names:
        sizes: tuple[Size, ...] = ("quick", "full") if name in in_full else ("quick",)
        made[name] = [reproduce(EXPERIMENTS[name], Asked(size), folder) for size in sizes]
        print(name, *(one.finding.verdict.value for one in made[name]), sep=": ", flush=True)
    return made


def overview(made: dict[str, list[Reproduction]]) -> str:
    """Verdicts in one table, with what the sizes take."""
    rows = []
    for name, done in made.items():
        quick, full = done[0], done[1:]
        rows.append(
            [
                f"[{name}](#{name})",
                quick.experiment.title,
                quick.finding.verdict.value,
                full[0].finding.verdict.value if full else f"not run: {length(quick.experiment)}",
            ]
        )
    return table(["experiment", "what is shown", "quick", "full"], rows)


def length(experiment: Experiment) -> str:
    """How long the full size takes, as the command says before it starts."""
    minutes = experiment.minutes[2]
    return f"about {minutes:.0f} minutes" if minutes < 120 else f"about {minutes / 60:,.0f} hours"


def section(done: Sequence[Reproduction], picture: str) -> str:
    """One experiment: claim, setting, what was measured at each size, and the picture of the largest."""
    experiment = done[0].experiment
    measured = [f"*{one.asked.size}* ({len(one.rows)} rows): {plain(one.finding.measured)}" for one in done]
    verdicts = list(dict.fromkeys(one.finding.verdict.value for one in done))
    return "\n\n".join(
        [
            f"### {experiment.id}",
            f"![{experiment.title}]({picture})",
            f"**Claim** ({experiment.paper}): {plain(experiment.claim)}",
            f"**Setting:** {plain(experiment.setting)}",
            *(f"**Measured,** {said}" for said in measured),
            f"**Verdict:** {'; '.join(verdicts)}.",
        ]
    )


def plain(text: str) -> str:
    r"""Text in which nothing is Markdown.

    >>> plain("‖J‖_∞ [0.1, 0.2]")
    '‖J‖\\_∞ \\[0.1, 0.2\\]'
    """
    return re.sub(r"([\\`*_$\[\]<>|])", r"\\\1", text)


def write(made: dict[str, list[Reproduction]], page: Path = PAGE) -> None:
    """The part of the page between the marks, and the pictures beside it."""
    pictures = page.parent / "images" / "reproduced"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [overview(made)]
    for name, done in made.items():
        write_whole(pictures / f"{name}.png", few_colours(done[-1].folder / f"{name}.png"))
        parts.append(section(done, f"images/reproduced/{name}.png"))
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}.")
    whole = f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"
    write_whole(page, whole.encode())


def few_colours(path: Path) -> bytes:
    """A picture of lines needs few colours, and then little room."""
    small = io.BytesIO()
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    write(runs(EXPERIMENTS, IN_FULL, Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
