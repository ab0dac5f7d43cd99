"""The solver against dense singular value decompositions in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from evidence.spectra import families, with_spectrum
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import Accuracy, MatrixOperator
from howsmooth.norms import golub_kahan
from howsmooth.norms.bidiagonal import Bidiagonalisation
from howsmooth.norms.counted_products import FlatProducts, rounding_allowance
from howsmooth.norms.lanczos_bound import LanczosBound


class Uncut(MatrixOperator):
    """A batch that cannot be cut."""

    def subset(self, index: Tensor) -> None:  # type: ignore[override]
        return None


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.slow
def test_value_equals_dense_svd_to_the_digits_asked_for() -> None:
    for family in families([(70, 70), (40, 90), (90, 40)], count=2, dtype=torch.float64, seed=1):
        m = golub_kahan(family.op, rtol=1e-9, seed=3)
        expected = torch.linalg.svdvals(family.op.dense())[:, 0]
        torch.testing.assert_close(m.value, expected, rtol=1e-8, atol=0)
        assert m.converged.all(), family.name


@pytest.mark.parametrize("shape", [(60, 60), (30, 80), (80, 30)])
def test_top_triplets_are_singular_triplets(shape: tuple[int, int]) -> None:
    matrix = gaussian(3, *shape)
    m = golub_kahan(MatrixOperator(matrix), k=4, rtol=1e-10)
    assert m.left is not None
    assert m.right is not None
    assert m.values is not None
    assert m.residuals is not None
    assert m.left.shape == (3, 4, shape[0])
    assert m.right.shape == (3, 4, shape[1])
    torch.testing.assert_close(m.values, torch.linalg.svdvals(matrix)[:, :4], rtol=1e-10, atol=0)
    forward = (matrix @ m.right.mT - m.left.mT * m.values[:, None]).norm(dim=1)
    backward = (matrix.mT @ m.left.mT - m.right.mT * m.values[:, None]).norm(dim=1)
    exact, approximate = (forward, backward) if shape[0] >= shape[1] else (backward, forward)
    assert exact.max() < 1e-12  # holds by construction on the side the process ends on
    assert (approximate <= 1e-10 * m.values[:, :1]).all()  # the residual that was asked for
    torch.testing.assert_close(m.right @ m.right.mT, torch.eye(4).double().expand(3, 4, 4), rtol=0, atol=1e-9)
    torch.testing.assert_close(m.left @ m.left.mT, torch.eye(4).double().expand(3, 4, 4), rtol=0, atol=1e-9)


def test_residuals_are_the_true_residuals() -> None:
    matrix = gaussian(50, 50)
    m = golub_kahan(MatrixOperator(matrix), rtol=1e-2, k=2)
    assert m.left is not None
    assert m.right is not None
    assert m.values is not None
    assert m.residuals is not None
    residual = (m.left @ matrix - m.values[:, None] * m.right).norm(dim=-1)
    torch.testing.assert_close(m.residuals, residual, rtol=1e-6, atol=1e-13)
    assert m.residuals.max() > 1e-10  # something was left to compare


@pytest.mark.parametrize("options", [{}, {"basis_limit": 5}])
def test_a_run_may_end_between_the_products_of_a_step(options: dict[str, int]) -> None:
    halfway = 0
    for seed in range(20):
        matrix = gaussian(50, 50, seed=seed)
        m = golub_kahan(MatrixOperator(matrix), rtol=1e-2, **options)  # type: ignore[arg-type]
        assert m.left is not None
        assert m.right is not None
        assert m.residuals is not None
        sigma = float(torch.linalg.svdvals(matrix)[0])
        assert float(m.lower) <= sigma <= float(m.upper) <= 1.01 * float(m.lower)
        assert bool(m.converged)
        torch.testing.assert_close(matrix @ m.right, m.left * float(m), rtol=0, atol=1e-11)
        residual = float((m.left @ matrix - float(m) * m.right).norm())
        if m.products % 2 == 1:
            assert math.isclose(residual, float(m.residuals), rel_tol=1e-6)
        else:
            halfway += 1
            assert residual <= float(m.residuals) <= 30 * residual
    assert 3 <= halfway <= 17


@pytest.mark.slow
@pytest.mark.parametrize("basis_limit", [3, 6, 15])
def test_restarts_reach_the_same_value(basis_limit: int) -> None:
    matrix = gaussian(4, 60, 60)
    m = golub_kahan(MatrixOperator(matrix), rtol=1e-8, basis_limit=basis_limit)
    torch.testing.assert_close(m.value, torch.linalg.svdvals(matrix)[:, 0], rtol=1e-12, atol=0)
    assert m.converged.all()
    assert m.products > 2 * basis_limit


def test_restarts_reach_the_same_triplets() -> None:
    matrix = gaussian(60, 45)
    m = golub_kahan(MatrixOperator(matrix), k=3, rtol=1e-8, basis_limit=9)
    assert m.left is not None
    assert m.right is not None
    assert m.values is not None
    torch.testing.assert_close(m.values, torch.linalg.svdvals(matrix)[:3], rtol=1e-12, atol=0)
    torch.testing.assert_close(matrix @ m.right.mT, m.left.mT * m.values, rtol=0, atol=1e-12)


def test_factorisation_holds_before_and_after_a_restart() -> None:
    matrix = gaussian(2, 30, 40)
    products = FlatProducts(MatrixOperator(matrix))
    process = Bidiagonalisation(products, torch.nn.functional.normalize(gaussian(2, 40, seed=1)), torch.Generator())

    def check() -> None:
        m = process.size
        u, v, b = process._left[:, :m], process._right[:, : m + 1], process._b[:, :m, :m]
        last = torch.zeros(2, m, m + 1).double()
        last[:, -1, -1] = process.beta
        torch.testing.assert_close(matrix @ v[:, :m].mT, u.mT @ b, rtol=0, atol=1e-12)
        torch.testing.assert_close(u @ matrix, b @ v[:, :m] + last @ v, rtol=0, atol=1e-12)
        torch.testing.assert_close(v @ v.mT, torch.eye(m + 1).double().expand(2, -1, -1), rtol=0, atol=1e-13)

    for _ in range(20):
        process.step()
    check()
    process.restart(process.project(), keep=5)
    for _ in range(7):
        process.step()
    assert process.size == 12
    check()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)])
def test_zero_map_gives_zero(shape: tuple[int, int], k: int) -> None:
    m = golub_kahan(MatrixOperator(torch.zeros(shape)), k=k)
    assert (float(m.value), float(m.lower), float(m.upper), bool(m.converged)) == (0, 0, 0, True)
    assert m.right is not None
    assert torch.isfinite(m.right).all()
    assert m.values is not None
    assert m.values.tolist() == [0] * k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_one_map_is_exact(dtype: torch.dtype) -> None:
    u, v = gaussian(50, seed=1, dtype=dtype), gaussian(30, seed=2, dtype=dtype)
    m = golub_kahan(MatrixOperator(torch.outer(u, v)), k=2)
    expected = float(u.double().norm() * v.double().norm())
    assert abs(float(m) / expected - 1) < 4 * torch.finfo(dtype).eps
    assert float(m.lower) <= expected <= float(m.upper)
    assert bool(m.converged)
    assert m.values is not None
    assert float(m.values[1]) < 10 * torch.finfo(dtype).eps * expected


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1)])
def test_single_row_or_column_gives_its_length(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    m = golub_kahan(MatrixOperator(matrix))
    assert float(m.lower) <= float(matrix.norm()) <= float(m.upper)
    assert bool(m.converged)
    torch.testing.assert_close(m.value, matrix.norm(), rtol=1e-14, atol=0)


def test_identity_gives_as_many_triplets_as_asked_for() -> None:
    m = golub_kahan(MatrixOperator(2 * torch.eye(6).double()), k=4)
    assert m.values is not None
    assert m.right is not None
    torch.testing.assert_close(m.values, torch.full((4,), 2.0).double(), rtol=1e-14, atol=0)
    torch.testing.assert_close(m.right @ m.right.T, torch.eye(4).double(), rtol=0, atol=1e-13)
    assert any("repeated" in note for note in m.notes)


@pytest.mark.parametrize("cut", [MatrixOperator, Uncut])
def test_maps_of_different_speed_share_a_batch(cut: type[MatrixOperator]) -> None:
    easy, hard = torch.zeros(3, 80, 80).double(), gaussian(2, 80, 80)
    easy[:, 0, 0] = torch.tensor([1.0, 2.0, 0.0])
    matrix = torch.stack([easy[0], hard[0], easy[1], hard[1], easy[2], hard[0]]).reshape(2, 3, 80, 80)
    m = golub_kahan(cut(matrix), rtol=1e-6)
    assert m.value.shape == (2, 3)
    assert m.converged.all()
    torch.testing.assert_close(m.value, torch.linalg.svdvals(matrix)[..., 0], rtol=1e-9, atol=1e-15)
    assert m.left is not None
    assert m.right is not None
    image = (matrix @ m.right.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(image, m.left * m.value.unsqueeze(-1), rtol=0, atol=1e-12)


def test_finished_maps_leave_the_operator() -> None:
    seen = []

    class Watched(MatrixOperator):
        def subset(self, index: Tensor) -> MatrixOperator:
            seen.append(index.tolist())
            return super().subset(index)

    matrix = gaussian(3, 60, 60)
    matrix[0], matrix[2] = torch.eye(60), 3 * torch.eye(60)
    golub_kahan(Watched(matrix))
    assert seen == [[1]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_operator_with_invalid_entries_is_named(bad: float) -> None:
    matrix = torch.eye(4)
    matrix[2, 1] = bad
    with pytest.raises(InvalidInput, match=r"(matrix|MatrixOperator).*NaN or infinite"):
        golub_kahan(MatrixOperator(matrix))


def test_warm_start_saves_products_and_gives_no_upper_end() -> None:
    matrix = gaussian(100, 100)
    cold = golub_kahan(MatrixOperator(matrix), rtol=1e-3)
    assert cold.right is not None
    warm = golub_kahan(MatrixOperator(matrix + 1e-4 * gaussian(100, 100, seed=1)), rtol=1e-3, start=cold.right)
    assert warm.products < cold.products / 2
    assert (warm.confidence, float(warm.upper), bool(warm.converged)) == (0, math.inf, True)
    assert any("no upper bound" in note for note in warm.notes)


@pytest.mark.parametrize("start", [torch.zeros(4), torch.full((4,), math.nan), torch.ones(5)])
def test_useless_start_is_refused(start: Tensor) -> None:
    with pytest.raises(InvalidInput, match="start"):
        golub_kahan(MatrixOperator(torch.eye(4)), start=start)


def test_same_seed_gives_the_same_result_and_another_seed_another_run() -> None:
    op = MatrixOperator(gaussian(2, 50, 50))
    first, again, other = (golub_kahan(op, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.value, again.value)
    assert torch.equal(first.upper, again.upper)
    assert not torch.equal(first.upper, other.upper)


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    golub_kahan(MatrixOperator(torch.eye(5)), k=3)
    assert torch.equal(torch.rand(1), expected)


def test_too_few_steps_leave_true_bounds_and_say_so() -> None:
    matrix = with_spectrum(torch.linspace(1, 0, 200).double(), 1, 200, 200, torch.Generator().manual_seed(0))[0]
    m = golub_kahan(MatrixOperator(matrix), rtol=1e-6, max_steps=4)
    assert not bool(m.converged)
    assert m.products == 9  # four steps, and one product for the value
    assert float(m.lower) < 1 < float(m.upper) < math.inf


def test_accuracy_beyond_the_dtype_ends_with_a_note() -> None:
    matrix = gaussian(80, 80, dtype=torch.float32)
    m = golub_kahan(MatrixOperator(matrix), rtol=1e-9)
    sigma = float(torch.linalg.svdvals(matrix.double())[0])
    assert not bool(m.converged)
    assert any("float32" in note for note in m.notes)
    assert float(m.lower) <= sigma <= float(m.upper) < sigma * (1 + 1e-4)


@pytest.mark.slow
def test_float32_errors_stay_within_half_the_rounding_allowance() -> None:
    for family in families([(400, 300)], count=2, dtype=torch.float32, seed=6):
        m = golub_kahan(family.op, rtol=1e-5)
        excess = (m.value / family.sigma[:, 0] - 1).max()
        assert excess <= rounding_allowance(torch.float32, m.products) / 2, family.name


def test_progress_is_called_after_every_step() -> None:
    seen: list[tuple[int, float]] = []
    m = golub_kahan(MatrixOperator(gaussian(60, 60)), progress=lambda step, value: seen.append((step, value)))
    assert [step for step, _ in seen] == list(range(1, m.products // 2 + 1))  # half a step counts as one
    assert all(a <= b <= float(m) * (1 + 1e-14) for (_, a), (_, b) in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 5}, "k=5"),
        ({"rtol": 0.0}, "rtol"),
        ({"max_steps": 0}, "max_steps"),
        ({"basis_limit": 2}, "basis_limit"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, float], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        golub_kahan(MatrixOperator(torch.eye(4)), **options)  # type: ignore[arg-type]


def test_half_precision_and_empty_operators_are_refused() -> None:
    with pytest.raises(InvalidInput, match="float32 or float64"):
        golub_kahan(MatrixOperator(torch.eye(4, dtype=torch.bfloat16)))
    with pytest.raises(InvalidInput, match="no entries"):
        golub_kahan(MatrixOperator(torch.zeros(0, 3, 3)))


def test_stops_where_told_and_does_not_call_it_converged() -> None:
    matrix = gaussian(3, 80, 80)
    sigma = torch.linalg.svdvals(matrix)[:, 0]
    full = golub_kahan(MatrixOperator(matrix), rtol=1e-3)
    goal = torch.stack([0.9 * sigma[0], 0.5 * sigma[1], 2 * sigma[2]])
    found = golub_kahan(MatrixOperator(matrix), rtol=1e-3, stop_at=goal)
    assert found.converged.tolist() == [False, False, True]  # the last cannot be reached, so it runs to the end
    assert (found.value[:2] >= (1 - 1e-12) * goal[:2]).all()
    assert (found.lower <= sigma).all()
    assert (sigma <= found.upper).all()
    early = golub_kahan(MatrixOperator(matrix[:1]), rtol=1e-3, stop_at=0.5 * float(sigma[0]))
    assert early.products < full.products / 2


def test_a_question_about_the_upper_end_is_answered_early_and_truly() -> None:
    values, sizes = torch.linspace(0.1, 1, 200, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    op = MatrixOperator(sizes[:, None, None] * with_spectrum(values, 2, 200, 200, torch.Generator().manual_seed(0)))
    full = golub_kahan(op, rtol=1e-6)
    for goal in (3.0, torch.tensor([1.5, 3.0])):
        found = golub_kahan(op, rtol=1e-6, stop_below=goal, stop_at=goal, verify=False)
        assert found.products < full.products
        assert bool((found.upper <= torch.as_tensor(goal)).all())
        assert bool((full.value <= found.upper).all())
        assert not bool(found.converged.any())
    below = golub_kahan(op, rtol=1e-6, stop_below=0.5)  # what is not true cannot be certified
    assert bool((below.upper >= full.value).all())
    assert bool(below.converged.all())


def test_without_the_last_product_there_is_no_lower_end() -> None:
    op = MatrixOperator(gaussian(60, 60))
    m, unverified = golub_kahan(op), golub_kahan(op, verify=False)
    assert unverified.products == m.products - 1
    assert float(unverified.lower) == 0
    assert not bool(unverified.converged)
    torch.testing.assert_close(unverified.upper, m.upper)
    torch.testing.assert_close(unverified.right, m.right)


def test_a_blurred_map_takes_its_value_from_the_products_made() -> None:
    """Their sum has the error of all of them, which a map that is blurred by more has to allow for anyway."""
    matrix = with_spectrum(0.9 ** torch.arange(60).double(), 3, 300, 200, torch.Generator().manual_seed(0)).float()
    last = []
    for point, product in ((0.0, 0.0), (1e-8, 0.0), (1e-5, 0.0), (1e-5, 1e-9)):
        op = MatrixOperator(matrix, Accuracy(point, product))
        m = golub_kahan(op)
        assert m.left is not None
        assert m.right is not None
        assert m.converged.all()
        moved = (matrix.double() @ m.right.double().unsqueeze(-1)).squeeze(-1)
        allowance = rounding_allowance(torch.float32, m.products)
        torch.testing.assert_close(m.value, moved.norm(dim=-1), rtol=allowance / 4, atol=0)
        torch.testing.assert_close(m.left.double(), moved / moved.norm(dim=-1, keepdim=True), rtol=0, atol=allowance)
        sigma = torch.linalg.svdvals(matrix.double())[:, 0]
        assert (m.lower <= sigma).all()
        assert (sigma <= m.upper).all()
        last.append(m.products - golub_kahan(op, verify=False).products)
    assert last == [1, 1, 0, 1]


@pytest.mark.parametrize(("share", "reached"), [(2.8e-4, True), (3.2e-4, True), (6e-4, False)])
def test_noise_below_a_third_of_rtol_leaves_it_within_reach(share: float, reached: bool) -> None:
    """Both ends move by it, and the upper end stays above the value by as much; beyond, a note says so."""
    matrix = torch.diag(torch.linspace(0, 1, 400, dtype=torch.float64) ** 2)
    op = MatrixOperator(matrix, Accuracy(product=share, alignment=1e-3))
    m = golub_kahan(op)
    assert bool(m.converged) is reached
    assert any("limits the ends" in note for note in m.notes) is not reached
    assert m.lower <= 1 <= m.upper


def test_an_upper_end_small_enough_may_come_between_two_products_but_not_before_the_first_step() -> None:
    """Half of a first step knows nothing: the start is not in the span that its bound speaks of."""
    matrix = with_spectrum(0.8 ** torch.arange(40).double(), 50, 60, 60, torch.Generator().manual_seed(0))
    sigma, counts = torch.linalg.svdvals(matrix)[:, 0], set()
    for each, truth in zip(matrix, sigma, strict=True):
        for share in (1.01, 1.3, 3.0, 1e6):
            m = golub_kahan(MatrixOperator(each), stop_below=share * truth, verify=False)
            assert truth * (1 - 1e-12) <= m.upper <= share * truth
            counts.add(m.products)
    assert min(counts) == 2
    assert any(count % 2 for count in counts)
    process = Bidiagonalisation(
        FlatProducts(MatrixOperator(matrix)), torch.ones(50, 60).double() / 60**0.5, torch.Generator()
    )
    process.step_left()
    with pytest.raises(AssertionError):
        LanczosBound(50, 60, 0.99).tighten(process.project_halfway())
