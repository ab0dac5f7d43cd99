"""The constant of a head or a block on a ball around an input: the minimum of three proved bounds.

For all X with |x_j − x⁰_j| ≤ ε_j (0 for fixed tokens): the three-path bound on the ball, the same bound with rows of
weights that stay distributions, and ‖J⁰‖ + ‖J − J⁰‖ with a proved value of the first term. Queries, keys and values
are linear; `howsmooth.certificates.ball.nonlinear_ball` bounds other maps.

Proof: docs/theory/certificates-ball.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth._util.validation import check_count
from howsmooth.attention import AttentionMap
from howsmooth.bounds.own.neighbourhood import three_path_ball_of
from howsmooth.bounds.question_setting import Setting
from howsmooth.certificates.ball.block_ball import LIMIT, BlockBall
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.nonlinear_ball import nonlinear_bound
from howsmooth.certificates.ball.norm_of_head_sum import norm_of_head_sum
from howsmooth.certificates.point.enclosure import Enclosure, enclose_block, enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.numerics.roundoff import gamma


def enclose_heads_around(at: HeadsAt, moves: Tensor, here: Sequence[Enclosure] | None = None) -> list[Enclosure]:
    """Every head over all inputs whose token j is within ``moves[j]`` of x's; the lower end is at x.

    ``here`` are the enclosures at x itself, where they are known.
    """
    here = enclose_heads(at) if here is None else here
    return _enclosures(here, *upper_ends(at, moves, _uppers(here)))


def upper_ends(at: HeadsAt, moves: Tensor, here: Tensor) -> tuple[Tensor, list[str]]:
    """The smallest proved bound of every head on the ball, ``(heads,)``, and its method; ``here`` are ends at x."""
    if _is_nonlinear(at.map):
        return nonlinear_bound(at, moves), ["curved paths"] * at.map.heads
    balls = head_balls(at, moves)
    return _minimum(balls, _changes(balls), at, here)


def enclose_block_around(at: HeadsAt, moves: Tensor) -> Enclosure:
    """The whole map: its value at x plus the change of all heads, or the sum of the heads if that is smaller."""
    if at.map.heads == 1:
        return enclose_heads_around(at, moves)[0]
    here = enclose_heads(at)
    block = enclose_block(at, here)
    if _is_nonlinear(at.map):
        heads, together = enclose_heads_around(at, moves, here), torch.inf
    else:
        balls = head_balls(at, moves)
        changes = _changes(balls)
        heads = _enclosures(here, *_minimum(balls, changes, at, _uppers(here)))
        together = (block.upper + _block_change(balls, changes, at)) * (1 + gamma(2))
    apart = norm_of_head_sum(at.map, [head.upper for head in heads])
    if together <= apart:
        return replace(block, upper=together, method="from the input")
    method = "sum of heads: " + ", ".join(sorted({head.method for head in heads}))
    return replace(block, upper=max(apart, block.upper), method=method)


def _minimum(balls: Sequence[HeadBall], changes: Tensor, at: HeadsAt, here: Tensor) -> tuple[Tensor, list[str]]:
    """The minimum of the three bounds of every head, and its method."""
    where = _setting(at, balls[0].eps)
    candidates = {
        "from the input": here + changes,
        "rows stay distributions": torch.cat([ball.norm() for ball in balls]),
        "three paths": torch.cat([three_path_ball_of(ball.group, where) for ball in balls]),
    }
    least, which = torch.stack(list(candidates.values())).min(0)
    return least, [list(candidates)[index] for index in which.tolist()]


def _enclosures(here: Sequence[Enclosure], uppers: Tensor, methods: list[str]) -> list[Enclosure]:
    """The ends on the ball; the lower ends are those at the input."""
    ends = zip(here, uppers.tolist(), methods, strict=True)
    return [replace(head, upper=max(upper, head.upper), method=method) for head, upper, method in ends]


def _uppers(here: Sequence[Enclosure]) -> Tensor:
    return torch.tensor([head.upper for head in here], dtype=torch.float64)


def _block_change(balls: Sequence[HeadBall], changes: Tensor, at: HeadsAt) -> float:
    """‖J − J⁰‖ of the whole map on the ball."""
    attention, x = at.map, at.x
    by_heads = norm_of_head_sum(attention, changes.tolist())
    if attention.heads * len(x) ** 2 * max(x.shape[-1], attention.out_features) > LIMIT:
        return by_heads
    with torch.no_grad():
        return min(by_heads, BlockBall(attention, balls).change())


def _changes(balls: Sequence[HeadBall]) -> Tensor:
    """‖J − J⁰‖ on the ball for every head, ``(heads,)``."""
    return torch.cat([ball.change() for ball in balls])


def head_balls(at: HeadsAt, moves: Tensor) -> list[HeadBall]:
    """The heads on a ball around x, in groups."""
    where = _setting(at, float(moves.max()))
    return [HeadBall(group, moves.double(), *where.norms(group)) for (group,) in at.groups()]


def _setting(at: HeadsAt, eps: float) -> Setting:
    return Setting(at.map, len(at.x), None, at.x, eps)


def _is_nonlinear(attention: AttentionMap) -> bool:
    """Whether queries, keys or values are nonlinear, logits are capped, or weights are no distributions."""
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    linear = all(stage.linear for stage in stages)
    return attention.kind != "dot_product" or attention.softcap is not None or not linear


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
