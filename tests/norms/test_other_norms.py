"""Dense, 1-, ∞- and Frobenius norms, and the choice between the ways, against torch.linalg."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from evidence.spectra import families, with_spectrum
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import MatrixOperator
from howsmooth.norms import dense_norm, frobenius_norm, inf_norm, one_norm, operator_norm
from howsmooth.norms.entry_norms import interval

SHAPES = [(2, 3, 20, 30), (30, 20), (25, 25), (1, 7), (7, 1)]
ORDS: list[float | str] = [2, 1, math.inf, "fro"]


class ProductsOnly(MatrixOperator):
    """A batch known through its products only: no cutting, and columns and rows one by one."""

    def subset(self, index: Tensor) -> None:  # type: ignore[override]
        return None

    def dense(self) -> Tensor:
        raise AssertionError("the matrix was asked for")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", ORDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_equals_torch(shape: tuple[int, ...], norm: float | str) -> None:
    matrix = gaussian(*shape)
    m = dense_norm(MatrixOperator(matrix), norm)
    expected = torch.linalg.matrix_norm(matrix, ord=norm)
    torch.testing.assert_close(m.value, expected, rtol=1e-14, atol=0)
    assert (m.confidence, m.norm, m.products) == (1.0, norm, min(shape[-2:]))
    assert ((m.lower < expected) & (expected < m.upper)).all()


def test_dense_triplets_are_singular_triplets() -> None:
    matrix = gaussian(2, 8, 5)
    m = dense_norm(MatrixOperator(matrix), k=3)
    assert m.left is not None
    assert m.right is not None
    assert m.values is not None
    torch.testing.assert_close(matrix @ m.right.mT, m.left.mT * m.values[:, None], rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_column_and_row_sums_equal_torch(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.norms.counted_products.CHUNK_BYTES", 2**12)  # several blocks even here
    matrix = gaussian(*shape)
    for m, ord_ in ((one_norm(ProductsOnly(matrix)), 1), (inf_norm(ProductsOnly(matrix)), math.inf)):
        torch.testing.assert_close(m.value, torch.linalg.matrix_norm(matrix, ord=ord_), rtol=1e-14, atol=0)
        assert (m.norm, m.method, m.confidence, m.products) == (ord_, "entries", 1.0, min(shape[-2:]))
        assert m.converged.all()


@pytest.mark.parametrize("operator", [MatrixOperator, ProductsOnly])
@pytest.mark.parametrize("shape", [(3, 60, 90), (90, 60)])
def test_estimated_one_norms_bracket_the_true_ones(shape: tuple[int, ...], operator: type[MatrixOperator]) -> None:
    matrix = gaussian(*shape)
    for measure, ord_ in ((one_norm, 1), (inf_norm, math.inf)):
        m = measure(operator(matrix), exact_limit=10)
        true = torch.linalg.matrix_norm(matrix, ord=ord_)
        assert ((m.lower <= true) & (true <= m.upper)).all()
        assert (m.value >= 0.9 * true).all()
        assert (m.norm, m.method, m.confidence) == (ord_, "higham-tisseur", 0.99)


def test_estimated_one_norm_is_attained_by_a_column_and_repeatable() -> None:
    matrix = gaussian(50, 50)
    op = MatrixOperator(matrix)
    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again = one_norm(op, exact_limit=0, seed=3), one_norm(op, exact_limit=0, seed=3)
    assert float(first) == float(again)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert float((matrix.abs().sum(0) - first.value).abs().min()) < 1e-12


def test_upper_bound_on_the_inf_norm_uses_the_input_size() -> None:
    """One full row attains ‖J‖_∞ = √in_size·‖J‖₂, so a smaller factor would be false."""
    matrix = torch.zeros(8, 200).double()
    matrix[3] = 1
    m = inf_norm(MatrixOperator(matrix), exact_limit=0)
    assert float(m.lower) <= 200 <= float(m.upper) < 200.01


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_frobenius_equals_torch(shape: tuple[int, ...]) -> None:
    matrix = gaussian(*shape)
    m = frobenius_norm(ProductsOnly(matrix))
    torch.testing.assert_close(m.value, torch.linalg.matrix_norm(matrix), rtol=1e-14, atol=0)
    assert m.method == "entries"
    assert m.converged.all()


@pytest.mark.parametrize("confidence", [0.5, 0.9])
@pytest.mark.parametrize("spectrum", ["rank one", "flat", "geometric"])
def test_sampled_frobenius_is_below_upper_with_its_probability_and_above_lower_always(
    spectrum: str, confidence: float
) -> None:
    values = {
        "rank one": torch.tensor([1.0]).double(),
        "flat": torch.ones(40).double(),
        "geometric": 0.8 ** torch.arange(40).double(),
    }[spectrum]
    matrix = with_spectrum(values, 400, 40, 50, torch.Generator().manual_seed(0))
    m = frobenius_norm(MatrixOperator(matrix), exact_limit=0, probes=16, confidence=confidence, seed=21)
    true = values.norm()
    assert (m.lower <= true).all()
    assert int((true <= m.upper).sum()) >= binom.ppf(0.001, 400, confidence)
    assert m.confidence == confidence
    assert "the norm is at least" in m.notes[0]


def test_tail_bound_holds_for_random_spectra() -> None:
    """The theorem itself, S known exactly: each end of the interval may fail with probability δ'/2."""
    generator = torch.Generator().manual_seed(2)
    for exponent in (0.0, 0.5, 1.0, 3.0):
        squares = (1 + torch.arange(30).double()) ** -exponent
        z = torch.randn(4000, 8, 30, generator=generator, dtype=torch.float64)
        mean = (z**2 * squares).sum(-1).mean(-1)
        low, high = interval(mean, squares[:1].sqrt().expand(4000), probes=8, delta=0.2)
        true = squares.sum()
        for failures in (int((low > true).sum()), int((high < true).sum())):
            assert failures <= binom.ppf(0.999, 4000, 0.1)


