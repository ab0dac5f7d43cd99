r"""Bounds of this project at one input: the three-path bound, the local bound, and the bound of composed attention.

**The three-path bound** says what the weights, the queries and the keys of a head can each do. In the notation of
`howsmooth.bounds.three_paths`, for every choice of key weights :math:`\tau_j > 0`, with :math:`\lambda_i = \|W\sum_j
S_{ij}\tau_j(v_j-m_i)(v_j-m_i)^\top W^\top\|`,

.. math:: \|J\| \;\le\; \|P\|\,\max_j\|WM^v_j\|
          \;+\; \max_i \Big\|W\sum_j S_{ij}(v_j-m_i)k_j^\top M^q_i\Big\|
          \;+\; \Big(\max_j \tau_j^{-1}\Big\|M^{k\top}_j \sum_i S_{ij}\lambda_i q_iq_i^\top M^k_j\Big\|\Big)^{1/2}.

Proof, path by path. *Value:* :math:`[P_{ij}WM^v_j]_{ij} = (P \otimes I)\,\mathrm{diag}_j(WM^v_j)`; when v is linear
this is :math:`P \otimes WW_v` and the bound is its norm. *Diagonal:* block diagonal, so the norm is that of the largest
block. *Cross:* with :math:`U_i = [v_j - m_i]_j`, :math:`D_i = \mathrm{diag}(S_i)`, :math:`T = \mathrm{diag}(\tau)`,
:math:`z_{ij} = q_i\cdot M^k_jy_j`,

.. math:: |WU_iD_iz_i|^2 \le \|WU_i(D_iT)^{1/2}\|^2\,|(D_iT^{-1})^{1/2}z_i|^2
          = \lambda_i \sum_j S_{ij}\tau_j^{-1}z_{ij}^2, \qquad \sum_i\lambda_i\sum_jS_{ij}\tau_j^{-1}z_{ij}^2
          = \sum_j \tau_j^{-1}\,y_j^\top\Big(M^{k\top}_j\sum_iS_{ij}\lambda_iq_iq_i^\top M^k_j\Big)y_j. \quad ∎

The weights τ come from `key_weights`: on heads with attention sinks they halve the cross part of τ = 1.
The cost is O(n²k² + nk³): products of S with pairs of coordinates, and powers of n small matrices.

The bound is for the map itself, in exact arithmetic: what float64 may have lost in the logits, the weights, the vectors
and the norms is added, as derived in `howsmooth.bounds.point_error` and `howsmooth.bounds.three_paths`.

**The local bound** has variances at the input in place of the radius of the ball. With V the value–output matrix and,
under the weights of row i, :math:`m_i` the mean token, :math:`s_i^2 = \sum_jS_{ij}|x_j-m_i|^2`, :math:`w_{ij} =
M^{k\top}_jq_i` (Ax_i + b without positions) and :math:`C_i = \sum_jS_{ij}(x_j-m_i)k_j^\top M^q_i` (Cov_i A without
positions):

.. math:: \|J\| \le \|V\|\Big[\max_i\|C_i\| + \max_i\big(1 + s_i\max_j|w_{ij}|\big)\,
          \Big(\max_j\sum_iP_{ij}\Big)^{1/2}\Big].

Proof. By `howsmooth.bounds.three_paths` with :math:`v_j = Vx_j` the Jacobian at token i is :math:`V[C_iy_i +
\sum_j(P_{ij}y_j + S_{ij}(x_j-m_i)(w_{ij}\cdot y_j))]`. The first part is block diagonal. As :math:`0 \le S \le P`,
Cauchy–Schwarz bounds the second by :math:`(1 + s_i\max_j|w_{ij}|)(\sum_jP_{ij}|y_j|^2)^{1/2}`, the maximum over the
tokens that i sees; summing squares over i brings the column sums. ∎

It holds for any mask, query bias, rotary positions, q/k normalisation and soft-cap, as long as values are linear; also
for L2 attention. The three-path bound is the sharper one on trained heads.

**Composed attention**, between token-wise maps: what is known of plain attention, times their norms. With L the
three-path bound of the plain heads at the features z = φ(x), F_i the derivative of φ at token i, g the gate of a head,
O its output and W its slice of the output matrix,

.. math:: \|J_h\| \le \max_i\|F_i\|\,L_h
          \quad\text{or, with a gate,}\quad
          \|W\|\,\bigl[\max_{i,a} g_{ia}\,\max_i\|F_i\|\,L_h + \max_i\|\mathrm{diag}(O_i\circ g_i')\,G\|\bigr].

Proof. The Jacobian is :math:`W[\mathrm{diag}(g)J(z)F + \mathrm{diag}(O\circ g')G]`, F and G act token by token, and the
norm of a block diagonal map is that of its largest block. A learned sink is one more token of plain attention, whose
rows and columns are left out, which lowers norms. ∎

The features are those computed in float64; to first order their own rounding moves the bound by a relative
eps·width·(1 + largest logit), which is added several times over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.bounds.catalogue import KNOWN_ROUNDING, LINEAR_VALUES, Assumption, theorem
from howsmooth.bounds.key_value_spread import NOISY, about_means, keys, product_slack
from howsmooth.bounds.point_error import known_rounding
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths, cross_scatter, distances, paths, scatter
from howsmooth.norms.small_matrices import spectral
from howsmooth.numerics.roundoff import gamma

TINY = 1e-300
_MARGIN = 1e-8
"""By how much a ceiling is raised before it is compared: what is built needlessly costs a little time, nothing else."""
_CHUNK = 128
_EXACT_WIDTH = 8
_EXACT_TOKENS = 128


@dataclass(frozen=True)
class ThreePath:
    """The bound and its parts, each ``(heads,)`` or ``(batch, heads)``, float64.

    Attributes:
        value: the value path, ‖P‖·max‖WM^v‖. diagonal: tokens moving their own query. cross: tokens moving keys.
    """

    value: Tensor
    diagonal: Tensor
    cross: Tensor

    @property
    def total(self) -> Tensor:
        """The bound: the sum of the parts, each with its allowance for rounding."""
        return (self.value + self.diagonal + self.cross) * (1 + gamma(4))


def three_path_parts(attention: AttentionMap, x: Tensor) -> ThreePath:
    """The parts of `three_path`.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.eye(1), torch.eye(1))
    >>> parts = three_path_parts(head, torch.tensor([[0.0], [1.0], [-1.0]]))
    >>> [round(float(path), 3) for path in (parts.value, parts.diagonal, parts.cross)]
    [1.008, 0.667, 0.556]
    """
    groups = [_parts(group) for group in paths(attention, x)]
    shape = (*x.shape[:-2], attention.heads)
    return ThreePath(*(torch.cat(parts).reshape(shape) for parts in zip(*groups, strict=True)))


def three_path(attention: AttentionMap, x: Tensor) -> Tensor:
    """The three-path bound on the constant of every head at x, for every attention map.

    It is at most 2 % above the formula: λ_i of heads wider than 8 is taken from above, see `psd_norm`. Differentiable
    in x where the maxima are attained once.

    Args:
        attention: any attention map. x: ``(n, d)`` or ``(batch, n, d)``.

    >>> import howsmooth as hs
    >>> head, x = hs.SelfAttention.random(8, heads=2), torch.ones(5, 8)  # equal tokens: the value path alone
    >>> bool(torch.allclose(three_path(head, x), hs.measure_heads(head, x).value.double(), rtol=1e-4))
    True
    """
    return three_path_parts(attention, x).total


@theorem(
    "howsmooth.three_path",
    r"\|P\|\,\|WM^v\|+\max_i\|W\,\mathrm{Cov}_i(v,k)M^q_i\|"
    r"+\bigl(\max_j\|M^{k\top}_j\textstyle\sum_iP_{ij}\lambda_iq_iq_i^\top M^k_j\|\bigr)^{1/2}",
    scope="point",
    kinds=(),
    assumptions=(KNOWN_ROUNDING,),
    on_paths=True,
)
def three_path_of(group: Paths, where: Setting | None = None) -> Tensor:
    """The bound of each map of a group, ``(g,)``."""
    return ThreePath(*_parts(group)).total


def _parts(group: Paths) -> tuple[Tensor, ...]:
    value, cross = weights_norm(group) * value_gain(group), cross_norm(group, key_weights(group))
    return tuple(nowhere_nan(one * group.allowance) for one in (value, diagonal_norm(group), cross))


def nowhere_nan(bound: Tensor) -> Tensor:
    """An upper bound that overflowed on the way (∞ − ∞, 0·∞) is +∞."""
    return torch.where(bound.isnan(), torch.inf, bound)


def root(squares: Tensor) -> Tensor:
    """The square root of numbers ≥ 0, from above: a zero is made tiny, where it has a derivative."""
    return squares.clamp_min(TINY).sqrt()


def value_gain(group: Paths) -> Tensor:
    """max_j ‖WM^v_j‖, ``(g,)``."""
    return (spectral(group.value_map) + group.radii.value_map).amax(1)


def weights_norm(group: Paths) -> Tensor:
    """‖P‖, ``(g,)``, from above; where the weights of a row sum to one, also at most the root of a column sum."""
    upper = group.upper_weights
    norm = nonnegative_norm(upper)
    return torch.minimum(norm, upper.sum(-2).amax(-1).sqrt()) if group.softmax else norm


def diagonal_norm(group: Paths) -> Tensor:
    """The largest query block, ``(g,)``."""
    slack, ceiling = product_slack(group, about_means(group, group.value, group.radii.value), keys(group))
    blocks = cross_scatter(group.slopes, group.value, group.mean, group.pull)
    if group.pull_map is not None:
        blocks = blocks @ group.pull_map
    grams = _grams(blocks)
    sizes = torch.linalg.vector_norm(grams, dim=(-2, -1))
    return largest_block(slack, ceiling, sizes, lambda maps, i: grams[maps, i])


def _grams(blocks: Tensor) -> Tensor:
    """The smaller Gram matrix of each block."""
    short = blocks if blocks.shape[-2] <= blocks.shape[-1] else blocks.mT
    return short @ short.mT


def largest_block(slack: Tensor, ceiling: Tensor, sizes: Tensor, build: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """max_i ‖block_i‖, ``(g,)``: computed norm plus slack, or the ceiling where the slack is a good part of it.

    Args:
        slack, ceiling: of `howsmooth.bounds.three_paths.product_slack`, ``(g, n)``.
        sizes: ≥ the norm of each Gram matrix, ``(g, n)``. build: Gram matrices for pairs (map, i).
    """
    clean = slack <= NOISY * ceiling
    sizes = torch.where(clean, sizes, 0.0)
    norms = largest(sizes, lambda maps, i: build(maps, i) * clean[maps, i, None, None]).sqrt()
    norms = norms + slack.masked_fill(~clean, 0.0).amax(1)
    return torch.maximum(norms, ceiling.masked_fill(clean, 0.0).amax(1))


def cross_norm(group: Paths, weights: Tensor) -> Tensor:
    r"""The bound of the cross score path with the key weights τ, ``(g, n) → (g,)``.

    When queries as keys feel them are off by :math:`\varepsilon_{ij}` it grows by at most
    :math:`\max_j(\sum_iS^+_{ij}\lambda_i\varepsilon_{ij}^2/\tau_j)^{1/2}`.
    """
    loads = value_spread(group, weights)
    shares = group.upper_slopes * loads[..., None]
    traces = (shares * group.push_lengths().square()).sum(-2)
    squares = largest(traces / weights, lambda maps, j: group.key_block(maps, j, loads) / weights[maps, j, None, None])
    off = (shares * push_radii(group).square()).sum(-2) / weights
    return squares.sqrt() + off.amax(-1).sqrt()


@torch.no_grad()
def push_radii(group: Paths) -> Tensor:
    """An error bound of M^k_jᵀq_i, ``(g, n, n)`` or ``(g, n, 1)``."""
    radius = group.radii.push[..., None]
    if group.push_map is None:
        return radius
    gain, lean = group.push_map.norm(dim=(-2, -1))[:, None], group.radii.push_map[:, None]
    rounding = gamma(2 * group.push.shape[-1])
    return group.push.norm(dim=-1, keepdim=True) * (lean + rounding * gain) + (gain + lean) * radius


def value_spread(group: Paths, weights: Tensor) -> Tensor:
    """λ_i of every token, ``(g, n)``, from above; the weights τ are at most 1."""
    cloud = about_means(group, group.value, group.radii.value)
    loads = group.upper_slopes * weights[:, None]
    norms = spread_norm(loads, group.value, group.mean)
    with torch.no_grad():
        apart = distances(group.mean, group.value).square() * group.seen
        ceiling = (loads * apart).sum(-1)
        if group.softmax:
            ceiling = torch.minimum(ceiling, apart.amax(-1))
        ceiling = ceiling * (1 + gamma(4 * apart.shape[-1] + group.value.shape[-1]))
        noisy = ~(moment_slack(loads, group.value, group.mean) <= NOISY * ceiling)
        noisy |= group.radii.slopes > NOISY
    norms = torch.where(noisy, torch.minimum(norms, ceiling), norms)
    return (norms.clamp_min(TINY).sqrt() + cloud.error).square()


def spread_norm(weights: Tensor, vectors: Tensor, centres: Tensor, maps: Tensor | None = None) -> Tensor:
    r""":math:`\|M_i^\top[\sum_jw_{ij}(v_j-c_i)(v_j-c_i)^\top]M_i\|` for every i, ``(g, n)``, from above.

    Without maps M is the identity. What float64 may lose in `scatter`, a difference of second moments, is added to the
    diagonal.
    """
    moments = scatter(weights, vectors, centres)
    moments.diagonal(dim1=-2, dim2=-1).add_(moment_slack(weights, vectors, centres)[..., None])
    return psd_norm(moments if maps is None else maps.mT @ moments @ maps)


def moment_slack(weights: Tensor, vectors: Tensor, centres: Tensor) -> Tensor:
    r""":math:`\gamma_{4(n+8)}\sum_jw_{ij}(|v_j|^2+|c_i|^2)`: by how much `scatter` may be off, in norm, ``(g, n)``."""
    squares = weights @ vectors.square().sum(-1, keepdim=True)
    squares = squares + weights.sum(-1, keepdim=True) * centres.square().sum(-1, keepdim=True)
    return gamma(4 * (weights.shape[-1] + 8)) * squares[..., 0]


def key_weights(group: Paths) -> Tensor:
    r"""Key weights τ that make the cross part small, ``(g, n)``, at most 1.

    With traces in place of norms the square of the cross part is :math:`\max_j (N\tau)_j/\tau_j`,

    .. math:: N_{jl} = \sum_i S_{ij}\,|M^{k\top}_jq_i|^2\;S_{il}\,|W(v_l-m_i)|^2,

    which the Perron vector of N minimises (Collatz–Wielandt). Its square root is taken because traces exaggerate. Any
    τ > 0 gives a bound, so a few steps of power iteration will do.
    """
    values, means = (vectors.square().sum(-1) for vectors in (group.value, group.mean))
    apart = values[:, None] - 2 * group.mean @ group.value.mT + means[..., None]
    spread, push = group.slopes * apart.clamp_min(0), group.slopes * group.push_lengths().square()
    return perron_weights(spread, push, steps=8).clamp_min(1e-4).sqrt()


def perron_weights(left: Tensor, right: Tensor, steps: int = 12) -> Tensor:
    r"""The Perron vector of :math:`R^\top L` for matrices ``(…, rows, n)`` with entries ≥ 0, ``(…, n)``.

    Its largest entry is 1, and none is below 10⁻⁶: weights that even out :math:`(R^\top L\tau)_j/\tau_j`.

    >>> perron_weights(torch.ones(1, 2), torch.tensor([[1.0, 0.5]]))
    tensor([1.0000, 0.5000])
    """
    weights = torch.ones_like(left[..., :1, :]).mT
    for _ in range(steps):
        weights = right.mT @ (left @ weights)
        weights = weights / weights.amax(-2, keepdim=True).clamp_min(TINY)
    return weights[..., 0].nan_to_num(nan=1.0).clamp(1e-6, 1.0)


def psd_norm(matrices: Tensor, squarings: int = 7) -> Tensor:
    r"""The norm of positive semidefinite matrices ``(…, k, k)`` from above.

    Exact (eigenvalues) up to k = 8; beyond it :math:`\|M\| \le (\mathrm{tr}\,M^p)^{1/p} \le k^{1/p}\|M\|` with
    :math:`p = 2^7`, by repeated squaring in float32 with an allowance for rounding, k²·2⁻²⁴: at most 3.9 % too large up
    to k = 128, and far quicker than many eigenvalue problems. The bounds here take its square root.

    >>> float(psd_norm(torch.diag(torch.arange(16.0, dtype=torch.float64))))
    15.00...
    """
    if matrices.shape[-1] <= _EXACT_WIDTH:
        return top(matrices)
    power, norm = matrices, torch.ones_like(matrices[..., 0, 0])
    for s in range(squarings):
        if s % 2 == 0:  # before powers leave the range of floating point
            scale = power.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(TINY if s == 0 else 1e-30)
            power, norm = (power / scale[..., None, None]).float(), norm * scale.double() ** (0.5**s)
        if s + 1 < squarings:
            power = power @ power
    last = torch.linalg.vector_norm(power, dim=(-2, -1)).double().clamp_min(1e-30)  # (tr M²)^½ of a symmetric matrix
    return nowhere_nan(norm * last ** (2 * 0.5**squarings) * (1 + matrices.shape[-1] ** 2 * 2**-24))


def nonnegative_norm(matrices: Tensor) -> Tensor:
    r"""The norm of matrices with entries ≥ 0, ``(g, n, n) → (g,)``, from above, to 0.1 %.

    Exact (eigenvalues of :math:`P^\top P`) up to n = 128 and where gradients are wanted. Beyond it Collatz and
    Wielandt: :math:`\|P\|^2 \le \max_j (P^\top Pz)_j/z_j` for every z > 0, which power iteration brings down to the
    norm; exact again for matrices on which it is slow.

    >>> float(nonnegative_norm(torch.full((1, 200, 200), 1 / 200, dtype=torch.float64)))
    1.0...
    """
    if matrices.shape[-1] <= _EXACT_TOKENS or matrices.requires_grad:
        return spectral(matrices)
    z = matrices.new_ones(*matrices.shape[:-1], 1)
    for _ in range(100):
        moved = matrices.mT @ (matrices @ z)
        upper = (moved / z).amax((-2, -1))
        lower = (z * moved).sum((-2, -1)) / z.square().sum((-2, -1))
        slow = upper > 1.002 * lower
        if not bool(slow.any()):
            break
        z = (moved / moved.amax((-2, -1), keepdim=True).clamp_min(TINY)).clamp_min(TINY)
    upper[slow] = spectral(matrices[slow]).square()
    return upper.sqrt()


def largest(ceilings: Tensor, build: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """max_i ‖M_i‖ of positive semidefinite matrices for every map, ``(g,)``.

    Matrices are built, by ``build(maps, i)`` for pairs, only where the ceiling ``(g, n)`` of ‖M_i‖ exceeds the best
    norm of their map, and their eigenvalues computed only where their Frobenius norm does, too. Gradients pass through
    the winners.

    >>> matrices = torch.tensor([1.0, 3.0, 2.0]).reshape(1, 3, 1, 1)
    >>> largest(torch.tensor([[4.0, 3.5, 2.5]]), lambda maps, i: matrices[maps, i])
    tensor([3.])
    """
    maps = torch.arange(len(ceilings), device=ceilings.device)
    with torch.no_grad():
        ceilings = (ceilings * (1 + _MARGIN)).nan_to_num(nan=torch.inf)
        winner = ceilings.argmax(1)
        best = top(build(maps, winner))
        norms, places = best.tolist(), winner.tolist()
        pending = (ceilings > best[:, None]).nonzero()
        pending = pending[(ceilings / best[:, None])[pending.unbind(1)].argsort(descending=True)]
        while len(pending):
            (of, i), pending = pending[:_CHUNK].unbind(1), pending[_CHUNK:]
            matrices = build(of, i)
            open_ = torch.linalg.vector_norm(matrices, dim=(-2, -1)) > best[of]
            of, i = of[open_], i[open_]
            for g, index, norm in zip(of.tolist(), i.tolist(), top(matrices[open_]).tolist(), strict=True):
                if norm > norms[g]:
                    norms[g], places[g] = norm, index
            best = best.new_tensor(norms)
            pending = pending[ceilings[pending.unbind(1)] > best[pending[:, 0]]]
        winner = winner.new_tensor(places)
    return top(build(maps, winner)) if torch.is_grad_enabled() else best


def top(matrices: Tensor) -> Tensor:
    """The largest eigenvalue of positive semidefinite matrices; a zero is made tiny, where roots have derivatives.

    +∞ where an entry has overflowed.
    """
    finite = matrices.detach().isfinite().all(-1).all(-1)
    if bool(finite.all()):
        return torch.linalg.eigvalsh(matrices)[..., -1].clamp_min(TINY)
    kept = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrices, 0.0))[..., -1]
    return torch.where(finite, kept.clamp_min(TINY), torch.inf)


@theorem(
    "howsmooth.local",
    r"\|V\|\bigl[\max_i\|C_iA\|+\max_i(1+|Ax_i+b|\,s_i)\,(\max_j\textstyle\sum_iP_{ij})^{1/2}\bigr]",
    scope="point",
    kinds=("dot_product", "l2"),
    assumptions=(LINEAR_VALUES, KNOWN_ROUNDING),
    on_paths=True,
)
def _local(group: Paths, where: Setting | None = None) -> Tensor:
    """The formula with weights, spreads and pushes raised by what rounding may have taken from them.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(torch.eye(1), torch.eye(1))
    >>> hs.bounds.get("howsmooth.local")(head, over=torch.tensor([[0.0], [1.0], [-1.0]]))  # 2/3 + (1 + 0.64)·√1.09
    tensor(2.3..., dtype=torch.float64)
    """
    cloud = about_means(group, group.tokens, 0.0)
    mean = group.weights @ group.tokens if group.softmax else torch.zeros_like(group.tokens)
    spread = (group.upper_slopes * distances(mean, group.tokens).square()).sum(-1)  # s_i²
    pulls = (group.upper_slopes @ group.pull.square().sum(-1, keepdim=True))[..., 0]

    maps = group.pull_map
    gain = 1.0 if maps is None else psd_norm(maps.mT @ maps, squarings=3)
    slack, ceiling = product_slack(group, cloud, keys(group))
    diagonal = largest_block(
        slack, ceiling, spread * pulls * gain, lambda maps, i: _grams(group.query_block(maps, i, group.tokens))
    )
    push = (group.push_lengths() + push_radii(group)).masked_fill(~group.seen, 0.0).amax(-1)
    columns = group.upper_weights.sum(-2).amax(-1)
    lengths = spread.clamp_min(TINY).sqrt() + cloud.error
    bound = value_gain(group) * (diagonal + (1 + lengths * push).amax(-1) * columns.sqrt())
    return nowhere_nan(bound * group.allowance)


_MANY = 64
"""How many times the first-order effect of rounding is added."""


def _known(where: Setting) -> bool:
    assert isinstance(where.attention, ComposedAttention)
    return known_rounding(where.attention.attention)


@theorem(
    "howsmooth.composed",
    r"\|W\|\,\bigl[\max g\,\max_i\|\varphi'(x_i)\|\,L(\varphi(x))+\max_i\|\mathrm{diag}(O_i\circ g_i')G\|\bigr]",
    scope="point",
    kinds=("composed",),
    assumptions=(Assumption("what rounding does in every stage of queries, keys and values is known", _known),),
)
def composed(where: Setting, folded: bool = True) -> Tensor:
    """The bound of every head, ``(heads,)``.

    >>> import howsmooth as hs
    >>> sinks = hs.attention.ComposedAttention(hs.SelfAttention.random(8, heads=2), sinks=torch.zeros(2))
    >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    >>> bound = hs.bounds.get("howsmooth.composed")(sinks, over=x, per_head=True)
    >>> bool((hs.measure_heads(sinks, x).value <= bound).all())
    True
    """
    assert isinstance(where.attention, ComposedAttention)
    attention = where.attention.in_dtype(torch.float64)
    x = where.point[None]
    parts = attention.parts(x)
    inner, tokens = parts.attention, parts.tokens
    bound = three_path(inner, tokens[0])
    if parts.derivative is not None:
        bound = bound * torch.as_tensor(parts.derivative.size()).max()
    if parts.gate is not None:
        query, key, value = inner.staged(tokens)
        output = (inner._weights(query, key) @ value)[0][:, parts.placement.outputs]  # (heads, n, v)
        moved = spectral((output * parts.gate.slope[0])[..., None] * parts.gate.weight[:, None]).amax(-1)
        bound = spectral(parts.gate.output) * (parts.gate.value[0].amax((-2, -1)) * bound + moved)
    query, key, _ = inner.staged(tokens)
    logit = float((query.norm(dim=-1).amax(-1) * key.norm(dim=-1).amax(-1)).max().detach())
    width = max(attention.in_features, tokens.shape[-1])
    return bound * (1 + _MANY * torch.finfo(torch.float64).eps * width * (1 + logit))
