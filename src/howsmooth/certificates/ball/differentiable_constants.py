"""Proved constants of heads as differentiable numbers.

The value at the input is proved by a factorisation, which has no derivative; its derivative is that of the enclosed
singular value, dσ = ⟨u, dJ v⟩ (docs/theory/certificates-ball.md, section "Derivatives of the bounds").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import NotNegative, check_finite, check_tensor, validated
from howsmooth.attention import AttentionMap
from howsmooth.bounds.three_paths import Paths
from howsmooth.certificates.ball.on_ball import move_radii, upper_ends
from howsmooth.certificates.network.parts_ir import check_attention_unchanged
from howsmooth.certificates.point.enclosure import enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.norms.local_constant import measure_heads

_RTOL = 1e-6
"""Tolerance of the singular vectors: their error enters the derivative, not the value."""


@validated
@full_precision
def certified_constants(
    attention: AttentionMap, x: Tensor, radius: NotNegative = 0.0, tokens: Sequence[int] | None = None
) -> Tensor:
    """The proved upper end of every head on the ball, ``(heads,)``, differentiable in x and in the weights.

    Its value is that of ``hs.certify(attention, Around(x, radius, moving=tokens), per_head=True).upper``.

    Args:
        attention: an attention map. x: tokens ``(n, d)``; computed in float64.
        radius: of the ball of every token. tokens: the moving tokens, all when None.

    >>> import howsmooth as hs
    >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    >>> bounds = certified_constants(hs.SelfAttention.random(8, heads=2), x, radius=0.01)
    >>> bounds.sum().backward()
    >>> bounds.shape, x.grad.shape
    (torch.Size([2]), torch.Size([5, 8]))
    """
    check_tensor(x, "x")
    check_finite(x, "x")
    check_tokens(x)
    if x.dim() != 2:
        raise InvalidInput(f"one input (n, d) is certified at a time, got shape {tuple(x.shape)}.")
    check_attention_unchanged(attention, "attention")
    x, moves = x.double(), move_radii(len(x), radius, tokens)
    at = HeadsAt(attention, x, stored=True)
    groups = [group for (group,) in at.groups(reduced=False)]
    with torch.no_grad():
        here = enclose_heads(at)
        vectors = measure_heads(attention.in_dtype(torch.float64), x, rtol=_RTOL)
        assert vectors.left is not None
        assert vectors.right is not None
    value = torch.cat([bilinear(group, vectors.left[group.heads], vectors.right[group.heads]) for group in groups])
    upper = value - value.detach() + value.new_tensor([head.upper for head in here])
    return torch.maximum(upper, upper_ends(at, moves, upper)[0]) if bool(moves.any()) else upper


def bilinear(group: Paths, left: Tensor, right: Tensor) -> Tensor:
    r""":math:`\langle u, Jv\rangle` of every map of a group, ``(g, n, d) → (g,)``, by its three paths.

    >>> import howsmooth as hs
    >>> from howsmooth.bounds.three_paths import paths
    >>> head, x = hs.SelfAttention.random(4).in_dtype(torch.float64), torch.randn(3, 4).double()
    >>> u, v = torch.randn(2, 3, 4).double()
    >>> [group] = paths(head, x, reduced=False)
    >>> exact = (u * torch.func.jvp(head, (x,), (v,))[1]).sum()
    >>> bool(torch.allclose(bilinear(group, u[None], v[None])[0], exact))
    True
    """
    values = (group.value_map @ right[..., None])[..., 0]
    queries = right if group.pull_map is None else (group.pull_map @ right[..., None])[..., 0]
    keys = right if group.push_map is None else (group.push_map @ right[..., None])[..., 0]
    logits = queries @ group.pull.mT + group.push @ keys.mT
    away = left @ group.value.mT - (left * group.mean).sum(-1, keepdim=True)
    return (group.weights * (left @ values.mT)).sum((-2, -1)) + (group.slopes * logits * away).sum((-2, -1))
