"""The common style of the figures: told apart without colour, nothing hidden, plain numbers along the axes."""

from __future__ import annotations

from itertools import pairwise

import pandas
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from howsmooth.papers import EXPERIMENTS, ExperimentOptions
from howsmooth.papers.figure_style import MARKS, finish, integer_ticks, line, median_band, panels


def test_series_are_told_apart_without_colour() -> None:
    (ax,) = panels(["seven"], "n", "σ")
    for number in range(7):
        line(ax, number, [1, 10], [1, 2 + number], f"measured {number}")
        line(ax, number, [1, 10], [1, 2 + number], f"theorem {number}", marks=False)
    measured, theorems = ax.lines[::2], ax.lines[1::2]
    assert {one.get_marker() for one in measured} == set(MARKS)
    assert {one.get_marker() for one in theorems} == {"None"}
    assert len({str(one._unscaled_dash_pattern) for one in theorems}) == 7


@pytest.mark.parametrize("most", [30, 500, 10_000])
def test_legends_hide_nothing_and_ticks_are_plain_and_apart(most: int) -> None:
    (ax,) = panels(["growth"], "n", "σ")
    line(ax, 0, [1, most], [0.2, 0.3], "measured")
    figure = finish(ax)
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    assert ax.get_legend().get_window_extent(renderer).y1 < ax.xaxis.get_tightbbox(renderer).y0
    low, high = ax.get_xlim()
    shown = [tick for tick in ax.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [tick.label1.get_window_extent(renderer) for tick in shown]
    assert len(boxes) >= 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    labels = [text.get_text() for text in (*ax.get_xticklabels(), *ax.get_yticklabels())]
    assert not any("e" in label or "10^" in label for label in labels)
    assert sum(low <= tick <= high for low, high in [ax.get_ylim()] for tick in ax.get_yticks()) >= 2


def test_a_band_goes_from_the_least_to_the_largest_value() -> None:
    (ax,) = panels(["spread"], "n", "σ")
    median_band(ax, 0, pandas.DataFrame({"n": [1, 1, 1, 2], "value": [1.0, 2.0, 9.0, 4.0]}), "n", "value", "measured")
    assert ax.lines[0].get_ydata().tolist() == [2.0, 4.0]  # type: ignore[union-attr]
    [band] = ax.collections
    assert band.get_paths()[0].get_extents().ymax == 9.0


def test_depths_are_integer_ticks() -> None:
    (ax,) = panels(["depth"], "depth", "bits", log="")
    line(ax, 0, [1, 2], [3.0, 3.1], "measured")
    integer_ticks(ax)
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["not-lipschitz", "masked-distance", "large-radius", "inversion"])
def test_figures_name_their_axes_and_series(name: str) -> None:
    experiment = EXPERIMENTS[name]
    rows = [
        row
        for cell in experiment.cells(ExperimentOptions("quick"))
        for row in experiment.run(ExperimentOptions("quick"), cell)
    ]
    figure = experiment.draw(pandas.DataFrame(rows))
    for ax in figure.axes:
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        assert ax.get_title()
        assert all(text.get_text() for text in ax.get_legend().get_texts())
