r"""Attention between token-wise maps, at an input: what is known of plain attention, times their norms.

With L the three-path bound of the plain heads at the features z = φ(x), F_i the derivative of φ at token i, g the gate
of a head, O its output and W its slice of the output matrix,

.. math:: \|J_h\| \le \max_i\|F_i\|\,L_h
          \quad\text{or, with a gate,}\quad
          \|W\|\,\bigl[\max_{i,a} g_{ia}\,\max_i\|F_i\|\,L_h + \max_i\|\mathrm{diag}(O_i\circ g_i')\,G\|\bigr].

Proof. The Jacobian is :math:`W[\mathrm{diag}(g)J(z)F + \mathrm{diag}(O\circ g')G]`, F and G act token by token, and the
norm of a block diagonal map is that of its largest block. A learned sink is one more token of plain attention, whose
rows and columns are left out, which lowers norms. ∎

The features are those computed in float64; to first order their own rounding moves the bound by a relative
eps·width·(1 + largest logit), which is added several times over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.bounds.catalogue import Assumption, theorem
from howsmooth.bounds.own.three_path import three_path
from howsmooth.bounds.point_error import known_rounding
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral

_MANY = 64
"""How many times the first-order effect of rounding is added."""


def _known(where: Setting) -> bool:
    assert isinstance(where.attention, ComposedAttention)
    return known_rounding(where.attention.attention)


@theorem(
    "howsmooth.composed",
    r"\|W\|\,\bigl[\max g\,\max_i\|\varphi'(x_i)\|\,L(\varphi(x))+\max_i\|\mathrm{diag}(O_i\circ g_i')G\|\bigr]",
    scope="point",
    kinds=("composed",),
    assumptions=(Assumption("what rounding does in every stage of queries, keys and values is known", _known),),
)
def composed(where: Setting, folded: bool = True) -> Tensor:
    """The bound of every head, ``(heads,)``.

    >>> import howsmooth as hs
    >>> sinks = hs.attention.ComposedAttention(hs.SelfAttention.random(8, heads=2), sinks=torch.zeros(2))
    >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    >>> bound = hs.bounds.get("howsmooth.composed")(sinks, over=x, per_head=True)
    >>> bool((hs.measure_heads(sinks, x).value <= bound).all())
    True
    """
    assert isinstance(where.attention, ComposedAttention)
    attention = where.attention.in_dtype(torch.float64)
    x = where.point[None]
    parts = attention.parts(x)
    inner, tokens = parts.attention, parts.tokens
    bound = three_path(inner, tokens[0])
    if parts.derivative is not None:
        bound = bound * torch.as_tensor(parts.derivative.size()).max()
    if parts.gate is not None:
        query, key, value = inner.staged(tokens)
        output = (inner._weights(query, key) @ value)[0][:, parts.placement.outputs]  # (heads, n, v)
        moved = spectral((output * parts.gate.slope[0])[..., None] * parts.gate.weight[:, None]).amax(-1)
        bound = spectral(parts.gate.output) * (parts.gate.value[0].amax((-2, -1)) * bound + moved)
    query, key, _ = inner.staged(tokens)
    logit = float((query.norm(dim=-1).amax(-1) * key.norm(dim=-1).amax(-1)).max().detach())
    width = max(attention.in_features, tokens.shape[-1])
    return bound * (1 + _MANY * torch.finfo(torch.float64).eps * width * (1 + logit))
