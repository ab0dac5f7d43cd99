"""Attention around an input: its derivative and a bound on its Taylor remainder on a ball.

For logits that move by u, |u_j| ≤ D_j, the remainder is e = Σ_j (P_j − P⁰_j)Δv_j + Σ_j P⁰_j(v_j − o)Δq_i·Δk_j +
∫₀¹ (1 − t) E_{Pᵗ}[(v − oᵗ)(u − E_{Pᵗ}u)²] dt; each term is bounded by means under rows between P̌ and P̂.

Proof: docs/theory/certificates-network.md, section "The remainder of attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.bounds.three_paths import PathsAt
from howsmooth.certificates.ball.weight_perturbation import largest_mean
from howsmooth.certificates.network.affine_form import AffineForm, block_diagonal, gauge, length, spectral_ceiling
from howsmooth.certificates.network.taylor_remainders import ROUNDED, Remainder, moved_by
from howsmooth.numerics.roundoff import gamma


@dataclass(frozen=True)
class AttentionRemainder(Remainder):
    """The remainder of all heads, each a group.

    Attributes:
        scores, weights: ``(heads, n, n)``. apart: |v_j − o_i|.
        logits: gauge of the moves of logits, ``(heads, n, n, ·)``. query, key, value: of tokens ``(heads, n, ·)``.
        along: slopes of the logits in the input's own moves, ``(heads, n, n, m, b)``.
        noise: gauge of the rounding error of the output; off: bound on that of a logit.
    """

    scores: Tensor
    weights: Tensor
    apart: Tensor
    logits: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    along: Tensor
    noise: Tensor
    off: Tensor

    def numbers(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (moved_by(rows, reach) for rows in (self.query, self.key, self.value))
        both = query[..., None] * key[..., None, :]
        moved = moved_by(self.logits, reach) + both + self.off
        high, low = softmax_ceiling(self.scores, moved), softmax_ceiling(self.scores, -moved)
        change = torch.maximum(high - self.weights, self.weights - low).clamp_min(0.0)
        change = (change + gamma(2**12) * self.weights) * (1 + ROUNDED)
        straight = self._second_order(reach, moved, change, high, low)
        values = (change * value[..., None, :]).sum(-1)
        products = (self.weights * self.apart * both).sum(-1)
        upper = ((straight + values + products) * (1 + ROUNDED)).mT + moved_by(self.noise, reach)
        return -upper, upper

    def _second_order(self, reach: Tensor, moved: Tensor, change: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """≥ the integral over the second derivative, ``(heads, n)``."""
        shift = (change * self.apart).sum(-1, keepdim=True)
        mean = largest_mean(moved, low, high)[..., None]
        centred = 0.5 * largest_mean((self.apart + shift) * (moved + mean).square(), low, high)
        square = torch.minimum(largest_mean(moved.square(), low, high), self._square(reach, moved, high))
        farthest = (self.apart * (high > 0)).amax(-1) + shift[..., 0]
        plain = ((change + self.weights * (moved + mean)) * self.apart).sum(-1)
        return torch.minimum(torch.minimum(centred, 0.5 * farthest * square), plain)

    def _square(self, reach: Tensor, moved: Tensor, high: Tensor) -> Tensor:
        """≥ E u² under every row below P̂: moves along one δ are not extreme in all logits at once."""
        moves = reach[1 : 1 + self.along.shape[-2]]
        straight = spectral_ceiling((high.clamp_min(1e-300).sqrt()[..., None, None] * self.along).movedim(3, 2)) @ moves
        rest = (moved - (1 - ROUNDED) * (length(self.along) @ moves)).clamp_min(0.0)
        return (straight + (high * rest.square()).sum(-1).clamp_min(1e-300).sqrt()).square() * (1 + ROUNDED)


@dataclass(frozen=True)
class _Heads:
    """Queries, keys and values ``(heads, n, k)``, their derivatives in every token ``(heads, n, k, d)``, weights."""

    projected: Sequence[Tensor]
    maps: Sequence[Tensor]
    scores: Tensor
    weights: Tensor

    @classmethod
    def of(cls, attention: AttentionMap, x: Tensor) -> _Heads:
        at, maps = PathsAt(attention, x), []
        matrices = (attention.query_weight, attention.key_weight, attention.value_weight)
        for weight, (_, chain) in zip(matrices, at.staged, strict=True):
            every = weight.repeat_interleave(attention.heads // len(weight), 0).permute(2, 0, 1)  # every coordinate
            maps.append(chain.jvp(every[:, :, None].expand(-1, -1, len(x), -1)).permute(1, 2, 3, 0))
        return cls([vectors for vectors, _ in at.staged], maps, *at.weights()[:2])

    def moves(self, slope: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Moves of outputs ``(heads, n, v, m, b)``; of logits ``(heads, n, n, m, b)``, queries, keys and values."""
        (query, key, value), weights = self.projected, self.weights
        flat = slope.flatten(2)
        dq, dk, dv = (torch.einsum("hnkd,ndc->hnkc", one, flat) for one in self.maps)
        logits = torch.einsum("hikc,hjk->hijc", dq, key) + torch.einsum("hik,hjkc->hijc", query, dk)
        logits = logits - torch.einsum("hikc,hik->hic", dq, weights @ key)[:, :, None]
        push = weights[..., None] * logits
        out = torch.einsum("hijc,hjv->hivc", push, value) - (weights @ value)[..., None] * push.sum(2)[:, :, None]
        out = out + torch.einsum("hij,hjvc->hivc", weights, dv)
        return out, [one.unflatten(-1, slope.shape[2:]) for one in (logits, dq, dk, dv)]


