"""JJᵀ of one head, or of all together, at one input in closed form, with bounds on its rounding error.

In the notation of `howsmooth.bounds.three_paths` the block of the Jacobian from token j to token i is
J_ij = P_ij V_j + S_ij u_ij t_ijᵀ + [i = j] B_i with V_j = M^v_j, u_ij = v_j − m_i, t_ij = M^kᵀ_j q_i and
B_i = Σ_j S_ij u_ij k_jᵀ M^q_i. The output matrix W enters through its triangular factor R, |Wy| = |Ry|.
With W_h = Q_h R_h and S the stacked Jacobians of the heads behind R_h, JJᵀ = Q(SSᵀ)Qᵀ: O(n³K² + n²K²d) operations for
heads of total width K.

Proof: docs/theory/certificates-point.md, sections "The Gram matrix of a head" and "The Gram matrix of a block".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.key_value_spread import about_means, keys, product_slack
from howsmooth.bounds.point_bounds import push_radii
from howsmooth.bounds.three_paths import Paths, PathsAt
from howsmooth.numerics.roundoff import gamma


@dataclass(frozen=True)
class HeadBlocks:
    """The parts of J of one head, behind the triangular factor of its output matrix.

    Attributes:
        weights, slopes: P, S ``(n, n)``. value: RV_j, ``(n or 1, k, d)``. apart: Ru_ij, ``(n, n, k)``.
        push: t_ij, ``(n, n, d)``, or ``(n, 1, d)`` where it is the same for all j. own: RB_i, ``(n, k, d)``.
        off: ≥ ‖J − Ĵ‖. size: ≥ the Frobenius norm of Ĵ with absolute values inside.
    """

    weights: Tensor
    slopes: Tensor
    value: Tensor
    apart: Tensor
    push: Tensor
    own: Tensor
    off: float
    size: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, k and d."""
        return len(self.weights), self.value.shape[-2], self.value.shape[-1]

    @property
    def rounding(self) -> float:
        """≥ ‖computed Gram matrix − ĴĴᵀ‖."""
        return gamma(8 * sum(self.shape)) * self.size**2

    def behind(self, output: Tensor, whole: bool) -> HeadBlocks:
        """The blocks behind an output matrix ``(d_out, k)``, or behind its triangular factor if that is smaller."""
        tall = output.shape[0] > output.shape[1] and not whole
        factor = torch.linalg.qr(output, mode="r").R if tall else output
        width = factor.norm().item()
        factor_error = gamma(8 * output.numel()) if tall else 0.0
        return replace(
            self,
            value=factor @ self.value,
            apart=self.apart @ factor.mT,
            own=factor @ self.own,
            off=width * (self.off + (factor_error + gamma(4 * sum(self.shape[1:]))) * self.size),
            size=width * self.size,
        )

    def times(self, factor: float) -> HeadBlocks:
        """The blocks of J times a power of two, without rounding."""
        scaled = {name: getattr(self, name) * factor for name in ("value", "apart", "own", "off", "size")}
        return replace(self, **scaled)

    def rows(self, i: int) -> Tensor:
        """The blocks J_ij of one query, ``(n, k, d)``."""
        block = self.weights[i, :, None, None] * self.value
        block = block + (self.slopes[i, :, None] * self.apart[i])[..., None] * self.push[i, :, None, :]
        block[i] = block[i] + self.own[i]
        return block

    def gram_rows(self, i: int) -> Tensor:
        """The rows of JJᵀ that belong to token i, ``(k, n·k)``."""
        n, k, _ = self.shape
        lean = self._leans
        pushed = self.slopes[..., None] * self.apart  # S u, (n, n, k)
        both = self.weights[i] * self.weights
        if len(self.value) == 1:
            squares = (self.value[0] @ self.value[0].mT).flatten()
            blocks = both.sum(-1)[:, None] * squares
        else:
            blocks = both @ (self.value @ self.value.mT).flatten(1)
        blocks = blocks.unflatten(-1, (k, k))  # (i', k, k)
        blocks = blocks + (self.weights[i, :, None] * lean).mT @ pushed  # Σ_j P_ij e_i'j (S u)_i'jᵀ
        blocks = blocks + pushed[i].mT @ (self.weights[..., None] * lean[i])
        dots = (self.push * self.push[i]).sum(-1)  # (i', n or 1)
        blocks = blocks + pushed[i].mT @ (dots[..., None] * pushed)
        here = self.value if len(self.value) == 1 else self.value[i]
        fixed = self.push[:, 0] if self.push.shape[1] == 1 else self.push[:, i]
        # B_i against J_i'i without its own B, for every i'
        blocks = blocks + (self.own[i] @ here.mT.reshape(-1, k)) * self.weights[:, i, None, None]
        blocks = blocks + (fixed @ self.own[i].mT)[:, :, None] * pushed[:, i, None, :]
        theirs = self.weights[i, :, None, None] * (self.value @ self.own.mT)
        push = self.push[i].expand(n, -1)
        theirs = theirs + pushed[i][:, :, None] * (self.own @ push[..., None]).mT
        blocks = blocks + theirs
        blocks[i] = blocks[i] + self.own[i] @ self.own[i].mT
        return blocks.transpose(0, 1).reshape(k, n * k)

    def gram(self) -> Tensor:
        """JJᵀ, ``(n·k, n·k)``, symmetric."""
        product = torch.cat([self.gram_rows(i) for i in range(len(self.weights))])
        return (product + product.mT) / 2

    def sums(self, basis: Tensor) -> tuple[float, Tensor]:
        """‖JJᵀ‖_F² and JJᵀU for U ``(n·k, r)``."""
        squares, products = 0.0, []
        for i in range(len(self.weights)):
            rows = self.gram_rows(i)
            squares += float(rows.square().sum())
            products.append(rows @ basis)
        return squares * (1 + gamma(rows.numel() + len(products))), torch.cat(products)

    @cached_property
    def _leans(self) -> Tensor:
        """e_ij = V_j t_ij, ``(n, n or 1, k)``."""
        if len(self.value) == 1:
            return self.push @ self.value[0].mT
        return torch.einsum("jkd,ijd->ijk", self.value, self.push.expand(-1, len(self.weights), -1))


