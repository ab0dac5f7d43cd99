"""`hs.measure`: the local Lipschitz constant of a map at an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import (
    Count,
    Positive,
    Probability,
    Seed,
    Size,
    check_count,
    check_number,
    check_options,
    keywords,
    validated,
)
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.attention.attention_map import MapModule
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY
from howsmooth.jacobians.closed_or_autodiff import closed_jacobian
from howsmooth.jacobians.truncated_operator import truncated_jacobian
from howsmooth.norms import Measurement, operator_norm
from howsmooth.norms.measurement import NormKind
from howsmooth.norms.relative_condition import with_scale

_OPTIONS = [name for name in signature(operator_norm).parameters if name != "op"]


@validated
@full_precision
def measure(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    norm: NormKind = 2,
    k: Count = 1,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
    *,
    confidence: Probability = 0.99,
    memory: Size = DEFAULT_MEMORY,
    skip: float = 0.0,
    **solver: Any,
) -> Measurement:
    r"""The local Lipschitz constant of ``f`` at ``x``: the norm of its Jacobian there.

    .. math:: \mathrm{Lip}_x(f) = \lim_{\varepsilon \to 0} \sup_{|y - x| \le \varepsilon} \frac{|f(y) - f(x)|}{|y - x|}
              = \|J(x)\|

    For ``norm=2`` this is the largest singular value σ_max of the (n·d) × (n·d) Jacobian, tokens measured in the
    Frobenius norm. ``relative`` of the result is σ|X|/|f(X)|, which compares layers and models.

    Args:
        f: an attention map, a layer of `howsmooth.nn` or `torch.nn.MultiheadAttention`, or any differentiable function
            or module of x.
        x: ``(n, d)``, or ``(batch, n, d)`` for one number per item.
        norm: 2, 1, inf, "fro", or "token": input and output measured by their longest token, max_i |x_i|₂
            (`howsmooth.norms.largest_token`).
        k: how many of the largest singular values and vectors to find (norm 2).
        rtol: relative accuracy of the value; ``converged`` tells whether both ends are so close.
        seed: of the random start.
        confidence: probability with which the upper end holds.
        memory: bytes of attention weights stored between products.
        skip: of an attention map, drop the tiles of smallest weight that together are at most about this share of the
            norm. The ends hold all the same, and a note tells how many; 0, the default, drops nothing.
        solver: further options of `howsmooth.norms.operator_norm`.

    Returns:
        A `Measurement` with value, lower and upper ends; `float(m)` for a single map.

    >>> import torch, howsmooth as hs
    >>> attention = hs.SelfAttention.from_bilinear(torch.zeros(1, 1), torch.ones(1, 1), mask="causal")
    >>> round(float(hs.measure(attention, torch.zeros(10, 1))), 3)  # the Cesàro matrix
    1.41
    """
    check_options(solver, [*_OPTIONS, *keywords(measure)], "measure")
    known = as_attention_map(f, *x.shape[-2:-1], kind=MapModule)
    operator = jacobian(f if known is None else known, x, memory=memory, skip=skip)
    result = solve(operator, norm=norm, k=k, rtol=rtol, seed=seed, confidence=confidence, **solver)
    return with_scale(result, operator, x, known)


@validated
@full_precision
def measure_heads(
    attention: Callable[[Tensor], Tensor],
    x: Tensor,
    norm: NormKind = 2,
    k: Count = 1,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
    **options: Any,
) -> Measurement:
    """The local Lipschitz constant of every head x ↦ W_h f_h(x), its own slice of the output projection included.

    Arguments as in `measure`; the value has shape ``(heads,)`` or ``(batch, heads)``. All heads are solved together, in
    the coordinates of their own subspaces where that leaves the norm unchanged.

    >>> import torch, howsmooth as hs
    >>> x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    >>> hs.measure_heads(hs.SelfAttention.random(32, heads=4), x).value.shape
    torch.Size([4])
    """
    check_options(options, [*_OPTIONS, "memory", "skip", *keywords(measure_heads)], "measure_heads")
    memory = check_count(options.pop("memory", DEFAULT_MEMORY), "memory", least=0)
    skip = check_number(options.pop("skip", 0.0), "skip", least=0.0)
    known = as_attention_map(attention, *x.shape[-2:-1], kind=MapModule)
    if known is None:
        raise InvalidInput(
            f"measure_heads needs an attention map with heads, got {type(attention).__name__}: build one with "
            "hs.SelfAttention(...), .from_torch or .from_transformers, or use hs.measure for the whole function."
        )
    turned = norm in (2, "2", "fro", "token")  # an orthonormal change of every token's coordinates leaves these alone
    operator: JacobianOperator
    if skip and isinstance(known, AttentionMap):
        operator = truncated_jacobian(known, x, skip, per_head=True, reduced=turned, memory=memory)
    else:
        operator = closed_jacobian(known, x, per_head=True, reduced=turned, memory=memory)
    result = solve(operator, norm=norm, k=k, rtol=rtol, seed=seed, **options)
    return with_scale(result, operator, x, known)


@validated
def solve(operator: JacobianOperator, *, confidence: Probability = 0.99, **options: Any) -> Measurement:
    """`howsmooth.norms.operator_norm` with its vectors in the coordinates of tokens and the operator's own notes."""
    return in_tokens(operator, operator_norm(operator, confidence=confidence, **options))


def in_tokens(operator: JacobianOperator, result: Measurement) -> Measurement:
    """A measurement whose vectors have been lifted from the operator's coordinates to those of tokens."""
    left, right = result.left, result.right
    return replace(
        result,
        left=None if left is None else operator.lift_out(left),
        right=None if right is None else operator.lift_in(right),
        notes=operator.notes + result.notes,
    )
