"""Heads on a ball with nonlinear queries or keys, capped logits or sigmoid weights.

Queries, keys and values are token-wise maps with bounds m ≥ ‖D‖ and h ≥ ‖D²‖ of their derivatives on the ball. Logits
move by at most δ_ij = ε_i|M^qᵀ_i(k_j − c_i)| + ε_j|M^kᵀ_j q_i| + ½ε_i²h^q_i|k_j − c_i| + ½ε_j²h^k_j|q_i| + r^q_i r^k_j;
the three paths follow from the extreme weights and slopes.

Proof: docs/theory/certificates-ball.md, section "Nonlinear queries and keys".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention.dot_product_map import _DistanceKey, _DistanceQuery
from howsmooth.attention.stages import Chain, Rotary, Scale, TokenStage, UnitNorm
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.bounds.point_bounds import nonnegative_norm
from howsmooth.bounds.three_paths import PathsAt
from howsmooth.certificates.ball.weight_perturbation import largest_mean
from howsmooth.certificates.network.affine_form import spectral_ceiling
from howsmooth.errors import DoesNotApply
from howsmooth.numerics.roundoff import gamma

_RAISED = 1 + gamma(2**14)


class NonlinearBall:
    """All heads on a ball.

    Attributes:
        query, key, value: the token-wise maps. weights: ends of P and largest slopes on the ball.
        centred_keys: k_j − c_i ``(heads, i, j, k)``. pull, push: M^qᵀ_i of it, and M^kᵀ_j q_i.

    >>> import howsmooth as hs
    >>> head, x = hs.SelfAttention.random(4, softcap=2.0).in_dtype(torch.float64), torch.eye(3, 4).double()
    >>> near, far = (float(NonlinearBall(PathsAt(head, x), torch.full((3,), eps)).bound()) for eps in (0.1, 0.2))
    >>> bool(hs.measure(head, x).lower < near < far)
    True
    """

    def __init__(self, at: PathsAt, moves: Tensor):
        attention, (x,), moves = at.attention, at.tokens, moves.double()
        matrices = (attention.query_weight, attention.key_weight, attention.value_weight)
        self.query, self.key, self.value = (
            _Feature.of(list(chain), start, matrix.repeat_interleave(attention.heads // len(matrix), 0), x, moves)
            for chain, start, matrix in zip(at.stages, at.projected, matrices, strict=True)
        )
        self.moves, self.output = moves, attention.output_weight
        query, key, cap = self.query.value, self.key.value, attention.softcap
        plain, softmax = query @ key.mT, attention.weighting == "softmax"
        scores, here, *_ = at.weights()
        centre = here @ key if softmax and cap is None else torch.zeros_like(query)
        self.mean = here @ self.value.value if softmax else torch.zeros_like(self.value.value)
        self.centred_keys = key[:, None] - centre[:, :, None]
        self.pull = self.query.back(self.centred_keys, 1)
        self.push = self.key.back(query[:, :, None].expand_as(self.centred_keys), 2)
        moved = self.logit_moves() * _RAISED + gamma(2**12) * (1 + plain.abs())
        self.weights = _Weights.of(scores, moved, plain, cap, softmax)

    def logit_moves(self) -> Tensor:
        """δ_ij ≥ the moves of the logits, ``(heads, n, n)``."""
        query, key, moves = self.query, self.key, self.moves
        long, size = self.centred_keys.norm(dim=-1), query.value.norm(dim=-1)[..., None]
        moved = moves[:, None] * (self.pull.norm(dim=-1) + query.derivative_change[..., None] * long)
        moved = moved + moves * (self.push.norm(dim=-1) + key.derivative_change[:, None] * size)
        moved = moved + query.error[..., None] * long + key.error[:, None] * size
        return moved + query.moved[..., None] * key.moved[:, None]

    def bound(self) -> Tensor:
        """The three paths together, ``(heads,)``."""
        query, key, value, weights = self.query, self.key, self.value, self.weights
        out_norm = spectral_ceiling(self.output)[:, None]
        width = value.through(self.output) + out_norm * value.derivative_change
        values = (value.value[:, None] - self.mean[:, :, None]) @ self.output[:, None]
        spread = weights.spread(values, (width * self.moves + out_norm * value.error)[:, None])
        derivative_change = query.derivative_change[..., None] * self.centred_keys.norm(dim=-1)
        lean = weights.spread(self.pull, query.derivative[..., None] * key.moved[:, None] + derivative_change)
        loads = weights.slopes * spread.square()[..., None]
        straight = spectral_ceiling((loads.clamp_min(1e-300).sqrt()[..., None] * self.push).transpose(1, 2))
        rest = (
            key.derivative[:, None] * query.moved[..., None]
            + key.derivative_change[:, None] * query.value.norm(dim=-1)[..., None]
        )
        cross = straight + (loads * rest.square()).sum(1).sqrt()
        paths = nonnegative_norm(weights.high * width[:, None]) + (spread * lean).amax(-1) + cross.amax(-1)
        return torch.nan_to_num(paths * _RAISED, nan=torch.inf)


@dataclass(frozen=True)
class _Feature:
    """Queries, keys or values on the ball.

    Attributes:
        value: ``(heads, n, k)``. chain: derivative of the stages. root: R with \\|Wᵀu\\| = \\|Ru\\|, ``(heads, k, k)``.
        derivative: m, ``(heads, n)``. derivative_change: hε. moved: r. All include rounding; error: the rounding alone.
    """

    value: Tensor
    chain: Chain
    root: Tensor
    derivative: Tensor
    derivative_change: Tensor
    moved: Tensor
    error: Tensor

    @classmethod
    def of(cls, stages: Sequence[TokenStage], start: Tensor, weight: Tensor, x: Tensor, moves: Tensor) -> _Feature:
        norm = spectral_ceiling(weight)[:, None]
        radius = norm * moves
        derivative, second, here = torch.ones_like(radius), torch.zeros_like(radius), start
        for stage in stages:
            m, h = _derivatives(stage, here, derivative * radius)
            derivative, second = m * derivative, m * second + h * derivative.square()
            here = stage(here[None])[0]
        value, chain = Chain.through(stages, start[None])
        unit = gamma(8 * (weight.shape[-1] + weight.shape[-2]) + 1600)
        entries = weight.norm(dim=(-2, -1))[:, None]
        error = unit * (derivative * (entries * x.norm(dim=-1) + start.norm(dim=-1)) + value[0].norm(dim=-1))
        slack = gamma(64 * weight[0].numel() + 1600) * entries * derivative  # of products with the triangular factor
        derivative_change, derivative = second * norm.square() * moves + slack, derivative * norm
        return cls(
            value[0],
            chain,
            torch.linalg.qr(weight.mT).R,
            derivative,
            derivative_change,
            derivative * moves + error,
            error,
        )

    def back(self, vectors: Tensor, axis: int) -> Tensor:
        """Mᵀu, up to a rotation, for u ``(heads, i, j, k)`` and the derivative at token i (axis 1) or j (axis 2)."""
        other = 3 - axis
        return self.chain.vjp(vectors.movedim(other, 0)).movedim(0, other) @ self.root.mT[:, None]

    def through(self, output: Tensor) -> Tensor:
        """‖W M_j‖, ``(heads, n)``, for W = ``output``ᵀ."""
        rows = self.chain.vjp(output.permute(2, 0, 1)[:, :, None].expand(-1, -1, self.value.shape[1], -1))
        return spectral_ceiling(torch.einsum("ohnk,hrk->hnor", rows, self.root))


def _derivatives(stage: TokenStage, here: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """m and h of a stage on balls around tokens ``(heads, n, k)``."""
    none = torch.zeros_like(radius)
    match stage:
        case Scale():
            return none + abs(stage.factor), none
        case Rotary():
            return none + max(1.0, abs(stage.amplitude)) * (1 + gamma(64)), none
        case UnitNorm():
            gain = abs(stage.length) * (1.0 if stage.gain is None else float(stage.gain.double().abs().max()))
            nearest = ((here.norm(dim=-1) * (1 - gamma(2**10)) - radius).clamp_min(0.0)).square() + stage.eps
            return gain / nearest.sqrt() * _RAISED, 2 / 3**0.5 * gain / nearest * _RAISED
        case _DistanceQuery():
            return none + 2 * stage.factor, none
        case _DistanceKey():
            reach = stage.reach.reshape(-1, 1) * (1 - gamma(16))
            far = (here - stage.centre.reshape(len(here), 1, -1)).norm(dim=-1) + radius
            return (1 + (2 * far / reach).square()).sqrt() * _RAISED, none + 2 / reach
    raise DoesNotApply(
        f"no bound around an input is proved for {type(stage).__name__}: certify at the input alone (radius 0)."
    )


@dataclass(frozen=True)
class _Weights:
    """Ends of the weights, largest slopes, and means under them; ``(heads, n, n)``."""

    low: Tensor
    high: Tensor
    slopes: Tensor
    is_softmax: bool

    @classmethod
    def of(cls, scores: Tensor, moved: Tensor, plain: Tensor, cap: float | None, is_softmax: bool) -> _Weights:
        flat = torch.ones_like(moved)
        if cap is not None:  # sech² falls with |s|: largest at the point of the interval nearest zero
            flat = 1 - torch.tanh((plain.abs() - moved).clamp_min(0.0) / cap).square()
        if is_softmax:
            high = softmax_ceiling(scores, moved) * _RAISED
            return cls(softmax_ceiling(scores, -moved) / _RAISED, high, high * flat**2, True)
        nearest = (scores.abs() - moved).clamp_min(0.0)
        slopes = (torch.sigmoid(nearest) * torch.sigmoid(-nearest)) * flat * _RAISED
        return cls(torch.sigmoid(scores - moved), torch.sigmoid(scores + moved) * _RAISED, slopes, False)

    def spread(self, vectors: Tensor, rest: Tensor) -> Tensor:
        """(E|u·a_j|²)^½ over all unit u and a_j within ``rest`` of the vectors ``(heads, n, n, ·)``: ``(heads, n)``."""
        weights = self.high if self.is_softmax else self.slopes
        straight = spectral_ceiling(weights.clamp_min(1e-300).sqrt()[..., None] * vectors)
        rest = rest.expand_as(weights)
        apart = self._mean((vectors.norm(dim=-1) + rest).square()).sqrt()
        return torch.minimum(straight + self._mean(rest.square()).sqrt(), apart) * _RAISED

    def _mean(self, numbers: Tensor) -> Tensor:
        """The largest mean of numbers along a row; for sigmoids the largest sum weighted by slopes."""
        if self.is_softmax:
            return largest_mean(numbers, self.low, self.high.clamp_max(1.0))
        return (self.slopes * numbers).sum(-1)