def attend(form: AffineForm, attention: AttentionMap) -> tuple[AffineForm, AttentionRemainder]:
    """The form behind an attention map, with a source for the remainders of its heads."""
    n, heads, output = len(form.value), _Heads.of(attention, form.value), attention.output_weight
    slopes, gauges, along = [], [], form.value
    for number, slope in enumerate(form.slopes):
        out, (logits, *tokens) = heads.moves(slope)
        slopes.append(torch.einsum("hvp,hivc->ipc", output, out).unflatten(-1, slope.shape[2:]))
        gauges.append([length(logits), *(spectral_ceiling(one.movedim(3, 2)) for one in tokens)])
        along = along if number else logits
    value, mixed = heads.projected[2], heads.weights @ heads.projected[2]
    result = torch.einsum("hvp,hiv->ip", output, mixed)
    result = result if attention.output_bias is None else result + attention.output_bias
    sums = gamma(8 * (attention.in_features + output[..., 0].numel() + n) + 1600)
    norms = [one.square().sum((0, 2, 3)).max().sqrt() for one in heads.maps]
    far = [length(one).amax() for one in heads.projected]
    off = sums * (1 + far[0] * far[1])
    # Moves of tokens by one number in all move outputs by at most this: values by ‖P‖ ≤ √n, logits by two terms.
    steep = n**0.5 * (norms[2] + 2 * far[2] * (norms[0] * far[1] + norms[1] * far[0]))
    noise = steep * (form.rounding + sums * form.size)
    noise = torch.cat([noise[:1] + 4 * n**0.5 * off * far[2], noise[1:]])
    logit_rows, *token_rows = (list(rows) for rows in zip(*gauges, strict=True))
    query, key, values = (gauge(rows, norm * form.rounding) for rows, norm in zip(token_rows, norms, strict=True))
    remainder = AttentionRemainder(
        heads.scores,
        heads.weights,
        length(value[:, None] - mixed[:, :, None]) * (1 + ROUNDED) + off * far[2],
        gauge(logit_rows, 2 * (norms[0] * far[1] + norms[1] * far[0]) * form.rounding),
        query,
        key,
        values,
        along,
        noise,
        off,
    )
    return form.after(result, slopes, block_diagonal(output.flatten(0, 1).mT, n), sums * output.norm()), remainder
