r"""The setting of a bound: the attention, the number of tokens, and their set or the input; constants of each head.

For tokens :math:`x = c + \Gamma z,\ |z| \le \rho` (see `Ellipsoid`) and a head with logits

.. math:: x_j^\top A_{ij} x_i + b_{ij}\cdot x_j + \beta_{ij}\cdot x_i + \text{const}, \qquad A_{ij} = K^\top R_{j-i} Q,

(R the rotation of rotary positions, the identity without; the logit scale is inside Q) and value–output matrix V,
every bound of this project on a set is a formula in the six numbers of `HeadNumbers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_finite, validated
from howsmooth.attention import AttentionMap, Rotary, as_attention_map
from howsmooth.attention.stages import Scale
from howsmooth.bounds.three_paths import Paths, PathsAt
from howsmooth.errors import InvalidInput
from howsmooth.norms.small_matrices import spectral
from howsmooth.numerics.roundoff import gamma
from howsmooth.sets import InputSet
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.near_sets import Over, as_set

_MOST_OFFSETS = 4096
"""Rotations looked at one by one; beyond it ‖Q‖‖K‖ stands for the worst of them."""
_ENTRIES = 2**21
"""Of the matrices of all heads that are looked at together: several arrays of this size are in memory."""
_SQUARINGS = 8
"""G^(2⁸) of a 64 × 64 Gram matrix tells its norm to 0.8 %, in products instead of decompositions."""


@dataclass(frozen=True)
class HeadNumbers:
    """Constants of each head on a set of tokens; every entry is ``(heads,)``, float64.

    Attributes:
        value: ‖V‖.
        spread: ρ‖VΓ‖ ≥ the standard deviation of the values under any weights.
        pull: ≥ the standard deviation of ∂logit/∂x_i = A_ijᵀx_j + β_ij over the keys.
        push: ≥ |∂logit/∂x_j| = |A_ij x_i + b_ij|.
        swing: half the range of a row of logits over the set (without positions).
        score: max ‖A_ij‖.
    """

    value: Tensor
    spread: Tensor
    pull: Tensor
    push: Tensor
    swing: Tensor
    score: Tensor


def value_matrices(attention: AttentionMap, folded: bool = True) -> Tensor:
    """V_h of every head, ``(heads, v, d)``, before non-linear stages; up to an isometry W_hV_h when ``folded``.

    R V_h, with R of `output_factor`, has the norms of W_hV_h and only v rows.
    """
    value = attention.per_head(attention.value_weight.double())
    for stage in attention.value_stages:
        if isinstance(stage, Scale):
            value = value * stage.factor
    return output_factor(attention) @ value if folded else value


def output_factor(attention: AttentionMap) -> Tensor:
    """R of every head's output slice W_h = U R with orthonormal columns in U, ``(heads, v, v)``: it keeps all norms."""
    return torch.linalg.qr(attention.output_weight.double().mT).R


def query_key(attention: AttentionMap) -> tuple[Tensor, Tensor, Tensor]:
    """Q (scaled) and K of every head, ``(heads, k, d)``, and the query bias, ``(heads, k)``: A = KᵀQ, b = Kᵀb_q."""
    scores = HeadScores.of(attention, 1)
    return scores.query, scores.key, scores.query_bias


@validated
def head_numbers(attention: AttentionMap, tokens: Ellipsoid, n: float) -> HeadNumbers:
    """The numbers of every head of dot-product attention with linear queries, keys and values.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-2 * torch.eye(2), 3 * torch.eye(2))
    >>> numbers = head_numbers(head, Ellipsoid.ball(1.5, width=2), n=8)
    >>> float(numbers.value), float(numbers.score), float(numbers.swing)
    (3.0, 2.0, 4.5)
    """
    value = value_matrices(attention)
    scores = HeadScores.of(attention, n)
    axes, reach, query, key = tokens.axes, tokens.reach, scores.query, scores.key
    query_at, key_at = scores.at(tokens.centre)
    score = by_key = by_query = by_both = scores.largest(key, query)
    if bool(score.isnan().any()):
        raise InvalidInput("the queries or keys of this attention have weights that are no numbers.")
    if not tokens.is_ball:
        by_key, by_query = scores.largest(key @ axes, query), scores.largest(key, query @ axes)
        by_both = scores.largest(key @ axes, query @ axes)
    pull = reach * by_key
    if scores.rotary is not None or attention.softcap is not None:  # a shift of all keys changes something
        pull = pull + scores.largest(key_at, query)
    push = reach * by_query + scores.largest(key, query_at)
    swing = reach * (reach * by_both + scores.largest(key @ axes, query_at))
    if attention.softcap is not None:
        swing = swing.clamp(max=attention.softcap)
    return HeadNumbers(spectral(value), reach * spectral(value @ axes), pull, push, swing, score)


