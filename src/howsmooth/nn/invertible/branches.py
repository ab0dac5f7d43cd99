r"""Branches of invertible residual blocks: maps of sequences with a bound on their Lipschitz constant.

x ↦ x + f(x) can be inverted when f is a contraction. A branch has a Lipschitz bound for that, and for the determinant
its reach: an output token depends on its own input token, on the past, or on all tokens. Both follow
for multiples (`ScaledBranch`) and compositions (`ComposedBranch`) of branches:

.. math:: \mathrm{Lip}(sf) = |s|\,\mathrm{Lip}(f), \qquad \mathrm{Lip}(f\circ g) \le \mathrm{Lip}(f)\,\mathrm{Lip}(g),
          \qquad (J^{f\circ g})_{ii} = J^f_{ii}\,J^g_{ii} \text{ when neither depends on later tokens.}
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

from torch import Tensor, nn

from howsmooth._util.validation import check_number, validated
from howsmooth.attention import AttentionMap, L2SelfAttention
from howsmooth.attention.logit_terms import as_mask
from howsmooth.bounds import least_upper_bound, setting
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.invertible.diagonal_blocks import causal_blocks, l2_blocks, token_wise_blocks
from howsmooth.nn.layers.attention_layer import AttentionLayer, Mask

BranchReach = Literal["token", "past", "all"]
_REACHES: tuple[BranchReach, ...] = get_args(BranchReach)


class Branch(nn.Module, ABC):
    """A map of sequences ``(batch, n, d)`` with a Lipschitz bound.

    Attributes:
        reach: the inputs on which an output token depends: its own "token", also the "past", or "all" tokens.
    """

    reach: BranchReach = "all"

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        """Return an upper bound for n tokens, in the norm 2 or inf of the flat sequence; or `DoesNotApply`."""

    def reach_at(self, n: int) -> BranchReach:
        """Return the reach on sequences of n tokens."""
        return self.reach

    def diagonal_blocks(self, x: Tensor) -> Tensor:
        """Return the blocks J_ii, ``(batch, n, d_out, d)``."""
        return token_wise_blocks(self, x) if self.reach_at(x.shape[1]) == "token" else causal_blocks(self, x)


class AttentionBranch(Branch):
    """An attention layer or map under a fixed mask.

    Args:
        attention: a layer of `howsmooth.nn`, or an attention map (with its own mask).
        mask: for a layer: None, "causal", booleans ``(n, n)`` (True = may look), or a `LogitBias`.

    >>> import torch, howsmooth as hs
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> branch = AttentionBranch(hs.L2SelfAttention(one, one, one, mask="causal"))
    >>> branch.reach_at(5), round(float(branch.lipschitz_bound(5)), 3)
    ('past', 4.635)
    """

    @validated
    def __init__(self, attention: AttentionLayer | AttentionMap, mask: Mask = None):
        super().__init__()
        if isinstance(attention, AttentionMap) and mask is not None:
            raise InvalidInput("an attention map has its own mask: give the mask to the map, not to the branch.")
        if isinstance(attention, AttentionLayer) and not attention.batch_first:
            raise InvalidInput("an attention layer in a branch must be batch_first: make it with batch_first=True.")
        self.attention = attention
        self.terms = attention.terms if isinstance(attention, AttentionMap) else as_mask(mask)
        if self.terms.items > 1:
            raise InvalidInput(
                "a branch needs one mask for all items, not one for each, because items converge one by one."
            )
        self.mask = self.terms if isinstance(attention, AttentionLayer) and self.terms else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.attention, AttentionLayer):
            return self.attention(x, attn_mask=self.mask)[0]
        return self.attention(x)

    def attention_map(self, n: int | None = None) -> AttentionMap:
        """Return the attention under the mask of this branch; see `AttentionLayer.attention_map`."""
        layer = self.attention
        return layer.attention_map(n, self.mask) if isinstance(layer, AttentionLayer) else layer

    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        if isinstance(self.attention, AttentionLayer):
            return self.attention.lipschitz_bound(n, norm=norm, mask=self.mask)
        where = setting(self.attention, n=n)
        found = least_upper_bound(where, norm)
        if found is None:
            raise DoesNotApply(
                f"no theorem bounds this {where.kind.replace('_', '-')} attention on all inputs in the {norm:g}-norm: "
                "use L2 attention with tied weights, in which every token sees itself."
            )
        return found[1]

    def reach_at(self, n: int) -> BranchReach:
        heads = self.attention.num_heads if isinstance(self.attention, AttentionLayer) else self.attention.heads
        return "past" if self.terms.looks_back(n, int(heads)) else "all"

    def diagonal_blocks(self, x: Tensor) -> Tensor:
        layer = self.attention
        attention = layer.attached_map(self.mask, x.shape[1]) if isinstance(layer, AttentionLayer) else layer
        if isinstance(attention, L2SelfAttention) and attention.tied:
            return l2_blocks(attention, x)
        return super().diagonal_blocks(x)


class ScaledBranch(Branch):
    """x ↦ factor · f(x).

    >>> import torch, howsmooth as hs
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> round(float(ScaledBranch(hs.L2SelfAttention(one, one, one), 0.1).lipschitz_bound(5)), 3)
    0.45
    """

    @validated
    def __init__(self, f: nn.Module, factor: float, *, mask: Mask = None):
        super().__init__()
        self.branch, self.factor = as_branch(f, mask), check_number(factor, "factor")

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.branch(x)

    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        return abs(self.factor) * self.branch.lipschitz_bound(n, norm)

    def reach_at(self, n: int) -> BranchReach:
        return self.branch.reach_at(n)

    def diagonal_blocks(self, x: Tensor) -> Tensor:
        return self.factor * self.branch.diagonal_blocks(x)


class ComposedBranch(Branch):
    """x ↦ f_k(… f_2(f_1(x)))."""

    @validated
    def __init__(self, *parts: nn.Module):
        super().__init__()
        if not parts:
            raise InvalidInput("a composition needs at least one part.")
        self.parts = nn.ModuleList(as_branch(branch) for branch in parts)

    def _branches(self) -> list[Branch]:
        return [branch for branch in self.parts if isinstance(branch, Branch)]

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.parts:
            x = branch(x)
        return x

    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        return math.prod(float(branch.lipschitz_bound(n, norm)) for branch in self._branches())

    def reach_at(self, n: int) -> BranchReach:
        return max((branch.reach_at(n) for branch in self._branches()), key=_REACHES.index)

    def diagonal_blocks(self, x: Tensor) -> Tensor:
        first, *others = self._branches()
        blocks = first.diagonal_blocks(x)
        x = first(x)
        for branch in others:
            blocks = branch.diagonal_blocks(x) @ blocks
            x = branch(x)
        return blocks


class _CustomBranch(Branch):
    """A module of the user with ``lipschitz_bound(n)``, or trusted without one, and optionally with a ``reach``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.reach = getattr(module, "reach", "all")
        if self.reach not in _REACHES:
            raise InvalidInput(f"reach is 'token', 'past' or 'all', got {self.reach!r}.")

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        bound = getattr(self.module, "lipschitz_bound", None)
        if not callable(bound):
            raise DoesNotApply(f"{type(self.module).__name__} has no Lipschitz bound.")
        if "norm" in inspect.signature(bound).parameters:
            return bound(n, norm=norm)
        if norm != 2:
            raise DoesNotApply(f"{type(self.module).__name__}.lipschitz_bound supports the norm 2 only.")
        return bound(n)


