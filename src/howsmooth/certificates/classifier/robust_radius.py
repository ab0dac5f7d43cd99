"""The largest ball on which a class is proved constant, for attention pooled at one token and a ReLU network behind it.

logits(p) = E o(p) + e + F relu(G o(p) + g) with o of `PooledAttention`. Hidden values get intervals from their
second order expansion and the bound on their third derivative, the ReLUs of a margin are relaxed, and the remaining
functional plus quadratic is bounded on the ball: min_{|δ| ≤ r} g·δ + ½δᵀHδ ≥ −½gᵀ(H + νI)⁻¹g − ½νr² for every ν ≥ 0
with H + νI ≻ 0, with equality at the best ν (the S-lemma); every ν is valid, so that its search needs no bound on
rounding.

Proof, with rounding: docs/theory/certificates-classifier.md, sections "Quadratics on a ball" and "The certified
radius".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from howsmooth.certificates.classifier.cls_token import Functionals, PooledAttention
from howsmooth.certificates.classifier.relu_relaxation import HiddenBounds, HiddenMoments, ReluRelaxation
from howsmooth.numerics.roundoff import gamma

_ROUNDS = 5
_FINENESS = 2e-3
_MAX_STEPS = 60
_SHIFTS = 8
_FARTHEST = 10.0
"""The largest radius that is tried, in norms of the input plus one: for networks that are constant near it."""


@dataclass(frozen=True)
class Classifier:
    """Pooled attention with a ReLU network behind it, in float64.

    Attributes:
        pool: o(p). direct: E ``(classes, m)``; direct_offset: e. hidden: G ``(k, m)``; hidden_offset: g.
        out: F ``(classes, k)``.
        sizes: the pool with absolute values inside every product it was folded from: bounds on |κ|, |s|, |U|, |u|.
    """

    pool: PooledAttention
    direct: Tensor
    direct_offset: Tensor
    hidden: Tensor
    hidden_offset: Tensor
    out: Tensor
    sizes: PooledAttention

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits."""
        output = self.pool(tokens)
        return (
            self.direct @ output + self.direct_offset + self.out @ torch.relu(self.hidden @ output + self.hidden_offset)
        )

    def noise(self, tokens: Tensor, radius: float) -> float:
        """≥ the rounding error of a margin or a hidden value on the ball."""
        pool = self.pool
        reach = torch.cat([tokens.new_zeros(pool.fixed, tokens.shape[-1]), tokens.abs() + radius])
        logits, rows = _largest(reach, pool)
        folded_logits, folded_rows = _largest(reach, self.sizes)
        heads, width, d = pool.values.shape
        count = pool.key_offsets.shape[-1]
        folding = gamma(8 * (width * heads + width + d))
        computing = gamma(8 * (count * d + heads * count + width + len(self.hidden)) + 1600)
        drift = 1 + 2**0.5 * radius * pool.keys.norm(dim=-1)
        share = folding * 4 * folded_logits + computing * 8 * (1 + logits) * drift.square()
        output = (share[:, None] * rows + folding * folded_rows).sum(0) + computing * pool.constant.abs()
        hidden = self.hidden.abs() @ output + computing * self.hidden_offset.abs()
        total = self.direct.abs() @ output + computing * self.direct_offset.abs() + self.out.abs() @ hidden
        return 2 * float(torch.maximum(total.amax(), hidden.amax()))


def _largest(reach: Tensor, pool: PooledAttention) -> tuple[Tensor, Tensor]:
    """≥ every |logit|, ``(heads,)``, and every |coordinate| of a row, ``(heads, m)``, for |tokens| ≤ reach."""
    logits = pool.keys.abs() @ reach.mT + pool.key_offsets.abs()
    return logits.amax(-1), (reach @ pool.values.abs().mT + pool.value_offsets.abs()).amax(1)


