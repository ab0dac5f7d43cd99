"""Small attention maps at inputs moved within a ball, by definition: what the terms of a proof there claim to bound.

Nothing here uses the proofs: queries, keys and values are affine functions of the tokens, written out in full
coordinates, and every quantity follows from them and from softmax. Letters are those of
`howsmooth.certificates.ball.head_ball`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import howsmooth as hs


@dataclass(frozen=True, eq=False)
class Case:
    """A map, an input ``(n, d)`` and how far every token may move ``(n,)``.

    Attributes:
        query: ``(heads, k, d)``. key, value: ``(kv_heads, k, d)``. output: ``(out, heads·k)``.
        bias: of the queries, ``(heads, k)``. mask: added to the logits, ``(n, n)``. turned: with rotary positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    x: Tensor
    moves: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    turned: bool = False

    @property
    def n(self) -> int:
        return len(self.x)

    @cached_property
    def attention(self) -> hs.SelfAttention:
        bias = None if self.bias is None else self.bias.flatten()
        return hs.SelfAttention(
            *(weight.flatten(0, 1) for weight in (self.query, self.key, self.value)),
            self.output,
            heads=len(self.query),
            kv_heads=len(self.key),
            query_bias=bias,
            mask=self.mask,
            rotary=hs.Rotary.standard(self.query.shape[1]) if self.turned else None,
            scale=1.0,
        )

    @cached_property
    def turns(self) -> Tensor:
        """The rotation of every token, ``(n, k, k)``."""
        width = self.query.shape[1]
        turns = torch.eye(width, dtype=torch.float64).repeat(self.n, 1, 1)
        if self.turned:
            half = width // 2
            for place in range(self.n):
                for m in range(half):
                    angle = place * 10_000.0 ** (-2 * m / width)
                    turns[place, m, m] = turns[place, m + half, m + half] = math.cos(angle)
                    turns[place, m + half, m] = math.sin(angle)
                    turns[place, m, m + half] = -math.sin(angle)
        return turns

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """M^q ``(heads, n, k, d)``, M^k likewise, and V = W M^v ``(heads, out, d)``."""
        heads, width, _ = self.query.shape
        key, value = (w.repeat_interleave(heads // len(w), 0) for w in (self.key, self.value))
        write = self.output.unflatten(1, (heads, width)).transpose(0, 1)
        return self.turns @ self.query[:, None], self.turns @ key[:, None], write @ value


class At:
    """The definitions at a batch of inputs ``(b, n, d)``: every tensor begins with batch and heads."""

    def __init__(self, case: Case, x: Tensor):
        ask, answer, self.value_map = case.maps
        self.case, self.moved = case, x - case.x
        self.query = torch.einsum("hikd,bid->bhik", ask, x)
        if case.bias is not None:
            self.query = self.query + torch.einsum("ikl,hl->hik", case.turns, case.bias)
        self.key = torch.einsum("hjkd,bjd->bhjk", answer, x)
        logits = self.query @ self.key.mT
        self.weights = torch.softmax(logits if case.mask is None else logits + case.mask, -1)
        self.value = torch.einsum("hmd,bjd->bhjm", self.value_map, x)
        self.felt = torch.einsum("hjkd,bhik->bhijd", answer, self.query)  # t_ij
        self.pull = torch.einsum("hikd,bhjk->bhijd", ask, self.key)  # M^qᵀ_i k_j, not centred

    @cached_property
    def value_and_key_paths(self) -> Tensor:
        """Blocks P_ijV + P_ij(v_j − o_i)t_ijᵀ, ``(…, i, j, m, d)``."""
        values = self.weights[..., None, None] * self.value_map[:, None, None]
        return values + outer(leading(self.weights, self.value), self.felt)

    @cached_property
    def query_path(self) -> Tensor:
        """Cov_P(v, k), as queries feel keys, ``(…, i, m, d)``."""
        return covariance(self.weights, self.value, self.pull)


def about(weights: Tensor, vectors: Tensor) -> Tensor:
    """Vectors ``(…, j, m)`` or ``(…, i, j, m)`` less their mean under the rows, ``(…, i, j, m)``."""
    if vectors.dim() == weights.dim():
        vectors = vectors[..., None, :, :]
    return vectors - (weights[..., None] * vectors).sum(-2, keepdim=True)


def covariance(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Σ_j P_ij (l_j − l̄)(r_j − r̄)ᵀ for every row, ``(…, i, m, d)``."""
    return (weights[..., None] * about(weights, left)).mT @ about(weights, right)


def leading(weights: Tensor, left: Tensor) -> Tensor:
    """P_ij(v_j − o_i): what a row makes of changes z_j of its logits, ``(…, i, j, m)``."""
    return weights[..., None] * about(weights, left)


def size(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)


def pairs(blocks: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """The norm of blocks ``(…, i, j, m, d)`` as one matrix, for the keys j from the first to before the last."""
    return size(blocks[..., first:last, :, :].transpose(-3, -2).flatten(-4, -3).flatten(-2, -1))


def outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def on_diagonal(blocks: Tensor) -> Tensor:
    """Blocks ``(…, i, m, d)`` as those of (i, i), ``(…, i, j, m, d)``."""
    return torch.diag_embed(blocks.movedim(-3, -1)).movedim((-2, -1), (-4, -3))


class Moved:
    """A batch of moved inputs beside the input itself."""

    def __init__(self, case: Case, x: Tensor):
        self.case, self.there, self.here = case, At(case, x), At(case, case.x[None])
        self.old, self.new = self.here.weights, self.there.weights
        self.shift = self.new - self.old
        ask, answer, _ = case.maps
        self.own = torch.einsum("bhijd,bid->bhij", about(self.old, self.here.pull), self.there.moved)  # β
        self.turn = torch.einsum("hjkd,hike,bie->bhijd", answer, ask, self.there.moved)  # A e_i, as key j feels it

    @cached_property
    def keys_part(self) -> Tensor:
        """a_j = (t_ij + Ae_i)·e_j."""
        return torch.einsum("bhijd,bjd->bhij", self.here.felt + self.turn, self.there.moved)

    def perturbed(self, share: float) -> Tensor:
        """P⁰ perturbed by the query's own move and a share of that of the keys."""
        return torch.softmax(self.old.log() + self.own + share * self.keys_part, -1)

    @cached_property
    def value_and_key_change(self) -> Tensor:
        """Both paths of the tokens of others, blocks ``(…, i, j, m, d)``."""
        return self.there.value_and_key_paths - self.here.value_and_key_paths

    @cached_property
    def query_change(self) -> Tensor:
        """Cov_P(v, k) − Cov_P⁰(v⁰, k⁰), as queries feel keys, ``(…, i, m, d)``."""
        return self.there.query_path - self.here.query_path

    @cached_property
    def jacobian(self) -> Tensor:
        """J in blocks."""
        return self.there.value_and_key_paths + on_diagonal(self.there.query_path)

    @cached_property
    def jacobian_change(self) -> Tensor:
        """J − J⁰ in blocks."""
        return self.value_and_key_change + on_diagonal(self.query_change)


Quantity = Callable[[Moved], Tensor]


def drawn(seed: int) -> Case:
    """A small map of any shape, with sizes of its parts that let any term of a bound be the largest."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=g))]

    def normal(*shape: int, spread: float = 1.0) -> Tensor:
        return 10 ** (spread * float(torch.randn((), generator=g))) * torch.randn(*shape, generator=g).double()

    n, d, heads, width = pick(2, 2, 3, 4), pick(1, 1, 2), pick(1, 2), pick(1, 1, 2)
    groups, turned = pick(1, heads), width == 2 and pick(0, 1) == 1
    still, alone, biased = pick(0, 0, 1), pick(0, 0, 1), pick(0, 1)
    query, key = normal(heads, width, d, spread=0.5), normal(groups, width, d, spread=0.5)
    value, output = normal(groups, width, d, spread=0.2), normal(pick(d, 2), heads * width, spread=0.2)
    x, bias, mask = normal(n, d, spread=0.3), normal(heads, width, spread=0.5), normal(n, n, spread=0.3)
    if pick(0, 0, 1):  # tokens do not see themselves
        mask = mask.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    if pick(0, 1):  # the logits at the input are those of the mask alone, however large queries and keys are
        at = At(Case(query, key, value, output, x, x[:, 0], bias if still or biased else None, None, turned), x[None])
        mask = mask - (at.query @ at.key.mT)[0, 0]
    moves = torch.full((n,), 10 ** float(-3 + 2.7 * torch.rand((), generator=g)), dtype=torch.float64)
    if alone:
        moves[1:] = 0
    return Case(0 * query if still else query, key, value, output, x, moves, bias if still or biased else None,
                mask, turned)  # fmt: skip


def apart(share: float, own: bool, gap: float = 100.0, move: float = 1.0, heads: int = 1) -> Case:
    """One row that looks at two tokens far apart, the second with this share, and moves with its query or its keys.

    Covariances of far tokens are so large that the moves of values and keys themselves do not count. The other rows
    look at the first token alone.
    """
    one, bias = torch.ones(heads, 1, 1, dtype=torch.float64), torch.full((heads, 1), 0.0 if own else 1.0).double()
    x = torch.tensor([[0.0], [-gap / 2], [gap / 2]], dtype=torch.float64)
    mask = torch.full((3, 3), -torch.inf, dtype=torch.float64)
    mask[1:, 0] = 0
    mask[0, 1:] = torch.tensor([1 - share, share], dtype=torch.float64).log() - bias[0] * x[1:, 0]
    moves = torch.tensor([move / gap, 0, 0] if own else [0, move, move], dtype=torch.float64)
    return Case(one, one, one, one[:, 0].mT, x, moves, bias, mask)


def pair(
    share: float, gap: float, move: float, *, heads: int = 1, value: float = 1.0, ask: float = 0.0, seen: bool = True
) -> Case:
    """Two tokens that look at each other, the second with this share, and a third that nobody sees, unless it is seen.

    Queries stay, unless they ``ask``: then they are nothing but what the tokens move by.
    """
    one, n = torch.ones(heads, 1, 1, dtype=torch.float64), 2 if seen else 3
    x = torch.tensor([[0.0], [gap], [0.0]], dtype=torch.float64)[:n]
    bias = one[:, 0] if ask == 0 else 0 * one[:, 0]
    mask = torch.tensor([1 - share, share, 0.0], dtype=torch.float64)[:n].log() - bias[0] * x[:, 0]
    moves = torch.full((n,), move, dtype=torch.float64)
    return Case(ask * one, one, value * one, one[:, 0].mT, x, moves, bias, mask.expand(n, n))


def sink(own: bool, gap: float = 100.0, move: float = 0.1) -> Case:
    """One row that looks at a token between two others far apart, which its query, or their keys, make gain or lose."""
    one, bias = torch.ones(1, 1, 1, dtype=torch.float64), torch.full((1, 1), 0.0 if own else 1.0).double()
    x = torch.tensor([[0.0], [0.0], [-gap / 2], [gap / 2]], dtype=torch.float64)
    mask = torch.full((4, 4), -torch.inf, dtype=torch.float64)
    mask[1:, 0] = 0
    mask[0, 1:] = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64).log() - bias[0] * x[1:, 0]
    moves = torch.tensor([move / gap, 0, 0, 0] if own else [0, 0, move, move], dtype=torch.float64)
    return Case(one, one, one, one[0], x, moves, bias, mask)


def rare(share: float = 0.02, move: float = 1.0) -> Case:
    """One row that shifts a rare token without value up, and so the others, which have values, down together."""
    first, second = torch.eye(2, dtype=torch.float64)[:, None, None]
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 50.0], [0.0, -50.0]], dtype=torch.float64)
    mask = torch.full((4, 4), -torch.inf, dtype=torch.float64)
    mask[1:, 0] = 0
    mask[0, 1:] = torch.tensor([share, 0.5 - share / 2, 0.5 - share / 2], dtype=torch.float64).log()
    moves = torch.tensor([move, 0, 0, 0], dtype=torch.float64)
    return Case(first, first, second, torch.ones(1, 1, dtype=torch.float64), x, moves, mask=mask)


@dataclass(frozen=True)
class Search:
    """How close moved inputs come to a bound.

    Every start is a corner of the ball (tokens at its surface), and follows the slope of its own largest ratio to the
    next corner; a quarter begin inside.
    """

    starts: int = 8
    steps: int = 5
    seed: int = 0

    def worst(self, case: Case, bound: Tensor, truth: Quantity) -> Tensor:
        """The largest truth that is met, entry by entry."""
        g = torch.Generator().manual_seed(self.seed)
        moves = torch.randn(self.starts, *case.x.shape, generator=g).double()
        depth = torch.ones(self.starts, 1, 1, dtype=torch.float64)
        depth[::4] = torch.rand(len(depth[::4]), 1, 1, generator=g).double()
        worst = torch.zeros_like(bound)
        for step in range(self.steps + 1):
            corner = moves / moves.norm(dim=-1, keepdim=True).clamp_min(1e-300) * case.moves[:, None]
            at = (case.x + (depth * corner if step == 0 else corner)).requires_grad_()
            found = truth(Moved(case, at))
            worst = torch.maximum(worst, found.detach().amax(0))
            largest = against(found, bound).reshape(self.starts, -1).amax(1)
            (slope,) = torch.autograd.grad(largest.sum(), at)
            moves = torch.where(slope.norm(dim=-1, keepdim=True) > 0, slope, moves).nan_to_num()
        return worst


def against(truth: Tensor, bound: Tensor) -> Tensor:
    """truth ÷ bound; entries of which both are nothing count as 0."""
    nothing = (bound.expand_as(truth) <= 1e-13) & (truth.detach() <= 1e-13)
    return torch.where(nothing, 0.0, truth / torch.where(bound > 1e-13, bound, 1e-13))
