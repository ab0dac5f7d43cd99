"""Scans side by side: what changed is found, what did not is not called change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import howsmooth as hs
from evidence.scan_faults import make_model
from howsmooth.cli import app
from howsmooth.reports.comparison_page import comparison_figure, series_figure, write_comparison
from howsmooth.scans import Scan
from howsmooth.scans.compare_scans import Change, Place
from tests.cli.command import Command
from tests.scans.stores import kept

WORDS = "to be or not to be, that is the question " * 20


def scanned(model: str, **options: object) -> Scan:
    return hs.scan(model, WORDS, lengths="8,12", explain=False, bounds="none", **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with the values of layer 1, head 1 times three."""
    folder = tmp_path_factory.mktemp("checkpoints")
    before, after = folder / "before", folder / "after"
    for path in (before, after):
        path.mkdir()
        make_model(path)
    from safetensors.torch import load_file, save_file

    (file,) = after.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if "layer.1." in name and "value.weight" in name]
    width = tensors[name].shape[0] // HEADS
    tensors[name][width : 2 * width] *= 3
    save_file(tensors, file, {"format": "pt"})
    return before, after


HEADS = 4


def test_a_head_that_was_scaled_by_three_is_first_and_alone(checkpoints: tuple[Path, Path]) -> None:
    before, after = (scanned(str(path)) for path in checkpoints)
    found = hs.compare(before, after, names=["before", "after"])
    assert found.changes[0].place == Place("head", 1, 1)
    assert found.changes[0].ratio == pytest.approx(3, rel=1e-3)
    assert found.changes[0].least <= 3 <= found.changes[0].most
    assert [change.place for change in (*found.rougher, *found.smoother)] == [Place("head", 1, 1)]
    assert all(change.certain == 1 for change in found.changes if change.place.layer == 0)
    assert "Layer 1, head 1 has become 3 times rougher" in found.headline()


def test_the_same_scan_has_not_changed(checkpoints: tuple[Path, Path]) -> None:
    before, again = scanned(str(checkpoints[0])), scanned(str(checkpoints[0]), seed=0, rtol=1e-2)
    found = hs.compare(before, again, names=["before", "again"])
    assert all(change.certain == 1 for change in found.changes)
    assert not found.rougher
    assert not found.smoother
    assert "0 of" in found.headline()


def test_what_the_ends_allow_is_no_change() -> None:
    rough = Change(Place("head", 0, 0), 8, 0, (1.0, 1.5), ratio=1.5, least=0.9, most=2.5, cells=1)
    assert rough.certain == 1
    assert Change(**(vars(rough) | {"least": 1.2})).certain == 1.2
    assert Change(**(vars(rough) | {"least": 0.2, "most": 0.5, "ratio": 0.3})).certain == 0.5


def test_values_of_zero_make_no_nan() -> None:
    head = Change(Place("head", 0, 0), 8, 0, (0.0, 1.0), ratio=math.inf, least=0.0, most=math.inf, cells=1)
    assert head.to_dict()["ratio"] is None
    assert json.dumps(head.to_dict(), allow_nan=False)


def test_a_series_keeps_every_value_and_is_drawn_as_lines(checkpoints: tuple[Path, Path]) -> None:
    scans = [scanned(str(path)) for path in (checkpoints[0], checkpoints[1], checkpoints[0])]
    found = hs.compare(*scans, names=["1", "2", "3"])
    assert all(len(change.values) == 3 for change in found.changes)
    assert all(change.certain == 1 for change in found.changes)
    lines = comparison_figure(found).axes[0].lines
    assert {len(line.get_ydata()) for line in lines} == {3}


def test_a_folder_of_checkpoints_is_a_series_over_its_steps(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    for step, model in ((90, checkpoints[0]), (100, checkpoints[0]), (1000, checkpoints[1])):
        (tmp_path / f"checkpoint-{step}").symlink_to(model, target_is_directory=True)
    asked = ["compare", str(tmp_path), "--length", "8", "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    assert said["scans"] == ["checkpoint-90", "checkpoint-100", "checkpoint-1000"]
    assert said["rougher"] == ["layer 1, head 1"]
    figure = series_figure(said["scans"], [("head", said["changes"][0]["values"])], "run")
    assert list(figure.axes[0].lines[0].get_xdata()) == [90, 100, 1000]


def test_the_page_escapes_names_and_asks_nobody(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    scans = [scanned(str(path)) for path in checkpoints]
    found = hs.compare(*scans, names=["<script>alert(1)</script>", "b\u202e"])
    page = write_comparison(found, tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "\u202e" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_scans_that_do_not_compare_are_refused(checkpoints: tuple[Path, Path]) -> None:
    one = scanned(str(checkpoints[0]))
    with pytest.raises(hs.InvalidInput, match="different texts"):
        hs.compare(one, hs.scan(str(checkpoints[0]), WORDS * 2 + "x", lengths=8))
    with pytest.raises(hs.InvalidInput, match="no cell in common"):
        hs.compare(one, hs.scan(str(checkpoints[0]), WORDS, lengths=10))
    with pytest.raises(hs.InvalidInput, match="at least two"):
        hs.compare(one)
    older = Scan([row | {"howsmooth": "0.0.1"} for row in one.rows])
    with pytest.raises(hs.InvalidInput, match=r"different versions \(.* and 0\.0\.1\)"):
        hs.compare(one, older)
    with pytest.raises(hs.InvalidInput, match="different windows"):
        hs.compare(one, Scan([row | {"window_start": 3} for row in one.rows]))
    with pytest.raises(hs.InvalidInput, match="factor"):
        hs.compare(one, one, limit=0.5)


def test_the_command_ends_with_three_when_something_is_rougher(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = map(str, checkpoints)
    text = tmp_path / "words.txt"
    text.write_text(WORDS)
    asked = ["compare", before, after, "--text", str(text), "--length", "8", "--json"]
    ended = CliRunner().invoke(app, [*asked, "--limit", "2", "--report", str(tmp_path / "page.html")])
    assert ended.exit_code == 3, ended.output
    assert json.loads(ended.stdout)["rougher"] == ["layer 1, head 1"]
    assert (tmp_path / "page.html").is_file()
    assert CliRunner().invoke(app, [*asked, "--limit", "4"]).exit_code == 0
    assert CliRunner().invoke(app, asked).exit_code == 0


def test_the_command_reads_stores(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    stores = [tmp_path / f"{path.name}.sqlite" for path in checkpoints]
    for path, store in zip(checkpoints, stores, strict=True):
        scanned(str(path), out=store)
    ended = CliRunner().invoke(app, ["compare", *map(str, stores), "--figure", str(tmp_path / "f.png")])
    assert ended.exit_code == 0, ended.output
    assert "Layer 1, head 1" in ended.stdout
    assert (tmp_path / "f.png").stat().st_size > 1000
    assert CliRunner().invoke(app, ["compare", str(stores[0])]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", str(stores[0]), str(tmp_path / "none.sqlite")]).exit_code == 2


def test_the_command_refuses_stores_of_different_versions_in_one_line(tmp_path: Path) -> None:
    older = kept(tmp_path / "older.sqlite")
    row = Scan.open(older).rows[0]
    newer = tmp_path / "newer.sqlite"
    hs.scan("random:bert[layers=1,width=16]", WORDS, lengths=8, out=newer)
    line = Command("compare").refusal(older, newer)
    assert f"different versions ({row['howsmooth']} and {hs.__version__})" in line
