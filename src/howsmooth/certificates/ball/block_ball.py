"""The change of the Jacobian of several heads on a ball, where heads write and read in different subspaces.

For a part (Σ_h Σ_j w^h_ij u^h_ij (t^h_ij·y_j))_i with (w^h_ij)² ≤ l^h_ij m^h_ij and all a_ih > 0 the norm is at most
max_j ‖Σ_{i,h} L_i a_ih⁻² m^h_ij t^h_ij t^hᵀ_ij‖^½, L_i = ‖Σ_h a_ih² Σ_j l^h_ij u^h_ij u^hᵀ_ij‖.

Proof: docs/theory/certificates-ball.md, section "Heads together".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.own.three_path import TINY, push_radii
from howsmooth.bounds.point_error import gamma
from howsmooth.certificates.ball.head_ball import HeadBall
from howsmooth.certificates.ball.norm_of_partitioned_sum import norm_apart
from howsmooth.certificates.ball.weight_perturbation import Step
from howsmooth.certificates.point.proved_eigenvalue import top_bounds

LIMIT = 2**24
"""Most numbers (heads × tokens² × width) of which the vectors of all heads may consist."""
_SINKS = 1
"""How many of the tokens that are looked at most are taken one by one, at most."""
_STEPS = 4
"""Towards better weights a."""
_SHARP = 40.0
"""How much more the largest key counts in them than others."""


def expected_change_seconds(attention: AttentionMap, n: int) -> float:
    """About how long the change of a block takes on one core, to be said before it starts."""
    width = max(attention.in_features, attention.out_features)
    numbers = attention.heads * n**2 * width
    return numbers * width / 6e7 if attention.heads > 1 and numbers <= LIMIT else 0.0


@dataclass(frozen=True)
class Side:
    """Vectors of all heads on one side of a sum.

    Attributes:
        rows: ``(b, heads, m, d)``. off: what rounding, and vectors of unknown direction, add to the norm of a head,
            ``(b, heads)``.
    """

    rows: Tensor
    off: Tensor

    @cached_property
    def sizes(self) -> Tensor:
        """About the norm of every head alone, ``(b, heads)``, to begin with."""
        grams = self.rows @ self.rows.mT if self.rows.shape[-2] < self.rows.shape[-1] else self.rows.mT @ self.rows
        sizes = grams.square().sum((-2, -1)).pow(0.25) + self.off
        most = sizes.amax()
        return sizes + torch.where(most > 0, 1e-6 * most, 1.0)  # weights stay finite where a head does nothing

    @cached_property
    def _quick(self) -> tuple[Tensor, Tensor]:
        """The rows in float32 and their scale: only guesses and weights depend on it."""
        scale = self.rows.abs().amax().clamp_min(TINY)
        return (self.rows / scale).float().flatten(1, 2), scale

    def shares(self, weights: Tensor, vectors: Tensor, steps: int = 2) -> tuple[Tensor, Tensor]:
        """What the heads give to the leading eigenvalue of Σ_h weights·RᵀR, and its vector, by a few powers."""
        (rows, scale), largest = self._quick, weights.amax().clamp_min(TINY)
        factors = (weights / largest).float().expand(len(rows), -1).repeat_interleave(self.rows.shape[2], 1)[..., None]
        for _ in range(steps):
            vectors = (rows.mT @ (factors * (rows @ vectors[..., None])))[..., 0]
            vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        products = (factors * (rows @ vectors[..., None]).square()).view(len(rows), -1, self.rows.shape[2])
        return products.sum(-1).double() * (largest * scale**2), vectors

    def norms(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """≥ ‖Σ_h weights·RᵀR‖^½ for every b, ``(b,)``."""
        guesses = self.shares(weights, vectors, 8)[0].sum(-1)
        rows = (self.rows * weights.sqrt()[..., None, None]).flatten(1, 2)
        turned = gamma(32 * rows.shape[-1] ** 2) * rows.norm(dim=(-2, -1))  # bases are orthonormal to within this
        return top_bounds(rows, guesses).sqrt() + turned + (weights * self.off.square()).sum(-1).sqrt()

    @property
    def start(self) -> Tensor:
        """To begin powers with, ``(b, d)``, in float32 as they are taken."""
        return torch.ones(len(self.rows), self.rows.shape[-1], dtype=torch.float32)


def row_by_row(left: Side, right: Side) -> Tensor:
    """The bound of the module for sums over heads and keys, every row i with weights of its own, ``(n,)``.

    >>> e = torch.eye(2, dtype=torch.float64)[None, :, None]  # two heads that share neither an input nor an output
    >>> none = torch.zeros(1, 2, dtype=torch.float64)
    >>> round(float(row_by_row(Side(3 * e, none), Side(e, none))), 2)
    3.0
    """
    logs = right.sizes.log() - left.sizes.log()
    first, second = left.start, right.start
    best, least = logs, torch.full_like(logs[:, 0], torch.inf)
    for step in range(_STEPS + 1):
        written, first = left.shares(logs.exp(), first)
        read, second = right.shares((-logs).exp(), second)
        size = written.sum(-1) * read.sum(-1)
        best, least = torch.where((size < least)[:, None], logs, best), torch.minimum(size, least)
        logs = logs - (_parts(written) - _parts(read)) / (1 + step / _STEPS)
    return left.norms(best.exp(), first) * right.norms((-best).exp(), second)


def over_keys(left: Side, right: Side, queries: int) -> Tensor:
    """The same for sums over heads and queries, ``(keys,)``, with weights that are good for the largest.

    Left are ``queries`` rows, right the keys, with ``(queries·heads)`` for its heads.
    """
    alone = (left.sizes.flatten() * right.sizes).square().view(len(right.rows), queries, -1).sum(1).amax(0)
    logs = 0.5 * alone.clamp_min(TINY).log() - 2 * left.sizes.log()
    first, second = left.start, right.start
    best, least = logs, torch.inf
    for step in range(_STEPS + 1):
        written, first = left.shares(logs.exp(), first)
        read, second = right.shares((written.sum(-1, keepdim=True) / logs.exp()).flatten()[None], second)
        sizes = read.sum(-1)
        if float(sizes.amax()) < least:
            best, least = logs, float(sizes.amax())
        shares = torch.softmax(_SHARP * sizes / sizes.amax().clamp_min(TINY), 0) @ _parts(read)
        logs = logs - (_parts(written) - _parts(shares.view(logs.shape))) / (1 + step / _STEPS)
    loads = left.norms(best.exp(), first).square()[:, None] / best.exp()
    return right.norms(loads.flatten()[None].expand(len(right.rows), -1), second)


def _parts(shares: Tensor) -> Tensor:
    return shares / shares.sum(-1, keepdim=True).clamp_min(TINY)


class BlockBall:
    """All heads of a map on a ball; the ``balls`` of its heads hold what is known of each."""

    def __init__(self, attention: AttentionMap, balls: Sequence[HeadBall]):
        self.balls, self.eps = balls, balls[0].eps
        self.writes = _bases(attention.output_weight.double().mT, attention.heads)
        weights = (attention.query_weight, attention.key_weight, attention.value_weight)
        self.asks, self.answers, self.reads = (_bases(weight.double().mT, attention.heads) for weight in weights)
        self.high, self.score = self._of(lambda ball: ball.high), self._of(lambda ball: ball.score)
        self.n = self.high.shape[-1]

    def change(self) -> float:
        """‖J − J⁰‖ on the ball."""
        if any(ball.group.value_map.shape[1] > 1 for ball in self.balls):
            return torch.inf
        looked_at = self._of(lambda ball: ball.group.weights).sum((0, 1)).argsort(descending=True)
        sinks = looked_at[: min(_SINKS, self.n - 1)]
        columns, queries, found = [self._column(int(j)) for j in sinks], self._queries(), []
        for count in range(len(columns) + 1):
            rest = looked_at[count:].sort().values
            parts = queries.new_tensor([*columns[:count], self._rest(rest)])
            found.append(norm_apart(parts, torch.cat([queries[sinks[:count]], queries[rest].amax()[None]])))
        bound = float(torch.stack(found).amin()) * max(ball.group.allowance for ball in self.balls)
        return bound if bound == bound else torch.inf

    def _of(self, part: Callable[[HeadBall], Tensor]) -> Tensor:
        return torch.cat([part(ball) for ball in self.balls])

    @cached_property
    def _steps(self) -> list[Step]:
        """The steps of the tilts, of all heads together."""
        every = zip(*(ball.steps for ball in self.balls), strict=True)
        return [Step(*(torch.cat([getattr(s, f.name) for s in step]) for f in fields(Step))) for step in every]

    @cached_property
    def _apart(self) -> Tensor:
        """u_ij, ``(n, heads, n, d_out)``."""
        return self._written(self._of(HeadBall.apart))

    def _written(self, vectors: Tensor) -> Tensor:
        """Vectors of the heads ``(heads, n, n, m)`` as they stand in the output, ``(n, heads, n, d_out)``."""
        return (vectors @ self.writes.mT[:, None]).transpose(0, 1).contiguous()

    @cached_property
    def _pull(self) -> Tensor:
        """b_ij, ``(n, heads, n, d)``."""
        return (self._of(HeadBall.pulled) @ self.asks.mT[:, None]).transpose(0, 1).contiguous()

    @cached_property
    def _push(self) -> Tensor:
        """t_ij, ``(n or 1, n, heads, d)``: key, query, head."""

        def felt(ball: HeadBall) -> Tensor:
            push, maps = ball.group.push, ball.group.push_map
            return push[:, :, None] if maps is None else torch.einsum("hik,hjkr->hijr", push, maps)

        return (self._of(felt) @ self.answers.mT[:, None]).permute(2, 1, 0, 3).contiguous()

    def _values(self, loads: Tensor, apart: Tensor | None = None) -> Side:
        """u_ij, or vectors in their place, under loads ``(heads, n, n)``."""
        off = self._of(lambda ball: ball.value_radius) * loads.sum(-1).sqrt()
        apart = self._apart if apart is None else apart
        return Side(loads.transpose(0, 1).contiguous().sqrt()[..., None] * apart, off.mT)

    def _keys(self, loads: Tensor) -> Side:
        """b_ij under loads."""
        off = self._of(lambda ball: ball.key_radius) * loads.sum(-1).sqrt()
        return Side(loads.transpose(0, 1).contiguous().sqrt()[..., None] * self._pull, off.mT)

    def _felt(self, loads: Tensor, keys: Tensor) -> Side:
        """t_ij of some keys under loads, query by query and head by head."""
        roots = loads.sqrt()[..., keys].permute(2, 1, 0).contiguous()
        push = self._push if len(self._push) == 1 else self._push[keys]
        radius = self._of(lambda ball: push_radii(ball.group).expand_as(ball.high))[..., keys].permute(2, 1, 0)
        return Side((roots[..., None] * push).flatten(1, 2)[:, :, None], (roots * radius).flatten(1))

    def _felt_by_heads(self, loads: Tensor, keys: Tensor) -> Side:
        """The same, all queries of a head as one."""
        felt = self._felt(loads, keys)
        rows = felt.rows.view(len(keys), self.n, -1, felt.rows.shape[-1]).transpose(1, 2).contiguous()
        return Side(rows, felt.off.view(len(keys), self.n, -1).square().sum(1).sqrt())

    @cached_property
    def _moved_values(self) -> Side:
        """εV, one row for all queries."""
        maps = self._of(lambda ball: ball.group.value_map[:, 0])
        off = self._of(lambda ball: ball.group.radii.value_map.amax(-1))
        return Side(self.eps * (maps.mT @ self.writes.mT)[None], self.eps * off[None])

    def _projectors(self, bases: Tensor, sizes: Tensor) -> Side:
        """Projectors times sizes ``(b, heads)``."""
        return Side(sizes[..., None, None] * bases.mT, torch.zeros_like(sizes))

    def _queries(self) -> Tensor:
        """How far the blocks of the queries can move, ``(n,)``."""
        moved = Side(
            *(part.expand(self.n, *part.shape[1:]) for part in (self._moved_values.rows, self._moved_values.off))
        )
        still, keys = self._values(self.high), self._keys(self.high)
        asked = self._projectors(self.asks, (self.eps * self.score).expand(self.n, -1))
        bound = row_by_row(moved, keys) + row_by_row(moved, asked) + row_by_row(still, asked)
        for step in self._steps:
            bound = bound + 2 * row_by_row(self._values(step.loads), self._keys(step.mixed))
        return bound

    def _rest(self, keys: Tensor) -> float:
        """How far the paths of values and keys can move for inputs of some tokens."""
        kept = torch.zeros(self.n, dtype=torch.float64).index_fill(0, keys, 1.0)
        bound = self._halves(self._of(lambda ball: ball.weights_move(kept)))
        for step in self._steps:
            left, right = self._values(step.loads), self._felt(step.mixed, keys)
            bound = bound + 2 * float(over_keys(left, right, self.n).amax())
        bound = bound + float(over_keys(self._moved_values, self._felt_by_heads(self.high, keys), 1).amax())
        return bound + self._asked(keys)

    def _asked(self, keys: Tensor) -> float:
        """What the queries' own move does in the path of the keys."""
        loads, sizes = self.high[..., keys], self.eps * self.score
        moved = self._projectors(self.answers, loads.sum(1).sqrt().mT * sizes)
        bound = float(over_keys(self._moved_values, moved, 1).amax())
        still = self._values(self.high)
        alone = (loads * still.sizes.mT.square()[..., None]).sum(1).amax(-1).sqrt() * sizes
        if float(alone.amax()) == 0:  # no query moves
            return bound
        weights = alone.clamp_min(1e-6 * float(alone.amax())) / still.sizes.square()
        shares = still.norms(weights, still.start).square()[:, None] / weights
        reads = torch.einsum("hij,ih->jh", loads, shares).sqrt() * sizes
        asked = self._projectors(self.answers, reads)
        return bound + float(asked.norms(torch.ones_like(reads), asked.start).amax())

    def _halves(self, sizes: Tensor) -> float:
        """‖Σ_h M_h ⊗ V_h‖ for matrices M_h of these norms."""
        maps, lost = (
            self._of(lambda ball: ball.group.value_map[:, 0]),
            self._of(lambda ball: ball.group.radii.value_map.amax(-1)),
        )
        u, s, v = torch.linalg.svd(maps, full_matrices=False)
        roots = (s * sizes[:, None]).sqrt()
        left = Side((roots[..., None] * u.mT @ self.writes.mT)[None], torch.zeros_like(sizes)[None])
        right = Side((roots[..., None] * v @ self.reads.mT)[None], torch.zeros_like(sizes)[None])
        off = lost + gamma(64 * maps.shape[-1] * maps.shape[-2]) * s.sum(-1)  # of the decomposition
        return float(row_by_row(left, right)) + float((sizes * off).sum())

    def _column(self, key: int) -> float:
        """How far the paths of values and keys can move for inputs of one token."""
        at = torch.tensor([key])
        directed = [ball.directed_change(key) for ball in self.balls]
        along, others = torch.cat([first for first, _ in directed]), [second for _, second in directed]
        most = self._of(lambda ball: ball.products[0][..., key])
        bound = self._halves(self._of(lambda ball: ball.change_of_weights)[..., key].norm(dim=-1))
        bound = bound + self._turned(self._towards(key, along), torch.ones_like(most), at)
        loads, size = (torch.cat([getattr(o, name) for o in others]) for name in ("loads", "size"))
        apart = torch.cat([ball.apart(o.centres) for ball, o in zip(self.balls, others, strict=True)])
        bound = bound + self._turned(self._values(loads, self._written(apart)), size, at)
        moved = self._felt_by_heads(self._at(2 * most, at), at)
        bound = bound + float(over_keys(self._moved_values, moved, 1))
        known, unknown = (torch.cat(part) for part in zip(*(ball.asked_change for ball in self.balls), strict=True))
        asked = self._projectors(self.answers.repeat(self.n, 1, 1), torch.ones(1, known[..., 0].numel()).double())
        bound = bound + float(over_keys(self._towards(key, known[..., key]), asked, self.n))
        loose = unknown[..., key].norm(dim=-1)[None]
        written = self._projectors(self.writes, torch.ones_like(loose))
        return bound + float(over_keys(written, self._projectors(self.answers, loose), 1))

    def _towards(self, key: int, sizes: Tensor) -> Side:
        """u_ij of one token j times sizes ``(heads, n)``."""
        off = sizes * self._of(lambda ball: ball.value_radius)
        return Side(sizes.mT[..., None, None] * self._apart[:, :, key, None], off.mT)

    def _turned(self, left: Side, sizes: Tensor, at: Tensor) -> float:
        """What has these vectors on the left, and t_ij of one token times sizes ``(heads, n)`` on the right."""
        return float(over_keys(left, self._felt(self._at(sizes, at), at), self.n))

    def _at(self, sizes: Tensor, at: Tensor) -> Tensor:
        """Squares of sizes ``(heads, n)`` as the loads of one key."""
        return torch.zeros_like(self.high).index_copy(-1, at, sizes.square()[..., None])


def _bases(matrices: Tensor, heads: int) -> Tensor:
    """Orthonormal bases of the ranges of matrices ``(…, d, k)``, one per head, that go with the paths' factors."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    identity = torch.eye(matrices.shape[-2], dtype=matrices.dtype).expand(len(matrices), -1, -1)
    bases = torch.linalg.qr(matrices).Q if tall else identity
    return bases.repeat_interleave(heads // len(matrices), 0)
