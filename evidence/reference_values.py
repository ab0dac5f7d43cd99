"""Every reference value of the theory pages, computed again and compared digit by digit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from scipy.optimize import minimize
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.bounds import get
from howsmooth.bounds.l2_bounds import not_lipschitz_witness, phi_inverse
from howsmooth.meanfield import Measure, local_constant

TITLE = "Reference values, computed again"
ONE = torch.eye(1, dtype=torch.float64)


@dataclass(frozen=True)
class Reference:
    """A printed number: ``line`` says where on the theory pages it stands, ``slow`` leaves it to `make verify`."""

    line: str
    printed: str
    compute: Callable[[], float]
    slow: bool = False

    def agrees(self, value: float) -> bool:
        """Whether the value rounds to the printed digits.

        >>> Reference("", "12.9", float).agrees(12.949), Reference("", "3.9e4", float).agrees(38752.0)
        (True, True)
        """
        digits = self.printed.partition("e")[0].replace(".", "").lstrip("0")
        return float(f"{value:.{len(digits) - 1}e}") == float(self.printed)


def references() -> Iterator[Reference]:
    """Every number, in the order of the pages."""
    yield from _dot_product()
    yield from _l2()


def _dot_product() -> Iterator[Reference]:
    head, masked = _line(-3.0), _line(-3.0, mask="causal")
    for t, printed in ((1, "1.889"), (10, "89.89"), (100, "8890")):
        yield Reference(
            f"dot product: not Lipschitz, ‖J‖_∞ of the witness at t = {t}", printed, lambda t=t: _witness(float(t))
        )
    for name, line, values in (
        ("howsmooth.two_atom", "two-atom lower bound", ("2.99", "12.9", "48.0", "166", "547")),
        ("howsmooth.mean_field", "sharper mean-field bound", ("6.44", "24.2", "83.3", "277", "895")),
        ("castin2024.mean_field", "mean-field bound as printed", ("29.6", "382", "4034", "3.9e4", "3.5e5")),
    ):
        for b, printed in enumerate(values, start=1):
            yield Reference(
                f"dot product: {line}, γR² = {b}",
                printed,
                lambda name=name, b=b: float(get(name)(_line(-float(b)), over=hs.sets.Ball(1.0))),
            )
    lengths = (50, 100, 200, 500, 1000, 2000, 10**4, 10**5)
    for n, printed in zip(lengths, ("10.4", "17.6", "28.4", "43.3", "48.0", "45.0", "26.2"), strict=False):
        yield Reference(
            f"dot product: σ of two clusters, γR² = 3, n = {n}", printed, lambda n=n: _two_clusters(head, n)
        )
    for n, printed in zip(lengths, ("9.0", "14.7", "24.1", "42.4", "57.3", "69.4", "83.3", "87.1"), strict=True):
        yield Reference(
            f"dot product, causal: σ of two clusters, γR² = 3, n = {n}",
            printed,
            lambda n=n: _measured(masked, two_cluster_on_the_line(n)),
            slow=n > 2000,
        )
    for n, printed in ((2, "1.144"), (10, "1.410"), (100, "1.630"), (1000, "1.748"), (3000, "1.786")):
        yield Reference(
            f"dot product, causal: A = 0, n = {n}",
            printed,
            lambda n=n: _measured(_line(0.0, mask="causal"), torch.zeros(n, 1, dtype=torch.float64)),
        )


def _l2() -> Iterator[Reference]:
    for n, printed in ((10, "5.404"), (100, "11.515"), (200, "13.588"), (500, "16.446"), (1000, "18.682")):
        yield Reference(f"L2: Lip_∞ bound, D = H = 1, N = {n}", printed, lambda n=n: _l2_bound("kim2021.lip_inf", n))
    yield Reference("L2: Lip_∞ bound, D = H = 1, N = 5000", "24.061", lambda: _l2_bound("kim2021.lip_inf", 5000))
    for n, printed in ((10, "4.407"), (100, "10.095"), (200, "12.093"), (500, "14.875"), (1000, "17.065")):
        yield Reference(f"L2: Lip_∞ by ascent, D = H = 1, N = {n}", printed, lambda n=n: l2_infinity_ascent(n))
    yield Reference("L2: Lip_∞ by ascent, D = H = 1, N = 5000", "22.366", lambda: l2_infinity_ascent(5000), slow=True)
    yield Reference("L2: corrected Lip_2, D = H = 1, N = 1000", "590.8", lambda: _l2_bound("kim2021.lip_2", 1000))
    yield Reference("L2: N^¼ + 2φ⁻¹ + 2√(φ⁻¹(√N+1) ln N), N = 1000", "77.6", lambda: _first_sharper_form(1000))
    yield Reference("L2: our Lip_2, D = H = 1, N = 1000", "31.4", lambda: _l2_bound("howsmooth.l2_lip_2", 1000))
    yield Reference("L2: corrected Lip_2, N = 2, W = 10", "298.9", lambda: _l2_bound("kim2021.lip_2", 2, 10.0))
    for b, printed in ((1, "5"), (10, "599"), (100, "59999")):
        yield Reference(f"L2: untied queries and keys, ‖J‖_∞ at b = {b}", printed, lambda b=b: _untied(float(b)))
    for b, printed in ((1, "3"), (10, "399"), (100, "39999")):
        yield Reference(f"L2: self hidden, ‖J‖_∞ at b = {b}", printed, lambda b=b: _self_hidden(float(b)))


def _line(a: float, **options: object) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(a * ONE, ONE, **options)


def _witness(t: float) -> float:
    attention = hs.SelfAttention(*ONE.repeat(3, 1, 1))
    return float(hs.measure(attention, not_lipschitz_witness(9, t), norm=float("inf")))


def two_cluster_on_the_line(n: int) -> Tensor:
    """−1 first, then n − 1 tokens at 1."""
    x = torch.ones(n, 1, dtype=torch.float64)
    x[0] = -1.0
    return x


def _two_clusters(head: hs.SelfAttention, n: int) -> float:
    """n tokens as a measure of two atoms: exact at any length."""
    atoms = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    weights = torch.tensor([1 / n, 1 - 1 / n], dtype=torch.float64)
    return float(local_constant(head, Measure(atoms, weights)).value)


def _measured(head: hs.SelfAttention, x: Tensor) -> float:
    return float(hs.measure(head, x, rtol=1e-4, seed=7).value)


def _l2_bound(name: str, n: int, weight: float = 1.0) -> float:
    return float(get(name)(hs.L2SelfAttention(weight * ONE, ONE), n=n))


def _first_sharper_form(n: int) -> float:
    c = phi_inverse(n - 1)
    return n**0.25 + 2 * c + 2 * (c * (n**0.5 + 1) * math.log(n)) ** 0.5


def _untied(b: float) -> float:
    """q = 1, k = ½, x_1 = 100b and k·x_{2,3} = q·x_1 ± b."""
    attention = hs.L2SelfAttention(ONE, ONE, key=ONE / 2)
    x = torch.tensor([[100 * b], [202 * b], [198 * b]], dtype=torch.float64)
    return float(hs.measure(attention, x, norm=math.inf))


def _self_hidden(b: float) -> float:
    attention = hs.L2SelfAttention(ONE, ONE, mask=~torch.eye(3, dtype=torch.bool))
    return float(hs.measure(attention, torch.tensor([[0.0], [b], [-b]], dtype=torch.float64), norm=math.inf))


def l2_infinity_row(x: Tensor) -> Tensor:
    """The row sum Σ_j |∂f_0/∂x_j| of L2 attention with D = H = 1 and unit weights at token 0, in O(N)."""
    gap = x - x[0]
    weight = torch.softmax(-gap.square(), dim=0)
    mean = (weight * x).sum()
    others = weight[1:] * (1 - 2 * gap[1:] * (x[1:] - mean))
    own = weight[0] + (weight[1:] * 2 * gap[1:] * (x[1:] - mean)).sum()
    return others.abs().sum() + own.abs()


def l2_infinity_ascent(n: int) -> float:
    """Largest ‖J‖_∞ found from the two-cluster input, by L-BFGS on the row of the token in the middle."""
    level = (1 + phi_inverse(n - 1)) ** 0.5
    start = torch.full((n,), float(level), dtype=torch.float64)
    start[0], start[1::2] = 0.0, -float(level)

    def negative(flat: object) -> tuple[float, object]:
        x = torch.tensor(flat, dtype=torch.float64, requires_grad=True)
        row = l2_infinity_row(x)
        row.backward()
        assert x.grad is not None
        return -float(row.detach()), -x.grad.numpy()

    tight = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-9}
    return -float(minimize(negative, start.numpy(), jac=True, method="L-BFGS-B", options=tight).fun)


def parts(progress: Callable[[str], None] = lambda text: None, slow: bool = True) -> list[str]:
    """The page."""
    rows = []
    for reference in references():
        if slow or not reference.slow:
            progress(reference.line)
            value = reference.compute()
            rows.append([reference.line, reference.printed, f"{value:.5g}", "yes" if reference.agrees(value) else "NO"])
    wrong = sum(row[-1] == "NO" for row in rows)
    head = f"{len(rows)} numbers of the theory pages, {wrong} of which disagree in a printed digit."
    return [head, table(["where it stands", "printed", "computed", "agrees"], rows)]
