"""Lower and upper ends of the largest singular value of a Jacobian at one input.

The Gram matrix JJᵀ is factored up to `CHOLESKY` outputs and deflated up to `DEFLATION`; beyond that the three-path
bound is the upper end, and the lower end is measured, not proved. With ‖J − Ĵ‖ ≤ η and ‖Ĝ − ĴĴᵀ‖ ≤ ρ:
‖J‖ ≤ (‖Ĝ‖ + ρ)^½ + η and ‖J‖ ≥ (uᵀĜu − ρ)^½ − η for every unit u.

Proof: docs/theory/certificates-point.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee
from howsmooth.attention import AttentionMap
from howsmooth.bounds.point_bounds import three_path_of
from howsmooth.certificates.point.head_gram import HeadBlocks, HeadsAt, StackedHeads
from howsmooth.certificates.point.proved_eigenvalue import cholesky_bound, deflated_bound, top_eigenvalue
from howsmooth.errors import InvalidInput
from howsmooth.norms.local_constant import measure_heads, measure_map
from howsmooth.numerics.roundoff import gamma

CHOLESKY = 6144
"""Maximum outputs of a map whose Gram matrix is factored: 300 MB and ten seconds of one core."""
BLOCK = 3072
"""Maximum outputs of a block of several heads that is treated as one map."""
DEFLATION = 16384
"""Maximum outputs of a head whose Gram matrix is deflated row by row."""
STACKED = 20480
"""Maximum outputs of a block whose Gram matrix is deflated."""
DEFLATED = 48
"""Leading singular vectors that deflate a head."""
BLOCK_DEFLATED = 200
"""Leading singular vectors that deflate a block, whose spectrum is longer."""
_LEAST = 1e-140
"""Numbers below this or above its inverse may under- or overflow in a sum of squares."""
_POWERS = (0.0, 0.25, 0.5)
"""Weights a_h of the heads in a sum: their norms to one of these powers."""


@dataclass(frozen=True)
class Enclosure:
    """Ends of ‖J‖, the upper one proved, and the method of its proof.

    ``lower_holds`` is the guarantee of the lower end: PROVED from a Gram matrix; MODELLED where maps are too large for
    one, or their logits too large for float64, and the lower end is that of a measurement.
    """

    lower: float
    upper: float
    method: str
    lower_holds: Guarantee = Guarantee.PROVED

    def times(self, unit: float) -> Enclosure:
        """The ends of a map that is larger by a power of two."""
        return replace(self, lower=self.lower * unit, upper=self.upper * unit)


def expected_seconds(attention: AttentionMap, n: int) -> float:
    """Approximate time of the enclosures of all heads on one core, to announce before they start.

    A Gram matrix of N rows takes some N³ operations, at 1.6·10¹⁰ of them a second; gone through row by row, four times
    that; the three-path bound takes no time beside it.
    """
    rows = n * min(attention.value_weight.shape[-2], attention.out_features)
    if rows > DEFLATION:
        return 0.0
    return attention.heads * rows**3 / 1.6e10 * (1 if rows <= CHOLESKY else 4)


def expected_block_seconds(attention: AttentionMap, n: int) -> float:
    """Approximate time of a block, which deflates n² products of matrices as wide as all heads together."""
    outputs, width = n * attention.out_features, attention.heads * attention.value_weight.shape[-2]
    if attention.heads == 1 or outputs > STACKED:
        return expected_seconds(attention, n)
    return outputs**3 / 1.6e10 if outputs <= BLOCK else n**2 * width**3 / 3e9


def enclose_heads(at: HeadsAt) -> list[Enclosure]:
    """Every head x ↦ W_h f_h(x) at one input."""
    attention, n = at.map, len(at.x)
    width = min(attention.value_weight.shape[-2], attention.out_features)
    if n * width > DEFLATION:
        return _three_path(at)
    bases, found = None if n * width <= CHOLESKY else _leading(attention, at.x), []
    for number, head in enumerate(at.blocks()):  # one at a time: they are large
        if not math.isfinite(head.off):  # at huge logits
            return _three_path(at)
        unit = _unit([head])
        scaled = head.times(1 / unit)
        if bases is None:
            proof = _factored(scaled.gram(), scaled.rounding, scaled.off)
        else:
            proof = _deflated(scaled, bases[number])
        found.append(proof.times(unit))
    return found


def enclose_block(at: HeadsAt, heads: Sequence[Enclosure] | None = None) -> Enclosure:
    """The whole map at one input; ``heads`` are the enclosures of its heads there, where they are known."""
    attention, n, d = at.map, len(at.x), at.map.out_features
    if attention.heads > 1 and n * d > BLOCK:
        stacked = StackedHeads.of(at) if n * d <= STACKED else None
        if stacked is not None and math.isfinite(stacked.off) and _LEAST < stacked.rounding < 1 / _LEAST:
            left = measure_map(attention, at.x.double(), k=min(BLOCK_DEFLATED, at.x.numel()), rtol=1e-2).left
            assert left is not None
            return _deflated(stacked, left.double().flatten(1).mT)
        return _sum_of_heads(at, heads)
    if attention.heads == 1:
        return enclose_heads(at)[0]
    heads_blocks = list(at.blocks(whole=True))
    if not all(math.isfinite(head.off) for head in heads_blocks):
        return _sum_of_heads(at, heads)
    unit = _unit(heads_blocks)
    heads_blocks = [head.times(1 / unit) for head in heads_blocks]
    dense = torch.zeros(n * d, n * attention.in_features, dtype=torch.float64)
    for head in heads_blocks:
        for i in range(n):
            dense[i * d : (i + 1) * d] += head.rows(i).transpose(0, 1).reshape(d, -1)
    off = sum(head.off for head in heads_blocks)
    size = sum(head.size for head in heads_blocks)
    rounding = gamma(8 * (dense.shape[1] + len(heads_blocks) + d)) * size**2
    return _factored(dense @ dense.mT, rounding, off).times(unit)


def _unit(heads: Sequence[HeadBlocks]) -> float:
    """A power of two near the size of a Jacobian: in its units no square leaves the range of float64."""
    size = max(head.size for head in heads)
    if size >= _LEAST:
        return 2.0 ** math.frexp(size)[1]
    if any(bool(part.any()) for head in heads for part in (head.value, head.own)):
        raise InvalidInput(f"the Jacobian is below {_LEAST:g}, where its squares leave float64: scale the values up.")
    return 1.0


def _sum_of_heads(at: HeadsAt, heads: Sequence[Enclosure] | None) -> Enclosure:
    heads = enclose_heads(at) if heads is None else heads
    upper, found = norm_of_head_sum(at.map, [head.upper for head in heads]), measure_map(at.map, at.x)
    return Enclosure(float(found.lower), upper, sum_of_heads(heads), found.lower_holds)


def sum_of_heads(heads: Sequence[Enclosure]) -> str:
    """The name of the method, with those of the heads."""
    return "sum of heads: " + ", ".join(sorted({head.method for head in heads}))


def _factored(gram: Tensor, rounding: float, off: float) -> Enclosure:
    value, vector = top_eigenvalue(gram)
    upper, method = cholesky_bound(gram, value), "cholesky"
    attained = float(vector @ (gram @ vector)) * (1 - gamma(4)) / float(vector @ vector)
    attained -= gamma(2 * len(gram)) * float(torch.linalg.matrix_norm(gram))
    if upper is None:  # nothing near the Ritz value holds: the norm of a matrix is at most its Frobenius norm
        upper, method = float(torch.linalg.matrix_norm(gram)) * (1 + gamma(gram.numel())), "frobenius"
    return _ends(attained, upper, rounding, off, method)


def _deflated(blocks: HeadBlocks | StackedHeads, basis: Tensor) -> Enclosure:
    """From ‖G‖_F² and GU of the Gram matrix G."""
    basis = torch.linalg.qr(basis).Q
    squares, products = blocks.sums(basis)
    rounding = 2 * blocks.rounding  # the rows are not made symmetric: twice the error covers both triangles
    vector = basis[:, 0]
    attained = float(vector @ products[:, 0]) - gamma(2 * len(vector)) * squares**0.5
    return _ends(attained, deflated_bound(squares, basis, products, rounding), rounding, blocks.off, "deflation")


def _ends(attained: float, upper: float, rounding: float, off: float, method: str) -> Enclosure:
    """From a value uᵀĜu and a bound on ‖Ĝ‖."""
    lower = (max(attained - rounding, 0.0) ** 0.5 - off) * (1 - gamma(8))
    return Enclosure(max(lower, 0.0), ((upper + rounding) ** 0.5 + off) * (1 + gamma(8)), method)


def _leading(attention: AttentionMap, x: Tensor) -> list[Tensor]:
    """Leading left singular vectors of every head in the coordinates of its triangular factor, ``(n·k, r)``."""
    left = measure_heads(attention, x.double(), k=DEFLATED, rtol=1e-2).left
    assert left is not None
    bases = range_bases(attention.output_weight.double().mT)
    return [(vectors @ basis).flatten(1).mT for vectors, basis in zip(left.double(), bases, strict=True)]


def range_bases(matrices: Tensor) -> Tensor:
    """Orthonormal bases of the ranges of matrices ``(heads, d, k)``, of all d dimensions unless d > k."""
    d, k = matrices.shape[-2:]
    return torch.linalg.qr(matrices).Q if d > k else torch.eye(d, dtype=matrices.dtype).expand(len(matrices), -1, -1)


def _three_path(at: HeadsAt) -> list[Enclosure]:
    upper = torch.cat([three_path_of(group) for (group,) in at.groups()])
    found = measure_heads(at.map, at.x)
    ends = zip(found.lower.tolist(), upper.tolist(), strict=True)
    return [Enclosure(*both, "three paths", found.lower_holds) for both in ends]


def norm_of_head_sum(attention: AttentionMap, norms: Sequence[float]) -> float:
    """A bound on the norm of a sum of maps of given norms, one per head, with the heads' output spaces.

    For projectors Π_h on the ranges of the output matrices and all a_h > 0, ‖Σ_h M_h‖ ≤ ‖Σ_h a_h² Π_h‖^½
    (Σ_h ‖M_h‖²/a_h²)^½, less than the sum of the norms where the ranges overlap little. Proof:
    docs/theory/certificates-ball.md, section "The norm of a sum of heads".

    >>> import howsmooth as hs
    >>> w = torch.eye(4, dtype=torch.float64)  # two heads, each with its own half of the output
    >>> round(norm_of_head_sum(hs.SelfAttention(w, w, w, w, heads=2), [3.0, 4.0]), 9)
    5.0
    """
    sizes = torch.tensor(norms, dtype=torch.float64)
    plain = float(sizes.sum()) * (1 + gamma(len(sizes)))
    if not 0 < plain < torch.inf:
        return plain
    outputs = attention.output_weight.double().mT
    bases = torch.linalg.qr(outputs).Q
    error = gamma(16 * outputs[0].numel()) * torch.linalg.matrix_norm(outputs)
    smallest = torch.linalg.svdvals(outputs).amin(-1) - 2 * error
    off = torch.where(smallest > error, error / smallest.clamp_min(1e-300), 1.0).clamp_max(1.0)
    off = off + gamma(16 * outputs[0].numel())
    found = [plain]
    for power in _POWERS:
        weights = sizes.clamp_min(1e-9 * float(sizes.max())) ** power
        squares = weights.square()
        overlap = ((bases * squares[:, None, None]) @ bases.mT).sum(0)
        top = float(torch.linalg.eigvalsh(overlap)[-1]) + gamma(16 * sum(bases.shape)) * float(squares.sum())
        found.append((top + float((squares * off).sum())) ** 0.5 * float((sizes / weights).norm()))
    return min(found) * (1 + gamma(16 * len(sizes)))
