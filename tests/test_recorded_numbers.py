"""Results of every kind are still what they were when they were recorded."""

from __future__ import annotations

import json

import pytest
import torch

from evidence.recorded_numbers import RECORD, SECTIONS, recorded

ACCURACY = 1e-3
"""The accuracy that measurements are asked for: on another processor they may differ by so much."""


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_numbers_are_those_recorded(section: str) -> None:
    before = json.loads(RECORD.read_text(encoding="utf-8"))[section]
    now = recorded(section)
    assert now.keys() == before.keys()
    for name, numbers in now.items():
        one, other = (
            torch.tensor([float.fromhex(n) for n in some], dtype=torch.float64) for some in (numbers, before[name])
        )
        torch.testing.assert_close(
            one, other, rtol=ACCURACY, atol=1e-9, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
