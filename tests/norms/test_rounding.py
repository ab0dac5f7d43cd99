"""The ends of a norm where rounding decides: near the identity, under cancellation, at the ends of the dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.near_identity import GAPS, NearIdentity, coverage, residual_blocks
from evidence.rounding_grid import CANCELLATION, SIZES, VALUE_SIZES, attention_tally, matrix_tally, merged
from evidence.spectra import with_spectrum
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, MatrixOperator
from howsmooth.norms import dense_norm, frobenius_norm, golub_kahan, inf_norm, one_norm, operator_norm
from howsmooth.norms.bidiagonal import Bidiagonalisation
from howsmooth.norms.counted_products import FlatProducts, overlaps, product_error

ORDS: list[float | str] = [2, 1, math.inf, "fro"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Hiding(MatrixOperator):
    """A map whose products are off by up to ``noise`` in the one direction that hides its largest singular value."""

    def __init__(self, matrix: Tensor, noise: float):
        super().__init__(matrix, Accuracy(product=noise))
        self.noise = noise
        left, _, right = torch.linalg.svd(matrix.double())
        self.u, self.v = left[..., :, 0].to(matrix), right[..., 0, :].to(matrix)

    def _hidden(self, y: Tensor, x: Tensor, direction: Tensor) -> Tensor:
        most = self.noise * x.norm(dim=-1, keepdim=True)
        part = (y * direction).sum(-1, keepdim=True)
        rest = (x * (self.v if direction is self.u else self.u)).sum(-1, keepdim=True)  # as if the value were 1
        return y - (part - rest).clamp(-most, most) * direction

    def matvec(self, v: Tensor) -> Tensor:
        return self._hidden(super().matvec(v), v, self.u)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self._hidden(super().rmatvec(u), u, self.v)

    def subset(self, index: Tensor) -> None:  # type: ignore[override]
        return None


class Diagonal(JacobianOperator):
    """One map that multiplies coordinate by coordinate."""

    def __init__(self, entries: Tensor):
        self.entries, self.dtype, self.device = entries, entries.dtype, entries.device
        self.batch_shape, self.in_shape, self.out_shape = torch.Size((1,)), entries.shape, entries.shape

    def matvec(self, v: Tensor) -> Tensor:
        return v * self.entries

    rmatvec = matvec


class Perturbed(MatrixOperator):
    """A map whose products are off by exactly ``noise``, each in a direction of its own."""

    def __init__(self, matrix: Tensor, noise: float):
        super().__init__(matrix, Accuracy(product=noise))
        self.noise, self.generator = noise, torch.Generator().manual_seed(3)

    def _off(self, y: Tensor, x: Tensor) -> Tensor:
        error = torch.randn(y.shape, generator=self.generator, dtype=y.dtype)
        return y + self.noise * x.norm(dim=-1, keepdim=True) * error / error.norm(dim=-1, keepdim=True)

    def matvec(self, v: Tensor) -> Tensor:
        return self._off(super().matvec(v), v)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self._off(super().rmatvec(u), u)

    def subset(self, index: Tensor) -> None:  # type: ignore[override]
        return None

    def dense(self) -> Tensor:
        return super(MatrixOperator, self).dense()


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", GAPS)
def test_upper_end_covers_maps_near_the_identity_at_its_rate(gap: float, dtype: torch.dtype, spread: bool) -> None:
    for size, runs in ((1000, 200), (10_000, 50)):
        found = coverage(size, gap, runs, dtype, spread)
        assert found.runs == runs
        assert found.lower_false == 0
        assert found.upper_false <= found.allowed


@pytest.mark.slow
def test_residual_blocks_are_covered_through_the_public_function() -> None:
    found = residual_blocks(runs=8)
    assert found.lower_false == 0
    assert found.upper_false <= found.allowed


def test_what_float32_cannot_resolve_widens_the_upper_end_and_is_said() -> None:
    m = golub_kahan(NearIdentity(300_000, 1e-4, 1, torch.float32), rtol=1e-4)
    assert 2e-4 < float(m.upper) - 1 < 2e-3
    assert not m.converged.any()
    assert any("rounding in float32 limits the ends" in note and "float64" in note for note in m.notes)
    assert m.products < 40  # it does not go on where nothing can be gained
    exact = golub_kahan(NearIdentity(300_000, 1e-4, 1, torch.float64), rtol=1e-4)
    assert exact.converged.all()
    assert exact.notes == ()


def test_lower_end_survives_the_rounding_of_long_sums() -> None:
    """The length of a vector of 10⁵ numbers is itself rounded: by ten eps, if its squares are added one by one."""
    op = NearIdentity(10**5, 1e-3, 10, torch.float64, spread=True)
    for seed in range(2):
        m = golub_kahan(op, seed=seed)
        assert (m.lower <= op.top).all()
        assert (m.lower >= op.top * (1 - 12 * torch.finfo(torch.float64).eps)).all()


def test_further_starts_certify_what_one_cannot() -> None:
    """A map that rounding limits is run again from independent starts; the others of its batch are not."""
    seen = []

    class Watched(MatrixOperator):
        def subset(self, index: Tensor) -> MatrixOperator:
            seen.append(index.tolist())
            return super().subset(index)

    matrix = torch.stack([torch.eye(400), gaussian(400, 400, dtype=torch.float32), torch.eye(400)])
    op = Watched(matrix)
    op.accuracy = Accuracy(product=torch.tensor([0.0, 0.0, 1e-6]))
    m = golub_kahan(op)
    assert m.converged.all()
    assert [1.0 <= x < 1.001 for x in m.upper[[0, 2]].tolist()] == [True, True]
    assert seen.count([2]) == 4
    op.accuracy = Accuracy(product=torch.tensor([0.0, 0.0, 1e-2]))
    assert golub_kahan(op).converged.tolist() == [True, True, False]


def test_products_stay_few_in_ordinary_float32_use() -> None:
    matrix = with_spectrum(0.9 ** torch.arange(60).double(), 10, 300, 200, torch.Generator().manual_seed(0))
    single, double = (golub_kahan(MatrixOperator(matrix.to(dtype))) for dtype in (torch.float32, torch.float64))
    assert single.converged.all()
    assert single.products <= double.products + 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"basis_limit": 6}])
@pytest.mark.parametrize("noise", [1e-7, 1e-5, 1e-3])
def test_errors_that_hide_the_largest_singular_value_are_covered(noise: float, options: dict[str, int]) -> None:
    """No assumption on the direction of rounding: here it conspires, and 99 % of the upper ends must still hold."""
    values = torch.ones(50).double()
    values[0] = 1.02
    matrix = with_spectrum(values, 300, 50, 50, torch.Generator().manual_seed(4))
    m = golub_kahan(Hiding(matrix, noise), max_steps=60, **options)  # type: ignore[arg-type]
    assert (m.lower <= 1.02).all()
    assert int((m.upper < 1.02).sum()) <= 9  # exceeded once in a thousand times at 1 % of 300


@pytest.mark.parametrize("limits", [{}, {"dense_limit": 0}, {"dense_limit": 0, "exact_limit": 0}])
@pytest.mark.parametrize("norm", ORDS)
@pytest.mark.parametrize("noise", [1e-6, 1e-2, 1.0, 100.0])
def test_both_ends_allow_for_absolute_errors_on_every_way(
    noise: float, norm: float | str, limits: dict[str, int]
) -> None:
    matrix = with_spectrum(0.8 ** torch.arange(12).double(), 20, 15, 12, torch.Generator().manual_seed(5))
    true = torch.linalg.matrix_norm(matrix, ord=norm)
    m = operator_norm(Perturbed(matrix, noise), norm, max_steps=30, **limits)  # type: ignore[arg-type]
    assert (m.lower <= true).all()
    assert (true <= m.upper).all()
    assert (m.lower >= 0).all()
    if noise >= 1:
        assert not m.converged.any()
        assert any("rounding" in note for note in m.notes) or m.method in ("higham-tisseur", "gaussian-probes")


def test_noise_may_differ_from_map_to_map_and_follows_the_adjoint() -> None:
    op = MatrixOperator(torch.eye(4).double().expand(2, 3, 4, 4).contiguous())
    op.accuracy = Accuracy(product=torch.tensor([0.0, 0.5, 2.0]))
    assert product_error(op.adjoint).tolist() == [0, 0.5, 2, 0, 0.5, 2]
    for measure in (golub_kahan, dense_norm):
        m = measure(op)
        torch.testing.assert_close(m.lower[0], m.lower[1])
        assert (m.lower[0] > torch.tensor([0.99, -1, -1])).all()
        assert (m.lower[0] <= torch.tensor([1.0, 0.5, 0.0])).all()
        assert m.converged.tolist() == 2 * [[True, False, False]]
    op.accuracy = Accuracy(product=-1.0)
    with pytest.raises(InvalidInput, match="rounding error"):
        golub_kahan(op)


def test_noise_on_a_map_that_vanishes_leaves_an_upper_end() -> None:
    op = MatrixOperator(torch.zeros(10, 10))
    op.accuracy = Accuracy(product=1e-3)
    m = golub_kahan(op)
    assert float(m.lower) == 0
    assert 1e-3 <= float(m.upper) < 10
    assert not m.converged


def test_dense_says_converged_only_when_its_ends_are_that_close() -> None:
    op = MatrixOperator(gaussian(20, 20, dtype=torch.float32))
    assert operator_norm(op, rtol=1e-3).converged
    m = operator_norm(op, rtol=1e-7)
    assert not m.converged
    assert m.notes == ("rounding in float32 limits the ends of this map: use float64 inputs",)


class Lying(MatrixOperator):
    """An operator that breaks its promise: products with Jᵀ are far too small."""

    def rmatvec(self, u: Tensor) -> Tensor:
        return 1e-9 * super().rmatvec(u)


def test_ends_that_contradict_each_other_are_never_converged() -> None:
    matrix = torch.diag(torch.linspace(1, 5, 40)).double()
    m = golub_kahan(Lying(matrix))
    assert not bool(m.converged)
    assert bool(m.lower <= m.upper)


def test_measurement_refuses_ends_that_cross() -> None:
    m = golub_kahan(MatrixOperator(torch.eye(3)))
    for upper in (0.5, math.nan):
        with pytest.raises(InvalidInput, match="above its upper end"):
            type(m)(**{**vars(m), "upper": torch.tensor(upper).double()})


@pytest.mark.parametrize("shape", [(30, 30), (20, 35), (35, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_triplets_beyond_the_rank_are_orthonormal_with_true_residuals(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rank_two = with_spectrum(torch.tensor([3.0, 1.0]).double(), 8, *shape, torch.Generator().manual_seed(6)).to(dtype)
    eps = torch.finfo(dtype).eps
    for seed in range(4):
        m = golub_kahan(MatrixOperator(rank_two), k=5, seed=seed)
        assert m.left is not None
        assert m.right is not None
        assert m.values is not None
        assert m.residuals is not None
        for vectors in (m.left.double(), m.right.double()):
            gram = vectors @ vectors.mT
            torch.testing.assert_close(gram, torch.eye(5).double().expand(8, 5, 5), rtol=0, atol=100 * eps)
        matrix, values = rank_two.double(), m.values[:, None]
        ahead = (matrix @ m.right.double().mT - m.left.double().mT * values).norm(dim=1)
        back = (matrix.mT @ m.left.double().mT - m.right.double().mT * values).norm(dim=1)
        true = torch.maximum(ahead, back)
        assert ((m.residuals - true).abs() <= 60 * eps).all()
        assert (m.values[:, 2:] <= 60 * eps).all()
        assert torch.equal(m.converged, (true <= 1e-3 * m.values[:, :1]).all(-1) & (m.upper <= 1.001 * m.lower))
        assert m.converged.all()


@pytest.mark.parametrize("norm", ORDS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.float32, size) for size in (1e-39, 1e-37, 1e-30, 1e-20, 1e20, 1e30, 1e37)),
        *((torch.float64, size) for size in (1e-305, 1e-200, 1e-150, 1e-30, 1e30, 1e150, 1e200, 1e300)),
    ],
)
def test_tiny_and_huge_maps_are_measured_on_every_way(dtype: torch.dtype, size: float, norm: float | str) -> None:
    shape = with_spectrum(0.7 ** torch.arange(12).double(), 3, 15, 12, torch.Generator().manual_seed(7))
    matrix = (shape * size).to(dtype)
    true = torch.linalg.matrix_norm(matrix.double() / size, ord=norm)
    for limits in ({}, {"dense_limit": 0}, {"dense_limit": 0, "exact_limit": 0}):
        m = operator_norm(MatrixOperator(matrix), norm, rtol=1e-2, **limits)  # type: ignore[arg-type]
        assert (m.lower / size <= true * (1 + 1e-12)).all(), m
        assert (true <= m.upper / size * (1 + 1e-12)).all(), m
        assert (m.lower > 0).all()
        assert m.converged.all() or m.method in ("higham-tisseur", "gaussian-probes")


def test_a_head_whose_values_are_denormal_is_measured_right() -> None:
    """Values of 1e-39: their products with vectors of length one have no more than a few digits in float32."""
    x = gaussian(30, 4, dtype=torch.float32)
    for scale in (1e-39, 1e-37):
        head = hs.SelfAttention.from_bilinear(0.1 * torch.eye(4), scale * torch.eye(4))
        true = float(hs.measure(head.in_dtype(torch.float64), x.double(), rtol=1e-9, dense_limit=0))
        m = hs.measure(head, x, dense_limit=0)
        assert float(m.lower) <= true <= float(m.upper)


def test_scaled_products_belong_to_the_maps_still_wanted() -> None:
    sizes = torch.tensor([1e-38, 1.0, 1e35, 0.0])
    op = MatrixOperator(sizes[:, None, None] * gaussian(9, 7, dtype=torch.float32))
    products = FlatProducts(op)
    v = torch.nn.functional.normalize(gaussian(4, 7, seed=1, dtype=torch.float32))
    first = products.calibrated(v)
    true = (op.matrix.double() @ v.double().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(first.double() * products.scale[:, None], true, rtol=1e-5, atol=0)
    products.keep(torch.tensor([True, False, True, True]))
    later = products.matvec(v[[0, 2, 3]]).double() * products.scale[:, None]
    torch.testing.assert_close(later, true[[0, 2, 3]], rtol=1e-5, atol=0)
    assert ((first[[0, 2]].norm(dim=-1) > 0.1) & (first[[0, 2]].norm(dim=-1) < 10)).all()


def test_maps_of_different_size_and_speed_share_a_batch() -> None:
    matrix = torch.stack([1e-36 * torch.eye(40), gaussian(40, 40, dtype=torch.float32), 1e30 * torch.eye(40)])
    matrix[2, 0, 0] = 3e30
    sigma = torch.linalg.svdvals(matrix.double())[:, 0]
    m = golub_kahan(MatrixOperator(matrix), basis_limit=8)
    assert m.converged.all()
    assert ((m.lower <= sigma) & (sigma <= m.upper)).all()
    goal = 0.5 * sigma
    assert (golub_kahan(MatrixOperator(matrix), stop_at=goal).value >= goal * (1 - 1e-6)).all()
    warm = golub_kahan(MatrixOperator(matrix), start=torch.ones(3, 40))
    assert (warm.lower <= sigma).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(CANCELLATION))
def test_ends_hold_under_prescribed_cancellation_from_1e_minus_30_to_1e30(dtype: torch.dtype) -> None:
    cells = [(SIZES[(3 * i) % len(SIZES)], ratio) for i, ratio in enumerate(CANCELLATION[dtype])]
    found = merged([matrix_tally(size, ratio, dtype, maps=3, seed=i) for i, (size, ratio) in enumerate(cells)])
    assert found.maps == 15
    assert (found.lower_false, found.crossed, found.converged_wrongly) == (0, 0, 0), found.worst
    assert found.upper_false <= found.allowed, found.worst
    assert found.zero_lower > 0  # the strongest cancellation leaves nothing
    assert found.converged > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(CANCELLATION))
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_ends_hold_for_attention_against_50_digits(offset: float, dtype: torch.dtype) -> None:
    found = merged([attention_tally(offset, size, dtype, maps=2, seed=3 + i) for i, size in enumerate(VALUE_SIZES)])
    assert found.maps == 6
    assert (found.lower_false, found.crossed, found.refused) == (0, 0, 0), found.worst
    assert found.upper_false <= found.allowed, found.worst


def test_other_norms_say_when_rounding_limits_them() -> None:
    op = MatrixOperator(gaussian(12, 12, dtype=torch.float32))
    op.accuracy = Accuracy(product=0.5)
    for measure in (one_norm, inf_norm, frobenius_norm):
        m = measure(op)
        assert not m.converged
        assert m.notes == ("rounding in float32 limits the ends of this map: use float64 inputs",)
        assert float(m.upper) - float(m.value) >= 0.5 * math.sqrt(12)


@pytest.mark.slow
@pytest.mark.parametrize("null", [5, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_null_space_does_not_cost_the_upper_end(null: int, dtype: torch.dtype) -> None:
    """Small singular values of B take the orthogonality of the left vectors, and rounding then seems to hide things."""
    values = torch.cat([torch.linspace(1.357, 1.2, 20), torch.linspace(1.05, 0.95, 980 - null), torch.zeros(null)])
    matrix = with_spectrum(values.double(), 4, 1000, 1000, torch.Generator().manual_seed(0)).to(dtype)
    m = golub_kahan(MatrixOperator(matrix))
    assert m.converged.all()
    assert not m.notes
    assert m.products < 80
    assert (m.lower <= 1.357 * (1 + 1e-6)).all()
    assert (m.upper >= 1.357 * (1 - 1e-6)).all()


def test_what_was_taken_away_covers_the_images_of_vectors_after_restarts_too() -> None:
    """J v = U B q misses what reorthogonalisation took from the left vectors, which a restart mixes."""
    values = torch.cat([torch.linspace(1.357, 1.2, 20), torch.linspace(1.05, 0.95, 275), torch.zeros(5)])
    matrix = with_spectrum(values.double(), 1, 300, 300, torch.Generator().manual_seed(0)).float()
    start, generator = gaussian(1, 300, dtype=torch.float32), torch.Generator().manual_seed(1)
    process = Bidiagonalisation(FlatProducts(MatrixOperator(matrix)), start / start.norm(), generator)
    running, eps = torch.ones(1, dtype=torch.bool), torch.finfo(torch.float32).eps
    for _ in range(60):
        process.step()
        small = process.project()
        right, images = (
            vectors(small, running, process.size).double() for vectors in (process.right_vectors, process.images)
        )
        error = right @ matrix.double().mT / process.products.scale - images
        taken = small.drift[0].norm(dim=-1)
        assert float(error.norm(dim=-1).max()) <= float(taken) + 8 * eps
        if process.size == 40:
            process.restart(small, 20)
    assert float(taken) > 16 * eps  # of a left basis that was lost


def test_overlaps_of_long_vectors_are_exact_to_the_last_digits_where_parts_of_their_sum_are_large() -> None:
    """As those of attention with a sink are: half of the sum takes away what the other half has brought."""
    size, eps = 2**20, torch.finfo(torch.float32).eps
    a, b = (torch.rand(1, 3, size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    b[..., size // 2 :] *= -1
    a, b = (torch.nn.functional.normalize(t, dim=-1) for t in (a, b))
    exact = torch.bmm(a.double(), b.double().mT)
    assert float((overlaps(a, b) - exact).abs().max()) <= eps
    assert torch.equal(overlaps(a.double(), b.double()), overlaps(b.double(), a.double()).mT)


def test_bases_of_long_vectors_stay_orthonormal() -> None:
    """Along a smooth start and its images, whose overlaps are sums of large parts."""
    size, steps = 2**19, 8
    places = torch.linspace(0, 1, size, dtype=torch.float64)
    start = torch.nn.functional.normalize(1 + places, dim=0).float()[None]
    op = Diagonal((1 + places).float())
    process = Bidiagonalisation(FlatProducts(op), start, torch.Generator().manual_seed(0))
    process._both = True
    for _ in range(steps):
        process.step()
    for basis in (process._left[:, :steps], process._right[:, :steps]):
        skew = torch.bmm(basis.double(), basis.double().mT) - torch.eye(steps, dtype=torch.float64)
        assert float(skew.abs().max()) <= 4 * torch.finfo(torch.float32).eps
