"""The tables on rounded caches, made of a tiny random model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence import rounded_caches, stories
from howsmooth.models import OpenModel, alice, open_model
from howsmooth.rounding import parse_format, parse_formats


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


def test_predicted_ranks_follow_the_direct_ones_head_by_head(tiny: OpenModel) -> None:
    windows, form = tiny.windows(alice(), 24, 2), parse_format("int4")
    scores = rounded_caches.predicted(tiny, windows, [form], 48, silent)
    truth = rounded_caches.direct(tiny, windows, form, True, silent)
    assert truth.shape == (3, 2, 2)
    _, _, together = rounded_caches.correlations(scores.by_cache[:, :, 0], truth)
    assert float(together) >= 0.9


@pytest.mark.slow
def test_a_study_has_all_its_tables(tiny: OpenModel) -> None:
    parts = rounded_caches.study(tiny, alice(), alice(), 24, 2, 4, True, silent)
    page = "\n\n".join(parts)
    for said in ("violations", "predicted KL", "sigma", "first and last N", "first tokens exact", "One head at a time"):
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
