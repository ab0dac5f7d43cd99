"""The page of reproduced experiments: made from runs, and nothing else on it is touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evidence import reproduced
from howsmooth.papers import EXPERIMENTS, Verdict

NAMES = ("not-lipschitz", "inversion")


@pytest.mark.slow
def test_only_what_stands_between_the_marks_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{reproduced.BEGIN}\nold\n{reproduced.END}\n# After\n")
    record = tmp_path / "record.json"
    made = reproduced.runs(NAMES, NAMES[:1], tmp_path / "runs")
    reproduced.write(made, page, record)
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\n# After\n")
    assert "old" not in text
    assert text.count("**Verdict:** confirmed.") == 2
    assert "*full* (78 rows)" in text
    for name in NAMES:
        assert (tmp_path / "images" / "reproduced" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    reproduced.write({NAMES[1]: made[NAMES[1]]}, page, record)
    assert page.read_text() == text, "what is not run again stays as it is recorded"


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="lacks the marks"):
        reproduced.write({}, page, tmp_path / "record.json")
    assert page.read_text() == "# Nothing\n"


def test_the_page_says_what_is_recorded(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(reproduced.PAGE.read_bytes())
    (tmp_path / "record.json").write_bytes(reproduced.RECORD.read_bytes())
    reproduced.write({}, page, tmp_path / "record.json")
    assert page.read_text(encoding="utf-8") == reproduced.PAGE.read_text(encoding="utf-8")
    record = json.loads(reproduced.RECORD.read_text(encoding="utf-8"))
    assert list(record) == list(EXPERIMENTS)
    assert {name for name, sizes in record.items() if "full" in sizes} == set(reproduced.IN_FULL)


def test_the_page_shows_every_experiment_with_its_picture_and_verdict() -> None:
    text = reproduced.PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^### ", text.partition(reproduced.BEGIN)[2].partition(reproduced.END)[0], flags=re.M)[1:]
    assert [section.partition("\n")[0] for section in sections] == list(EXPERIMENTS)
    for section in sections:
        [picture] = re.findall(r"!\[.+\]\((.+\.png)\)", section)
        assert (reproduced.PAGE.parent / picture).is_file()
        said = re.search(r"\*\*Verdict:\*\* ([^.]+)\.", section)
        assert said is not None
        assert set(said[1].split("; ")) <= {verdict.value for verdict in Verdict}
