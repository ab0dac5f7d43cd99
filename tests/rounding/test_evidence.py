"""The tables on rounded caches, made of a tiny random model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence import (
    rounded_caches,
    rounded_caches_ascents,
    rounded_caches_direct,
    rounded_caches_sinks,
    stories,
)
from howsmooth.models import OpenModel, alice, open_model
from howsmooth.rounding import parse_format, parse_formats
from howsmooth.rounding.rounded_model import RoundedModel, Scores


def silent(label: str) -> None:
    pass


@pytest.fixture(scope="module")
def tiny() -> OpenModel:
    opened = open_model("random:llama[layers=3,width=64,heads=4,kv_heads=2]", head=True)
    for parameter in opened.model.parameters():
        parameter.mul_(3.0) if parameter.dim() == 2 else None
    return opened


def test_no_head_passes_its_bound_and_first_order_is_right_at_eight_bits(tiny: OpenModel) -> None:
    windows = tiny.windows(alice(), 24, 2)
    rows = rounded_caches.head_ratios(tiny, windows, parse_formats("int8,int4,nvfp4,int4[per=channel]"), silent)
    assert [row.violations for row in rows] == [0] * 8
    assert all(row.closest >= 1 for row in rows)
    assert all(row.off < 0.1 for row in rows if row.format == "int8")
    assert {row.heads for row in rows} == {3 * 4 * 2}


def test_ascents_inside_the_cell_come_near_the_bound_and_not_above(tiny: OpenModel) -> None:
    reader = RoundedModel.of(tiny.model, tiny.inputs(tiny.windows(alice(), 8)[0]))
    for one in rounded_caches_ascents.attack(reader.sites[1], steps=12):
        assert 0.8 < one.keys <= 1
        assert 0.8 < one.values <= 1


def test_the_error_of_first_order_is_stated_in_quantiles(tiny: OpenModel) -> None:
    rows = rounded_caches.head_ratios(tiny, tiny.windows(alice(), 24, 1), parse_formats("int8,int2"), silent)
    for row in rows:
        assert row.off <= row.quantiles[0] <= row.quantiles[1] <= row.quantiles[2]
        assert (row.within == 1) == (row.quantiles[2] <= 0.1)
    assert rows[0].quantiles[2] < rows[2].quantiles[2]
    one = rounded_caches.Ratios("int8", "key", 3, 0, 2.0, 1.0, 1.0, 0.02, (0.16, 0.196, 0.2), 2 / 3)
    assert rounded_caches.order_table([one]).endswith("| int8 | 3 | 2.00% | 16.00% | 19.60% | 20.00% | 66.67% |")


def test_predicted_ranks_follow_the_direct_ones_head_by_head(tiny: OpenModel) -> None:
    windows, form = tiny.windows(alice(), 24, 2), parse_format("int4")
    scores = rounded_caches.predicted(tiny, windows, [form], 48, silent)
    truth = rounded_caches.direct(tiny, windows, form, True, silent)
    assert truth.shape == (3, 2, 2)
    _, _, together = rounded_caches.correlations(scores.by_cache[:, :, 0], truth)
    assert float(together) >= 0.9


def test_layers_before_a_rounded_one_need_not_be_run_again(tiny: OpenModel) -> None:
    reader = RoundedModel.of(tiny.model, tiny.inputs(tiny.windows(alice(), 24)[0]))
    whole, form = rounded_caches_direct.Suffixes(reader), parse_format("int3")
    assert torch.equal(whole.exact, reader.outcome())
    for layer in (2, 0, 1):
        assert torch.equal(whole.outcome(layer, "value", form), reader.outcome({(layer, "value"): form}))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_behind_the_windows_it_has(
    tiny: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, formats = tiny.windows(alice(), 16, 3), parse_formats("int4")
    whole = rounded_caches.head_ratios(tiny, windows, formats, silent)
    monkeypatch.setenv("HOWSMOOTH_KEPT", str(tmp_path / "kept.sqlite"))
    said: list[str] = []

    def stop(label: str) -> None:
        said.append(label)
        if "window 3" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounded_caches.head_ratios(tiny, windows, formats, stop)
    again: list[str] = []
    assert rounded_caches.head_ratios(tiny, windows, formats, again.append) == whole
    assert len(said) == 3
    assert again == said[2:]


def test_the_ranking_is_stated_for_sets_of_windows_and_samples() -> None:
    """Scores whose squares are the truth itself: every set ranks perfectly, whatever its size."""
    truth = torch.rand(4, 5, 2, generator=torch.Generator().manual_seed(0)).double() + 0.1
    products = (2 * 7 * truth).sqrt()[:, None].expand(4, 6, 5, 2).flatten(0, 1)[:, :, :, None, None]
    page = rounded_caches.ranking_by_size(Scores(products, 7, 1), truth, 0)
    assert page.count("1.00 (1.00)") == 3 * 2 * 3
    assert "| 4 | 6 |" in page
    assert "| 1 | 2 |" in page


def test_the_picture_of_the_first_tokens_shows_ratios_of_means(tmp_path: Path, tiny: OpenModel) -> None:
    """Bars against ratios taken by hand, their numbers against the means, and the dots against the windows."""
    damage = torch.rand(3, 2, 3, 3, generator=torch.Generator().manual_seed(0)).double() + 0.5
    for b, panel in enumerate(rounded_caches_sinks.sink_figure(damage, "tiny").axes):
        for r in range(3):
            for k in range(3):
                none, some = damage[:, b, 0, r].tolist(), damage[:, b, k, r].tolist()
                assert panel.patches[3 * r + k].get_height() == pytest.approx(100 * sum(some) / sum(none))
                assert panel.texts[3 * r + k].get_text() == f"{sum(some) / 3:#.3g}"
                if k:
                    shares = [100 * a / c for a, c in zip(some, none, strict=True)]
                    assert list(panel.lines[2 * r + k - 1].get_ydata()) == pytest.approx(shares)
    shown = rounded_caches_sinks.sink_picture(damage, tiny, tmp_path / "sinks.png")
    assert shown.endswith("(../images/sinks.png)")
    assert (tmp_path / "sinks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_study_has_all_its_tables(tiny: OpenModel) -> None:
    parts = rounded_caches.study(tiny, alice(), alice(), 24, 2, 4, True, silent, defaults={"length": 24})
    page = "\n\n".join(parts)
    for said in (
        "violations",
        "predicted KL",
        "sigma",
        "first and last N",
        "first tokens exact",
        "One head at a time",
        "within 10 %",
        "errors within a cell",
        "as it is (4 windows of 24 tokens, 24 samples)",
    ):
        assert said in page
    assert page.count("| allocation |") == 3


def test_checkpoints_of_llama2_c_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file written as llama2.c writes it, whose logits are computed here by hand for one token."""
    width, hidden, layers, words = 8, 12, 1, 20
    sizes = (width, hidden, layers, 2, 2, words, 16)
    generator = torch.Generator().manual_seed(0)
    shapes = [(words, width), (layers, width), *[(layers, width, width)] * 4, (layers, width)]
    shapes += [(layers, hidden, width), (layers, width, hidden), (layers, hidden, width), (width,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    checkpoint = struct.pack("<7i", *sizes) + b"".join(t.numpy().astype("<f4").tobytes() for t in tensors)
    pieces = struct.pack("<i", 4) + b"".join(
        struct.pack("<fi", -number, 1) + bytes([97 + number]) for number in range(words)
    )
    path = tmp_path / "llama2.data"
    path.write_bytes(checkpoint + pieces)
    monkeypatch.setenv("HOWSMOOTH_STORIES", str(path))
    monkeypatch.setattr(stories, "CHECKPOINT", len(checkpoint))
    opened = stories.stories15m()
    table, norm, _, _, value, output, after, gate, down, up, last = tensors

    def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return gain * x / (x.square().mean() + 1e-5).sqrt()

    x = table[3]  # one token attends to itself: its value passes through
    x = x + output[0] @ value[0] @ rms(x, norm[0])
    y = rms(x, after[0])
    x = x + down[0] @ (torch.nn.functional.silu(gate[0] @ y) * (up[0] @ y))
    expected = table @ rms(x, last)
    with torch.no_grad():
        found = opened.model(input_ids=torch.tensor([[3]])).logits[0, 0]
    assert np.allclose(found.numpy(), expected.numpy(), atol=1e-4)
    assert opened.processor.encode("cab")[-3:] == [2, 0, 1]
