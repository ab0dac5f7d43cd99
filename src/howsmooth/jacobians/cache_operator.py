r"""The Jacobian of attention with respect to its queries, keys or values, in closed form.

They are what a cache holds: projected, normalised and turned to their positions, before the scale of the logits. With
P the weights, D their slopes (see `howsmooth.jacobians.softmax_products`), o_i = Σ_j P_ij v_j and W the output matrix
of a head,

    values    δv ↦ Σ_j P_ij δv_j W
    keys      δk ↦ Σ_j D_ij (v_j − o_i) (q_i·δk_j) W
    queries   δq ↦ Σ_j D_ij (v_j − o_i) (δq_i·k_j) W

with o_i only for softmax weights. One cached token j moves every output that sees it, each along a line:

    ‖δv_j ↦ ·‖ = (Σ_i P_ij²)^½ ‖W‖,     ‖δk_j ↦ ·‖² = ‖ Σ_i D_ij² |(v_j − o_i)W|² q_i q_iᵀ ‖,

and Frobenius norms are the same with ‖W‖_F, and with |q_i|² in place of q_iq_iᵀ. Rounding errors of one variance per
number have no direction of their own, so their mean square at the output is that variance times the squared Frobenius
norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import check_one_of, validated
from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.stages import Chain, Rotary, UnitNorm
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian, attention_jacobian
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.jacobians.product_error import Rounding
from howsmooth.jacobians.projection import BlockProjection
from howsmooth.jacobians.softmax_products import EvaluationPoint, largest_size

Part = Literal["queries", "keys", "values"]
PARTS: tuple[str, ...] = get_args(Part)


class CachedJacobian(JacobianOperator):
    """Products with the Jacobian of an attention map in its queries, keys or values; build it with `cached_jacobian`.

    ``in_shape`` is ``(heads, n, width)``, with as many heads as the map has of that part; with ``per_head`` every head
    is a map of its own from ``(n, width)``, and grouped heads each see the shared keys as theirs.
    """

    def __init__(self, parent: AttentionJacobian, wrt: Part, chain: Chain, width: int, error: Tensor):
        self.parent, self.wrt, self.chain, self.mixing = parent, wrt, chain, parent.mixing
        self.accuracy = replace(parent.accuracy, product=error)
        self.group, tokens, projection = 1, torch.Size([self.mixing.query.shape[1], width]), parent.projection
        if isinstance(projection, BlockProjection):
            heads = projection.heads if wrt == "queries" else projection.kv_heads
            self.group, tokens = projection.heads // heads, torch.Size([heads, *tokens])
        self._take_after(parent, in_shape=tokens)

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        moved = v.to(self.dtype).reshape(-1, *self.in_shape[-2:])
        moved = self.chain.jvp(moved if self.group == 1 else moved.repeat_interleave(self.group, dim=0))
        if self.wrt == "values":
            mixed = self.mixing.jvp(None, moved)
        else:
            still = torch.zeros_like(self.mixing.query)
            mixed = self.mixing.jvp((moved, still) if self.wrt == "queries" else (still, moved), None)
        return self.parent.projection.combine(mixed).reshape(*self.batch_shape, *self.out_shape)

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = self.parent.projection.distribute(u.to(self.dtype).reshape(-1, *self.out_shape))
        of_values = self.wrt == "values"
        back = self.mixing.vjp(grad, score=not of_values, value=of_values)[PARTS.index(self.wrt)]
        back = self.chain.vjp(back).unflatten(0, (-1, self.group)).sum(1)
        return back.reshape(*self.batch_shape, *self.in_shape)

    def influence(self, norm: Literal["fro", 2] = "fro") -> Tensor:
        """The effect of one cached token on the output of a head: the norm of its columns, ``batch_shape + (n,)``.

        Of keys and values, head by head. The squares of Frobenius norms sum to that of the whole Jacobian. Squares are
        summed in float64, so that of a key without influence about 10⁻⁸ of the largest may remain.

        >>> import howsmooth as hs
        >>> J = cached_jacobian(hs.SelfAttention.random(8, heads=2), torch.randn(5, 8), "values", per_head=True)
        >>> bool(torch.allclose(J.influence().square().sum(-1).sqrt().float(), torch.linalg.matrix_norm(J.dense())))
        True
        """
        if self.wrt == "queries" or not self.parent.by_head:
            raise InvalidInput("influence is of cached keys or values, head by head: build with per_head=True.")
        if norm not in ("fro", 2):
            raise InvalidInput(f"the influence of a token is measured in norm 'fro' or 2, got {norm!r}.")
        stretch = self._stretch()  # (maps, n, width, staged width): the derivative of the stages behind the cache
        output = self.parent.projection.distribute(torch.eye(self.out_shape[1], dtype=self.dtype, device=self.device))
        if self.wrt == "values":
            through = stretch @ output.double().mT[:, None]
            size = torch.linalg.matrix_norm(through, ord=norm)
            return (size * self._received().sqrt()).reshape(*self.batch_shape, -1)
        gram = stretch @ self._key_gram(output) @ stretch.mT
        square = gram.diagonal(dim1=-2, dim2=-1).sum(-1) if norm == "fro" else torch.linalg.eigvalsh(gram)[..., -1]
        return square.clamp_min(0).sqrt().reshape(*self.batch_shape, -1)

    def _stretch(self) -> Tensor:
        maps, (n, width) = len(self.mixing.query), self.in_shape[-2:]
        unit = torch.eye(width, dtype=self.dtype, device=self.device)
        return torch.stack([self.chain.jvp(one.expand(maps, n, width)).expand(maps, n, -1) for one in unit], 2).double()

    def _received(self) -> Tensor:
        """Σ_i P_ij², ``(maps, n)``."""
        total = torch.zeros(self.mixing.value.shape[:2], dtype=torch.float64, device=self.device)
        for tile in self.mixing.tiles:
            total[tile.keys] += self.mixing.weights_of(tile)[0].double().square().sum(-2)
        return total

    def _key_gram(self, output: Tensor) -> Tensor:
        """Σ_i D_ij² |(v_j − o_i)W|² q_i q_iᵀ for every key j, ``(maps, n, k, k)``."""
        mixing, factor = self.mixing, torch.linalg.qr(output.double()).R.mT  # (v, v): |vW| = |v·factor|
        value, centre, query = mixing.value.double() @ factor, mixing.output.double() @ factor, mixing.query.double()
        if not mixing.softmax:
            centre = torch.zeros_like(centre)
        maps, n, width = query.shape
        total = torch.zeros(maps, n, width * width, dtype=torch.float64, device=self.device)
        pairs = (query[..., :, None] * query[..., None, :]).flatten(-2)
        for tile in mixing.tiles:
            slopes = mixing.weights_of(tile)[1].double()
            apart = torch.cdist(centre[tile.queries], value[tile.keys], compute_mode="donot_use_mm_for_euclid_dist")
            total[tile.keys] += (slopes * apart).square().mT @ pairs[tile.queries]
        return total.unflatten(-1, (width, width))


@validated
@full_precision
def cached_jacobian(
    attention: AttentionMap, x: Tensor, wrt: Part, *, per_head: bool = False, memory: int = DEFAULT_MEMORY
) -> CachedJacobian:
    """The Jacobian of an attention map at x with respect to its queries, keys or values.

    Args:
        wrt: "queries", "keys" or "values", as a cache holds them: after normalisation and rotary positions (L2
            attention: as they are projected), before the scale of the logits.
        per_head: one map per head, for norms and influences head by head.
        memory: bytes of attention weights to keep between products.

    >>> import howsmooth as hs
    >>> J = cached_jacobian(hs.SelfAttention.random(8, heads=4, kv_heads=2), torch.randn(5, 8), "keys")
    >>> tuple(J.in_shape), tuple(J.out_shape)
    ((2, 5, 2), (5, 8))
    """
    check_one_of(wrt, PARTS, "wrt")
    number = PARTS.index(wrt)
    parent = attention_jacobian(attention, x, per_head=per_head, memory=memory)
    stages = (attention.query_stages, attention.key_stages, attention.value_stages)[number]
    stored = [i for i, stage in enumerate(stages) if isinstance(stage, Rotary | UnitNorm)]
    chain = Chain(parent.chains[number].links[stored[-1] + 1 if stored else 0 :])
    width = attention.input_weights[number].shape[1]
    return CachedJacobian(parent, wrt, chain, width, _product_error(attention, x, parent, number, chain))


def _product_error(attention: AttentionMap, x: Tensor, parent: AttentionJacobian, number: int, chain: Chain) -> Tensor:
    """As ``accuracy.product`` of `AttentionJacobian`, when the tangent enters behind the projections."""
    size = largest_size(chain, parent.mixing.query)
    norms = tuple(size if i == number else torch.zeros_like(size) for i in range(3))
    point = EvaluationPoint.at(attention, x, parent.dtype)
    errors = Rounding(point).path_errors(parent.mixing, parent.by_head, norms).along("all")
    errors = errors.reshape(*parent.batch_shape, -1)
    if parent.by_head:
        return errors.squeeze(-1)
    # A shared key moves every head of its group.
    return torch.linalg.vector_norm(errors, dim=-1) * (attention.heads // attention.kv_heads) ** 0.5
