"""Measured ≤ worst found ≤ certified: the heads of a map against the radius of a ball around an input.

sup ‖J‖ over the ball is at least the lower end at the input and the maximum that a search finds in the ball, and at
most the certificate. What a search finds is measured: its rounding is modelled, while the other ends are proved. Balls
grow with the radius, so a value found in one counts in all larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from howsmooth._util.guarantee import Guarantee, weakest
from howsmooth.attention import AttentionMap
from howsmooth.certificates.ball.on_ball import enclose_heads_around, move_radii
from howsmooth.certificates.point.enclosure import enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.search import worst_case
from howsmooth.sets import Around

SHARES = (0.01, 0.1, 0.3, 1.0)
"""Of the largest radius."""


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
    """Every head on balls in which each token moves by at most the radius.

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
        found = [_worst_found(attention, x, radius, head, steps) for head in range(attention.heads)]
        worst.append([max(pair) for pair in zip(worst[-1], found, strict=True)])
    norm = float(x.norm(dim=-1).mean())
    return Ladder(
        tuple(radii), norm, steps, worst[0], worst[1:], certified, weakest(*(head.lower_holds for head in here))
    )


def _worst_found(attention: AttentionMap, x: Tensor, radius: float, head: int, steps: int) -> float:
    over = Around(x, radius)
    return worst_case(attention, over=over, start=x, head=head, starts=1, steps=steps, constructions=False).lower
