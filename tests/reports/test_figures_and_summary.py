"""Figures for papers and the summary for the terminal carry the numbers of the rows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

import howsmooth as hs
from howsmooth._util.common import printable
from howsmooth.models.random_models import RANDOM_TWIN
from howsmooth.reports import group_headline, groups, summary, write_figures
from howsmooth.reports import report as write_report
from howsmooth.reports.figures import save_figure
from howsmooth.reports.findings import bound_distances, growths
from howsmooth.reports.growth.laws import rounded_up
from howsmooth.reports.scan_figures import distances_figure, heads_figure, layers_figure, scanned_growth
from tests.reports.measured import Measured, stored

COARSE = "4-bit (Q4_1), dequantised"


@pytest.fixture(scope="module")
def scan() -> Measured:
    return stored()


def test_heads_figure_shows_the_roughest_window_of_every_head(scan: Measured) -> None:
    (group,) = groups(scan)
    axes = heads_figure(group).axes[0]  # type: ignore[union-attr]
    expected = np.zeros((6, 12))
    for row in scan.rows:
        if row["what"] == "head" and row["length"] == 128:
            at = row["layer"], row["head"]
            expected[at] = max(expected[at], row["value"])
    assert np.array_equal(axes.images[0].get_array(), expected)
    assert axes.get_title() == "minilm [float32] on Alice in Wonderland, n = 128"


def test_heads_that_were_not_scanned_are_covered(scan: Measured) -> None:
    chosen = [
        row for row in scan.rows if row["what"] == "head" and (row["layer"], row["head"]) in ((1, 2), (1, 7), (4, 7))
    ]
    axes = heads_figure(groups(chosen)[0]).axes[0]  # type: ignore[union-attr]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "7"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "4"]
    assert [patch.get_xy() for patch in axes.patches if patch.get_hatch()] == [(-0.5, 0.5)]


def test_growth_figure_has_the_fit_and_every_window(scan: Measured) -> None:
    (group,) = groups(scan)
    axes = scanned_growth(group).axes[0]  # type: ignore[union-attr]
    (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
    worst = group.roughest("head")[0]
    mine = [row for row in scan.rows if row["what"] == "head" and all(row[k] == worst[k] for k in ("layer", "head"))]
    assert sorted(zip(*dots.get_data(), strict=True)) == sorted((row["length"], row["value"]) for row in mine)
    fit = growths(group)["head", worst["layer"], worst["head"]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any(f"n^{{{fit.exponent:.2f} \\pm {rounded_up(fit.error)}}}" in label for label in labels)
    assert "≤ howsmooth.three_path" in labels
    assert "≤ howsmooth.mean_field" not in labels  # far beyond the frame
    assert len(axes.lines) == 71 + 1 + 1 + 4


def test_distances_figure_has_the_medians(scan: Measured) -> None:
    (group,) = groups(scan)
    axes = distances_figure(group).axes[0]  # type: ignore[union-attr]
    found = bound_distances(group.roughest("head"))
    dots = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [one.middle for one in reversed(found[:4])]
    assert found[4].name == "howsmooth.mean_field"
    assert f"beyond: howsmooth.mean_field {found[4].middle:.1g}" in axes.get_xlabel()


def test_layers_figure_follows_the_block(scan: Measured) -> None:
    (group,) = groups(scan)
    (line,) = layers_figure(group).axes[0].lines  # type: ignore[union-attr]
    best = [
        max(r["value"] for r in scan.rows if (r["what"], r["layer"], r["length"]) == ("attention", layer, 128))
        for layer in range(6)
    ]
    assert line.get_ydata().tolist() == best


def test_nothing_is_drawn_from_one_length_and_one_kind(scan: Measured) -> None:
    (group,) = groups(
        [row | {"proved": None, "bounds": None} for row in scan.rows if row["length"] == 8 and row["what"] == "head"]
    )
    assert scanned_growth(group) is distances_figure(group) is layers_figure(group) is None


@pytest.mark.slow
def test_all_figures_are_written_in_all_formats(scan: Measured, tmp_path: Path) -> None:
    written = write_figures(scan, tmp_path / "new")
    assert len(written) == 12
    assert {path.suffix for path in written} == {".png", ".svg", ".pdf"}
    for path in written:
        assert path.stat().st_size > 5000
        if path.suffix == ".png":
            assert imread(path).std() > 0.05
    with pytest.raises(hs.InvalidInput, match=r"'\.docx' is no format"):
        write_figures(scan, tmp_path, ["docx"])


def test_summary_is_one_page_with_the_headline_and_the_roughest(scan: Measured) -> None:
    console = Console(width=130, record=True, file=StringIO())
    console.print(summary(scan))
    said = console.export_text()
    (group,) = groups(scan)
    assert group_headline(group)[:100] in said.replace("\n", " ")
    assert len(said.splitlines()) < 30
    for row in group.roughest("head")[:8]:
        (line,) = [
            line for line in said.splitlines() if line.strip().startswith(f"layer {row['layer']}, head {row['head']} ")
        ]
        assert f"{row['value']:.4g}" in line
        assert str(growths(group)["head", row["layer"], row["head"]]) in line
    assert "howsmooth.three_path / σ: median 1.95" in said


def test_summary_labels_a_coarse_model_and_counts_what_did_not_converge(scan: Measured) -> None:
    rows = [row | {"precision": COARSE, "converged": row["length"] != 128} for row in scan.rows]
    console = Console(width=200, record=True, file=StringIO())
    console.print(summary(rows))
    said = console.export_text()
    assert f"minilm [{COARSE}]" in said.splitlines()[0]
    assert f"of minilm [{COARSE}] is the roughest" in said
    assert "156 of 780 cells did not reach the requested accuracy." in said


def test_summary_counts_what_did_not_converge_beside_the_model_too(scan: Measured) -> None:
    """Otherwise a scan with a reference would end with 1 and not say why."""
    twins = [row | {"model": row["model"] + RANDOM_TWIN, "converged": row["length"] != 128} for row in scan.rows]
    console = Console(width=200, record=True, file=StringIO())
    console.print(summary([*scan.rows, *twins]))
    assert "156 of 780 cells of the random weights did not reach the requested accuracy." in console.export_text()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk with no more room than this."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, b"an older one"])
def test_a_full_disk_leaves_the_older_page_and_figure_or_nothing(
    scan: Measured, tmp_path: Path, before: bytes | None
) -> None:
    page, picture = tmp_path / "r.html", tmp_path / "p.png"
    if before is not None:
        page.write_bytes(before)
        picture.write_bytes(before)
    figure = heads_figure(groups(scan)[0])
    assert figure is not None
    with files_of_at_most(1000):
        with pytest.raises(hs.InvalidInput, match=r"cannot write .*r\.html"):
            write_report(scan, page)
        with pytest.raises(hs.InvalidInput, match=r"cannot write .*p\.png"):
            save_figure(figure, picture)
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if before is None else ["p.png", "r.html"])
    assert all(path.read_bytes() == before for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$x_{", "a $x^2$ b", r"\frac{$", "<b>&\"'", "[bold]", "\x1b[2J\u202e", "$" * 5])
def test_figures_show_odd_names_as_they_are(scan: Measured, tmp_path: Path, name: str) -> None:
    rows = [row | {"model": name, "text": name} for row in scan.rows if row["length"] >= 32]
    figure = heads_figure(groups(rows)[0])
    assert figure is not None
    shown = figure.axes[0].title
    plain, is_math = shown._preprocess_math(shown.get_text())
    assert not is_math
    assert printable(name) in plain
    save_figure(figure, tmp_path / "p.svg")
    written = write_figures(rows, tmp_path / "all", ["png"])
    assert len(written) == 4
    assert all(path.stat().st_size > 1000 for path in written)
