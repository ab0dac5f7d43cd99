"""Distances between measures, Wasserstein's and the one that keeps positions, and their ratios after attention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from howsmooth._util.optional_deps import need
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.meanfield.measure_attention import MASS_TOLERANCE, Measure, push

_MOST_PIVOTS = 10_000_000


@validated
def w2(mu: Measure, nu: Measure) -> float:
    """W₂(μ, ν), exactly (a linear programme).

    >>> w2(Measure(torch.zeros(1, 2), [1.0]), Measure.empirical(torch.tensor([[3.0, 4.0], [0.0, 0.0]])))
    3.5355339...
    """
    return wasserstein(mu, nu, 2)


@validated
def wasserstein(mu: Measure, nu: Measure, p: float = 2) -> float:
    r""":math:`W_p(\mu, \nu) = (\min_\pi \sum_{ij} \pi_{ij} |x_i - y_j|^p)^{1/p}` over all plans π from μ to ν.

    Solved by the network simplex of POT. Masses are rounded to ε = 1e-16, and rounding them can change the distance by
    ε^{1/p} times the diameter of the supports. Measures with positions have `conditional` instead.
    """
    _check(mu, nu, p)
    if mu.positions is not None or nu.positions is not None:
        raise InvalidInput("W_p ignores positions: compare measures that have them with `conditional`.")
    return _transport(mu.atoms, mu.weights, nu.atoms, nu.weights, p) ** (1 / p)


@validated
def conditional(mu: Measure, nu: Measure, p: float = 2) -> float:
    r"""The distance of masked measures, in which mass keeps its position:

    .. math:: d_p(\mu, \nu)^p = \int W_p(\mu^\tau, \nu^\tau)^p\,d\theta(\tau)

    when both have the same distribution θ of positions, with :math:`\mu^\tau` the tokens at τ; infinite otherwise.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> conditional(Measure.of_tokens(x), Measure.of_tokens(x.flip(0)))  # W₂ without positions is 0
    1.0
    """
    _check(mu, nu, p)
    if mu.positions is None or nu.positions is None:
        raise InvalidInput("d_p needs positions in both measures: build them with Measure.of_tokens or give positions.")
    total = 0.0
    for position in torch.cat([mu.positions, nu.positions]).unique():
        here, there = mu.positions == position, nu.positions == position
        mass, other = float(mu.weights[here].sum()), float(nu.weights[there].sum())
        if abs(mass - other) > MASS_TOLERANCE * max(mass, other):
            return math.inf
        total += _transport(mu.atoms[here], mu.weights[here], nu.atoms[there], nu.weights[there], p)
    return total ** (1 / p)


@validated
def distance(mu: Measure, nu: Measure, p: float = 2) -> float:
    """d_p of measures with positions, W_p of measures without."""
    return wasserstein(mu, nu, p) if mu.positions is None and nu.positions is None else conditional(mu, nu, p)


def _check(mu: Measure, nu: Measure, p: float) -> None:
    if mu.width != nu.width:
        raise InvalidInput(f"measures on R^{mu.width} and R^{nu.width} have no distance: their atoms need one width.")
    if not isinstance(p, int | float) or isinstance(p, bool) or not 1 <= p < 1e300:
        raise InvalidInput(f"W_p is a distance for finite p ≥ 1, got {p!r}.")


def _transport(x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float) -> float:
    """The least cost of moving weights a at x to weights b at y at |x_i − y_j|^p for each unit of mass."""
    with warnings.catch_warnings():  # its first compilation warns of its own escape sequences
        warnings.filterwarnings("ignore", message="invalid escape sequence")
        ot = need("ot", "the distance between measures")
    x, a, y, b = (tensor.detach().cpu() for tensor in (x, a, y, b))
    costs = (x[:, None] - y).norm(dim=-1) ** float(p)
    if not costs.isfinite().all():
        raise InvalidInput(f"the costs |x − y|^p are beyond float64 for p = {p:g}: choose a smaller p.")
    return float(ot.emd2(a.numpy(), b.numpy(), costs.numpy(), numItermax=_MOST_PIVOTS))


Pair = tuple[Measure, Measure]


@validated
def ratio(attention: nn.Module, mu: Measure, nu: Measure) -> float:
    """W₂(F(μ), F(ν)) / W₂(μ, ν), or the same in d₂ when the measures have positions.

    Every such ratio is a lower bound of the constant of F on any set of measures that holds both.

    >>> import torch, howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), 3 * torch.eye(1))  # F(μ) sits at 3 · the mean
    >>> round(ratio(head, Measure.empirical(torch.zeros(2, 1)), Measure.empirical(torch.ones(3, 1))), 12)
    3.0
    """
    apart = distance(mu, nu)
    if not 0 < apart < math.inf:
        why = "are the same" if apart == 0 else "have different masses at some position, which makes d₂ infinite"
        raise InvalidInput(f"the two measures {why}: a ratio needs two at a finite distance.")
    return distance(push(attention, mu), push(attention, nu)) / apart


@validated
def largest_ratio(attention: nn.Module, pairs: Iterable[Pair]) -> tuple[float, Pair]:
    """The largest `ratio` of the pairs, and the pair that has it."""
    ratios, listed = [], list[object](pairs)
    for pair in listed:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInput(f"the largest ratio takes pairs of measures, got {type(pair).__name__}.")
        ratios.append((ratio(attention, *pair), (pair[0], pair[1])))
    if not ratios:
        raise InvalidInput("the largest ratio of no pairs does not exist: give at least one pair of measures.")
    return max(ratios, key=lambda entry: entry[0])