def test_many_equal_singular_values_narrow_the_interval() -> None:
    op = MatrixOperator(torch.eye(400).double())
    m = frobenius_norm(op, exact_limit=0, probes=64)
    assert float(m.lower) <= 1 < 20 <= float(m.upper) < 20 * 1.03
    assert 1 / 1.05 < float(m.notes[0].split("at least ")[1].split()[0]) <= 20 / float(m.value)
    assert m.residuals is not None
    assert 1e-3 < float(m.residuals) < 0.2


def test_sampled_frobenius_of_the_zero_map_is_zero() -> None:
    m = frobenius_norm(MatrixOperator(torch.zeros(30, 30)), exact_limit=0)
    assert (float(m.value), float(m.lower), float(m.upper)) == (0, 0, 0)


@pytest.mark.parametrize("name", [2, "2", 1, "1", math.inf, "inf", float("inf"), "fro"])
@pytest.mark.parametrize("dense_limit", [0, 256])
def test_operator_norm_takes_every_name(name: float | str, dense_limit: int) -> None:
    matrix = gaussian(2, 40, 30)
    m = operator_norm(MatrixOperator(matrix), norm=name, dense_limit=dense_limit, rtol=1e-6)
    ord_ = name if name == "fro" else float(name)
    torch.testing.assert_close(m.value, torch.linalg.matrix_norm(matrix, ord=ord_), rtol=1e-6, atol=0)
    assert (m.method == "dense") == (dense_limit == 256)


def test_operator_norm_refuses_what_it_does_not_know() -> None:
    op = MatrixOperator(torch.eye(3))
    with pytest.raises(InvalidInput, match="norm=3"):
        operator_norm(op, norm=3)
    with pytest.raises(InvalidInput, match="2-norm"):
        operator_norm(op, norm=1, k=2)
    with pytest.raises(InvalidInput, match="k=4"):
        operator_norm(op, k=4)


@pytest.mark.parametrize("norm", ORDS)
@pytest.mark.parametrize("limit", [0, 256])
def test_invalid_entries_are_refused_on_every_way(norm: float | str, limit: int) -> None:
    matrix = torch.eye(20)
    matrix[3, 4] = math.nan
    for exact_limit in (0, 100):
        with pytest.raises(InvalidInput, match="NaN or infinite"):
            operator_norm(MatrixOperator(matrix), norm=norm, dense_limit=limit, exact_limit=exact_limit)


@pytest.mark.slow
def test_bounds_of_all_ways_contain_the_dense_norm_in_float32() -> None:
    for family in families([(80, 60)], count=2, dtype=torch.float32, seed=5):
        matrix = family.op.dense().double()
        for norm in ORDS:
            true = torch.linalg.matrix_norm(matrix, ord=norm)
            for m in (operator_norm(family.op, norm), operator_norm(family.op, norm, dense_limit=0, exact_limit=0)):
                assert ((m.lower <= true) & (true <= m.upper)).all(), (family.name, norm, m.method)
