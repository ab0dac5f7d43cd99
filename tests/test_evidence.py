"""Evidence that belongs to no room of its own, on maps and models small enough for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import howsmooth as hs
from evidence import model_variants, token_norms
from evidence.certified_balls import ratios_figure
from evidence.certified_steps import row, steps
from evidence.early_warnings import leads_figure


def test_certificate_takes_at_least_as_many_steps_as_the_value() -> None:
    attention = hs.SelfAttention.random(48, heads=3, dtype=torch.float64)
    found = steps(attention, torch.randn(40, 48, dtype=torch.float64))
    assert len(found) == 3
    assert all(1 <= right <= certified for right, certified in found)


def test_row_gives_least_median_and_most() -> None:
    assert row("x", [(1, 4), (2, 9), (3, 5)]) == ["x", "1, 2, 3", "4, 5, 9"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("series", "right", "refused"),
    [
        (lambda: model_variants.padded("Llama", "left"), 2, 0),
        (lambda: model_variants.padded("T5", "right"), 2, 0),
        (lambda: model_variants.padded("T5", "with a hole"), 0, 1),
        (lambda: model_variants.two_texts("MT5", "decoder_attention_mask"), 4, 1),
        (lambda: model_variants.two_texts("Whisper"), 4, 0),
        (lambda: model_variants.media("ViT"), 2, 0),
        (lambda: model_variants.changed("GPT2", model_variants.CHANGES["LoRA, switched off"]), 2, 0),
        (lambda: model_variants.changed("GPT2", model_variants.CHANGES["float16"]), 2, 0),
    ],
)
def test_models_as_they_are_met_are_measured_right_or_refused(
    series: Callable[[], Iterator[model_variants.Case]], right: int, refused: int
) -> None:
    counts = model_variants.outcomes(series)
    assert (counts["right"], counts["refused"], counts["wrong"]) == (right, refused, 0)


def test_a_wrong_end_counts_as_wrong() -> None:
    assert not model_variants.Case("x", lower=1.0, upper=2.0, exact=2.1).right
    assert not model_variants.Case("x", lower=1.0, upper=2.0, exact=0.9).right


@pytest.mark.parametrize("limit", [0, 4096])
def test_the_norm_of_the_largest_token_lies_where_a_search_of_all_directions_says(limit: int) -> None:
    x = 2 * torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _, f in token_norms.functions(4, 2, seed=1):
        right, apart = token_norms.trial(f, x, limit)
        assert right
        assert limit == 0 or apart < 1e-3


def test_the_figure_of_certified_balls_has_the_medians() -> None:
    figure = ratios_figure([0.001, 0.01], {"a model": [[1.1, 1.2], [2.0, 4.0]]})
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([1.15, 3.0])


def test_the_figure_of_early_warnings_counts_the_warned_runs() -> None:
    figure = leads_figure({"σ": [12, 30, None], "loss": [4, 6, 5]})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["loss (3 of 3)", "σ (2 of 3)"]