def norm_rounding(attention: AttentionMap, folded: bool = True) -> tuple[Tensor, Tensor]:
    r"""By how much ‖V‖ and ‖A‖ of every head may be off: :math:`\gamma_{8dk}` times the product of the factors' norms.

    Products of matrices are known to within the product of their norms, which is more when they nearly cancel.
    """
    query, key, _ = query_key(attention)
    value, output = value_matrices(attention, folded=False), attention.output_weight.double()
    # The Frobenius norm from above, without squares that could overflow.
    sizes = [weight.abs().amax((-2, -1)) * weight[0].numel() ** 0.5 for weight in (query, key, value, output)]
    turned = [max(1.0, abs(stage.amplitude)) for stage in attention.query_stages if isinstance(stage, Rotary)]
    steps = gamma(8 * attention.in_features * query.shape[-2] + 64)
    outer = gamma(8 * output[0].numel() + 64) * sizes[3] if folded else gamma(64)
    return outer * sizes[2], steps * sizes[0] * sizes[1] * math.prod(turned) ** 2


def without_output(numbers: HeadNumbers, attention: AttentionMap, tokens: Ellipsoid) -> HeadNumbers:
    """The same heads without their slices of the output matrix: the logits, which cost most, are those of before."""
    value = value_matrices(attention, folded=False)
    return replace(numbers, value=spectral(value), spread=tokens.reach * spectral(value @ tokens.axes))


