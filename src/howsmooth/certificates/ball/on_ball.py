"""The constant of a head or a block on a ball around an input: the minimum of three proved bounds.

For all X with |x_j − x⁰_j| ≤ ε_j (0 for fixed tokens): the three-path bound on the ball, the same bound with rows of
weights that stay distributions, and ‖J⁰‖ + ‖J − J⁰‖ with a proved value of the first term. Queries, keys and values
are linear; `howsmooth.certificates.ball.nonlinear_ball` bounds other maps.

Proof: docs/theory/certificates-ball.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from howsmooth._util.guarantee import Guarantee, weakest
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import NotNegative, check_count, check_finite, check_tensor, validated
from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import check_map_unchanged
from howsmooth.bounds.neighbourhood import three_path_ball_of
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths
from howsmooth.certificates.ball.block_ball import LIMIT, BlockBall
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.nonlinear_ball import NonlinearBall
from howsmooth.certificates.point.enclosure import (
    Enclosure,
    enclose_block,
    enclose_heads,
    norm_of_head_sum,
    sum_of_heads,
)
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.norms.local_constant import measure_heads
from howsmooth.numerics.roundoff import gamma
from howsmooth.search import worst_case
from howsmooth.sets import Around

SHARES = (0.01, 0.1, 0.3, 1.0)
"""Radii of a ladder, of the largest."""
_RTOL = 1e-6
"""Tolerance of the singular vectors: their error enters the derivative, not the value."""


def enclose_heads_around(at: HeadsAt, moves: Tensor, here: Sequence[Enclosure] | None = None) -> list[Enclosure]:
    """Every head over all inputs whose token j is within ``moves[j]`` of x's; the lower end is at x.

    ``here`` are the enclosures at x itself, where they are known.
    """
    here = enclose_heads(at) if here is None else here
    return _enclosures(here, at, moves, head_balls(at, moves))


def _enclosures(here: Sequence[Enclosure], at: HeadsAt, moves: Tensor, balls: Sequence[HeadBall]) -> list[Enclosure]:
    """The ends on the ball; the lower ends are those at the input."""
    uppers, methods = upper_ends(at, moves, balls, torch.tensor([head.upper for head in here], dtype=torch.float64))
    ends = zip(here, uppers.tolist(), methods, strict=True)
    return [replace(head, upper=max(upper, head.upper), method=method) for head, upper, method in ends]


def upper_ends(at: HeadsAt, moves: Tensor, balls: Sequence[HeadBall], here: Tensor) -> tuple[Tensor, list[str]]:
    """The smallest proved bound of every head on the ball, ``(heads,)``, and its method; ``here`` are ends at x."""
    if not balls:
        return NonlinearBall(at, moves).bound(), ["curved paths"] * at.map.heads
    where = _setting(at, balls[0].eps)
    candidates = {
        "from the input": here + torch.cat([ball.change for ball in balls]),
        "rows stay distributions": torch.cat([ball.norm() for ball in balls]),
        "three paths": torch.cat([three_path_ball_of(ball.group, where) for ball in balls]),
    }
    minimum, which = torch.stack(list(candidates.values())).min(0)
    return minimum, [list(candidates)[index] for index in which.tolist()]


def enclose_block_around(at: HeadsAt, moves: Tensor) -> Enclosure:
    """The whole map: its value at x plus the change of all heads, or the sum of the heads if that is smaller."""
    if at.map.heads == 1:
        return enclose_heads_around(at, moves)[0]
    here, balls = enclose_heads(at), head_balls(at, moves)
    block, heads = enclose_block(at, here), _enclosures(here, at, moves, balls)
    together = (block.upper + _block_change(balls, at)) * (1 + gamma(2))
    apart = norm_of_head_sum(at.map, [head.upper for head in heads])
    if together <= apart:
        return replace(block, upper=together, method="from the input")
    return replace(block, upper=max(apart, block.upper), method=sum_of_heads(heads))


def _block_change(balls: Sequence[HeadBall], at: HeadsAt) -> float:
    """‖J − J⁰‖ of the whole map on the ball."""
    if not balls:
        return torch.inf
    attention, x = at.map, at.x
    by_heads = norm_of_head_sum(attention, torch.cat([ball.change for ball in balls]).tolist())
    if attention.heads * len(x) ** 2 * max(x.shape[-1], attention.out_features) > LIMIT:
        return by_heads
    with torch.no_grad():
        return min(by_heads, BlockBall(attention, balls).change())


def head_balls(at: HeadsAt, moves: Tensor) -> list[HeadBall]:
    """The heads on a ball around x, in groups; none where queries, keys or values are nonlinear, logits are capped, or
    weights are no distributions."""
    attention = at.map
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    if attention.kind != "dot_product" or attention.softcap is not None or not all(stage.linear for stage in stages):
        return []
    where = _setting(at, float(moves.max()))
    return [HeadBall(group, moves.double(), *where.norms(group)) for (group,) in at.groups()]


def _setting(at: HeadsAt, eps: float) -> Setting:
    return Setting(at.map, len(at.x), None, at.x, eps)


def move_radii(n: int, radius: float, tokens: Sequence[int] | None) -> Tensor:
    """The radius of every token's ball, ``(n,)``: equal for all tokens, or zero for all but the named ones.

    >>> move_radii(3, 0.5, [1])
    tensor([0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if tokens is None:
        return torch.full((n,), radius, dtype=torch.float64)
    moves = torch.zeros(n, dtype=torch.float64)
    for token in tokens:
        moves[check_count(token, "tokens", least=0, most=n - 1)] = radius
    return moves


@validated
@full_precision
def certified_constants(
    attention: AttentionMap, x: Tensor, radius: NotNegative = 0.0, tokens: Sequence[int] | None = None
) -> Tensor:
    """The proved upper end of every head on the ball, ``(heads,)``, differentiable in x and in the weights.

    The value at the input is proved by a factorisation, which has no derivative; its derivative is that of the enclosed
    singular value, dσ = ⟨u, dJ v⟩ (docs/theory/certificates-ball.md, section "Derivatives of the bounds"). It is that
    of ``hs.certify(attention, Around(x, radius, moving=tokens), per_head=True).upper``.

    Args:
        attention: an attention map. x: tokens ``(n, d)``; computed in float64.
        radius: of the ball of every token. tokens: the moving tokens, all when None.

    >>> import howsmooth as hs
    >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    >>> bounds = certified_constants(hs.SelfAttention.random(8, heads=2), x, radius=0.01)
    >>> bounds.sum().backward()
    >>> bounds.shape, x.grad.shape
    (torch.Size([2]), torch.Size([5, 8]))
    """
    check_one_input(x)
    check_map_unchanged(attention, "attention")
    x, moves = x.double(), move_radii(len(x), radius, tokens)
    at = HeadsAt(attention, x, stored=True)
    groups = [group for (group,) in at.groups(reduced=False)]
    with torch.no_grad():
        here = enclose_heads(at)
        vectors = measure_heads(attention.in_dtype(torch.float64), x, rtol=_RTOL)
        assert vectors.left is not None
        assert vectors.right is not None
    value = torch.cat([bilinear(group, vectors.left[group.heads], vectors.right[group.heads]) for group in groups])
    upper = value - value.detach() + value.new_tensor([head.upper for head in here])
    return torch.maximum(upper, upper_ends(at, moves, head_balls(at, moves), upper)[0]) if bool(moves.any()) else upper


def check_one_input(x: Tensor) -> None:
    """Refuse all but the tokens ``(n, d)`` of one input."""
    check_tensor(x, "x")
    check_finite(x, "x")
    check_tokens(x)
    if x.dim() != 2:
        raise InvalidInput(f"one input (n, d) is certified at a time, got shape {tuple(x.shape)}.")


def bilinear(group: Paths, left: Tensor, right: Tensor) -> Tensor:
    r""":math:`\langle u, Jv\rangle` of every map of a group, ``(g, n, d) → (g,)``, by its three paths.

    >>> import howsmooth as hs
    >>> from howsmooth.bounds.three_paths import paths
    >>> head, x = hs.SelfAttention.random(4).in_dtype(torch.float64), torch.randn(3, 4).double()
    >>> u, v = torch.randn(2, 3, 4).double()
    >>> [group] = paths(head, x, reduced=False)
    >>> exact = (u * torch.func.jvp(head, (x,), (v,))[1]).sum()
    >>> bool(torch.allclose(bilinear(group, u[None], v[None])[0], exact))
    True
    """

    def moved(maps: Tensor | None) -> Tensor:
        return right if maps is None else (maps @ right[..., None])[..., 0]

    values, queries, keys = map(moved, (group.value_map, group.pull_map, group.push_map))
    logits = queries @ group.pull.mT + group.push @ keys.mT
    away = left @ group.value.mT - (left * group.mean).sum(-1, keepdim=True)
    return (group.weights * (left @ values.mT)).sum((-2, -1)) + (group.slopes * logits * away).sum((-2, -1))


@dataclass(frozen=True)
class Ladder:
    """All heads of one map at one input.

    Attributes:
        radii: of the balls, growing. norm: the mean length of a token. steps: of each search.
        measured: lower end at the input, per head.
        worst: the largest lower end found in each ball, ``[radius][head]``. certified: the proved upper end, likewise.
        lower_holds: the guarantee of ``measured``. worst_holds: that of ``worst``.
    """

    radii: tuple[float, ...]
    norm: float
    steps: int
    measured: list[float]
    worst: list[list[float]]
    certified: list[list[float]]
    lower_holds: Guarantee = Guarantee.PROVED
    worst_holds: Guarantee = Guarantee.MODELLED

    @property
    def ratios(self) -> list[list[float]]:
        """Certified ÷ worst found, ``[radius][head]``."""
        rows = zip(self.certified, self.worst, strict=True)
        return [[upper / lower if lower > 0 else 1.0 for upper, lower in zip(*row, strict=True)] for row in rows]


def ladder_radii(x: Tensor, largest: float = 0.0) -> tuple[float, ...]:
    """Radii up to the largest, which defaults to one per cent of the mean token norm."""
    limit = largest or 0.01 * float(x.norm(dim=-1).mean())
    return tuple(share * limit for share in SHARES)


def ladder(
    attention: AttentionMap,
    x: Tensor,
    radii: Sequence[float],
    *,
    steps: int = 20,
    progress: Callable[[str], None] = lambda text: None,
) -> Ladder:
    """Every head on balls in which each token moves by at most the radius: measured ≤ worst found ≤ certified.

    sup ‖J‖ over the ball is at least the lower end at the input and the maximum that a search finds in the ball,
    and at most the certificate. Balls grow with the radius, so a value found in one counts in all larger ones.

    >>> import torch, howsmooth as hs
    >>> attention = hs.SelfAttention.random(8, heads=2).in_dtype(torch.float64)
    >>> found = ladder(attention, torch.eye(4, 8).double(), (0.01, 0.1), steps=20)
    >>> rungs = zip(found.measured, *found.worst, found.certified[-1])
    >>> all(a <= b <= c <= d for a, b, c, d in rungs)
    True
    """
    x = x.double()
    at = HeadsAt(attention, x, stored=True)
    here = enclose_heads(at)
    worst, certified = [[head.lower for head in here]], []
    for radius in radii:
        progress(f"radius {radius:.3g}")
        certified.append([head.upper for head in enclose_heads_around(at, move_radii(len(x), radius, None), here)])
        over = Around(x, radius)
        search = partial(worst_case, attention, over=over, start=x, starts=1, steps=steps, constructions=False)
        worst.append([max(found, search(head=head).lower) for head, found in enumerate(worst[-1])])
    norm = float(x.norm(dim=-1).mean())
    below = weakest(*(head.lower_holds for head in here))
    return Ladder(tuple(radii), norm, steps, worst[0], worst[1:], certified, below)
