"""The examples of the gallery: a sample runs here, all of them when the site is built."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
from matplotlib.figure import Figure

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
SAMPLE = ("plot_05_spectrum", "plot_08_bounds_against_n", "plot_14_causal_mask", "plot_19_stack")


def test_there_are_enough_and_each_begins_with_a_title() -> None:
    assert len(EXAMPLES) >= 15
    for path in EXAMPLES:
        title, line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "\n").splitlines()[:2]
        assert set(line) == {"="}, path.name
        assert len(line) >= len(title) > 5, path.name
        assert path.name.startswith("plot_")
        assert "__file__" not in path.read_text(encoding="utf-8"), path.name  # the gallery's builder defines none


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_an_example_draws_a_figure_with_named_axes(name: str) -> None:
    [path] = [path for path in EXAMPLES if path.stem == name]
    made = runpy.run_path(str(path))
    [figure] = [thing for thing in made.values() if isinstance(thing, Figure)]
    assert all(ax.get_ylabel() for ax in figure.axes)
    assert all(ax.get_title() for ax in figure.axes)