@dataclass(frozen=True)
class HeadScores:
    """Queries (scaled) and keys of each head, (heads, k, d), with their biases, and every rotation between them."""

    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor
    rotary: Rotary | None
    n: float

    @classmethod
    def of(cls, attention: AttentionMap, n: float) -> HeadScores:
        """The constants of an attention map on n tokens."""
        query, key = attention.query_weight.double(), attention.per_head(attention.key_weight.double())
        none = torch.zeros_like(query[..., 0])
        query_bias = none if attention.query_bias is None else attention.query_bias.double()
        key_bias = none if attention.key_bias is None else attention.per_head(attention.key_bias.double())
        rotary = None
        for stage in attention.query_stages:
            if isinstance(stage, Scale):
                query, query_bias = query * stage.factor, query_bias * stage.factor
            elif isinstance(stage, Rotary):
                rotary = stage
        return cls(query, key, query_bias, key_bias, rotary, n)

    @cached_property
    def _offsets(self) -> Tensor | None:
        """Every difference of two positions, or None when there are too many."""
        if self.rotary is not None and not self.rotary.has_frequencies:
            return None
        if self.rotary is None or self.rotary.positions is None:
            few = 2 * self.n <= _MOST_OFFSETS
            return torch.arange(-int(self.n) + 1, int(self.n), dtype=torch.float64) if few else None
        positions = self.rotary.positions.double()
        few = len(positions) <= _MOST_OFFSETS  # otherwise not even all pairs are written out
        offsets = (positions[:, None] - positions).unique() if few else positions
        return None if len(offsets) > _MOST_OFFSETS else offsets

    def at(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """The query and the key of a token, each (heads, k, 1)."""
        query, key = self.query @ token + self.query_bias, self.key @ token + self.key_bias
        return query[..., None], key[..., None]

    def largest(self, left: Tensor, right: Tensor) -> Tensor:
        """max over rotations R of ‖leftᵀ R right‖, (heads,); both (heads, k, ·)."""
        # Only the triangular factors matter: k × k instead of d × d.
        left, right = (torch.linalg.qr(side.mT).R.mT if side.shape[-1] > 1 else side for side in (left, right))
        if self.rotary is None:
            return spectral(left.mT @ right)
        if not bool(left.any() and right.any()):
            return torch.zeros(len(left), dtype=left.dtype)
        if self._offsets is None:
            # Coordinates that do not turn keep their length, so an amplitude below one shrinks nothing for sure.
            return spectral(left) * spectral(right) * max(1.0, abs(self.rotary.amplitude)) ** 2
        best = torch.zeros(len(left), dtype=left.dtype)
        fixed = _turn(self.rotary, left, self._offsets.new_zeros(1))
        each = left.shape[-2] * right.shape[-1] + left.shape[-1] * right.shape[-1]
        for offsets in self._offsets.split(min(64, max(1, _ENTRIES // (len(left) * each)))):
            turned = _turn(self.rotary, right, offsets)  # (heads, offsets, k, ·)
            best = torch.maximum(best, _largest_norm(fixed.mT @ turned, best))
        return best


def _largest_norm(matrices: Tensor, known: Tensor) -> Tensor:
    r"""max_t ‖M_t‖ of (heads, t, ·, ·) where it exceeds ``known``, (heads,); less elsewhere.

    :math:`\|M\|^2 \le (\mathrm{tr}\, G^p)^{1/p} \le r^{1/p}\|M\|^2` for the r × r Gram matrix G, so that only
    the matrices near the largest of these have to be decomposed.
    """
    with torch.no_grad():
        wide = matrices.shape[-1] >= matrices.shape[-2]
        power = matrices @ matrices.mT if wide else matrices.mT @ matrices
        rank, above = power.shape[-1], torch.zeros_like(power[..., 0, 0])  # ln (tr G^p)^(1/2p)
        for squarings in range(_SQUARINGS + 1):
            trace = power.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1e-300)
            above = above + trace.log() / 2 ** (squarings + 1)
            power = power / trace[..., None, None]
            power = power @ power
        least = above.amax(1) - math.log(rank) / 2 ** (_SQUARINGS + 1)
        wanted = above >= torch.maximum(least, known.log())[:, None] - 1e-9
    heads = wanted.nonzero()[:, 0]
    return torch.zeros_like(known).scatter_reduce(0, heads, spectral(matrices[wanted]), "amax")


def _turn(rotary: Rotary, matrix: Tensor, places: Tensor) -> Tensor:
    """R_t M for every place t: (heads, k, ·) → (heads, places, k, ·)."""
    stage = Rotary(rotary.frequencies.double(), rotary.interleaved, rotary.amplitude, places)
    columns = matrix.mT[:, :, None].expand(-1, -1, len(places), -1)  # every column a sequence of tokens
    return stage(columns).permute(0, 2, 3, 1)


PathNumber = Callable[[Paths, "Setting"], Tensor]
"""A number of each map of a group of `Paths`, ``(g,)``."""


@dataclass(frozen=True)
class Setting:
    """The setting in which a bound is evaluated; build it with `setting`.

    Attributes:
        attention: an `AttentionMap`, or another attention module with a ``kind``.
        n: number of tokens; ``inf`` for measures; None when unknown.
        tokens: the ellipsoid every token lies in, when known.
        x: the input, ``(n, d)``, when the bound is for one input.
        eps: every token may move by this much from x.
    """

    attention: nn.Module
    n: float | None = None
    tokens: Ellipsoid | None = None
    x: Tensor | None = None
    eps: float | None = None
    _known: dict[tuple[PathNumber, bool], Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def kind(self) -> str:
        """Kind of attention: "dot_product", "l2", "sigmoid", "cosine", …"""
        return str(getattr(self.attention, "kind", "unknown"))

    @property
    def map(self) -> AttentionMap:
        """The attention as a map with heads."""
        assert isinstance(self.attention, AttentionMap)
        return self.attention

    @property
    def heads(self) -> int:
        """Number of heads; 1 for modules without."""
        return int(getattr(self.attention, "heads", 1))

    @property
    def count(self) -> float:
        """n, which the bound requires."""
        assert self.n is not None
        return self.n

    @property
    def radius(self) -> float:
        """R, which the bound requires."""
        assert self.tokens is not None
        return self.tokens.radius

    @property
    def point(self) -> Tensor:
        """The input in float64, which the bound requires."""
        assert self.x is not None
        return self.x.double()

    @cached_property
    def _numbers(self) -> dict[bool, HeadNumbers]:
        tokens = self.tokens or Ellipsoid.ball(1.0, self.map.in_features)  # ‖V‖ and ‖A‖ are the same on every set
        numbers = head_numbers(self.map, tokens, math.inf if self.n is None else self.n)
        return {True: numbers, False: without_output(numbers, self.map, tokens)}

    @cached_property
    def output_norm(self) -> float:
        """‖W^O‖ of the whole output matrix."""
        return float(torch.linalg.matrix_norm(self.map.output_weight.double().flatten(0, 1), 2))

    def numbers(self, folded: bool) -> HeadNumbers:
        """The constants of each head for bounds on sets, with the output matrix folded into V or not."""
        return self._numbers[folded]

    def on_ball(self, folded: bool) -> tuple[Tensor, Tensor, float]:
        """‖V‖ and ‖A‖ of each head, ``(heads,)``, and R: what theorems on balls are made of."""
        return self.numbers(folded).value, self.numbers(folded).score, self.radius

    def norms(self, group: Paths) -> tuple[Tensor, Tensor]:
        """‖V‖ and max ‖A_ij‖ of each map of a group, ``(g,)``, enlarged by their rounding."""
        numbers, lost = self.numbers(group.folded), norm_rounding(self.map, group.folded)
        return (numbers.value + lost[0])[group.heads], (numbers.score + lost[1])[group.heads]

    def on_paths(self, number: PathNumber, folded: bool) -> Tensor:
        """A number of every head at x, ``(heads,)``, from its paths; NaN where it overflows."""
        self.walk([number], (folded,))
        return self._known[number, folded]

    def walk(self, numbers: Iterable[PathNumber], foldings: Sequence[bool]) -> None:
        """Find several numbers of every head, with and without the output matrix, in one pass over the paths at x."""
        wanted = [(one, folded) for one in numbers for folded in foldings if (one, folded) not in self._known]
        if not wanted:
            return
        sides = sorted({folded for _, folded in wanted})
        numbers_of: dict[tuple[PathNumber, bool], list[Tensor]] = {key: [] for key in wanted}
        for groups in PathsAt(self.map, self.point).groups(sides):
            for one, folded in wanted:
                group = groups[sides.index(folded)]
                try:
                    numbers_of[one, folded].append(one(group, self))
                except OverflowError:
                    numbers_of[one, folded].append(torch.full_like(group.weights[:, 0, 0], torch.nan))
        self._known.update({key: torch.cat(values) for key, values in numbers_of.items()})


@validated
def setting(
    attention: nn.Module,
    *,
    n: float | None = None,
    over: Over | None = None,
) -> Setting:
    """A checked `Setting`; one sentence refuses each question that no bound can answer.

    Args:
        attention: an attention map, a layer of `howsmooth.nn`, or a `torch.nn.MultiheadAttention`.
        n: number of tokens; the set may know it.
        over: the set of inputs (`howsmooth.sets`): `Ball`, `Normalised`, `Point`, `Around`, …; an input ``(n, d)`` is
            its `Point`, a LayerNorm or RMSNorm its image. None for all inputs.

    >>> import torch, howsmooth as hs
    >>> setting(hs.SelfAttention.random(4), n=8, over=torch.ones(3, 4))
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the input has 3 tokens, but n=8 was given: leave n out.
    """
    width = getattr(attention, "in_features", None)
    region = as_set(over, width if isinstance(width, int) else None)
    if region.length is not None:
        if n is not None and n != region.length:
            raise InvalidInput(f"the input has {region.length} tokens, but n={n} was given: leave n out.")
        n = region.length
    n = None if n is None else _count(n)
    attention = as_attention_map(attention, n, kind=nn.Module) or attention
    if not hasattr(attention, "kind"):
        raise InvalidInput(
            f"bounds need an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers."
        )
    for name, buffer in attention.state_dict().items():
        check_finite(buffer, f"the weight {name}")
    tokens = _tokens(int(attention.in_features), region)  # type: ignore[arg-type]
    if isinstance(attention, AttentionMap) and n is not None and math.isfinite(n):
        attention.terms.check(int(n), attention.heads, 1)
        blind = attention.terms.first_blind(int(n), attention.heads)
        if blind is not None:
            raise InvalidInput(f"token {blind} sees nothing under this mask: leave padded tokens out.")
    return Setting(attention, n, tokens, region.x, region.eps)


def _count(n: float) -> float:
    """A number of tokens; beyond 2⁵³, where not every one is a float64, the next one that is."""
    try:
        whole, most = n >= 1 and (math.isinf(n) or n == int(n)), float(n)
    except OverflowError:
        whole, most = True, math.inf
    if not whole:
        raise InvalidInput(f"n must be a whole number of tokens, at least 1 (or inf for measures), got {n}.")
    return n if n <= 2**53 else most


def _tokens(width: int, region: InputSet) -> Ellipsoid | None:
    """The ellipsoid of the tokens, of the width that the attention takes."""
    if region.x is not None and region.x.shape[-1] != width:
        raise InvalidInput(f"the tokens are {region.x.shape[-1]} wide, but the attention takes {width}.")
    if region.x is None and region.reach == 0:
        raise InvalidInput("bounds on a ball need a ball of positive radius.")
    tokens = region.ellipsoid(width)
    if tokens is not None and tokens.width != width:
        raise InvalidInput(f"the set holds tokens of width {tokens.width}, but the attention takes {width}.")
    return tokens