class HeadsAt(PathsAt):
    """The heads of a map at one input ``(n, d)``: their paths and the blocks of their Jacobians, evaluated once."""

    def __init__(self, attention: AttentionMap, x: Tensor, stored: bool = False):
        super().__init__(attention, x, stored)
        self.map = attention

    @cached_property
    @torch.no_grad()
    def _inner(self) -> list[HeadBlocks]:
        """The blocks of every head before its output matrix."""
        groups = (group for (group,) in self.groups((False,), reduced=False))
        return [_blocks(group, one) for group in groups for one in range(len(group.value))]

    @torch.no_grad()
    def blocks(self, whole: bool = False) -> Iterator[HeadBlocks]:
        """The blocks of every head, behind R, or behind W itself where the whole output is wanted."""
        for head, output in zip(self._inner, self.attention.output_weight.mT, strict=True):
            yield head.behind(output, whole)


def _blocks(group: Paths, one: int) -> HeadBlocks:
    """The blocks of one map of a group."""
    slopes, value_map = group.slopes[one], group.value_map[one]
    apart = group.value[one] - group.mean[one][:, None]
    if group.push_map is None:
        push = group.push[one][:, None]
    else:
        push = torch.einsum("ik,jkd->ijd", group.push[one], group.push_map[one])
    own = (slopes[..., None] * apart).mT @ group.pull[one]
    if group.pull_map is not None:
        own = own @ group.pull_map[one]
    lengths = value_map.norm(dim=(-2, -1)), apart.norm(dim=-1), push.norm(dim=-1)
    size = _size(group, one, *lengths)
    off = _off(group, one, *lengths) + gamma(4 * sum(group.value.shape[1:]) + 64) * size
    return HeadBlocks(group.weights[one], slopes, value_map, apart, push, own, off, size)


