r"""Invertible residual blocks: y = x + f(x) for a contraction f.

With Lip(f) = c < 1, g(x) = x + f(x) is a homeomorphism: x is the only fixed point of x ↦ y − f(x), and
:math:`|\hat x - x| \le |g(\hat x) - y|/(1-c)` for every x̂ (Behrmann et al. 2019). The inverse is
differentiable where f is, by the implicit function theorem: a gradient u with respect to x becomes
:math:`w = (I+J^\top)^{-1}u` with respect to y, the fixed point of :math:`w \mapsto u - J^\top w`, a contraction in the
dual norm with the same c.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import evaluating
from howsmooth._util.validation import check_count, check_finite, check_number, check_positive, validated
from howsmooth.errors import DoesNotApply, InvalidInput, NotDifferentiable
from howsmooth.nn.invertible.branches import as_branch, vector_jacobian_product
from howsmooth.nn.invertible.fixed_point import (
    Contraction,
    DidNotConverge,
    FixedPoint,
    FixedPointMap,
    RoundingBound,
    solve_fixed_point,
)
from howsmooth.nn.invertible.log_determinant import LogDeterminant, Method, log_determinant
from howsmooth.nn.layers.attention_layer import Mask, without_autocast
from howsmooth.numerics.running_error import UnknownRounding, evaluation_error


@dataclass(frozen=True)
class Inversion(FixedPoint):
    """The x with g(x) = y, item by item; fields as in `FixedPoint` (without a batch axis when y has none).

    Attributes:
        contraction: basis of the error bound, which is a theorem when ``contraction.by_theorem``. Otherwise it holds if
            the given coefficient is right and, for a custom branch with operations unknown to
            `invertible.running_error`, if their rounding is a few units in the last place of |x| + |y|.
    """

    contraction: Contraction

    @property
    def by_theorem(self) -> bool:
        """Return whether the error bound rests on theorems alone, and not on a coefficient that was trusted."""
        return self.contraction.by_theorem


class InvertibleResidual(nn.Module):
    """y = x + f(x) with its inverse and log-determinant, for f with a known Lipschitz constant c < 1.

    Args:
        f: a layer of `howsmooth.nn` with a global bound, `ContractiveMLP`, `ScaledBranch`, `ComposedBranch`, or any
            module with ``lipschitz_bound(n)``. Dot-product attention is refused: it has no Lipschitz constant.
        coefficient: the required c; by default the bound of f for the given number of tokens.
        mask: of an attention layer: None, "causal", booleans (True = may look), or a `LogitBias`.
        norm: 2 or inf; by default 2, or inf when c < 1 is known only there.
        trust: assume ``coefficient`` where no theorem gives one so small. Error bounds are then conditional, and two
            iterates that contradict it raise an error.

    >>> import howsmooth as hs
    >>> from howsmooth.nn.invertible.branches import ScaledBranch
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> block = InvertibleResidual(ScaledBranch(hs.L2SelfAttention(one, one, one), 0.15))
    >>> x = torch.tensor([[0.0], [1.0], [-2.0]], dtype=torch.float64)
    >>> inverted = block.inverse(block(x))
    >>> bool((inverted.x - x).norm() <= inverted.error_bound) and float(inverted.error_bound) < 1e-11
    True
    """

    @validated
    def __init__(
        self,
        f: nn.Module,
        coefficient: float | None = None,
        *,
        mask: Mask = None,
        norm: float | None = None,
        trust: bool = False,
    ):
        super().__init__()
        if coefficient is not None:
            check_number(coefficient, "coefficient", least=0, below=1)  # otherwise x + f(x) need not be invertible
        if trust and coefficient is None:
            raise InvalidInput("trust=True needs the coefficient that is to be trusted.")
        if norm not in (None, 2, math.inf):
            raise InvalidInput(f"the norm of a contraction is 2 or inf, got {norm!r}.")
        self.branch = as_branch(f, mask, trust=trust)
        self.coefficient, self.norm, self.trust = coefficient, norm, trust
        with contextlib.suppress(InvalidInput):  # a mask for another number of tokens
            self.contraction(mask.shape[-1] if isinstance(mask, Tensor) else 1)

    @torch.no_grad()
    def contraction(self, n: int) -> Contraction:
        """Return the contraction constant of f in evaluation for n tokens, or refuse with the reason."""
        reasons = []
        limit = 1.0 if self.coefficient is None else self.coefficient
        for norm in (2, math.inf) if self.norm is None else (self.norm,):
            try:
                with evaluating(self.branch):
                    bound = float(self.branch.lipschitz_bound(n, norm))
            except DoesNotApply as refusal:
                reasons.append(str(refusal).rstrip("."))
                continue
            if bound < 1 and bound <= limit * (1 + 1e-6):
                return Contraction(bound, norm, True)
            reasons.append(f"the bound for {n} token(s) in the {norm:g}-norm is {bound:.4g}")
        if self.trust:
            assert self.coefficient is not None
            return Contraction(self.coefficient, 2 if self.norm is None else self.norm, False)
        wanted = "below 1" if self.coefficient is None else f"at most {self.coefficient:g}"
        raise DoesNotApply(
            f"no theorem gives the branch a Lipschitz constant {wanted} ({'; '.join(reasons)}): scale it down, "
            "or pass coefficient and trust=True for an inverse whose error bound is conditional."
        )

    def forward(self, x: Tensor) -> Tensor:
        """x + f(x)."""
        tokens = _tokens(x)
        out = tokens + self.branch(tokens)
        return out[0] if x.dim() == 2 else out

    def inverse(
        self, y: Tensor, *, tolerance: float | None = None, max_iterations: int = 500, accelerate: bool = True
    ) -> Inversion:
        """Return the x with x + f(x) = y, for f in evaluation (no dropout, exact norms).

        Args:
            y: ``(n, d)`` or ``(batch, n, d)``; for half precision the result is float32.
            tolerance: relative error bound to reach; by default 1e-12 in float64, 1e-5 in float32.
            max_iterations: evaluations of f after which `DidNotConverge` is raised.
            accelerate: use Anderson acceleration.

        Differentiable in y and in the parameters of f (once); the gradient is solved for to the same tolerance.
        """
        if tolerance is not None:
            check_positive(tolerance, "tolerance")
        check_count(max_iterations, "max_iterations")
        tokens = _in_dtype_of(self.branch, _tokens(y))
        with evaluating(self.branch), without_autocast(tokens):
            contraction = self.contraction(tokens.shape[1])
            memory, fixed = 8 if accelerate else 0, tokens.detach()
            options = {"tolerance": tolerance, "max_iterations": max_iterations, "memory": memory}
            rounding_bound = self._allowance(fixed, contraction)
            if rounding_bound is None:
                contraction = replace(contraction, by_theorem=False)
            step: FixedPointMap = lambda x, index: fixed[index] - self.branch(x)  # noqa: E731
            with torch.no_grad():
                solution = _solved(step, fixed, contraction, options | {"rounding_bound": rounding_bound}, "inverse")
            if torch.is_grad_enabled() and (tokens.requires_grad or any(p.requires_grad for p in self.parameters())):
                solution = replace(solution, x=self._attached(tokens, solution.x, contraction, options))
        values = {field.name: getattr(solution, field.name) for field in fields(FixedPoint)}
        if y.dim() == 2:
            values = {name: value[0] for name, value in values.items()}
        return Inversion(**values, contraction=contraction)

    def _allowance(self, x: Tensor, contraction: Contraction) -> RoundingBound | None:
        """Return bounds on the rounding of the branch at points like x; None for operations without a rule."""

        def rounding_bound(points: Tensor) -> Tensor:
            return contraction.size(evaluation_error(self.branch, points))

        try:
            rounding_bound(x[:1])
        except UnknownRounding:
            return None
        return rounding_bound

    def _attached(self, y: Tensor, x: Tensor, contraction: Contraction, options: dict[str, Any]) -> Tensor:
        """Return x = y − f(x) with a backward pass that solves (I + Jᵀ)w = u."""
        leaf = x.detach().requires_grad_()
        moved = self.branch(leaf)

        def solved(u: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # create_graph: the returned gradient would count as constant
                raise NotDifferentiable("the inverse has first derivatives only: leave create_graph=True out.")

            def step(w: Tensor, index: Tensor) -> Tensor:
                every = torch.zeros_like(u).index_copy(0, index, w)
                return (u - vector_jacobian_product(moved, leaf, every))[index]

            # The contraction was checked during the iteration for x.
            return _solved(step, u, contraction.dual, options | {"checked": False}, "gradient of the inverse").x

        attached = y - moved
        attached.register_hook(lambda u: None if u is None else solved(u))  # None: an undefined gradient
        return attached.view_as(attached)  # the caller's tensor keeps its own gradient

    def log_det(
        self,
        x: Tensor,
        method: Method = "auto",
        *,
        samples: int = 16,
        tolerance: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> LogDeterminant:
        """Compute log|det(I + J(x))| of every item; see `howsmooth.nn.invertible.log_determinant`. Differentiable.

        In evaluation every method checks the contraction, because a density needs an invertible map. In training, where
        spectral norms are estimates, the constant of f may slightly exceed the one that truncates the series.
        """
        tokens = _in_dtype_of(self.branch, _tokens(x))
        if not self.training:
            self.contraction(tokens.shape[1])
        with without_autocast(tokens):
            contraction = partial(self.contraction, tokens.shape[1])
            estimate = log_determinant(self.branch, tokens, method, contraction, samples, tolerance, generator)
        if x.dim() == 3:
            return estimate
        names = ("value", "standard_error", "truncation", *(() if estimate.limit is None else ("limit",)))
        return replace(estimate, **{name: getattr(estimate, name)[0] for name in names})


def _solved(step: FixedPointMap, y: Tensor, contraction: Contraction, options: dict[str, Any], what: str) -> FixedPoint:
    """Return the fixed points, or raise an error with the residual."""
    fixed = solve_fixed_point(step, y, contraction=contraction, scale=contraction.size(y), **options)
    failed = ~fixed.converged
    if not bool(failed.any()):
        return fixed
    raise DidNotConverge(
        f"the {what} did not converge for {int(failed.sum())} of {len(failed)} item(s) in "
        f"{int(fixed.iterations.max())} evaluations: the largest residual is {float(fixed.residual[failed].max()):.3g} "
        f"and the error bound {float(fixed.error_bound[failed].max()):.3g}; raise max_iterations or tolerance, "
        "compute in float64, or make the branch a stronger contraction.",
        fixed,
    )


def _tokens(x: Tensor) -> Tensor:
    """Check x, and add a batch axis where it has none."""
    if x.dim() not in (2, 3) or not x.is_floating_point() or 0 in x.shape[-2:]:
        raise InvalidInput(
            f"tokens must be floating, of shape (n, d) or (batch, n, d) with n, d ≥ 1, got {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
    return x[None] if x.dim() == 2 else x


def _in_dtype_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Convert finite tokens to the dtype of the module, which must be float32 or float64."""
    check_finite(tokens.detach(), "the input")
    tensors = [*module.parameters(), *module.buffers()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits) if dtypes else tokens.dtype
    if any(torch.finfo(dtype).bits < 32 for dtype in dtypes):
        raise InvalidInput("an inverse needs weights in float32 or float64, not half precision: call .float() first.")
    if torch.finfo(widest).bits < torch.finfo(tokens.dtype).bits:
        raise InvalidInput("the tokens are float64 but the weights float32: convert one of them.")
    return tokens.to(torch.promote_types(widest, torch.float32))
