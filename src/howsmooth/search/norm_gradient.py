r"""How ‖J(X)‖ grows with X: its gradient through fixed singular vectors.

The norm is a maximum, :math:`\|J\| = \max_{u,v}\langle u, Jv\rangle`, so that with the maximisers held fixed its
gradient is that of :math:`\langle u, J(X)v\rangle` in X (Danskin): one backward pass of a Jacobian product. The same
pass gives :math:`J^\top u`, the next step of the power method (Boyd 1974 for the ∞-norm), so that the vectors follow X
at no further cost.

For attention the pass is written out. Per head, with g = uWᵀ, G = gvᵀ, H = g dvᵀ, m = rowsum(P∘G), T = P∘dS and
t = rowsum(T):

    ⟨u, Jv⟩ = Σ P ∘ (dS ∘ (G − m) + H),   E = P ∘ (G − m),   C = T − tP,
    F = dS ∘ (G − m) + H − tG,            B = P ∘ (F − rowsum(P∘F)),
    gq = Bk + E dk,   gk = Bᵀq + Eᵀdq,   gdq = Ek,   gdk = Eᵀq,   gv = Cᵀg,   gdv = Pᵀg.

All n × n arrays are local to a block of queries, so memory is O(block · n), and nothing is stored between blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain as joined
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.torch_globals import exact_autograd
from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.attention.stages import Chain
from howsmooth.errors import NotDifferentiable
from howsmooth.jacobians import function_checks
from howsmooth.jacobians.function_operator import tensor_map
from howsmooth.jacobians.projection import BlockProjection

BLOCK_SIZE = 2**17
"""Entries of one block of an n × n array, over all maps: little enough for its dozen arrays to stay in the cache."""


@dataclass(frozen=True)
class Slope:
    """At every start: ‖J(X)v‖ (for unit v, hence at most ‖J‖), its gradient in X, and the vectors to go on with."""

    value: Tensor
    gradient: Tensor
    vectors: Tensor


class Roughness(ABC):
    """A map whose ‖J(X)‖ is to be climbed, for many X at once.

    The vectors that follow X are right singular vectors v for attention, left ones u for functions.
    """

    norm: float

    @abstractmethod
    def slope(self, x: Tensor, vectors: Tensor) -> Slope:
        """The slope at x, ``(starts, n, d)``."""

    @abstractmethod
    def out_shape(self, x: Tensor) -> torch.Size:
        """The shape of the map's value at one x, ``(n, d)``."""


class AttentionRoughness(Roughness):
    """‖J(X)‖ of an attention map in closed form."""

    def __init__(self, attention: AttentionMap, norm: float):
        self.map, self.norm = attention.in_dtype(torch.float64), norm
        self.projection = BlockProjection.of(self.map)
        one = self.map.project(torch.zeros(1, 1, self.map.in_features, dtype=torch.float64))
        stages = self.map.stages(*(t.flatten(0, 1) for t in one[:2]))
        self.straight = all(stage.scale is not None for stage in joined(*stages))

    def slope(self, x: Tensor, vectors: Tensor) -> Slope:
        x, v = x.detach().requires_grad_(not self.straight), vectors.detach().requires_grad_(not self.straight)
        with torch.set_grad_enabled(not self.straight):
            tokens = [t.flatten(0, 1) for t in self.map.project(x)]
            linear = [Chain.through(s, t) for s, t in zip(self.map.stages(*tokens[:2]), tokens, strict=True)]
            chains = [chain for _, chain in linear]
            moved = [chain.jvp(t) for chain, t in zip(chains, self.projection.into_heads(v), strict=True)]
            outputs = [*(token for token, _ in linear), *moved]
        with torch.no_grad():
            mixing = _Mixing(self.map, self.projection, len(x), [t.detach() for t in outputs])
            value, gradients = mixing.steepest_row() if self.norm == math.inf else mixing.steepest()
        if self.straight:  # no second derivatives: back by hand, in two thirds of the time for short inputs
            gx, gv = (
                self.projection.from_heads(*(chain.vjp(g) for chain, g in zip(chains, three, strict=True)))
                for three in (gradients[:3], gradients[3:])
            )
        else:
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
            gx, gv = torch.autograd.grad([o for o, _ in pairs], [x, v], [g for _, g in pairs])
        return Slope(value, gx, aligned(gv, self.norm))

    def out_shape(self, x: Tensor) -> torch.Size:
        return torch.Size([len(x), self.map.out_features])


