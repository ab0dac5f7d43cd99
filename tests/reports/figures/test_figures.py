"""Figures show the numbers they are given, and can be written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import howsmooth as hs
from howsmooth.reports.figures import (
    head_bars,
    heads_heatmap,
    influence_map,
    new_figure,
    save_figure,
    token_energies,
)
from howsmooth.reports.figures.head_and_token_figures import chosen_labels


def test_heatmap_frames_the_largest_value() -> None:
    values = torch.tensor([[0.05, 0.5, 3.0], [120.0, 1.0, 2.0]])
    axes = heads_heatmap(values, layers=["a", "b"]).axes[0]
    assert [t.get_text() for t in axes.texts] == ["0.05", "0.50", "3.0", "120", "1.0", "2.0"]
    assert axes.patches[0].get_xy() == (-0.5, 0.5)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b"]


def test_influence_map_keeps_rows_as_outputs_and_hides_zeros() -> None:
    influence = torch.tensor([[1.0, 0.0], [0.5, 1e-9]])
    axes = influence_map(influence, ["[CLS]", "$x$"]).axes[0]
    shown = axes.images[0].get_array()
    assert shown.mask.tolist() == [[False, True], [False, False]]
    assert shown[1, 0] == 0.5
    assert shown[1, 1] == 1e-3  # what is far below the largest takes the lowest colour
    assert axes.get_ylabel().startswith("output")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["[CLS] 0", "$x$ 1"]


def test_labels_of_a_long_input_are_the_heaviest_and_do_not_touch() -> None:
    weight = np.zeros(400)
    weight[[0, 1, 200, 399]] = [5.0, 4.0, 3.0, 2.0]
    chosen = chosen_labels(weight)
    assert {0, 200, 399} <= set(chosen)
    assert min(np.diff(chosen)) >= 10
    assert len(chosen) == 20


def test_bars_have_the_estimates_as_heights() -> None:
    value = torch.tensor([1.0, 2.0])
    axes = head_bars(value, value - 0.1, torch.tensor([1.2, float("inf")])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_figure_with_any_token_is_written(tmp_path: Path, suffix: str) -> None:
    figure, (left, right) = new_figure(2)
    tokens = ["Ġthe", "$", "漢字", "a_b^{"]
    influence_map(torch.rand(4, 4), tokens, ax=left)
    token_energies(torch.rand(4), torch.rand(4), tokens, ax=right)
    path = tmp_path / f"figure{suffix}"
    save_figure(figure, path)
    assert path.stat().st_size > 5000
    if suffix == ".png":
        assert imread(path).std() > 0.05


def test_a_wrong_ending_or_folder_is_refused(tmp_path: Path) -> None:
    figure, _ = new_figure()
    with pytest.raises(hs.InvalidInput, match="does not end like a picture"):
        save_figure(figure, tmp_path / "x.docx")
    with pytest.raises(hs.InvalidInput, match="does not exist"):
        save_figure(figure, tmp_path / "no" / "x.png")
