r"""`hs.measure`: the local Lipschitz constant σ of a map at an input; `hs.explain`: the paths and tokens that make it.

A model does not know in which units its tokens are measured. With the gain of a normalisation multiplied by c and the
weights behind it divided by c it computes the same function, and σ of its attention is divided by c. The
**relative condition** does not change:

.. math:: \kappa = \|J(X)\|\,\frac{|X|}{|f(X)|},

by what share of its own size the output can move when the input moves by a small share of its size: 1 % of κ = 3 is
3 %. σ compares inputs, lengths and heads of one layer; κ compares layers and models as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.display import card
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import (
    Count,
    NotNegative,
    Positive,
    Probability,
    Seed,
    Size,
    check_options,
    keywords,
    validated,
)
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.attention.attention_map import MapModule
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian
from howsmooth.jacobians.closed_or_autodiff import closed_jacobian
from howsmooth.jacobians.composite_operator import CompositeJacobian
from howsmooth.jacobians.truncated_operator import truncated_jacobian
from howsmooth.norms import Measurement, operator_norm
from howsmooth.norms.measurement import NormKind
from howsmooth.norms.small_matrices import spectral

_PART = 2**16
"""Coordinates of a map that are brought to float64 together."""
SOLVER_OPTIONS = [name for name in signature(operator_norm).parameters if name != "op"]
"""The options of the solver, by name."""


@validated
@full_precision
def measure_map(
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
    check_options(solver, [*SOLVER_OPTIONS, *keywords(measure_map)], "measure")
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
    *,
    memory: Size = DEFAULT_MEMORY,
    skip: NotNegative = 0.0,
    **solver: Any,
) -> Measurement:
    """The local Lipschitz constant of every head x ↦ W_h f_h(x), its own slice of the output projection included.

    Arguments as in `measure_map`; the value has shape ``(heads,)`` or ``(batch, heads)``. All heads are solved
    together, in the coordinates of their own subspaces where that leaves the norm unchanged.

    >>> import torch, howsmooth as hs
    >>> x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    >>> hs.measure_heads(hs.SelfAttention.random(32, heads=4), x).value.shape
    torch.Size([4])
    """
    check_options(solver, [*SOLVER_OPTIONS, *keywords(measure_heads)], "measure_heads")
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
    result = solve(operator, norm=norm, k=k, rtol=rtol, seed=seed, **solver)
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
    orders: dict[NormKind, NormKind] = {"token": math.inf, "fro": 2}
    order = orders.get(norm, norm)
    flat = tokens.flatten(-dims) if dims else tokens[..., None]
    parts = [torch.linalg.vector_norm(part.double(), ord=order, dim=-1) for part in flat.split(_PART, dim=-1)]
    return torch.linalg.vector_norm(torch.stack(parts, dim=-1), ord=order, dim=-1)


_BLOCK_ENTRIES = 2**22
"""Entries of the vectors held for one chunk of token blocks."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The parts of the norm of an attention map at an input.

    ``…`` stands for the shape of the batch, ``()`` for a single input; heads follow on request.

    Attributes:
        total: the local Lipschitz constant itself, with its top singular vectors.
        value_path: norm with the weights P held fixed: P ⊗ WV. Grows with the attention sink.
        score_path: norm with the values held fixed: the movement through the weights.
        value_share: uᵀJ_value v/σ for the top singular vectors u, v: the share of σ = uᵀJv that the value path has in
            the worst direction. The rest is the score path's (and the gate's, if there is one); below 0 or above 1
            they work against each other.
        sink: largest column sum of P per head, ``(…, heads)``: the attention one token receives, between 1 and n for
            softmax weights; ‖P‖₂ ≤ √sink.
        sink_token: the position of that token.
        entropy: mean entropy of the rows of P in nats, per head.
        input_energy: |v_j|² of the top right singular vector, ``(…, n)``: where a perturbation does most. Sums to one.
        output_energy: |u_i|² of the top left singular vector: where it shows.
        influence: ‖J_ij‖₂ for output token i and input token j, ``(…, n, n)``, estimates without ends, or None when not
            requested.
        gate_path: norm with attention held fixed: the movement through an output gate; None where there is none.
    """

    total: Measurement
    value_path: Measurement
    score_path: Measurement
    value_share: Tensor
    sink: Tensor
    sink_token: Tensor
    entropy: Tensor
    input_energy: Tensor
    output_energy: Tensor
    influence: Tensor | None = None
    gate_path: Measurement | None = None

    def __repr__(self) -> str:
        paths = {"value path": self.value_path, "score path": self.score_path, "gate path": self.gate_path}
        lines = [f"{name}: {m!r}" for name, m in paths.items() if m is not None]
        shares = ", ".join(f"{100 * share:.0f} %" for share in self.value_share.flatten().tolist())
        return "\n".join([f"total: {self.total!r}", *lines, f"through the values: {shares} of the total (estimate)"])

    def _repr_html_(self) -> str:
        sinks = zip(self.sink.flatten().tolist(), self.sink_token.flatten().tolist(), strict=True)
        shares = self.value_share.flatten().tolist()
        facts = [
            ("value path", f"{repr(self.value_path).partition(';')[0]}): the weights held fixed"),
            ("score path", f"{repr(self.score_path).partition(';')[0]}): the movement through the weights"),
            ("through the values", ", ".join(f"{100 * share:.0f} %" for share in shares)),
            ("sink", ", ".join(f"token {token} receives {amount:.3g}" for amount, token in sinks)),
            ("entropy, nats", ", ".join(f"{nats:.3g}" for nats in self.entropy.flatten().tolist())),
        ]
        return card(repr(self.total), facts, self.total.notes)


@validated
@full_precision
def explain(
    attention: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    per_head: bool = False,
    influence: bool = True,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
    confidence: Probability = 0.99,
    memory: Size = DEFAULT_MEMORY,
) -> Explanation:
    """Measure an attention map and say where its roughness comes from.

    The Jacobian is the sum of a value path, a score path and, behind an output gate, the gate's own path, so that
    total ≤ value_path + score_path + gate_path.

    Args:
        attention: an attention map, a layer of `howsmooth.nn` or `torch.nn.MultiheadAttention`.
        x: ``(n, d)`` or ``(batch, n, d)``.
        per_head: explain every head by itself.
        influence: also compute the n × n map of token influences.
        rtol, seed, confidence, memory: as in `howsmooth.measure`.

    >>> import torch, howsmooth as hs
    >>> x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    >>> story = hs.explain(hs.SelfAttention.random(8, heads=2, mask="causal"), x)
    >>> bool(story.influence[0, 5] == 0)  # the first token cannot see the last
    True
    """
    known = as_attention_map(attention, *x.shape[-2:-1], kind=MapModule)
    if known is None:
        raise InvalidInput(
            f"explain needs an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers; token_influence and measure take any function."
        )
    operator = closed_jacobian(known, x, per_head=per_head, reduced=per_head, memory=memory)
    options: dict[str, Any] = {"rtol": rtol, "seed": seed, "confidence": confidence}
    total = operator_norm(operator, **options)
    assert total.left is not None
    assert total.right is not None
    by_value = (total.left * operator.along("value").matvec(total.right)).sum((-2, -1))
    lifted = with_scale(in_tokens(operator, total), operator, x, known)
    assert lifted.left is not None
    assert lifted.right is not None
    gated = operator.along("gate") if isinstance(operator, CompositeJacobian) and operator.gates is not None else None
    sums = operator.mixing.column_sums().unflatten(0, (*x.shape[:-2], known.heads))
    sink = sums.max(-1)
    return Explanation(
        total=lifted,
        value_path=solve(operator.along("value"), **options),
        score_path=solve(operator.along("score"), **options),
        value_share=by_value / total.value.clamp_min(torch.finfo(torch.float64).tiny),
        sink=sink.values,
        sink_token=sink.indices,
        entropy=operator.mixing.entropy().unflatten(0, (*x.shape[:-2], known.heads)),
        input_energy=lifted.right.square().sum(-1),
        output_energy=lifted.left.square().sum(-1),
        influence=_influence(operator, max(rtol, 1e-2), seed) if influence else None,
        gate_path=None if gated is None else solve(gated, **options),
    )


@validated
@full_precision
def token_influence(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    per_head: bool = False,
    head: int | None = None,
    rtol: Positive = 1e-2,
    seed: Seed = 0,
    memory: Size = DEFAULT_MEMORY,
) -> Tensor:
    """‖J_ij‖₂ for every output token i and input token j: ``(…, n, n)``, estimates without ends.

    Attention maps use their closed form; other functions need a dense Jacobian, hence a small input.

    Args:
        per_head: every head by itself, ``(…, heads, n, n)``.
        head: this head alone, ``(…, n, n)``.
        rtol: relative accuracy of each entry.
    """
    attention = as_attention_map(f, *x.shape[-2:-1], kind=MapModule)
    if attention is None:
        return _dense_influence(f, x)
    if head is not None and not -attention.heads <= head < attention.heads:
        raise InvalidInput(f"there is no head {head}: the attention has {attention.heads}, counted from 0.")
    by_head = per_head or head is not None
    operator = closed_jacobian(attention, x, per_head=by_head, reduced=by_head, memory=memory)
    return _influence(operator, rtol, seed, head)


def _dense_influence(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    operator = jacobian(f, x)
    into, out = operator.in_shape, operator.out_shape
    if len(into) != 2 or len(out) != 2:
        raise InvalidInput(f"token influence needs tokens in and out, but f maps {into} to {out}.")
    return spectral(operator.dense().unflatten(-1, into).unflatten(-3, out).transpose(-3, -2))


def _influence(
    operator: AttentionJacobian | CompositeJacobian, rtol: float, seed: int, head: int | None = None
) -> Tensor:
    """‖J_ij‖₂ of every map of the operator, one item of the batch after the other; of one head alone on request."""
    items = operator.batch_shape[:-1] if operator.by_head else operator.batch_shape
    maps = torch.arange(operator.batch_size, device=operator.device).reshape(math.prod(items), -1)
    chosen = maps if head is None else maps[:, [head]]
    influences = torch.stack([_influence_of_one(operator.subset(index), rtol, seed) for index in chosen])
    influences = influences if head is None else influences[:, 0]
    return influences.reshape(*items, *influences.shape[1:])


def _influence_of_one(operator: AttentionJacobian | CompositeJacobian, rtol: float, seed: int) -> Tensor:
    n = operator.out_shape[0]
    chunk = max(
        1,
        _BLOCK_ENTRIES
        // (operator.in_shape[0] * max(operator.in_shape[1], operator.out_shape[1]) * operator.batch_size),
    )
    rows = (slice(start, min(start + chunk, n)) for start in range(0, n, chunk))
    norms = [operator_norm(operator.token_blocks(some), rtol=rtol, seed=seed).value for some in rows]
    full = torch.cat(norms)  # (n, n) or (n, heads, n)
    return full.transpose(0, 1) if operator.by_head else full
