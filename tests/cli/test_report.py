"""`howsmooth report` turns a real store into a page, figures and a summary, and complains in one line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from howsmooth.reports import group_headline, groups
from howsmooth.scans import Scan, scan
from tests.cli.command import Command

REPORT = Command("report")
run, refusal = REPORT.run, REPORT.refusal
TEXT = "Alice was <b>beginning</b> to get very tired of sitting by her sister on the bank. " * 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scan of a small random model."""
    path = tmp_path_factory.mktemp("scan") / "tiny.sqlite"
    scan("random:gpt2", TEXT, lengths=[8, 16, 32], what=["head", "attention"], out=path)
    return path


def test_the_page_lies_beside_the_store_and_holds_its_numbers(store: Path) -> None:
    done = run(store)
    assert done.exit_code == 0, done.output
    page = store.with_suffix(".html").read_text(encoding="utf-8")
    assert f"report: {store.with_suffix('.html')}" in done.stdout
    found = json.loads(page.partition('id="scan">')[2].partition("</script>")[0])
    (group,) = found["groups"]
    rows = Scan.open(store).rows
    assert group["columns"]["value"] == pytest.approx([row["value"] for row in rows], rel=1e-4)
    assert group["columns"]["length"] == [row["length"] for row in rows]
    assert len(group["energies"]) == sum(row["what"] == "head" for row in rows) > 0
    assert {"8/0", "16/0", "32/0"} == set(group["tokens"])
    assert group_headline(groups(store)[0]) in done.stdout


@pytest.mark.slow
def test_output_figures_and_summary_can_be_asked_for(store: Path, tmp_path: Path) -> None:
    done = run(store, "-o", tmp_path / "r.html", "--figures", tmp_path / "figures", "--format", "png,svg", "--summary")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.html").stat().st_size > 50_000
    kinds = ("heads", "growth", "bounds", "layers")
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(written) == 8
    assert all(any(f"-{kind}." in name for name in written) for kind in kinds)
    assert "roughest" in done.stdout
    assert "howsmooth.three_path / σ" in done.stdout


def test_json_names_what_was_written(store: Path, tmp_path: Path) -> None:
    done = run(store, "-o", tmp_path / "r.html", "--json")
    found = json.loads(done.stdout)
    assert found["report"] == str(tmp_path / "r.html")
    assert found["figures"] == []
    assert found["groups"][0]["headline"] == group_headline(groups(store)[0])


def test_links_lead_to_the_documentation_that_is_named(store: Path, tmp_path: Path) -> None:
    assert run(store, "-o", tmp_path / "r.html", "--docs", "https://example.org").exit_code == 0
    assert 'href="https://example.org/theory/three-path/"' in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_wrong_requests_are_one_line_and_write_nothing(store: Path, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("this is no store")
    for missing in (tmp_path / "none.sqlite", ".", "", tmp_path):
        assert "there is no scan at" in refusal(missing)
    assert "text.sqlite" in refusal(tmp_path / "text.sqlite")
    assert "use .html" in refusal(store, "-o", tmp_path / "r.pdf")
    assert "does not exist" in refusal(store, "-o", tmp_path / "no" / "r.html")
    assert "'.docx' is no format" in refusal(store, "-o", tmp_path / "r.html", "--format", "docx")
    assert [path.name for path in tmp_path.iterdir()] == ["text.sqlite"]


def test_a_store_is_never_overwritten_by_its_page(store: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "store.html", tmp_path / "link.html"
    shutil.copyfile(store, other)
    link.symlink_to(other)
    before = other.read_bytes()
    for args in ([other], [other, "-o", link]):
        assert "is also the store, which it would overwrite" in refusal(*args)
    assert other.read_bytes() == before


def test_salvage_reports_what_is_whole_and_leaves_the_damaged_store_alone(store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite"
    shutil.copyfile(store, damaged)
    count = len(Scan.open(store))
    db = sqlite3.connect(damaged)
    db.execute("UPDATE cells SET value = 1000 * value WHERE layer = 1 AND head = 2 AND length = 16")
    db.commit()
    db.close()
    before = damaged.read_bytes()
    assert "the head at layer 1, head 2, n = 16, window 0 is not what was written" in refusal(damaged)
    done = run(damaged, "--salvage", "--json", "-o", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["salvaged"]["kept"] == count - 1
    assert found["salvaged"]["dropped"] == ["the head at layer 1, head 2, n = 16, window 0"]
    assert f"{count - 1} of {count} cells are whole" in done.stderr
    assert damaged.read_bytes() == before
    assert len(Scan.open(tmp_path / "r-salvaged.sqlite")) == count - 1
    assert "is there already" in refusal(damaged, "--salvage", "-o", tmp_path / "r.html")
