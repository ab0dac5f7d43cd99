"""Interval arithmetic through a network: the plainest certificate there is, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.attention.stages import Chain
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.certificates.network.parts_ir import (
    ActivationPart,
    AttentionPart,
    LinearPart,
    NormalisationPart,
    Part,
    PoolPart,
    ResidualPart,
)

Interval = tuple[Tensor, Tensor]
"""Centre and half-width of every number."""


def interval_radius(parts: Sequence[Part], x: Tensor, label: int, token: int, steps: int = 10) -> float:
    """The largest radius, by bisection, for which intervals around one token keep the class (of a box, not a ball)."""

    def safe(radius: float) -> bool:
        width = torch.zeros_like(x)
        width[token] = radius
        lowest, highest = _logits(parts, (x, width), label)
        return bool((lowest > highest).all())

    high = float(x.norm())
    low = next((high / 2**k for k in range(1, 60) if safe(high / 2**k)), 0.0)
    high = 2 * low
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if safe(middle) else (low, middle)
    return low


def _logits(parts: Sequence[Part], box: Interval, label: int) -> tuple[Tensor, Tensor]:
    centre, width = through(parts, box)
    others = [c for c in range(centre.shape[-1]) if c != label]
    return centre[0, label] - width[0, label], (centre[0] + width[0])[others]


def through(parts: Sequence[Part], box: Interval) -> Interval:
    """Intervals of the output for intervals of the input."""
    centre, width = box
    for part in parts:
        match part:
            case LinearPart(weight, bias):
                centre, width = centre @ weight.mT + (0.0 if bias is None else bias), width @ weight.abs().mT
            case PoolPart(pool):
                centre, width = (t.mean(0)[None] if pool == "mean" else t[:1] for t in (centre, width))
            case ResidualPart(branch):
                inner = through(branch, (centre, width))
                centre, width = centre + inner[0], width + inner[1]
            case ActivationPart(activation):
                centre, width = _bend(activation, centre, width)
            case NormalisationPart(eps):
                centre, width = _divide(centre, width, eps)
            case AttentionPart(attention):
                centre, width = _attend(attention, centre, width)
    return centre, width


def _ends(low: Tensor, high: Tensor) -> Interval:
    return (low + high) / 2, (high - low) / 2


def _product(one: Interval, other: Interval) -> Interval:
    """Products of matrices of intervals."""
    (a, r), (b, s) = one, other
    return a @ b, a.abs() @ s + r @ b.abs() + r @ s


def _bend(activation: str, centre: Tensor, width: Tensor) -> Interval:
    f = {"relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}[activation]
    low, high = f(centre - width), f(centre + width)
    if activation == "relu":
        return _ends(low, high)
    bottom, at = {"gelu": (-0.17, -0.7518), "silu": (-0.2785, -1.2785)}[activation]  # below the minimum; where it is
    inside = ((centre - at).abs() <= width + 1e-3).double()
    return _ends(inside * bottom + (1 - inside) * torch.minimum(low, high), torch.maximum(low, high))


def _divide(centre: Tensor, width: Tensor, eps: float) -> Interval:
    least = (centre.abs() - width).clamp_min(0.0).square().mean(-1, keepdim=True) + eps
    most = (centre.abs() + width).square().mean(-1, keepdim=True) + eps
    low, high = centre - width, centre + width
    corners = torch.stack([end / size.sqrt() for end in (low, high) for size in (least, most)])
    return _ends(corners.amin(0), corners.amax(0))


def _attend(attention: AttentionMap, centre: Tensor, width: Tensor) -> Interval:
    n = len(centre)
    values = attention.project(centre[None])
    chains = attention.stages(*values[:2])
    parts = []
    for stages, value, weight in zip(
        chains, values, (attention.query_weight, attention.key_weight, attention.value_weight), strict=True
    ):
        after, chain = Chain.through(stages, value)
        matrix = weight.repeat_interleave(attention.heads // len(weight), 0).permute(2, 0, 1)
        maps = chain.jvp(matrix[:, :, None].expand(-1, -1, n, -1)).permute(1, 2, 3, 0)  # heads, n, k, d
        parts.append((after[0], torch.einsum("hnkd,nd->hnk", maps.abs(), width)))
    query, key, value = parts
    scores, moves = _product(query, (key[0].mT, key[1].mT))
    scores = attention.terms.added_to(scores, Maps.every(1, attention.heads, n, query[0][None]))
    weights = _ends(softmax_ceiling(scores, -moves), softmax_ceiling(scores, moves))
    mixed, off = _product(weights, value)
    output = attention.output_weight
    out = torch.einsum("hvp,hiv->ip", output, mixed)
    return (
        out if attention.output_bias is None else out + attention.output_bias,
        torch.einsum("hvp,hiv->ip", output.abs(), off),
    )
