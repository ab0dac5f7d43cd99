"""The change of the Jacobian of several heads on a ball, where heads write and read in different subspaces.

For a part (Σ_h Σ_j w^h_ij u^h_ij (t^h_ij·y_j))_i with (w^h_ij)² ≤ l^h_ij m^h_ij and all a_ih > 0 the norm is at most
max_j ‖Σ_{i,h} L_i a_ih⁻² m^h_ij t^h_ij t^hᵀ_ij‖^½, L_i = ‖Σ_h a_ih² Σ_j l^h_ij u^h_ij u^hᵀ_ij‖.

Proof: docs/theory/certificates-ball.md, section "Heads together".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.point_bounds import TINY, push_radii
from howsmooth.certificates.ball.head_ball import HeadBall, norm_of_partitioned_sum
from howsmooth.certificates.ball.weight_perturbation import PerturbationStep
from howsmooth.certificates.point.enclosure import range_bases
from howsmooth.certificates.point.proved_eigenvalue import top_bounds
from howsmooth.numerics.roundoff import gamma

LIMIT = 2**24
"""Maximum number of entries (heads × tokens² × width) of the vectors of all heads."""
_SINKS = 1
"""Maximum number of sinks that are bounded one by one."""
_STEPS = 4
"""Steps towards better weights a."""
_SHARPNESS = 40.0
"""Sharpness of the softmax over keys that these steps minimise."""


def expected_change_seconds(attention: AttentionMap, n: int) -> float:
    """About how long the change of a block takes on one core, to announce before it starts."""
    width = max(attention.in_features, attention.out_features)
    numbers = attention.heads * n**2 * width
    return numbers * width / 6e7 if attention.heads > 1 and numbers <= LIMIT else 0.0


@dataclass(frozen=True)
class Side:
    """Vectors of all heads on one side of a sum.

    Attributes:
        rows: ``(b, heads, m, d)``. error: bound on the share of rounding, and of vectors of unknown direction, in the
            norm of a head, ``(b, heads)``.
    """

    rows: Tensor
    error: Tensor

    @cached_property
    def sizes(self) -> Tensor:
        """Approximate norms of single heads, ``(b, heads)``, for the first weights."""
        grams = self.rows @ self.rows.mT if self.rows.shape[-2] < self.rows.shape[-1] else self.rows.mT @ self.rows
        sizes = grams.square().sum((-2, -1)).pow(0.25) + self.error
        largest = sizes.amax()
        return sizes + torch.where(largest > 0, 1e-6 * largest, 1.0)  # weights stay finite where a head does nothing

    @cached_property
    def _float32_rows(self) -> tuple[Tensor, Tensor]:
        """The rows in float32 and their scale: only guesses and weights depend on them."""
        scale = self.rows.abs().amax().clamp_min(TINY)
        return (self.rows / scale).float().flatten(1, 2), scale

    def head_shares(self, weights: Tensor, vectors: Tensor, steps: int = 2) -> tuple[Tensor, Tensor]:
        """Shares of the heads in the leading eigenvalue of Σ_h weights·RᵀR, and its vector, by power iteration."""
        (rows, scale), largest = self._float32_rows, weights.amax().clamp_min(TINY)
        factors = (weights / largest).float().expand(len(rows), -1).repeat_interleave(self.rows.shape[2], 1)[..., None]
        for _ in range(steps):
            vectors = (rows.mT @ (factors * (rows @ vectors[..., None])))[..., 0]
            vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        products = (factors * (rows @ vectors[..., None]).square()).view(len(rows), -1, self.rows.shape[2])
        return products.sum(-1).double() * (largest * scale**2), vectors

    def norms(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """≥ ‖Σ_h weights·RᵀR‖^½ for every b, ``(b,)``."""
        guesses = self.head_shares(weights, vectors, 8)[0].sum(-1)
        rows = (self.rows * weights.sqrt()[..., None, None]).flatten(1, 2)
        turned = gamma(32 * rows.shape[-1] ** 2) * rows.norm(dim=(-2, -1))  # bases are orthonormal to within this
        return top_bounds(rows, guesses).sqrt() + turned + (weights * self.error.square()).sum(-1).sqrt()

    @property
    def start_vectors(self) -> Tensor:
        """First vectors of the power iteration, ``(b, d)``, in float32."""
        return torch.ones(len(self.rows), self.rows.shape[-1], dtype=torch.float32)


def row_by_row(left: Side, right: Side) -> Tensor:
    """The bound for sums over heads and keys, every row i with weights of its own, ``(n,)``.

    >>> e = torch.eye(2, dtype=torch.float64)[None, :, None]  # two heads that share neither an input nor an output
    >>> none = torch.zeros(1, 2, dtype=torch.float64)
    >>> round(float(row_by_row(Side(3 * e, none), Side(e, none))), 2)
    3.0
    """
    logs = right.sizes.log() - left.sizes.log()
    first, second = left.start_vectors, right.start_vectors
    best, minimum = logs, torch.full_like(logs[:, 0], torch.inf)
    for step in range(_STEPS + 1):
        written, first = left.head_shares(logs.exp(), first)
        read, second = right.head_shares((-logs).exp(), second)
        size = written.sum(-1) * read.sum(-1)
        best, minimum = torch.where((size < minimum)[:, None], logs, best), torch.minimum(size, minimum)
        logs = logs - (_normalised(written) - _normalised(read)) / (1 + step / _STEPS)
    return left.norms(best.exp(), first) * right.norms((-best).exp(), second)


def over_keys(left: Side, right: Side, queries: int = 1) -> float:
    """The largest bound of a key for sums over heads and queries, with weights that are good for it.

    The left side has ``queries`` rows, the right side the keys, with ``(queries·heads)`` for its heads.
    """
    single = (left.sizes.flatten() * right.sizes).square().view(len(right.rows), queries, -1).sum(1).amax(0)
    logs = 0.5 * single.clamp_min(TINY).log() - 2 * left.sizes.log()
    first, second = left.start_vectors, right.start_vectors
    best, minimum = logs, torch.inf
    for step in range(_STEPS + 1):
        written, first = left.head_shares(logs.exp(), first)
        read, second = right.head_shares((written.sum(-1, keepdim=True) / logs.exp()).flatten()[None], second)
        sizes = read.sum(-1)
        if float(sizes.amax()) < minimum:
            best, minimum = logs, float(sizes.amax())
        shares = torch.softmax(_SHARPNESS * sizes / sizes.amax().clamp_min(TINY), 0) @ _normalised(read)
        logs = logs - (_normalised(written) - _normalised(shares.view(logs.shape))) / (1 + step / _STEPS)
    loads = left.norms(best.exp(), first).square()[:, None] / best.exp()
    return float(right.norms(loads.flatten()[None].expand(len(right.rows), -1), second).amax())


def _normalised(shares: Tensor) -> Tensor:
    return shares / shares.sum(-1, keepdim=True).clamp_min(TINY)


class BlockBall:
    """All heads of a map on a ball; the ``balls`` hold the bounds of its heads."""

    def __init__(self, attention: AttentionMap, balls: Sequence[HeadBall]):
        self.balls, self.eps = balls, balls[0].eps
        weights = attention.query_weight, attention.key_weight, attention.value_weight, attention.output_weight
        self.query_bases, self.key_bases, self.value_bases, self.output_bases = (
            range_bases(weight.double().mT).repeat_interleave(attention.heads // len(weight), 0) for weight in weights
        )
        self.upper_weights, self.score = self._joined("upper_weights"), self._joined("score")
        self.n = self.upper_weights.shape[-1]

    def change(self) -> float:
        """‖J − J⁰‖ on the ball."""
        if any(ball.group.value_map.shape[1] > 1 for ball in self.balls):
            return torch.inf
        by_weight = self._joined("group.weights").sum((0, 1)).argsort(descending=True)
        sinks = by_weight[: min(_SINKS, self.n - 1)]
        columns, queries, found = [self.one_token_change(int(j)) for j in sinks], self.query_change(), []
        for count in range(len(columns) + 1):
            rest = by_weight[count:].sort().values
            parts = queries.new_tensor([*columns[:count], self.other_tokens_change(rest)])
            found.append(
                norm_of_partitioned_sum(parts, torch.cat([queries[sinks[:count]], queries[rest].amax()[None]]))
            )
        bound = float(torch.stack(found).amin()) * max(ball.group.allowance for ball in self.balls)
        return bound if bound == bound else torch.inf

    def _joined(self, name: str) -> Tensor:
        """An attribute of the balls, for all heads."""
        return torch.cat([attrgetter(name)(ball) for ball in self.balls])

    @cached_property
    def _steps(self) -> list[PerturbationStep]:
        """The steps of the perturbation of all heads."""
        every = zip(*(ball.steps for ball in self.balls), strict=True)
        return [
            PerturbationStep(*(torch.cat([getattr(s, f.name) for s in step]) for f in fields(PerturbationStep)))
            for step in every
        ]

    @cached_property
    def _centred_values(self) -> Tensor:
        """u_ij, ``(n, heads, n, d_out)``."""
        return _outside([ball.centred_values() for ball in self.balls], self.output_bases)

    @cached_property
    def _centred_keys(self) -> Tensor:
        """b_ij, ``(n, heads, n, d)``."""
        return _outside([ball.centred_keys() for ball in self.balls], self.query_bases)

    @cached_property
    def _pushes(self) -> Tensor:
        """t_ij, ``(n or 1, n, heads, d)``: key, query, head."""
        pairs = [(ball.group.push, ball.group.push_map) for ball in self.balls]
        felt = [
            push[:, :, None] if maps is None else torch.einsum("hik,hjkr->hijr", push, maps) for push, maps in pairs
        ]
        return (torch.cat(felt) @ self.key_bases.mT[:, None]).permute(2, 1, 0, 3).contiguous()

    def _value_side(self, loads: Tensor, apart: Tensor | None = None) -> Side:
        """u_ij, or other vectors, under loads ``(heads, n, n)``."""
        return _under(loads, self._centred_values if apart is None else apart, self._joined("value_radius"))

    def _key_side(self, loads: Tensor) -> Side:
        """b_ij under loads."""
        return _under(loads, self._centred_keys, self._joined("key_radius"))

    def _push_side(self, loads: Tensor, keys: Tensor) -> Side:
        """t_ij of some keys under loads, for every query and head."""
        roots = loads.sqrt()[..., keys].permute(2, 1, 0).contiguous()
        push = self._pushes if len(self._pushes) == 1 else self._pushes[keys]
        radii = torch.cat([push_radii(ball.group).expand_as(ball.upper_weights) for ball in self.balls])
        radius = radii[..., keys].permute(2, 1, 0)
        return Side((roots[..., None] * push).flatten(1, 2)[:, :, None], (roots * radius).flatten(1))

    def _push_side_by_head(self, loads: Tensor, keys: Tensor) -> Side:
        """t_ij of some keys under loads, all queries of a head as one."""
        felt = self._push_side(loads, keys)
        rows = felt.rows.view(len(keys), self.n, -1, felt.rows.shape[-1]).transpose(1, 2).contiguous()
        return Side(rows, felt.error.view(len(keys), self.n, -1).square().sum(1).sqrt())

    @property
    def _value_map(self) -> tuple[Tensor, Tensor]:
        """V of every head and a bound on its rounding error."""
        return self._joined("group.value_map")[:, 0], self._joined("group.radii.value_map").amax(-1)

    @cached_property
    def _value_maps(self) -> Side:
        """εV, one row for all queries."""
        maps, error = self._value_map
        return Side(self.eps * (maps.mT @ self.output_bases.mT)[None], self.eps * error[None])

    def query_change(self) -> Tensor:
        """≥ the change of the blocks of the queries, ``(n,)``."""
        maps = self._value_maps
        moved = Side(maps.rows.expand(self.n, -1, -1, -1), maps.error.expand(self.n, -1))
        still, keys = self._value_side(self.upper_weights), self._key_side(self.upper_weights)
        query_side = _projectors(self.query_bases, (self.eps * self.score).expand(self.n, -1))
        bound = row_by_row(moved, keys) + row_by_row(moved, query_side) + row_by_row(still, query_side)
        for step in self._steps:
            bound = bound + 2 * row_by_row(self._value_side(step.loads), self._key_side(step.mixture))
        return bound

    def other_tokens_change(self, keys: Tensor) -> float:
        """≥ the change of the value and key paths for inputs of some tokens."""
        mask = torch.zeros(self.n, dtype=torch.float64).index_fill(0, keys, 1.0)
        bound = self._value_sum_norm(torch.cat([ball.weight_matrix_change(mask) for ball in self.balls]))
        for step in self._steps:
            left, right = self._value_side(step.loads), self._push_side(step.mixture, keys)
            bound = bound + 2 * over_keys(left, right, self.n)
        bound = bound + over_keys(self._value_maps, self._push_side_by_head(self.upper_weights, keys))
        return bound + self.query_move_change(keys)

    def query_move_change(self, keys: Tensor) -> float:
        """≥ the change of the key path by the queries' move."""
        loads, sizes = self.upper_weights[..., keys], self.eps * self.score
        moved = _projectors(self.key_bases, loads.sum(1).sqrt().mT * sizes)
        bound = over_keys(self._value_maps, moved)
        still = self._value_side(self.upper_weights)
        single = (loads * still.sizes.mT.square()[..., None]).sum(1).amax(-1).sqrt() * sizes
        if float(single.amax()) == 0:  # no query moves
            return bound
        weights = single.clamp_min(1e-6 * float(single.amax())) / still.sizes.square()
        shares = still.norms(weights, still.start_vectors).square()[:, None] / weights
        reads = torch.einsum("hij,ih->jh", loads, shares).sqrt() * sizes
        query_side = _projectors(self.key_bases, reads)
        return bound + float(query_side.norms(torch.ones_like(reads), query_side.start_vectors).amax())

    def _value_sum_norm(self, sizes: Tensor) -> float:
        """‖Σ_h M_h ⊗ V_h‖ for matrices M_h of these norms."""
        maps, error = self._value_map
        u, s, v = torch.linalg.svd(maps, full_matrices=False)
        roots = (s * sizes[:, None]).sqrt()
        left, right = (
            _exact((roots[..., None] * vectors @ bases.mT)[None])
            for vectors, bases in ((u.mT, self.output_bases), (v, self.value_bases))
        )
        error = error + gamma(64 * maps.shape[-1] * maps.shape[-2]) * s.sum(-1)  # of the decomposition
        return float(row_by_row(left, right)) + float((sizes * error).sum())

    def one_token_change(self, key: int) -> float:
        """≥ the change of the value and key paths for inputs of one token."""
        at = torch.tensor([key])
        directed = [ball.directed_change(key) for ball in self.balls]
        along, others = torch.cat([first for first, _ in directed]), [second for _, second in directed]
        variances = torch.cat([ball.weight_variances[0][..., key] for ball in self.balls])
        bound = self._value_sum_norm(self._joined("weight_change")[..., key].norm(dim=-1))
        bound = bound + self._key_term(self._along_values(key, along), torch.ones_like(variances), at)
        loads, size = (torch.cat([getattr(o, name) for o in others]) for name in ("loads", "size"))
        apart = [ball.centred_values(o.centres) for ball, o in zip(self.balls, others, strict=True)]
        bound = bound + self._key_term(self._value_side(loads, _outside(apart, self.output_bases)), size, at)
        moved = self._push_side_by_head(self._loads_of_key(2 * variances, at), at)
        bound = bound + over_keys(self._value_maps, moved)
        known, unknown = (torch.cat(part) for part in zip(*(ball.query_move_terms for ball in self.balls), strict=True))
        query_side = _projectors(self.key_bases.repeat(self.n, 1, 1), torch.ones(1, known[..., 0].numel()).double())
        bound = bound + over_keys(self._along_values(key, known[..., key]), query_side, self.n)
        loose = unknown[..., key].norm(dim=-1)[None]
        written = _projectors(self.output_bases, torch.ones_like(loose))
        return bound + over_keys(written, _projectors(self.key_bases, loose))

    def _along_values(self, key: int, sizes: Tensor) -> Side:
        """u_ij of one token j times sizes ``(heads, n)``."""
        off = sizes * self._joined("value_radius")
        return Side(sizes.mT[..., None, None] * self._centred_values[:, :, key, None], off.mT)

    def _key_term(self, left: Side, sizes: Tensor, at: Tensor) -> float:
        """≥ the norm of a sum of these vectors times t_ij of one token times sizes ``(heads, n)``."""
        return over_keys(left, self._push_side(self._loads_of_key(sizes, at), at), self.n)

    def _loads_of_key(self, sizes: Tensor, at: Tensor) -> Tensor:
        """Squares of sizes ``(heads, n)`` as the loads of one key."""
        return torch.zeros_like(self.upper_weights).index_copy(-1, at, sizes.square()[..., None])


def _exact(rows: Tensor) -> Side:
    return Side(rows, rows.new_zeros(rows.shape[:2]))


def _projectors(bases: Tensor, sizes: Tensor) -> Side:
    """Projectors times sizes ``(b, heads)``."""
    return _exact(sizes[..., None, None] * bases.mT)


def _outside(vectors: Sequence[Tensor], bases: Tensor) -> Tensor:
    """Vectors ``(g, n, n, m)`` of groups of heads in the input or output, ``(n, heads, n, d)``."""
    return (torch.cat(list(vectors)) @ bases.mT[:, None]).transpose(0, 1).contiguous()


def _under(loads: Tensor, vectors: Tensor, radius: Tensor) -> Side:
    """Vectors ``(n, heads, n, d)`` with these rounding errors under loads ``(heads, n, n)``."""
    rows = loads.transpose(0, 1).contiguous().sqrt()[..., None] * vectors
    return Side(rows, (radius * loads.sum(-1).sqrt()).mT)
