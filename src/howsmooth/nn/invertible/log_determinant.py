r"""log|det(I + J)| of x ↦ x + f(x), for densities.

Exact where possible: without dependence on later tokens the Jacobian is block lower triangular and
:math:`\log|\det(I+J)| = \sum_i \log|\det(I_d + J_{ii})|`, O(n d³); for few coordinates by the dense Jacobian.
Otherwise, with Lip(f) ≤ c < 1, the power series and Hutchinson's traces, v with independent entries ±1,

.. math:: \log\det(I+J) = \sum_{k\ge1} \frac{(-1)^{k+1}}{k}\,\mathrm{tr}\,J^k
          = \mathbb E_v \sum_{k\ge1} \frac{(-1)^{k+1}}{k}\,v^\top J^kv,

truncated after K terms, or weighted by 1/P(at least k terms are drawn) ("Russian roulette", Chen, Behrmann, Duvenaud,
Jacobsen 2019), which is unbiased up to the truncation after `MAX_TERMS`. The truncation error of one sample is at most

.. math:: \sum_{k>K} \frac{|v^\top J^kv|}{k} \le \frac{c\,|v|\,|w_K|}{(K+1)(1-c)}, \qquad w_K = (J^\top)^Kv,

never more than :math:`N c^{K+1}/((K+1)(1-c))`, N = nd, and in practice far less. All values are differentiable.

**Error bars.** With A the sum of the series, a sample is :math:`v^\top Av`, of variance at most
:math:`2(\|A\|_F^2 - \sum_i A_{ii}^2)`, which is twice the sum over coordinates of the variance of
:math:`v_i(Av)_i`: known far better than the variance of the few sums, which may even be all alike. The worst case is a
variance in one direction, :math:`A = auu^\top`: samples are then χ² with one degree of freedom (for
Gaussian u·v), and the variance is underestimated together with the value. Bars are wide enough for that. All m samples
can be alike, though the variance is not 0, with a probability of :math:`2^{1-m}`; beyond that confidence only the
limits :math:`N\log(1-c) \le \log|\det(I+J)| \le N\log(1+c)` are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from scipy.stats import chi2
from scipy.stats import norm as normal
from scipy.stats import t as student
from torch import Tensor

from howsmooth._util.validation import check_count, check_fraction, check_one_of, check_positive
from howsmooth.errors import DoesNotApply
from howsmooth.nn.invertible.branches import Branch, token_wise_blocks, vector_jacobian_product
from howsmooth.nn.invertible.fixed_point import Contraction

Method = Literal["auto", "blocks", "dense", "series", "roulette"]
METHODS: tuple[str, ...] = get_args(Method)
DENSE = 256
"""Maximum number of coordinates n·d for which "auto" uses the dense Jacobian."""
MAX_TERMS = 1000


@dataclass(frozen=True)
class LogDeterminant:
    """log|det(I + J)| of every item, with bounds on its error.

    Attributes:
        value: ``(batch,)``, differentiable.
        standard_error: ``(batch,)`` of the mean over samples, or a bound on it when that is larger; 0 when exact.
        truncation: ``(batch,)`` bound on the truncation error of the mean; 0 when exact.
        method: "blocks", "dense", "series" or "roulette".
        samples: number of random vectors.
        limit: ``(batch,)`` bound on the error for all samples; None when there is none.
    """

    value: Tensor
    standard_error: Tensor
    truncation: Tensor
    method: str
    samples: int = 0
    limit: Tensor | None = None

    @property
    def exact(self) -> bool:
        """Return whether the only error is rounding."""
        return self.samples == 0

    def error_bar(self, confidence: float = 0.99) -> Tensor:
        """Return half the width of an interval that contains the value with this probability, truncation included.

        Not a theorem, but tested on the worst known case; with m samples, 2^(1−m) > 1 − confidence, and where it is
        narrower, it is the ``limit``.
        """
        check_fraction(confidence, "confidence")
        if self.exact:
            return self.truncation
        bar = _quantile(confidence, self.samples) * self.standard_error + self.truncation
        if self.limit is None:
            return bar
        return self.limit if 2.0 ** (1 - self.samples) > 1 - confidence else torch.minimum(bar, self.limit)


def _quantile(confidence: float, samples: int) -> float:
    """Return the number of standard errors to each side: Student's, or more where the error is estimated from χ².

    >>> [round(_quantile(0.99, samples), 2) for samples in (16, 64, 10_000)]
    [4.54, 3.32, 2.62]
    """
    beyond = (1 - confidence) / 2
    underestimated = float(chi2.ppf(beyond, samples)) / samples
    return max(float(student.ppf(1 - beyond, samples - 1)), float(normal.ppf(1 - beyond)) / underestimated**0.5)


def sum_log_determinants(terms: Sequence[LogDeterminant]) -> LogDeterminant:
    """Return the log-determinant of a composition: values and truncations add up, standard errors in squares.

    The error bar uses the smallest number of samples of any term, which does not make it narrower.
    """
    value, cut = (torch.stack([getattr(term, name) for term in terms]).sum(0) for name in ("value", "truncation"))
    spread = torch.stack([term.standard_error for term in terms]).square().sum(0).sqrt()
    samples = min((term.samples for term in terms if not term.exact), default=0)
    limits = [torch.zeros_like(cut) if term.exact else term.limit for term in terms]
    limit = None if any(each is None for each in limits) else torch.stack(limits).sum(0)  # type: ignore[arg-type]
    return LogDeterminant(value, spread, cut, " + ".join(dict.fromkeys(term.method for term in terms)), samples, limit)


def log_determinant(
    branch: Branch,
    x: Tensor,
    method: Method,
    contraction: Callable[[], Contraction],
    samples: int,
    tolerance: float,
    generator: torch.Generator | None,
) -> LogDeterminant:
    """Compute log|det(I + J)| of ``x + branch(x)`` at every item of x, ``(batch, n, d)``.

    Args:
        method: "auto" chooses "blocks" without dependence on later tokens, "dense" up to 256 coordinates or "series".
        contraction: returns the contraction constant of the branch, for the series.
        samples: random vectors of "series" and "roulette".
        tolerance: the series is truncated when the bound on the remainder is below this many nats.
        generator: for the random vectors; torch's own by default.
    """
    check_one_of(method, METHODS, "method")
    reach = branch.reach_at(x.shape[1])
    if method == "auto":
        small = math.prod(x.shape[1:]) <= DENSE
        method = "blocks" if reach != "all" else "dense" if small else "series"
    if method == "blocks":
        if reach == "all":
            raise DoesNotApply(
                "this branch depends on later tokens, so its Jacobian is not block triangular: use a causal mask, or "
                "method='dense' or 'series'."
            )
        return _exact(branch.diagonal_blocks(x), method)
    if method == "dense":
        flat = x.flatten(1)[:, None]  # one token with all coordinates
        return _exact(token_wise_blocks(lambda all_of_x: branch(all_of_x.view_as(x)).flatten(1)[:, None], flat), method)
    check_count(samples, "samples", least=2)  # an error bar needs two
    check_positive(tolerance, "tolerance")
    estimate = _Estimate(x, contraction(), samples, generator)
    return estimate.series(branch, tolerance) if method == "series" else estimate.roulette(branch)


def _exact(blocks: Tensor, method: str) -> LogDeterminant:
    """Σ_i log|det(I + B_i)| for blocks ``(batch, n, d, d)``."""
    total = torch.linalg.slogdet(torch.eye(blocks.shape[-1]).to(blocks) + blocks).logabsdet.sum(1)
    zeros = torch.zeros_like(total.detach())
    return LogDeterminant(total, zeros, zeros, method)


class _Estimate:
    """Samples of vᵀ(Jᵀ)^k v, k = 1, 2, …, for every item."""

    def __init__(self, x: Tensor, contraction: Contraction, samples: int, generator: torch.Generator | None):
        self.x, self.samples, self.generator = x, samples, generator
        self.c, self.dual = contraction.coefficient, contraction.dual
        signs = torch.randint(0, 2, (samples, *x.shape), generator=generator, device=x.device)
        self.probes = (2 * signs - 1).to(x.dtype)
        self.coordinates = math.prod(x.shape[1:])
        self.length = 1.0 if contraction.norm == math.inf else self.coordinates**0.5  # |v|

    def series(self, branch: Branch, tolerance: float) -> LogDeterminant:
        ones = self.x.new_ones(self.samples)

        def rest(k: int, moved: Tensor) -> Tensor:
            size = self.dual.size(moved.flatten(0, 1)).view(self.samples, -1).mean(0)
            return self.c * self.length * size / ((k + 1) * (1 - self.c))

        more = lambda k, moved: bool((rest(k, moved) > tolerance).any())  # noqa: E731
        return self._sum(branch, "series", lambda k: ones, more, rest)

    def roulette(self, branch: Branch) -> LogDeterminant:
        """Sum two terms, and each further one with probability q = max(½, c), so that the weights are bounded.

        At most `MAX_TERMS` are summed: c bounds the truncation of the expected value.
        """
        q, certain = max(0.5, self.c), 2
        uniform = torch.rand(self.samples, generator=self.generator, dtype=torch.float64)
        drawn = (certain + (uniform.log() / math.log(q)).floor()).clamp(max=MAX_TERMS).to(self.x)

        def weight(k: int) -> Tensor:
            return (drawn >= k) / q ** max(0, k - certain)

        maximum = int(drawn.max())
        truncated = self.coordinates * self.c ** (MAX_TERMS + 1) / ((MAX_TERMS + 1) * (1 - self.c))
        return self._sum(
            branch, "roulette", weight, lambda k, moved: k < maximum, lambda k, moved: moved.new_tensor(truncated)
        )

    def _sum(
        self,
        branch: Branch,
        method: str,
        weight: Callable[[int], Tensor],
        more: Callable[[int, Tensor], bool],
        rest: Callable[[int, Tensor], Tensor],
    ) -> LogDeterminant:
        follow = torch.is_grad_enabled()
        with torch.enable_grad():
            copies = self.x.expand(self.samples, *self.x.shape).flatten(0, 1)
            copies = copies if copies.requires_grad else copies.detach().requires_grad_()
            out = branch(copies)
        moved, k = self.probes, 0
        terms = self.x.new_zeros(self.samples, len(self.x))
        applied = torch.zeros_like(self.probes)  # Av
        while k < MAX_TERMS and (k == 0 or more(k, moved.detach())):
            k += 1
            moved = vector_jacobian_product(out, copies, moved.flatten(0, 1), create_graph=follow).view_as(self.probes)
            trace = (self.probes * moved).flatten(2).sum(-1)  # (samples, batch)
            share = (-1) ** (k + 1) / k * weight(k)
            terms = terms + share[:, None] * trace
            applied += share[:, None, None, None] * moved.detach()
        value = terms.mean(0)
        variance = 2 * (self.probes * applied).flatten(2).var(0).sum(-1)
        spread = torch.maximum(terms.detach().var(0), variance).sqrt() / self.samples**0.5
        cut = rest(k, moved.detach()).expand_as(spread)
        # The distance to the log-determinants of eigenvalues 1 + λ, |λ| ≤ c.
        low, high = (self.coordinates * math.log1p(sign * self.c) for sign in (-1, 1))
        limit = torch.maximum(value.detach() - low, high - value.detach())
        return LogDeterminant(value, spread, cut, method, self.samples, limit)
