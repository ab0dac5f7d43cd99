"""The probabilistic upper bound against its textbook form, and its premises."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta as beta_distribution

from evidence.juries import ROUNDING
from evidence.lanczos_terms import examples, halfway_with_errors
from evidence.spectra import families, orthogonal, with_spectrum
from howsmooth._util.common import random_stream
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import MatrixOperator
from howsmooth.norms import golub_kahan
from howsmooth.norms.lanczos_bound import LanczosBound, RitzProjection, kuczynski_wozniakowski1992, smallest_component


def christoffel_upper(jacobi: np.ndarray, last: float, size: int, confidence: float, above: float = 1.0) -> float:
    """√λ* where c² ≤ 1/Σ_{j≤m} p_j(λ)² equals τ², by the three-term recurrence of the orthonormal polynomials.

    ``jacobi`` and the ``last`` entry beside it belong to the measure of the start, or to that measure times its
    argument; c² is then the mass of the start times λ over ``above``.
    """
    off = np.append(np.diag(jacobi, 1), last)
    tau2 = beta_distribution.ppf(1 - confidence, 0.5, (size - 1) / 2)

    def kernel(lam: float) -> float:
        before, p, total = 0.0, 1.0, 1.0
        for j in range(len(jacobi)):
            before, p = p, ((lam - jacobi[j, j]) * p - (off[j - 1] * before if j else 0)) / off[j]
            total += p * p
        return total * (1.0 if above == 1.0 else lam / above)

    low = np.linalg.eigvalsh(jacobi)[-1]
    high = max(jacobi[0, 0] + off[0] / math.sqrt(tau2), low) * (1 if above == 1.0 else 1 + above / tau2)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if kernel(middle) < 1 / tau2 else (low, middle)
    return math.sqrt(high)


@pytest.mark.parametrize("confidence", [0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_equals_the_christoffel_bound_by_recurrence(steps: int, confidence: float) -> None:
    generator = torch.Generator().manual_seed(3)
    alpha = 0.5 + torch.rand(4, steps, generator=generator, dtype=torch.float64)
    beta = 0.5 + torch.rand(4, steps, generator=generator, dtype=torch.float64)
    b = torch.diag_embed(alpha) + torch.diag_embed(beta[:, :-1], 1)
    upper = LanczosBound(4, 1000, confidence).tighten(RitzProjection.of(b, beta[:, -1]))
    last = alpha[:, -1] * beta[:, -1]
    expected = [
        christoffel_upper((b.T @ b).numpy(), float(end), 1000, confidence) for b, end in zip(b, last, strict=True)
    ]
    np.testing.assert_allclose(upper, expected, rtol=1e-9)


@pytest.mark.parametrize("confidence", [0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_halfway_it_is_the_christoffel_bound_of_the_measure_times_its_argument(steps: int, confidence: float) -> None:
    generator = torch.Generator().manual_seed(3)
    alpha = 0.5 + torch.rand(4, steps + 1, generator=generator, dtype=torch.float64)
    beta = 0.5 + torch.rand(4, steps, generator=generator, dtype=torch.float64)
    b = torch.diag_embed(alpha) + torch.diag_embed(beta, 1)
    small = RitzProjection.halfway(b, torch.zeros(4), steps + 1, torch.zeros(2, 4, steps + 1))
    upper = LanczosBound(4, 1000, confidence).tighten(small)
    above = b[:, :-1]
    last = alpha[:, -1] * beta[:, -1]
    expected = [
        christoffel_upper((b @ b.T).numpy(), float(end), 1000, confidence, float(first) ** 2)
        for b, end, first in zip(above, last, alpha[:, 0], strict=True)
    ]
    np.testing.assert_allclose(upper, expected, rtol=1e-9)


@pytest.mark.slow
def test_halfway_no_overlap_exceeds_its_bound_whatever_the_errors() -> None:
    closest, without = 0.0, 0.0
    for seed in range(400):
        for error in (0.0, 1e-6, 1e-3, 3e-2):
            small, lam, truth = halfway_with_errors(8, 2 + seed % 6, error, seed)
            if float(lam) <= float(small.theta[0, 0]) ** 2:
                continue
            share, _ = LanczosBound(1, 8, 0.99).judge(lam[None], small)
            tau = smallest_component(8, 0.99)
            closest = max(closest, float(truth / (share[0] * tau)))
            exact = replace(small, drift=torch.zeros_like(small.drift), skew=torch.zeros(1))
            share, _ = LanczosBound(1, 8, 0.99).judge(lam[None], exact)
            without = max(without, float(truth / (share[0] * tau)))
    assert 0.99 < closest <= 1
    assert without > 1.5  # what errors hide is needed


def test_no_start_with_the_component_that_is_promised_leads_to_an_end_below_the_norm() -> None:
    """Runs of all lengths, with restarts and with errors; the exact distribution of that component."""
    for example in examples():
        shares = example.shares()
        assert 0.99 < max(shares.values()) <= 1 + ROUNDING, example.label


def test_halfway_the_bound_falls_in_lambda() -> None:
    for seed in range(20):
        small, _, _ = halfway_with_errors(8, 5, 1e-3, seed)
        lam = float(small.theta[0, 0]) ** 2 * torch.linspace(1.001, 30, 2000, dtype=torch.float64)
        share, _ = LanczosBound(1, 8, 0.99).judge(lam[:, None], small)
        assert (share[1:] <= share[:-1]).all()


def test_smallest_component_is_the_quantile_of_random_unit_vectors() -> None:
    v = torch.randn(40_000, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = (v[:, 0] / v.norm(dim=-1)).abs()
    for confidence in (0.5, 0.9, 0.99):
        share = float((first >= smallest_component(30, confidence)).double().mean())
        assert abs(share - confidence) < 4 * math.sqrt(confidence * (1 - confidence) / 40_000)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 99.0])
def test_confidence_outside_the_unit_interval_is_refused(confidence: float) -> None:
    with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
        smallest_component(10, confidence)


def test_one_coordinate_leaves_no_doubt() -> None:
    assert smallest_component(1, 0.99) == 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 6, 10, 15, 20])
def test_never_looser_than_the_a_priori_bound(steps: int) -> None:
    for family in families([(60, 60), (40, 120)], count=3, dtype=torch.float64, seed=4):
        m = golub_kahan(family.op, max_steps=steps, rtol=1e-12, seed=8)
        for value, upper in zip(m.value.tolist(), m.upper.tolist(), strict=True):
            assert upper <= kuczynski_wozniakowski1992(value, steps, family.op.in_size, 0.99), family.name


def test_a_priori_bound_is_finite_where_the_comparison_needs_it() -> None:
    assert math.isfinite(kuczynski_wozniakowski1992(1.0, 6, 60, 0.99))


def test_bound_fails_for_a_start_that_is_not_random() -> None:
    """The premise matters: a top singular vector orthogonal to the start stays unseen, and the bound is then false."""
    generator = torch.Generator().manual_seed(11)
    start = torch.randn(1, 80, generator=random_stream(5, "golub-kahan start"), dtype=torch.float64)[0]
    right = orthogonal(1, 80, 80, generator)[0]
    right[:, 0] -= start * (start @ right[:, 0]) / (start @ start)
    right = torch.linalg.qr(right)[0]
    values = torch.cat([torch.tensor([1.05]).double(), torch.linspace(1, 0.1, 79, dtype=torch.float64)])
    matrix = (orthogonal(1, 80, 80, generator)[0] * values) @ right.mT
    blind, fair = (golub_kahan(MatrixOperator(matrix), seed=seed) for seed in (5, 6))
    assert float(blind.upper) < 1.01
    assert float(fair.lower) <= 1.05 <= float(fair.upper)


@pytest.mark.slow
def test_bound_keeps_its_meaning_through_restarts() -> None:
    """A restart multiplies the component on the top vector by the filter; without that factor nothing is certified."""
    matrix = with_spectrum(torch.linspace(1, 0.01, 80).double(), 200, 80, 80, torch.Generator().manual_seed(1))
    m = golub_kahan(MatrixOperator(matrix), basis_limit=8, seed=2, confidence=0.5)
    covered = int((m.upper >= 1).sum())
    assert m.converged.all()
    assert 80 <= covered <= 130  # binomial(200, ½) from −2.8σ; far above would mean a loose bound


@pytest.mark.slow
def test_confidence_one_half_is_neither_false_nor_trivially_loose() -> None:
    """A wrong quantile or slack in the bound takes the share out of these limits: binomial −3.5σ, +6σ of 600 maps."""
    covered = 0
    for family in families([(40, 60)], count=200, dtype=torch.float64, seed=9):
        if family.name.split()[0] in ("geometric", "outlier", "gaussian"):
            m = golub_kahan(family.op, confidence=0.5, seed=13)
            covered += int((family.sigma[:, 0] <= m.upper).sum())
    assert 257 <= covered <= 375


def test_start_is_not_the_input_drawn_with_the_same_seed() -> None:
    """``x = torch.randn(n, d)`` with seed 0 and ``measure(f, x, seed=0)`` must stay independent."""
    for seed in range(5):
        x = torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        start = torch.randn(500, generator=random_stream(seed, "golub-kahan start"), dtype=torch.float64)
        assert abs(float(x @ start / (x.norm() * start.norm()))) < 0.2