def _off(group: Paths, one: int, values: Tensor, u: Tensor, t: Tensor) -> float:
    """≥ ‖J − Ĵ‖ before the output matrix, from ‖V_j‖, |u_ij| and |t_ij|, but for the rounding of sums."""
    radii = group.radii
    cloud = about_means(group, group.value, radii.value)
    grown_p, grown_s = (torch.expm1(r[one])[:, None] for r in (radii.weights, radii.slopes))
    value = group.weights[one] * (grown_p * values + (1 + grown_p) * radii.value_map[one])
    moved = radii.value[one][None] + cloud.off[one][:, None]
    t_off = push_radii(group)[one]
    cross = group.slopes[one] * (grown_s * u * t + (1 + grown_s) * (moved * t + (u + moved) * t_off))
    slack, _ = product_slack(group, cloud, keys(group))
    return float(value.norm() + cross.norm() + slack[one].amax())


def _size(group: Paths, one: int, values: Tensor, u: Tensor, t: Tensor) -> float:
    """≥ the Frobenius norm of Ĵ with absolute values inside, before the output matrix."""
    weights, slopes = group.weights[one], group.slopes[one]
    gain = 1.0 if group.pull_map is None else group.pull_map[one].norm(dim=(-2, -1))
    diagonal = (slopes * u * group.pull[one].norm(dim=-1)).sum(-1) * gain
    return float((weights * values).norm() + (slopes * u * t).norm() + diagonal.norm()) * (1 + gamma(64))


