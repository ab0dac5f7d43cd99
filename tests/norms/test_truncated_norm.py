"""The norm from a cheaper map nearby, against matrices whose singular values are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from howsmooth.jacobians.operator import MatrixOperator
from howsmooth.jacobians.truncated_operator import Truncated
from howsmooth.norms import golub_kahan, operator_norm
from howsmooth.norms.norm_choice import Deflated, _Near, deflated_norm

N = 300


def matrix(*largest: float, seed: int = 0) -> Tensor:
    """A matrix with these singular values, and others below 0.3."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    values = torch.cat([torch.tensor(largest, dtype=torch.float64), 0.3 * torch.rand(N - len(largest)).double()])
    return u @ torch.diag(values) @ v.mT


class OfMatrices(Truncated):
    """Matrices instead of attention: products with the exact ones have no error."""

    notes = ()

    def matvec_within(self, v: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        return self.exact.matvec(v), torch.zeros_like(limit)

    def rmatvec_within(self, u: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        return self.exact.rmatvec(u), torch.zeros_like(limit)

    def subset(self, index: Tensor) -> OfMatrices:
        error, lower = (t.reshape(-1)[index.cpu()] for t in (self.error, self.lower))
        return replace(self, exact=self.exact.subset(index), cheap=self.cheap.subset(index), error=error, lower=lower)


def truncated(exact: Tensor, cheap: Tensor, error: float, lower: float = 0.0, kind: type = OfMatrices) -> Truncated:
    several = torch.ones(exact.shape[:-2], dtype=torch.float64)
    return kind(MatrixOperator(exact), MatrixOperator(cheap), error * several, lower * several, None, None, None, None)


def apart(whole: Tensor, size: float, seed: int = 1, **options: Any) -> Truncated:
    """A matrix that differs from the exact one by a random one of this norm."""
    error = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return truncated(whole, whole - size * error / torch.linalg.matrix_norm(error, 2)[..., None, None], size, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 0.05, 0.2])
@pytest.mark.parametrize("second", [0.2, 0.6])
def test_a_tenth_of_the_norm_may_be_missing_and_the_value_is_certified(size: float, second: float) -> None:
    for seed in range(5):
        op = apart(matrix(1.0, second, seed=seed), size, seed + 9)
        m = operator_norm(op, seed=seed)
        assert m.method == "golub-kahan, deflated"
        assert float(m.lower) <= 1 + 1e-9
        assert float(m.upper) >= 1 - 1e-9
        assert float(m.upper) <= 1.001 * float(m.lower)
        assert bool(m.converged)


def test_few_products_are_made_with_the_whole() -> None:
    op = apart(matrix(1.0, 0.5), 0.1)
    made: list[str] = []
    whole = op.exact
    for name in ("matvec", "rmatvec"):
        own = getattr(whole, name)
        setattr(whole, name, lambda v, own=own: (made.append(""), own(v))[1])
    operator_norm(op)
    assert len(made) <= 6 < golub_kahan(MatrixOperator(matrix(1.0, 0.5))).products


def test_what_cannot_be_told_apart_is_measured_in_full_and_says_so() -> None:
    op = apart(matrix(1.0, 0.97), 0.1)
    m = operator_norm(op)
    assert any("1 of 1 maps were measured with all tiles" in note for note in m.notes)
    assert float(m.lower) <= 1 <= float(m.upper) <= 1.001 * float(m.lower)


def test_only_the_maps_that_need_it_are_measured_in_full() -> None:
    several = torch.stack([matrix(1.0, 0.4), matrix(2.0, 1.95), matrix(3.0, 0.5)])
    op = apart(several, 0.2)
    m = operator_norm(op)
    assert any("1 of 3 maps" in note for note in m.notes)
    truth = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert bool((m.lower <= truth + 1e-9).all())
    assert bool((truth <= m.upper + 1e-9).all())
    assert bool(m.converged.all())
    torch.testing.assert_close(m.value, truth, rtol=1e-3, atol=0)


def test_without_what_is_left_out_an_end_is_wrong() -> None:
    """A negative control: the larger of two directions is missing from the cheap map, which does not say so."""
    whole = torch.diag(torch.cat([torch.tensor([1.0, 0.9]), torch.full((N - 2,), 0.1)]).double())
    cheap = whole.clone()
    cheap[0, 0] = 0.1
    assert float(deflated_norm(truncated(whole, cheap, 0.9), 1e-3, 0.99, 0).upper) >= 1
    op = truncated(whole, cheap, 0.0)
    wrong = [float(deflated_norm(op, 1e-3, 0.99, seed).upper) < 1 for seed in range(5)]
    assert any(wrong)


def test_a_deflated_map_does_not_see_its_vector() -> None:
    y = torch.linalg.qr(torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q.mT
    several = torch.stack([matrix(1.0), matrix(2.0)])
    op = Deflated(MatrixOperator(several), y)
    dense = several @ (torch.eye(N, dtype=torch.float64) - y[:, :, None] * y[:, None])
    torch.testing.assert_close(op.dense(), dense)
    part = op.subset(torch.tensor([1]))
    if part is not None:
        torch.testing.assert_close(part.dense(), dense[1:])


def test_enough_is_where_the_bound_reaches_the_most() -> None:
    whole = MatrixOperator(matrix(1.0, 0.5))
    near = _Near.of(truncated(whole.matrix, whole.matrix, 0.0, 1.0), golub_kahan(whole).right, 1e-3)  # type: ignore[arg-type]
    enough = near.enough(1.001 * near.lower)
    assert 0.5 < float(enough) < 1.01
    assert float(near.upper(enough)) <= 1.001 * float(near.lower)
    assert float(near.upper(enough * (1 + 1e-6))) > 1.001 * float(near.lower)
    assert float(near.enough(0.9 * near.lower)) == 0


@dataclass(frozen=True, eq=False, repr=False)
class Losing(OfMatrices):
    """Exact products that lose a part of the top singular vectors, and state how much."""

    stated: ClassVar[float] = 1e-4
    lost: ClassVar[float] = 1e-4

    def matvec_within(self, v: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        u = self.exact.matvec(v)
        return u * (1 - self.lost / u.norm()), torch.full_like(most, self.stated)

    def rmatvec_within(self, u: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        v = self.exact.rmatvec(u)
        return v * (1 - self.lost / v.norm()), torch.full_like(most, self.stated)


class Understating(Losing):
    stated, lost = 1e-5, 1e-2


def test_what_products_lose_is_allowed_for_and_an_understated_loss_makes_an_end_wrong() -> None:
    whole = matrix(1.0, 0.3)
    m = operator_norm(apart(whole, 0.05, lower=1.0, kind=Losing))
    assert m.method == "golub-kahan, deflated"
    assert bool(m.converged)
    assert float(m.lower) <= 1 <= float(m.upper)
    assert float(operator_norm(apart(whole, 0.05, lower=1.0, kind=Understating)).upper) < 1
