"""Interval arithmetic through a network: the plainest certificate there is, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.attention.stages import Chain, TokenStage
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation, Norm
from howsmooth.network.nodes import (
    Attend,
    Beside,
    MixTokens,
    Multiply,
    Node,
    Parallel,
    Rearrange,
    Series,
    Skip,
    Tokenwise,
)

Interval = tuple[Tensor, Tensor]
"""Centre and half-width of every number."""


def interval_radius(root: Node, x: Tensor, label: int, token: int, steps: int = 10) -> float:
    """The largest radius, by bisection, for which intervals around one token keep the class (of a box, not a ball)."""

    def safe(radius: float) -> bool:
        width = torch.zeros_like(x)
        width[token] = radius
        lowest, highest = _logits(root, (x, width), label)
        return bool((lowest > highest).all())

    high = float(x.norm())
    low = next((high / 2**k for k in range(1, 60) if safe(high / 2**k)), 0.0)
    high = 2 * low
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if safe(middle) else (low, middle)
    return low


def _logits(root: Node, box: Interval, label: int) -> tuple[Tensor, Tensor]:
    centre, width = through(root, box)
    others = [c for c in range(centre.shape[-1]) if c != label]
    return centre[0, label] - width[0, label], (centre[0] + width[0])[others]


def through(node: Node, box: Interval) -> Interval:
    """Intervals of the output for intervals of the input."""
    centre, width = box
    match node:
        case Series():
            for inner in node.nodes:
                box = through(inner, box)
            return box
        case Tokenwise():
            for stage in node.stages:
                box = _staged(stage, box)
            return box
        case Parallel():
            branches = [through(inner, box) for inner in node.nodes]
            return sum(c for c, _ in branches), sum(w for _, w in branches)  # type: ignore[return-value]
        case Beside():
            branches = [through(inner, box) for inner in node.nodes]
            return torch.cat([c for c, _ in branches], -1), torch.cat([w for _, w in branches], -1)
        case Multiply():
            return _times(*(through(inner, box) for inner in node.nodes))
        case Rearrange():
            off = Rearrange(node.index, None if node.factor is None else node.factor.abs())
            return node(centre), off(width)
        case MixTokens():
            return node(centre), MixTokens(node.matrix.abs())(width)
        case Attend():
            assert isinstance(node.attention, AttentionMap)
            return _attend(node.attention, centre, width)
    assert isinstance(node, Skip)
    return box


def _staged(stage: TokenStage, box: Interval) -> Interval:
    centre, width = box
    match stage:
        case Affine():
            return stage(centre), width @ stage.weight.abs().mT
        case Diagonal():
            return stage(centre), width * torch.as_tensor(stage.gain).abs()
        case Activation():
            return _bend(stage.name, centre, width)
        case GatedActivation():
            (gate, up), (off_gate, off_up) = centre.chunk(2, -1), width.chunk(2, -1)
            return _times(_bend(stage.name, gate, off_gate), (up, off_up))
    assert isinstance(stage, Norm)
    return _normalise(stage, centre, width)


def _normalise(norm: Norm, centre: Tensor, width: Tensor) -> Interval:
    """A centring matrix, a division, the gain and the shift."""
    eye = torch.eye(norm.width, dtype=torch.float64)
    if norm.centred:
        matrix = eye - 1 / norm.width
        centre, width = centre @ matrix, width @ matrix.abs()
    centre, width = _divide(centre, width, norm.eps)
    if norm.gain is not None:
        centre, width = centre * norm.gain, width * norm.gain.abs()
    return centre if norm.shift is None else centre + norm.shift, width


def _ends(low: Tensor, high: Tensor) -> Interval:
    return (low + high) / 2, (high - low) / 2


def _product(one: Interval, other: Interval) -> Interval:
    """Products of matrices of intervals."""
    (a, r), (b, s) = one, other
    return a @ b, a.abs() @ s + r @ b.abs() + r @ s


def _times(one: Interval, other: Interval) -> Interval:
    """Products of single numbers of intervals."""
    (a, r), (b, s) = one, other
    corners = torch.stack([x * y for x in (a - r, a + r) for y in (b - s, b + s)])
    return _ends(corners.amin(0), corners.amax(0))


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