@dataclass(frozen=True)
class StackedHeads:
    """The parts of all heads of a map, behind the triangular factors of their output matrices.

    Attributes:
        bases: Q, ``(d_out, heads·k)``. weights: P ``(heads, n, n)``. values: V ``(heads·k, d)``.
        pushed: S u ``(heads, n, n, k)``. push: t ``(heads, n, n or 1, d)``. own: B ``(n, heads·k, d)``.
        off: ≥ ‖J − Ĵ‖. rounding: ≥ ‖computed Gram matrix − ĴĴᵀ‖ in the Frobenius norm.
    """

    bases: Tensor
    weights: Tensor
    values: Tensor
    pushed: Tensor
    push: Tensor
    own: Tensor
    off: float
    rounding: float

    @classmethod
    def of(cls, at: HeadsAt) -> StackedHeads | None:
        """At one input; None where derivatives of values differ, or a head is as wide as the output."""
        heads, outputs = list(at.blocks()), at.attention.output_weight.mT
        narrow = outputs.shape[-2] > outputs.shape[-1]
        if not narrow or any(len(head.value) > 1 for head in heads):
            return None
        n, k, d = heads[0].shape
        size = k**0.5 * sum(head.size for head in heads)
        turned = gamma(8 * outputs[0].numel()) * size  # Q off its exact self
        return cls(
            torch.cat(list(torch.linalg.qr(outputs).Q), 1),
            torch.stack([head.weights for head in heads]),
            torch.cat([head.value[0] for head in heads]),
            torch.stack([head.slopes[..., None] * head.apart for head in heads]),
            torch.stack([head.push for head in heads]),
            torch.cat([head.own for head in heads], 1),
            sum(head.off for head in heads) + turned,
            4 * gamma(8 * (n + d + k * len(heads))) * size**2,
        )

    @cached_property
    def _squares(self) -> Tensor:
        """VVᵀ, ``(heads, k, heads, 1, k)``."""
        heads, k = len(self.weights), self.pushed.shape[-1]
        return (self.values @ self.values.mT).view(heads, k, heads, 1, k)

    @cached_property
    def _leans(self) -> Tensor:
        """V t of all heads and queries, ``(heads, k, heads, n, n or 1)``."""
        return torch.einsum(
            "hkd,gejd->hkgej", self.values.view(len(self.weights), -1, self.values.shape[-1]), self.push
        )

    @cached_property
    def _crossed(self) -> Tensor:
        """VBᵀ of all queries, ``(n, heads·k, heads·k)``."""
        return self.values @ self.own.mT

    def rows(self, i: int) -> Tensor:
        """The rows of SSᵀ that belong to query i, ``(n, K, K)``: between its heads and those of every query."""
        heads, n, k = len(self.weights), self.weights.shape[1], self.pushed.shape[-1]
        here, mine, own = self.weights[:, i], self.pushed[:, i], self.own[i]  # (h, j), (h, j, k), (h·k, d)
        pairs = torch.einsum("hj,gej->hge", here, self.weights)
        blocks = pairs[:, None, :, :, None] * self._squares + self._pushed_rows(i)
        fixed = self.push[:, :, min(i, self.push.shape[2] - 1)]  # t_ei of every query e
        to_values, to_push = (own @ self.values.mT).view(heads, k, heads, 1, k), own @ fixed.flatten(0, 1).mT
        blocks = blocks + to_values * self.weights[:, :, i][None, None, :, :, None]
        blocks = blocks + to_push.view(heads, k, heads, n, 1) * self.pushed[:, :, i][None, None]
        result = blocks.permute(3, 0, 1, 2, 4).reshape(n, heads * k, heads * k)
        result = result + here.T.repeat_interleave(k, 1)[..., None] * self._crossed
        reached = self.push[:, i].transpose(0, 1) @ self.own.mT  # t_ie·B of every query e, (e, h, K)
        result = result + mine.permute(1, 0, 2).reshape(n, -1, 1) * reached.repeat_interleave(k, 1)
        result[i] = result[i] + own @ own.mT
        return result

    def _pushed_rows(self, i: int) -> Tensor:
        """The terms of the key paths in the rows of query i, ``(heads, k, heads, n, k)``."""
        here, mine, leans = self.weights[:, i], self.pushed[:, i], self._leans
        if self.push.shape[2] > 1:
            theirs = torch.einsum("hkgej,gejl->hkgel", here[:, None, None, None] * leans, self.pushed)
            felt = torch.einsum("hjk,glhj->hgjkl", mine, leans[:, :, :, i])
            dots = torch.einsum("hjd,gejd->hgej", self.push[:, i], self.push)
            both = torch.einsum("hgej,hjk,gejl->hkgel", dots, mine, self.pushed)
            return theirs + torch.einsum("hgjkl,gej->hkgel", felt, self.weights) + both
        mixed = torch.einsum("hj,gejl->hgel", here, self.pushed)
        theirs = torch.einsum("hjk,gej->hkge", mine, self.weights)
        dots = torch.einsum("hd,ged->hge", self.push[:, i, 0], self.push[:, :, 0])
        both = torch.einsum("hjk,gejl->hkgel", mine, self.pushed)
        blocks = leans * mixed[:, None] + dots[:, None, :, :, None] * both
        return blocks + theirs[..., None] * leans[:, :, :, i, 0].permute(2, 0, 1)[:, None, :, None, :]

    def sums(self, basis: Tensor) -> tuple[float, Tensor]:
        """‖JJᵀ‖_F² and JJᵀU for U ``(n·d_out, r)``."""
        n, out = self.weights.shape[1], len(self.bases)
        squares, products, inside = 0.0, [], self.bases.mT @ basis.view(n, out, -1)
        for i in range(n):
            rows = self.rows(i)
            sizes = (self.bases @ rows[i:] @ self.bases.mT).square().sum((1, 2))  # the rest is their mirror image
            squares += float(2 * sizes.sum() - sizes[0])
            products.append(self.bases @ (rows @ inside).sum(0))
        return squares * (1 + gamma(n * n * out * out)), torch.cat(products)