class _Mixing:
    """One evaluation of ⟨u, J(X)v⟩ with its derivatives in q, k, v and in their tangents; ``(starts·heads, n, ·)``."""

    def __init__(self, attention: AttentionMap, projection: BlockProjection, starts: int, tokens: list[Tensor]):
        query, key, value, dquery, dkey, dvalue = tokens
        self.attention, self.projection, self.starts, self.heads = attention, projection, starts, attention.heads
        self.query = query
        self.n, self.width = query.shape[1:]
        self.keys = torch.cat([key, dkey], dim=-1)
        self.values = torch.cat([value, dvalue], dim=-1)
        self.queries = torch.cat([dquery, query], dim=-1)  # against `keys` it gives dq kᵀ + q dkᵀ
        self.crossed = torch.cat([query, dquery], dim=-1)
        self.maps = Maps.every(starts, attention.heads, self.n, query)
        self.gqueries = torch.zeros_like(self.queries)  # of dq and of q
        self.gkeys, self.gvalues = torch.zeros_like(self.keys), torch.zeros_like(self.values)

    def steepest(self) -> tuple[Tensor, list[Tensor]]:
        """‖Jv‖₂ of every start, and the derivatives with u = Jv/‖Jv‖."""
        squares = self.query.new_zeros(self.starts)
        for maps, rows in self._blocks():
            block = _Block(self, maps, rows)
            out = self.projection.combine(block.moved)
            block.accumulate(self.projection.distribute(out))
            squares[maps.start // self.heads : maps.stop // self.heads] += out.square().sum((-2, -1))
        norms = squares.sqrt()
        scale = norms.clamp(min=1e-300).reciprocal().repeat_interleave(self.heads)[:, None, None]
        return norms, [g * scale for g in self._gradients()]

    def steepest_row(self) -> tuple[Tensor, list[Tensor]]:
        """‖Jv‖_∞ of every start, and the derivatives with u the largest coordinate of Jv, which is in one row."""
        best = self.query.new_zeros(self.starts)
        largest: list[tuple[int, int, float]] = [(0, 0, 1.0)] * self.starts  # row, coordinate and sign
        for maps, rows in self._blocks():
            out = self.projection.combine(_Block(self, maps, rows).moved)
            for s, one in enumerate(out, maps.start // self.heads):
                i, a = divmod(int(one.abs().argmax()), one.shape[-1])
                if one[i, a].abs() > best[s]:
                    best[s] = one[i, a].abs()
                    largest[s] = (rows.start + i, a, float(one[i, a].sign()))
        for s, (i, a, sign) in enumerate(largest):
            block = _Block(self, slice(s * self.heads, (s + 1) * self.heads), slice(i, i + 1))
            u = self.query.new_zeros(1, 1, self.projection.weight_out.shape[-1])
            u[..., a] = sign
            block.accumulate(self.projection.distribute(u))
        return best, self._gradients()

    def _blocks(self) -> list[tuple[slice, slice]]:
        """Runs of starts with blocks of queries."""
        group = max(1, min(self.starts, BLOCK_SIZE // (self.n * self.n * self.heads)))
        rows = max(1, min(self.n, BLOCK_SIZE // (self.n * self.heads * group)))
        return [
            (slice(s * self.heads, min(s + group, self.starts) * self.heads), slice(r, min(r + rows, self.n)))
            for s in range(0, self.starts, group)
            for r in range(0, self.n, rows)
        ]

    def _gradients(self) -> list[Tensor]:
        (gdquery, gquery), (gkey, gdkey) = self.gqueries.chunk(2, -1), self.gkeys.chunk(2, -1)
        gvalue, gdvalue = self.gvalues.chunk(2, -1)
        return [gquery, gkey, gvalue, gdquery, gdkey, gdvalue]


class _Block:
    """The arrays of one block of queries; ``moved`` is the tangent of the heads' outputs there."""

    def __init__(self, parent: _Mixing, maps: slice, rows: slice):
        self.parent, self.maps, self.rows = parent, maps, rows
        attention, softcap = parent.attention, parent.attention.softcap
        self.softmax = attention.weighting == "softmax"
        self.cols = slice(*attention.terms.key_range(rows.start, rows.stop, parent.n))
        self.keys, self.values = parent.keys[maps, self.cols], parent.values[maps, self.cols]
        key, self.value = self.keys[..., : parent.width], self.values[..., : self.values.shape[-1] // 2]
        logits = parent.query[maps, rows] @ key.mT
        self.shift = parent.queries[maps, rows] @ self.keys.mT  # the tangent of the logits
        self.bend: Tensor | None = None
        self.cap: Tensor | None = None
        if softcap is not None:
            bent = (logits / softcap).tanh()
            logits = softcap * bent
            self.cap = 1 - bent.square()
            self.bend = -2 / softcap * bent * self.cap * self.shift  # the share of the cap's own slope
            self.shift = self.shift * self.cap
        added = attention.terms.block(rows, self.cols, parent.maps.select(maps))
        logits = logits if added is None else logits.add_(added)
        if self.softmax:
            top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
            logits -= top.masked_fill_(top == -math.inf, 0.0)
            weights = logits.exp_()
            self.weights = weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1e-300))
            self.response = self.weights * self.shift
            self.total = self.response.sum(-1, keepdim=True)
            self.response -= self.total * self.weights  # C
        else:
            self.weights = logits.sigmoid_()
            self.slopes = self.weights - self.weights.square()
            self.response = self.slopes * self.shift
        self.moved = self.response @ self.value + self.weights @ self.values[..., self.value.shape[-1] :]

    def accumulate(self, g: Tensor) -> None:
        """Add the derivatives of Σ g ∘ moved to the parent's."""
        parent, width, v = self.parent, self.parent.width, self.value.shape[-1]
        seen, fixed = g @ self.value.mT, g @ self.values[..., v:].mT  # G and H
        if self.softmax:
            fixed.addcmul_(self.total, seen, value=-1)
            seen -= (self.weights * seen).sum(-1, keepdim=True)
            fixed.addcmul_(self.shift, seen)  # F
            fixed -= (self.weights * fixed).sum(-1, keepdim=True)
            curved = fixed.mul_(self.weights)  # B
            straight = seen.mul_(self.weights)  # E
        else:
            curved = self.slopes * ((1 - 2 * self.weights) * self.shift * seen + fixed)
            straight = seen.mul_(self.slopes)
        if self.cap is not None and self.bend is not None:
            curved = curved * self.cap + straight * self.bend
            straight = straight * self.cap
        here, seen_keys = (self.maps, self.rows), (self.maps, self.cols)
        gqueries, gkeys, gvalues = parent.gqueries[here], parent.gkeys[seen_keys], parent.gvalues[seen_keys]
        both = straight @ self.keys
        gqueries[..., :width] += both[..., :width]
        gqueries[..., width:] += both[..., width:] + curved @ self.keys[..., :width]
        both = straight.mT @ parent.crossed[here]
        gkeys[..., width:] += both[..., :width]
        gkeys[..., :width] += both[..., width:] + curved.mT @ parent.query[here]
        gvalues[..., :v] += self.response.mT @ g
        gvalues[..., v:] += self.weights.mT @ g


class FunctionRoughness(Roughness):
    """‖J(X)‖ of any function that can be differentiated twice, through g = Jᵀu: v = g/‖g‖, and Jv = ∂⟨g, v⟩/∂u."""

    def __init__(self, f: Callable[[Tensor], Any], norm: float):
        self.call, self.norm = tensor_map(f, torch.float64, torch.float64), norm
        self.batched = True

    def slope(self, x: Tensor, vectors: Tensor) -> Slope:
        with exact_autograd(x.device):
            try:
                if self.batched and len(x) > 1:
                    try:
                        return self._slope(x, vectors, torch.vmap(self._pulled))
                    except Exception:  # an operation without a batching rule: one start after the other
                        self.batched = False
                parts = [self._slope(x[i : i + 1], vectors[i : i + 1], self._alone) for i in range(len(x))]
            except RuntimeError as error:
                raise NotDifferentiable(
                    f"f cannot be differentiated twice, which climbing its Jacobian needs: {str(error).splitlines()[0]}"
                ) from error
        return Slope(*(torch.cat([getattr(p, k) for p in parts]) for k in ("value", "gradient", "vectors")))

    def out_shape(self, x: Tensor) -> torch.Size:
        """Also refuses functions that no Jacobian can be taken of, and those that are random."""
        with exact_autograd(x.device), torch.no_grad():
            y = self.call(x)
            function_checks.check_output(y, x)
            function_checks.check_repeatable(lambda: self.call(x), y)
        return y.shape

    def _pulled(self, x: Tensor, u: Tensor) -> Tensor:
        pulled: Tensor = torch.func.vjp(self.call, x)[1](u)[0]
        return pulled

    def _alone(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.autograd.grad(self.call(x[0]), x, u[0], create_graph=True)[0]

    def _slope(self, x: Tensor, u: Tensor, pulled: Callable[[Tensor, Tensor], Tensor]) -> Slope:
        x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
        g = pulled(x, u)
        value = (g * aligned(g.detach(), self.norm)).flatten(1).sum(1)
        gx, gu = torch.autograd.grad(value.sum(), [x, u], allow_unused=True)
        gradient = torch.zeros_like(x) if gx is None else gx
        moved = torch.zeros_like(u) if gu is None else gu
        return Slope(
            value.detach(), gradient.detach(), largest_entry_sign(moved) if self.norm == math.inf else unit(moved)
        )


def aligned(t: Tensor, norm: float) -> Tensor:
    """The v with ‖v‖ = 1 that maximises ⟨t, v⟩."""
    return t.sign() if norm == math.inf else unit(t)


def unit(t: Tensor) -> Tensor:
    """Every start's vector divided by its length."""
    return t / _flat(t).norm(dim=1).clamp(min=1e-300).reshape(-1, *[1] * (t.dim() - 1))


def largest_entry_sign(t: Tensor) -> Tensor:
    """The sign of the largest entry of every start, at its place, and zeros elsewhere."""
    flat = _flat(t)
    index = flat.abs().argmax(1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, index, flat.gather(1, index).sign()).reshape(t.shape)


def _flat(t: Tensor) -> Tensor:
    """One row per start; a function of one number has one entry for each."""
    return t.flatten(1) if t.dim() > 1 else t[:, None]
