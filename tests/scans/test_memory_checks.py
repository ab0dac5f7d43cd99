"""What does not fit in memory is said in one sentence, before it is read where sizes tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.scans import Scan, run, scan
from howsmooth.scans.cell_values import ModelSizes, check_fits, fitting, free_bytes, least_bytes

TINY = "random:bert[layers=2,width=16,heads=2]"


def test_the_estimate_is_below_what_attention_really_holds() -> None:
    heads, n = 2, 512
    logits = torch.zeros(heads, n, n)
    weights = torch.softmax(logits, -1)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (logits, weights))
    assert held <= least_bytes(n, ModelSizes(width=16, heads=heads, layers=2)) < 1.1 * held


def test_a_window_that_cannot_fit_is_refused_before_anything_is_read() -> None:
    model = open_model(TINY)
    check_fits(model, 512, free=10**9)
    with pytest.raises(InvalidInput, match=r"n = 512 does not fit in memory: .* 2 heads take at least 0\.00426 GB"):
        check_fits(model, 512, free=4_000_000)
    assert 0 < free_bytes() < 2**50


def test_a_scan_says_so_before_its_first_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.scans.cell_values.free_bytes", lambda: 1_000_000)
    with pytest.raises(InvalidInput, match="n = 512 does not fit in memory"):
        scan(TINY, lengths="8,512", out=tmp_path / "s.sqlite")
    assert not (tmp_path / "s.sqlite").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        ),
        RuntimeError("CUDA out of memory"),
    ],
)
def test_running_out_keeps_the_cells_before_and_names_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    measured = run.measure_batch

    def fails(targets: object, batch: object, settings: object) -> object:
        if batch.length == 16:  # type: ignore[attr-defined]
            raise error
        return measured(targets, batch, settings)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "measure_batch", fails)
    with pytest.raises(InvalidInput, match="n = 16 does not fit in memory: ask for shorter lengths"):
        scan(TINY, lengths="8,16", out=tmp_path / "s.sqlite")
    assert {row["length"] for row in Scan.open(tmp_path / "s.sqlite").rows} == {8}


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), fitting(8):
        raise RuntimeError("shapes do not match")