def as_branch(f: nn.Module, mask: Mask = None, *, trust: bool = False) -> Branch:
    """Convert ``f`` to a branch, or refuse it with the reason.

    Args:
        trust: accept a module without ``lipschitz_bound``.
    """
    if isinstance(f, AttentionLayer | AttentionMap):
        _refuse_dot_product(f, (f.map(n=2) if isinstance(f, AttentionLayer) else f).kind)
        return AttentionBranch(f, mask)
    if isinstance(f, nn.MultiheadAttention):
        _refuse_dot_product(f, "dot_product")
    if mask is not None:
        raise InvalidInput(f"a mask is for attention, but {type(f).__name__} is none: give it to the attention inside.")
    if isinstance(f, Branch):
        return f
    if callable(getattr(f, "lipschitz_bound", None)) or (trust and isinstance(f, nn.Module)):
        return _CustomBranch(f)
    raise InvalidInput(
        f"{type(f).__name__} has no known constant: a branch needs lipschitz_bound(n), an upper bound on its Lipschitz "
        "constant, like that of ContractiveL2Attention and ContractiveMLP."
    )


def _refuse_dot_product(f: nn.Module, kind: str) -> None:
    if kind == "dot_product":
        raise DoesNotApply(
            f"{type(f).__name__} is dot-product attention, which has no Lipschitz constant (Kim et al. 2021, Theorem "
            "3.1), so x + f(x) need not be invertible at any scale: use ContractiveL2Attention."
        )
