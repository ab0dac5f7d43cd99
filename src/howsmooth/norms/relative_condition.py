r"""Numbers that compare: σ against the sizes of input and output.

A model does not know in which units its tokens are measured. With the gain of a normalisation multiplied by c and the
weights behind it divided by c it computes the same function, and σ of its attention is divided by c. What does not
change is the **relative condition**

.. math:: \kappa = \|J(X)\|\,\frac{|X|}{|f(X)|},

by what share of its own size the output can move when the input moves by a small share of its size: 1 % of κ = 3 is
3 %. σ compares inputs, lengths and heads of one layer; κ compares layers and models as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.measurement import Measurement, NormKind

_PART = 2**16
"""Coordinates of a map that are brought to float64 together."""


def with_scale(
    result: Measurement, operator: JacobianOperator, x: Tensor, f: Callable[[Tensor], Tensor] | None = None
) -> Measurement:
    """A measurement that knows |X|/|f(X)|, in the vector norm that belongs to its own.

    Args:
        operator: at x; without a value of its own (`JacobianOperator.value_at`) the result has no scale.
        f: the attention map, where the operator belongs to one.
    """
    output = operator.value_at(f, x)
    if output is None:
        return result
    above = size(x, result.norm, x.dim() if x.dim() < 3 else x.dim() - 1).cpu()
    below = size(output, result.norm, output.dim() - len(operator.batch_shape)).cpu()
    if above.dim() < below.dim():  # every head sees the same tokens
        above = above[..., None]
    scale = torch.where(below > 0, above / below, math.nan).expand(result.value.shape)
    return replace(result, scale=scale)


def size(tokens: Tensor, norm: NormKind, dims: int) -> Tensor:
    """The length of what the last ``dims`` axes hold, in float64, as the norm of a Jacobian measures it.

    Frobenius for 2 and "fro", the sum of all entries for 1, the largest for inf, the longest token for "token".

    >>> x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> [round(float(size(x, norm, 2)), 3) for norm in (2, 1, math.inf, "token")]
    [5.385, 9.0, 4.0, 5.0]
    """
    tokens = tokens.detach()
    if norm == "token":
        tokens = torch.linalg.vector_norm(tokens.double(), dim=-1, keepdim=True)
    order = {"token": math.inf, "fro": 2}.get(norm, norm) if isinstance(norm, str) else norm
    flat = tokens.flatten(-dims) if dims else tokens[..., None]
    parts = [torch.linalg.vector_norm(part.double(), ord=order, dim=-1) for part in flat.split(_PART, dim=-1)]
    return torch.linalg.vector_norm(torch.stack(parts, dim=-1), ord=order, dim=-1)
