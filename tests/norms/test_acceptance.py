"""What a user may rely on, shown on 1,008 operators with known spectra, clusters with gaps of 1e-3 included."""

from __future__ import annotations

import pytest
import torch

from evidence.known_spectra import SETTINGS, count, operators
from evidence.spectra import Family


@pytest.fixture(scope="module")
def thousand() -> list[Family]:
    return operators(copies=14)


@pytest.mark.slow
@pytest.mark.parametrize(("rtol", "confidence"), SETTINGS)
def test_bounds_and_convergence_are_true_on_a_thousand_operators(
    thousand: list[Family], rtol: float, confidence: float
) -> None:
    found = count(thousand, rtol, confidence)
    assert found.total == 1008
    assert found.lower_false == 0
    assert found.upper_false <= found.allowed(confidence)
    assert found.converged_wrongly <= found.allowed(confidence)
    in_reach = found.total if rtol > 1e-5 else sum(len(f.sigma) for f in thousand if f.op.dtype == torch.float64)
    assert found.converged == in_reach  # float32 cannot certify 1e-6 and must not claim it