class BallMargins:
    """An input, its class, and lower bounds on its margins on balls around it, in the 2-, 1- or ∞-norm.

    A ball of radius r in the 1-norm lies in the Euclidean one of the same radius, in the ∞-norm in that of radius r√N:
    curvature and remainders are bounded there, while gradients are met by the dual norm.
    """

    def __init__(self, classifier: Classifier, tokens: Tensor, label: int, norm: float = 2):
        self.classifier, self.tokens, self.label, self.norm = classifier, tokens, label, norm
        self.point = classifier.pool.at(tokens)
        self.neurons = Functionals(self.point, classifier.hidden)
        size = self.neurons.gradient.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        self._bends = self.neurons.hessian_product(self.neurons.gradient / size)
        self.hidden, self.noise = cache(self._hidden), cache(partial(classifier.noise, tokens))
        self._guesses: dict[int, tuple[Tensor, HiddenMoments]] = {}

    def _hidden(self, radius: float) -> HiddenBounds:
        """Intervals of all hidden values on the ball."""
        neurons, (lowest, highest) = self.neurons, self.neurons.curvature
        start, far = neurons.value + self.classifier.hidden_offset, self.euclidean(radius)
        rest, noise = neurons.remainder(far), self.noise(far)
        reach, bent = radius * self.dual(neurons.gradient), 0.5 * far**2
        down = ball_minimum(neurons.gradient, self._bends, lowest, far)
        up = ball_minimum(neurons.gradient, -self._bends, -highest, far)
        lower = start + torch.maximum(down, -reach + bent * lowest) - rest
        upper = start - torch.maximum(up, -reach - bent * highest) + rest
        bowed = bent * torch.maximum(highest, -lowest) + rest
        return HiddenBounds(start, neurons.gradient, lower - noise, upper + noise, bowed + noise, reach)

    def euclidean(self, radius: float) -> float:
        """The radius of a Euclidean ball around the ball."""
        return radius * self.tokens.numel() ** 0.5 if self.norm == torch.inf else radius

    def dual(self, gradients: Tensor) -> Tensor:
        """The dual norm along the last axis: the largest gain of a unit move."""
        return torch.linalg.vector_norm(gradients, ord={2: 2, 1: torch.inf, torch.inf: 1}[self.norm], dim=-1)

    def lower(self, other: int, radius: float, rounds: int = _ROUNDS) -> float:
        """A lower bound on the margin to another class on the whole ball."""
        net, hidden = self.classifier, self.hidden(radius)
        weights = net.out[self.label] - net.out[other]
        start = (hidden.start > 0).double(), HiddenMoments(hidden.start, hidden.upper.square())
        lines, guess = self._guesses.get(other, start)
        best = -float("inf")
        for step in range(rounds):
            relaxed = ReluRelaxation.of(weights, hidden, lines, guess if self.norm == 2 else None)
            bound, move, swing = self._relaxed_lower(other, relaxed, radius)
            best = max(best, bound)
            if best > 0:
                break
            reached, swung = hidden.start + hidden.slope @ move, hidden.slope @ swing
            guess = guess.towards(reached, reached.square() + swung.square(), 1 / (step + 2))
            lines = lines + ((reached > 0).double() - lines) / (step + 2)
            self._guesses[other] = lines, guess
        return best

    def _relaxed_lower(self, other: int, relaxed: ReluRelaxation, radius: float) -> tuple[float, Tensor, Tensor]:
        net = self.classifier
        direction = net.direct[self.label] - net.direct[other] + relaxed.coefficients @ net.hidden
        margin = Functionals(self.point, direction[None])
        constant = net.direct_offset[self.label] - net.direct_offset[other] + relaxed.coefficients @ net.hidden_offset
        value = margin.value[0] + constant + relaxed.constant
        bent = relaxed.squares != 0
        slope = self.neurons.gradient
        gradient = margin.gradient[0] + relaxed.slopes[bent] @ slope[bent]
        lowest, columns, factors = _nystrom(margin, gradient)
        columns = torch.cat([columns, slope[bent].mT], 1)
        factors = torch.cat([factors, 2 * relaxed.squares[bent]])
        basis = torch.linalg.qr(torch.cat([gradient[:, None], columns], 1)).Q
        inside = basis.mT @ columns
        far = self.euclidean(radius)
        bound, move, swing = form_minimum(basis.mT @ gradient, (inside * factors) @ inside.mT, lowest, far)
        move, swing = basis @ move, basis @ swing
        if self.norm != 2:  # without parabolas the form is Q alone, which is at least −μ
            bound = max(bound, -radius * float(self.dual(gradient)) + 0.5 * far**2 * lowest)
            move, swing = -radius * self._steepest(gradient), torch.zeros_like(swing)
        return float(value) + bound - float(margin.remainder(far)) - self.noise(far), move, swing

    def _steepest(self, gradient: Tensor) -> Tensor:
        """The unit move, in the ball's own norm, with the largest gain along a gradient."""
        if self.norm == torch.inf:
            return gradient.sign()
        return torch.nn.functional.one_hot(gradient.abs().argmax(), len(gradient)) * gradient.sign()

    def radius(self) -> tuple[float, int]:
        """The largest radius found to be safe, and the class that limits it."""
        net, on = self.classifier, self.neurons.value + self.classifier.hidden_offset > 0
        logits, slopes = net(self.tokens), Functionals(self.point, net.direct + (net.out * on) @ net.hidden).gradient
        margins, sizes = logits[self.label] - logits, self.dual(slopes[self.label] - slopes)
        reach = (margins / sizes.clamp_min(1e-300)).tolist()
        others = sorted((c for c in range(len(reach)) if c != self.label), key=lambda c: reach[c])
        if min(margins[c] for c in others) <= self.noise(0.0):
            return 0.0, others[0]
        best, limiting = min(2 * reach[others[0]], _FARTHEST * (1 + float(self.tokens.norm()))), others[0]
        for other in others:
            radius = self._largest(other, best, float(margins[other]))
            if radius < best:
                best, limiting = radius, other
        return best, limiting

    def _largest(self, other: int, highest: float, margin: float) -> float:
        """The largest safe radius for one class, at most ``most``; by false position, always on the safe side."""
        at_most = self.lower(other, highest)
        if at_most > 0:
            return highest
        low, high, below, above = 0.0, highest, margin, at_most
        for step in range(_MAX_STEPS):
            if high - low <= _FINENESS * high:
                break
            share = below / (below - above) if step % 3 < 2 else 0.5
            middle = low + min(max(share, 0.05), 0.95) * (high - low)
            value = self.lower(other, middle)
            if value > 0:
                low, below = middle, value
            else:
                high, above = middle, value
        return low


