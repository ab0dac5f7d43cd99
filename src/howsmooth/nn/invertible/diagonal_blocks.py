r"""The diagonal blocks J_ii of a Jacobian, of output token i in input token i, ``(batch, n, d_out, d)``.

Without dependence on later tokens (token-wise maps, causal attention) the Jacobian is block lower triangular, and these
blocks determine its determinant: :math:`\det(I+J) = \prod_i \det(I+J_{ii})`. All three functions are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.attention import L2SelfAttention

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
