r"""Branches of invertible residual blocks: maps of sequences with a bound on their Lipschitz constant.

x ↦ x + f(x) can be inverted when f is a contraction. A branch has a Lipschitz bound for that, and for the determinant
its reach: an output token depends on its own input token, on the past, or on all tokens. Both follow
for multiples (`ScaledBranch`) and compositions (`ComposedBranch`) of branches:

.. math:: \mathrm{Lip}(sf) = |s|\,\mathrm{Lip}(f), \qquad \mathrm{Lip}(f\circ g) \le \mathrm{Lip}(f)\,\mathrm{Lip}(g),
          \qquad (J^{f\circ g})_{ii} = J^f_{ii}\,J^g_{ii} \text{ when neither depends on later tokens.}

**Diagonal blocks** J_ii, of output token i in input token i, are ``(batch, n, d_out, d)``. Without dependence on later
tokens the Jacobian is block lower triangular and they determine :math:`\det(I+J) = \prod_i \det(I+J_{ii})`. The
functions that compute them are differentiable.

**Contractive networks** x ↦ c · W_k a(… a(W_1x + b_1) …) + b_k divide every W_i by max(1, ‖W_i‖) and have 1-Lipschitz
activations: the constant is at most c, for one token and hence for n (the Jacobian is block diagonal). Many hidden
units under one spectral norm have small rows, on which a smooth activation is almost linear. So every unit has its own
sharpness β: t ↦ a(βt)/β is 1-Lipschitz like a, for every β > 0.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth._util.validation import Count, check_number, check_one_of, check_positive, check_weights, validated
from howsmooth.attention import AttentionMap, L2SelfAttention
from howsmooth.attention.masks import as_mask
from howsmooth.bounds import least_upper_bound, setting
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.attention_layer import AttentionLayer, Mask, NormOrder, as_norm, glorot
from howsmooth.nn.layers.weight_norms import SpectralNorm
from howsmooth.norms.small_matrices import spectral

TokenMap = Callable[[Tensor], Tensor]


def token_wise_blocks(f: TokenMap, x: Tensor) -> Tensor:
    """Compute the blocks of a token-wise map: d backward passes for all tokens together.

    >>> x = torch.tensor([[[1.0, 2.0]]])
    >>> token_wise_blocks(torch.square, x).detach()
    tensor([[[[2., 0.],
              [0., 4.]]]])
    """
    follow = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        out = f(x)
        rows = [vector_jacobian_product(out[..., a].sum(), x, create_graph=follow) for a in range(out.shape[-1])]
    return torch.stack(rows, dim=-2)


def vector_jacobian_product(out: Tensor, x: Tensor, u: Tensor | None = None, create_graph: bool = False) -> Tensor:
    """Return Jᵀu of an output computed from x, zeros where it does not depend on x; the graph is retained."""
    options = {"create_graph": create_graph, "retain_graph": True, "materialize_grads": True, "allow_unused": True}
    return torch.autograd.grad(out, x, u, **options)[0]


def causal_blocks(f: TokenMap, x: Tensor) -> Tensor:
    """Compute the blocks of any map of sequences: one copy of the sequence for each token, in which only it varies.

    The time is that of the dense Jacobian, the memory is less, and determinants are those of d × d blocks.
    """
    batch, n, _ = x.shape
    moved = torch.eye(n, dtype=torch.bool, device=x.device)[:, None, :, None]  # copy i moves token i

    def all_copies(moving: Tensor) -> Tensor:
        copies = torch.where(moved, moving.transpose(0, 1)[:, :, None], x)  # (n, batch, n, d)
        out = f(copies.flatten(0, 1)).unflatten(0, (n, batch))
        return out.diagonal(dim1=0, dim2=2).movedim(-1, 1)  # output i of copy i

    # A separate view: the gradient with respect to the varying tokens excludes the fixed ones.
    return token_wise_blocks(all_copies, x.view_as(x) if x.requires_grad else x)


def l2_blocks(attention: L2SelfAttention, x: Tensor) -> Tensor:
    r"""Compute the blocks of tied L2 attention in closed form, for any mask, in O(nD³) and one pass over the weights.

    With :math:`z_i = W_h^\top x_i/\sqrt s` the weights are :math:`P_{ij} \propto e^{-|z_i-z_j|^2}`. The
    distance of token i to itself stays 0 when it moves, so its weights move by
    :math:`\partial P_{ij} = 2P_{ij}(z_j - m_i)\cdot\partial z_i`, m_i the mean, and with v_j the values (A_h folded in)

    .. math:: J_{ii} = \sum_h W_h^{O\top}\big(P_{ii}W_h^{V\top}A_h + 2\,\mathrm{Cov}_i(v, z)\,W_h^\top/\sqrt s\big).

    >>> one = torch.ones(1, 1)
    >>> x = torch.tensor([[[0.0], [3.0], [-3.0]]])
    >>> l2_blocks(L2SelfAttention(one, one, one), x)[0, 0]  # 1·P₀₀ + 2·Var₀
    tensor([[1.0042]])
    """
    query, value = attention.query_weight / attention.temperature**0.5, attention.value_weight
    weights = attention.weights(x)  # (batch, heads, n, n)
    tokens = (x - x.mean(1, keepdim=True))[:, None]  # a covariance does not change, and loses fewer digits
    z, v = tokens @ query.mT, tokens @ value.mT
    outer = (v[..., :, None] * z[..., None, :]).flatten(-2)  # (batch, heads, n, width of v · width of z)
    moment = (weights @ outer).unflatten(-1, (v.shape[-1], z.shape[-1]))
    covariance = moment - (weights @ v)[..., :, None] * (weights @ z)[..., None, :]
    self_weights = weights.diagonal(dim1=-2, dim2=-1)[..., None, None]
    inner = self_weights * value[:, None] + 2 * covariance @ query[:, None]  # (batch, heads, n, width of v, d)
    return attention.output_weight.mT.movedim(0, 1).flatten(1) @ inner.transpose(1, 2).flatten(2, 3)


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
        self.parts: Any = nn.ModuleList(as_branch(branch) for branch in parts)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.parts:
            x = branch(x)
        return x

    def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor | float:
        return math.prod(float(branch.lipschitz_bound(n, norm)) for branch in self.parts)

    def reach_at(self, n: int) -> BranchReach:
        return max((branch.reach_at(n) for branch in self.parts), key=_REACHES.index)

    def diagonal_blocks(self, x: Tensor) -> Tensor:
        first, *others = self.parts
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
        check_one_of(self.reach, _REACHES, "reach")

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


STEEPEST_SWISH = 1.09984
"""The largest slope of x·σ(x), 1.0998393…, at the root 2.3994 of 2 + x(1 − 2σ(x)) = 0, rounded up."""


def lip_swish(x: Tensor) -> Tensor:
    r"""x·σ(x)/1.09984: smooth, and 1-Lipschitz (Chen et al. 2019).

    >>> x = torch.linspace(-20, 20, 100_001, dtype=torch.float64, requires_grad=True)
    >>> slope, = torch.autograd.grad(lip_swish(x).sum(), x)
    >>> bool(0.999999 < slope.abs().max() <= 1)
    True
    """
    return functional.silu(x) / STEEPEST_SWISH


NONEXPANSIVE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "lip_swish": lip_swish,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "relu": torch.relu,
}
"""All 1-Lipschitz in every coordinate. Densities want smooth ones: not relu."""


class ContractiveMLP(Branch):
    """c · W_k a(… a(W_1x + b_1) …) + b_k on every token, with a Lipschitz constant of at most c.

    **In training** with norm 2 spectral norms are lower estimates from a warm-started iteration: the constant may
    exceed c slightly. **At evaluation** they are exact. `lipschitz_bound` is an upper bound in either
    mode. In the ∞-norm the norms (largest absolute row sums) are always exact.

    Args:
        width: d of a token.
        hidden: width of the hidden layers.
        coefficient: c > 0; below 1 the network contracts.
        depth: number of hidden layers.
        out_width: width of an output token; d by default.
        activation: a key of `NONEXPANSIVE_ACTIVATIONS`.
        norm: 2 or inf, in which the constant is c.

    >>> mlp = ContractiveMLP(4, 16, coefficient=0.5).eval()
    >>> mlp(torch.zeros(2, 3, 4)).shape, float(mlp.lipschitz_bound(n=3)) <= 0.5 * (1 + 1e-6)
    (torch.Size([2, 3, 4]), True)
    """

    reach = "token"

    @validated
    def __init__(
        self,
        width: Count,
        hidden: Count,
        coefficient: float = 0.9,
        *,
        depth: Count = 1,
        out_width: Count | None = None,
        activation: str = "lip_swish",
        norm: NormOrder = 2,
    ):
        super().__init__()
        out_width = width if out_width is None else out_width
        check_weights(hidden * (width + (depth - 1) * hidden + out_width), "the network")
        widths = [width, *[hidden] * depth, out_width]
        self.coefficient = check_positive(coefficient, "coefficient")
        self.activation, self.norm = check_one_of(activation, NONEXPANSIVE_ACTIVATIONS, "activation"), as_norm(norm)
        self.linears: Any = nn.ModuleList(glorot(b, a, bias=True) for a, b in pairwise(widths))
        self.norms: Any = nn.ModuleList(SpectralNorm(b, a) for a, b in pairwise(widths))
        self.log_sharpness = nn.ParameterList(torch.zeros(hidden) for _ in range(depth))
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Spread the kinks over the range of tokens of size 1, and make them sharp on that scale."""
        for norm, linear in zip(self.norms, self.linears, strict=True):
            norm.follow(linear.weight)
        for log_sharpness, weight, linear in zip(self.log_sharpness, self._weights(), self.linears, strict=False):
            rows = torch.linalg.vector_norm(weight, dim=1).clamp(min=1e-3)
            linear.bias.copy_((4 * torch.rand_like(rows) - 2) * rows)
            log_sharpness.copy_((3 / rows).log())

    def _weights(self, follow: bool = True) -> list[Tensor]:
        """Return the weights in use: each divided by max(1, norm)."""
        weights = [linear.weight for linear in self.linears]
        if self.norm == 2:
            sizes = [norm(weight, follow) for norm, weight in zip(self.norms, weights, strict=True)]
        else:
            sizes = [torch.linalg.matrix_norm(weight, math.inf) for weight in weights]
        return [weight / size.clamp(min=1) for weight, size in zip(weights, sizes, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        activation, weights = NONEXPANSIVE_ACTIVATIONS[self.activation], self._weights()
        for weight, linear, log_sharpness in zip(weights, self.linears, self.log_sharpness, strict=False):
            beta = log_sharpness.exp()
            x = activation(beta * functional.linear(x, weight, linear.bias)) / beta
        return functional.linear(x, self.coefficient * weights[-1], self.linears[-1].bias)

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: NormOrder = 2) -> Tensor:
        """Return c times the norms of the weights in use, in float64: the same for every n."""
        weights = [weight.double() for weight in self._weights(follow=False)]
        sizes = [spectral(w) if as_norm(norm) == 2 else torch.linalg.matrix_norm(w, math.inf) for w in weights]
        return self.coefficient * torch.stack(sizes).prod()
