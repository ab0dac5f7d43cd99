"""Fitted power laws, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import linregress

from howsmooth.scanning.growth import fit_growth


def test_exponent_and_standard_error_equal_those_of_scipy() -> None:
    draw = np.random.default_rng(0)
    lengths = np.repeat([8, 16, 32, 64, 128], 3)
    values = 0.7 * lengths**0.4 * np.exp(draw.normal(0, 0.2, len(lengths)))
    found, line = fit_growth(lengths.tolist(), values.tolist()), linregress(np.log(lengths), np.log(values))
    assert found is not None
    assert found.exponent == pytest.approx(line.slope, rel=1e-12)
    assert found.error == pytest.approx(line.stderr, rel=1e-12)
    assert found.factor == pytest.approx(np.exp(line.intercept), rel=1e-12)
    assert found.at(32) == pytest.approx(np.exp(line.intercept + line.slope * np.log(32)), rel=1e-12)


def test_two_points_have_a_law_but_no_error() -> None:
    found = fit_growth([4, 16], [1.0, 2.0])
    assert found is not None
    assert (found.exponent, found.error) == (pytest.approx(0.5), None)
    assert str(found) == "n^0.50"


@pytest.mark.parametrize(("lengths", "values"), [([8, 8], [1.0, 2.0]), ([8, 16], [0.0, 1.0]), ([8, 16], [1, np.inf])])
def test_there_is_no_law_through_one_length_or_values_without_logarithm(lengths: list, values: list) -> None:
    assert fit_growth(lengths, values) is None
