"""Inverting x + f(x) by its fixed point: plain c·F as in Kim et al. 2021, and the contractive layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mpmath
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.tables import table
from howsmooth.errors import HowsmoothError
from howsmooth.nn import ContractiveL2Attention, DotProductAttention, L2Attention
from howsmooth.nn.invertible.branches import ScaledBranch
from howsmooth.nn.invertible.fixed_point import solve_fixed_point
from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual
from howsmooth.nn.layers.attention_layer import CallMasks
from howsmooth.nn.layers.l2_layers import average_2

TITLE = "Inverting residual attention"
COEFFICIENTS = (0.5, 0.7, 0.9)
TARGET = 1e-10


def tokens(batch: int, n: int, width: int) -> Tensor:
    """One token at 0, the others uniform in [−10, 10]."""
    x = 20 * torch.rand(batch, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 10
    x[:, 0] = 0
    return x


def layer(width: int, heads: int, coefficient: float | None = None, seed: int = 0) -> L2Attention:
    """L2 attention with Glorot weights, plain or contractive."""
    torch.manual_seed(seed)
    plain = coefficient is None
    made = L2Attention(width, heads) if plain else ContractiveL2Attention(width, heads, coefficient)
    return made.double().eval()


def train(model: nn.Module, n: int, width: int, steps: int) -> None:
    """Some steps of Adam on a task of the sort attention is for: give back the mean of the tokens, sharpened."""
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    model.train()
    for _ in range(steps):
        x = torch.randn(8, n, width, dtype=torch.float64, generator=generator)
        loss = (model(x)[0] - torch.tanh(3 * x.mean(1, keepdim=True))).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


@dataclass(frozen=True)
class Case:
    """One branch with the x that is to be found again."""

    name: str
    coefficient: float
    block: InvertibleResidual
    x: Tensor

    def found(self, accelerate: bool) -> Inversion:
        """The inverse at y = x + f(x)."""
        with torch.no_grad():
            return self.block.inverse(self.block(self.x), accelerate=accelerate)

    @torch.no_grad()
    def errors(self, accelerate: bool, evaluations: int = 40) -> list[float]:
        """The largest error of an entry after 1, 2, … evaluations of f, with nothing to stop them."""
        y = self.block(self.x)
        seen: list[float] = []

        def step(point: Tensor, index: Tensor) -> Tensor:
            image = y[index] - self.block.branch(point)
            seen.append(float((image - self.x[index]).abs().max()))
            return image

        contraction = self.block.contraction(y.shape[1])
        options = {"tolerance": 0.0, "max_iterations": evaluations, "memory": 8 if accelerate else 0}
        solve_fixed_point(step, y, contraction=contraction, scale=contraction.size(y), **options)  # type: ignore[arg-type]
        return seen

    def error(self, found: Inversion) -> float:
        """The largest error of an entry."""
        return float((found.x - self.x).abs().max())

    def within(self, found: Inversion) -> bool:
        """Whether the error bound holds for every item."""
        errors = (found.x - self.x).flatten(1).norm(dim=1)
        return bool((errors <= found.error_bound).all())


def first_below(errors: list[float], target: float = TARGET) -> int | str:
    """How many evaluations it took.

    >>> first_below([1.0, 1e-11, 1e-12]), first_below([1.0])
    (2, '> 1')
    """
    return next((count for count, error in enumerate(errors, 1) if error <= target), f"> {len(errors)}")


def cases(batch: int = 128, n: int = 64, width: int = 64, heads: int = 8, steps: int = 60) -> Iterator[Case]:
    """Plain c·F, trusted to contract by c, and contractive layers, by theorem; Glorot weights and trained ones."""
    x = tokens(batch, n, width)
    for steps_taken in (0, steps):
        state = "trained" if steps_taken else "Glorot"
        for c in COEFFICIENTS:
            plain = layer(width, heads)
            train(plain, n, width, steps_taken)
            yield Case(f"c·F, {state}", c, InvertibleResidual(ScaledBranch(plain, c), coefficient=c, trust=True), x)
            contractive = layer(width, heads, c)
            train(contractive, n, width, steps_taken)
            yield Case(f"contractive, {state}", c, InvertibleResidual(contractive), x)


@torch.no_grad()
def dot_product_error(c: float, batch: int = 8, n: int = 64, width: int = 64, heads: int = 8) -> float:
    """What refusing protects from: the largest error after 25 steps x ← y − c·f(x) for dot-product attention."""
    torch.manual_seed(0)
    attention = DotProductAttention(width, heads).double().eval()
    x = tokens(batch, n, width)
    y = x + c * attention(x)[0]
    found = y
    for _ in range(25):
        found = y - c * attention(found)[0]
    return float((found - x).abs().max())


@dataclass(frozen=True)
class Steep:
    """Two clusters of tokens close together, one feature, and weights so large that the clusters tell them apart.

    The rounding of the logits, of the order of ε·w², is then of order one. With one feature and one head the layer is
    ±(c/κ)·Σ_j P_ij x_j, P_ij ∝ exp(−w²(x_i − x_j)²), whatever its other weights.
    """

    weight: float
    coefficient: float
    x: Tensor

    @classmethod
    def drawn(cls, seed: int, largest: float = 8.0, dtype: torch.dtype = torch.float64) -> Steep:
        """Weights from 1 to 10^largest."""
        generator = torch.Generator().manual_seed(seed)
        weight = 10 ** (largest * float(torch.rand((), generator=generator)))
        n = int(torch.randint(2, 6, (), generator=generator))
        sides = 2.0 * torch.randint(0, 2, (n, 1), generator=generator) - 1
        spread = 3 * torch.rand((), generator=generator, dtype=torch.float64) / weight
        x = sides + spread * torch.randn(n, 1, dtype=torch.float64, generator=generator)
        exact = float(torch.tensor(weight, dtype=dtype))
        return cls(exact, (0.3, 0.5, 0.9)[seed % 3], x.to(dtype))

    def block(self) -> InvertibleResidual:
        """The residual block."""
        made = ContractiveL2Attention(1, 1, self.coefficient).to(self.x.dtype).eval()
        with torch.no_grad():
            for linear, value in ((made.qk_proj, self.weight), (made.v_proj, 0.7), (made.out_proj, -1.3)):
                linear.weight.fill_(value)
        return InvertibleResidual(made).eval()

    def truth(self, y: Tensor, sign: float = -1.0) -> list[mpmath.mpf]:
        """The inverse of y in 60 digits, by iteration."""
        with mpmath.workdps(60):
            factor = sign * mpmath.mpf(self.coefficient) / mpmath.mpf(average_2(CallMasks(len(y))))
            given, square = [mpmath.mpf(float(each)) for each in y], mpmath.mpf(self.weight) ** 2
            x, steps = given, int(50 / -math.log10(self.coefficient)) + 20
            for _ in range(steps):
                new = []
                for a, moved in zip(x, given, strict=True):
                    shares = [mpmath.exp(-square * (a - b) ** 2) for b in x]
                    new.append(moved - factor * mpmath.fdot(shares, x) / mpmath.fsum(shares))
                x = new
            return x

    @torch.no_grad()
    def ratios(self) -> tuple[float, float, float]:
        """Errors over bounds by theorem, of two inverses with tokens in another order and of the truth; the bound."""
        block = self.block()
        y, order = block(self.x), torch.arange(len(self.x)).roll(1)
        one, other = block.inverse(y), block.inverse(y[order])
        assert one.by_theorem
        assert other.by_theorem
        apart = float((one.x[order] - other.x).norm()) / float(one.error_bound + other.error_bound)
        with mpmath.workdps(60):
            wrong = [mpmath.mpf(float(a)) - b for a, b in zip(one.x, self.truth(y), strict=True)]
            error = float(mpmath.sqrt(mpmath.fsum(each**2 for each in wrong)))
        return apart, error / float(one.error_bound), float(one.error_bound)


def refusals(width: int = 8) -> list[tuple[str, str]]:
    """What is said of branches that cannot be inverted."""
    asked: list[tuple[str, Callable[[], object]]] = [
        ("`hs.SelfAttention`", lambda: InvertibleResidual(hs.SelfAttention.random(width))),
        ("`nn.MultiheadAttention`", lambda: InvertibleResidual(nn.MultiheadAttention(width, 2))),
        ("`hs.nn.DotProductAttention`", lambda: InvertibleResidual(DotProductAttention(width, 2))),
        ("the same, on trust", lambda: InvertibleResidual(hs.SelfAttention.random(width), 0.5, trust=True)),
        ("c = 1", lambda: InvertibleResidual(L2Attention(width, 2), 1.0, trust=True)),
        ("`nn.Linear`", lambda: InvertibleResidual(nn.Linear(width, width))),
    ]
    said = []
    for name, ask in asked:
        try:
            ask()
            said.append((name, "**accepted**"))
        except HowsmoothError as error:
            said.append((name, str(error)))
    return said


def parts(progress: Callable[[str], None] = lambda text: None, batch: int = 128) -> list[str]:
    """The page."""
    rows, broken = [], 0
    for case in cases(batch):
        progress(f"{case.name}, c = {case.coefficient}")
        sigma = float(hs.measure(case.block.branch, case.x[0]).value)
        plain, fast = case.found(False), case.found(True)
        slow_errors, fast_errors = case.errors(False), case.errors(True, 20)
        broken += case.block.contraction(case.x.shape[1]).by_theorem and not (case.within(plain) and case.within(fast))
        bound = float(case.block.branch.lipschitz_bound(case.x.shape[1]))
        rows.append(
            [
                case.name,
                case.coefficient,
                f"{bound:.3g}",
                f"{sigma:.3g}",
                f"{slow_errors[24]:.0e}",
                first_below(slow_errors),
                first_below(fast_errors),
                f"{int(plain.iterations.max())}, {int(fast.iterations.max())}",
                f"{case.error(fast):.0e}",
                f"{float(fast.error_bound.max()):.0e}",
            ]
        )
    head = ["branch", "c", "Lip bound", "σ at x", "error after 25"]
    head += ["plain", "accelerated", "until the bound stops", "error", "bound"]
    steep = []
    for dtype, largest in ((torch.float64, 8.0), (torch.float32, 4.5)):
        progress(f"large weights, {dtype}")
        found = [Steep.drawn(seed, largest, dtype).ratios() for seed in range(3 * batch)]
        apart, off, bounds = (torch.tensor(each) for each in zip(*found, strict=True))
        steep.append(
            [
                str(dtype).removeprefix("torch."),
                f"1 to {10**largest:.0e}",
                len(found),
                f"{float(apart.max()):.2g}",
                f"{float(off.max()):.2g}",
                int(((apart > 1) | (off > 1)).sum()),
                f"{float(bounds.median()):.0e}, {float(bounds.max()):.0e}",
            ]
        )
    return [
        f"N = D = 64, H = 8, batch {batch}, float64, one token at 0 and the others uniform in [−10, 10]. `c·F` is "
        "plain L2 attention times c: no theorem says that it contracts by c (its Lipschitz bound is in the third "
        "column), so it is inverted on trust and its error bound is conditional. The contractive layer has a theorem. "
        "`σ at x` is the measured local constant of the branch at one item. Then: largest error of an entry after 25 "
        f"plain evaluations of f; evaluations until no entry is wrong by more than {TARGET:g}, plain and with Anderson "
        "acceleration; evaluations until the error bound itself is below 1e-12 (relative), plain and accelerated; the "
        "largest error of an entry and the largest bound (Frobenius norm of an item) then. "
        f"Error bounds by theorem below the true error: {broken}.",
        table(head, rows),
        "Dot-product attention times c in place of L2, error after 25 plain steps: "
        + ", ".join(f"{dot_product_error(c):.2g} at c = {c}" for c in COEFFICIENTS)
        + ". It is refused, and so are:",
        table(["branch", "reason"], refusals()),
        "Large weights: two to five tokens of one feature in two clusters at ±1, spread about 1/w, where the logits "
        "round by ε·w². Inverses by theorem of the same tokens in another order, and the inverse in 60 digits, against "
        "the bounds by theorem:",
        table(
            [
                "dtype",
                "w",
                "inversions",
                "largest apart/bounds",
                "largest error/bound",
                "broken",
                "bound: median, most",
            ],
            steep,
        ),
    ]