def _nystrom(margin: Functionals, gradient: Tensor) -> tuple[float, Tensor, Tensor]:
    """−μ ≤ the spectrum of a functional's curvature Q, with v and 1/τ such that Q ⪰ −μI + vvᵀ/τ, along a gradient."""
    lowest = float(margin.curvature[0][0])
    unit = gradient / gradient.norm().clamp_min(1e-300)
    v = margin.hessian_product(unit[None])[0] - lowest * unit
    stiffness = float(unit @ v)
    usable = stiffness > 1e-12 * float(v.norm())
    return lowest, v[:, None], gradient.new_tensor([1 / stiffness if usable else 0.0])


def ball_minimum(gradient: Tensor, bend: Tensor, floor: Tensor, radius: float) -> Tensor:
    """min g·δ + ½δᵀQδ from below for a batch: gradients ``(g, N)``, ``bend`` = Qĝ, ``floor`` = −μ ≤ spectrum of Q.

    >>> g, q = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[-1.0, 0.0], [0.0, -1.0]]).double()
    >>> round(float(ball_minimum(g, (g / 5) @ q, torch.tensor([-1.0]).double(), 2.0)), 6)  # −2·5 − ½·4
    -12.0
    """
    size = gradient.norm(dim=-1)
    unit = gradient / size.clamp_min(1e-300)[:, None]
    v = bend - floor[:, None] * unit
    stiffness = (unit * v).sum(-1)
    square = v.square().sum(-1)
    usable = stiffness > 1e-12 * square.sqrt()
    lift = torch.where(usable, square / stiffness.where(usable, torch.ones_like(stiffness)), 0.0)
    share = torch.where(usable, stiffness.square() / square.clamp_min(1e-300), 0.0).clamp_max(1.0)
    along, across = share * size.square(), (1 - share) * size.square()
    shift = _best_shift(torch.stack([across, along], -1), torch.stack([torch.zeros_like(lift), lift], -1), radius)
    dual = across / shift + along / (shift + lift)
    return -0.5 * dual - 0.5 * (shift - floor) * radius**2


def form_minimum(gradient: Tensor, form: Tensor, floor: float, radius: float) -> tuple[float, Tensor, Tensor]:
    """min g·δ + ½δᵀ(H − μI)δ from below, for H with its gradient in a subspace; floor = −μ ≤ 0.

    Also a δ near the minimum and a swing: where δ is short of the ball, δ ± swing are as low and on its sphere.
    """
    spectrum, vectors = torch.linalg.eigh(form)
    low = min(float(spectrum[0]), 0.0)  # outside the subspace the form is zero
    turned = vectors.mT @ gradient
    square = turned.square()
    shift = _best_shift(square[None], (spectrum - low)[None], radius)[0]
    move = -vectors @ (turned / (spectrum - low + shift))
    dual = (square / (spectrum - low + shift)).sum()
    margin = form.shape[-1] ** 2 * 2**-50 * torch.linalg.matrix_norm(form)  # LAPACK's backward error
    bound = -0.5 * dual - 0.5 * (shift - low - floor + margin) * radius**2
    remaining = max(radius**2 - float(move.square().sum()), 0.0)
    return float(bound), move, remaining**0.5 * vectors[:, 0]


def _best_shift(squares: Tensor, offsets: Tensor, radius: float) -> Tensor:
    """Near the root ν > 0 of Σ squares/(offsets + ν)² = r²; offsets ≥ 0.

    Newton's method on 1/|δ(ν)| − 1/r, which is nearly straight (Moré and Sorensen 1983), kept positive.
    """
    shift = squares.sum(-1).sqrt() / radius + 1e-150
    for _ in range(_SHIFTS):
        terms = squares / (offsets + shift[..., None]).square()
        length = terms.sum(-1).clamp_min(1e-300)
        slope = (terms / (offsets + shift[..., None])).sum(-1).clamp_min(1e-300)
        shift = torch.maximum(shift + length / slope * (length.sqrt() / radius - 1), shift / 8)
    return shift
