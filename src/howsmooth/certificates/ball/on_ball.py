r"""The constant of a head on a ball around an input: the least of three proofs.

For all X with :math:`|x_j - x^0_j| \le ε_j` (0 for tokens that stay); linear queries, keys and values, any mask, bias,
grouped heads, rotary positions (other maps: `howsmooth.certificates.ball.nonlinear_ball`).

**Three paths** (`howsmooth.bounds.own.neighbourhood.three_path_ball`).

**Rows stay distributions.** The same, with weights of a row that sum to one, and with weights for the keys.

**From the input.** :math:`\|J\| \le \|J^0\| + \|J - J^0\|` with a proved value of the first
(`howsmooth.certificates.point.enclosure`) and a bound on the second, so that the bound tends to that value as ε → 0.

The last two are proved in `howsmooth.certificates.ball.head_ball`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth._util.validation import check_count
from howsmooth.attention import AttentionMap
from howsmooth.attention.positions import Rotary
from howsmooth.attention.stages import Scale
from howsmooth.bounds.head_constants import head_numbers, norm_rounding
from howsmooth.bounds.own.neighbourhood import three_path_ball
from howsmooth.bounds.point_error import gamma
from howsmooth.bounds.three_paths import paths
from howsmooth.certificates.ball.block_ball import LIMIT, BlockBall
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.nonlinear_ball import curved_bound
from howsmooth.certificates.ball.norm_of_head_sum import norm_together
from howsmooth.certificates.point.enclosure import Enclosure, enclose_block, enclose_heads
from howsmooth.sets.ellipsoid import Ellipsoid


def enclose_heads_around(
    attention: AttentionMap, x: Tensor, moves: Tensor, here: list[Enclosure] | None = None
) -> list[Enclosure]:
    """Every head over all inputs whose token j is within ``moves[j]`` of x's; the lower end is at x.

    ``here`` are the enclosures at x itself, where they are known.
    """
    here = enclose_heads(attention, x) if here is None else here
    return _enclosures(here, *upper_ends(attention, x, moves, _uppers(here)))


def upper_ends(attention: AttentionMap, x: Tensor, moves: Tensor, here: Tensor) -> tuple[Tensor, list[str]]:
    """The least of the proofs on the ball for every head, ``(heads,)``, and which; ``here`` are upper ends at x."""
    if _is_curved(attention):
        return curved_bound(attention, x, moves), ["curved paths"] * attention.heads
    balls = _balls(attention, x, moves)
    return _least(balls, _changes(balls), attention, x, moves, here)


def enclose_block_around(attention: AttentionMap, x: Tensor, moves: Tensor) -> Enclosure:
    """The whole map likewise: its own value at x plus the changes of all heads, or the heads on the ball, if less."""
    if attention.heads == 1:
        return enclose_heads_around(attention, x, moves)[0]
    block = enclose_block(attention, x)
    if _is_curved(attention):
        heads, together = enclose_heads_around(attention, x, moves), torch.inf
    else:
        balls = _balls(attention, x, moves)
        changes = _changes(balls)
        here = enclose_heads(attention, x)
        heads = _enclosures(here, *_least(balls, changes, attention, x, moves, _uppers(here)))
        together = (block.upper + _block_change(balls, changes, attention, x)) * (1 + gamma(2))
    apart = norm_together(attention, [head.upper for head in heads])
    if together <= apart:
        return Enclosure(block.lower, together, "from the input")
    return Enclosure(
        block.lower, max(apart, block.upper), "sum of heads: " + ", ".join(sorted({h.method for h in heads}))
    )


def _least(
    balls: list[HeadBall], changes: Tensor, attention: AttentionMap, x: Tensor, moves: Tensor, here: Tensor
) -> tuple[Tensor, list[str]]:
    """The least of the three proofs for every head, and which."""
    candidates = {
        "from the input": here + changes,
        "rows stay distributions": torch.cat([ball.rows() for ball in balls]),
        "three paths": three_path_ball(attention, x, float(moves.max())),
    }
    least, which = torch.stack(list(candidates.values())).min(0)
    return least, [list(candidates)[index] for index in which.tolist()]


def _enclosures(here: list[Enclosure], uppers: Tensor, methods: list[str]) -> list[Enclosure]:
    """The ends on the ball; the lower ones are those at the input."""
    ends = zip(here, uppers.tolist(), methods, strict=True)
    return [Enclosure(head.lower, max(upper, head.upper), method) for head, upper, method in ends]


def _uppers(here: list[Enclosure]) -> Tensor:
    return torch.tensor([head.upper for head in here], dtype=torch.float64)


def _block_change(balls: list[HeadBall], changes: Tensor, attention: AttentionMap, x: Tensor) -> float:
    """‖J − J⁰‖ of the whole map on the ball."""
    by_heads = norm_together(attention, changes.tolist())
    if attention.heads * len(x) ** 2 * max(x.shape[-1], attention.out_features) > LIMIT:
        return by_heads
    with torch.no_grad():
        return min(by_heads, BlockBall(attention, balls).change())


def _changes(balls: list[HeadBall]) -> Tensor:
    """‖J − J⁰‖ on the ball for every head, ``(heads,)``."""
    return torch.cat([ball.change() for ball in balls])


def _balls(attention: AttentionMap, x: Tensor, moves: Tensor) -> list[HeadBall]:
    unit = Ellipsoid.ball(1.0, attention.in_features)
    numbers, lost = head_numbers(attention, unit, n=len(x)), norm_rounding(attention, True)
    value, score = numbers.value + lost[0], numbers.score + lost[1]
    balls, first = [], 0
    for group in paths(attention, x):
        heads = slice(first, first := first + len(group.value))
        balls.append(HeadBall(group, moves.double(), value[heads], score[heads]))
    return balls


def _is_curved(attention: AttentionMap) -> bool:
    """Whether queries, keys or values are not linear, logits capped, or weights no distributions."""
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    linear = all(isinstance(stage, Scale | Rotary) for stage in stages)
    return attention.kind != "dot_product" or attention.softcap is not None or not linear


def move_radii(n: int, radius: float, tokens: Sequence[int] | None) -> Tensor:
    """How far every token may move, ``(n,)``: all by the radius, or only those named.

    >>> move_radii(3, 0.5, [1])
    tensor([0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if tokens is None:
        return torch.full((n,), radius, dtype=torch.float64)
    moves = torch.zeros(n, dtype=torch.float64)
    for token in tokens:
        moves[check_count(token, "tokens", least=0, most=n - 1)] = radius
    return moves
