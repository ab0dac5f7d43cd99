"""Checks for an attention or a bound of your own: the same that those of this package pass.

They are slow and sure: every number is compared with the dense Jacobian that autograd writes out in float64. A failed
check raises an `AssertionError` of one sentence.

>>> import torch, howsmooth as hs
>>> check_attention(hs.SelfAttention.random(4, heads=2, mask="causal"), torch.randn(5, 4))
>>> block, ball = hs.SelfAttention.random(4, heads=2), hs.sets.Ball(1.0)
>>> round(check_bound("howsmooth.sqrt_n", block, n=5, over=ball, steps=20), 1)
0.2
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_tensor, relative_error
from howsmooth._util.validation import check_finite, check_tensor, validated
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.attention.masks import Maps
from howsmooth.bounds import Bound, Setting, get, setting
from howsmooth.bounds.catalogue import applicable
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import JacobianOperator, attention_jacobian, jacobian
from howsmooth.jacobians.function_checks import check_takes_one
from howsmooth.norms.local_constant import measure_map
from howsmooth.search import worst_case
from howsmooth.sets import Around, Point

__all__ = ["check_attention", "check_bound", "dense_jacobian"]

ROUNDING = 1e-9
"""Relative difference that two ways to compute the same number in float64 may have."""
_FACTOR = 3.0


@validated
def dense_jacobian(f: Callable[[Tensor], Any], x: Tensor, *, create_graph: bool = False) -> Tensor:
    """The Jacobian of f at x as a matrix, ``(outputs, inputs)``, one backward pass for each output.

    Args:
        f: a function or module; of a tuple its first tensor is meant.
        x: any shape; float64 for an oracle.
        create_graph: whether the matrix can be differentiated in what f depends on.

    >>> dense_jacobian(lambda x: (x[0] * x[1], None), torch.tensor([2.0, 3.0]))
    tensor([[3., 2.]])
    """
    check_takes_one(f)
    weights = [] if not isinstance(f, nn.Module) else [*f.parameters(), *f.buffers()]
    other = next((w.dtype for w in weights if w.is_floating_point() and w.dtype != x.dtype), None)
    if other is not None:
        raise InvalidInput(f"x is {x.dtype}, but the weights of f are {other}: give both the same dtype.")
    matrix = torch.autograd.functional.jacobian(lambda y: first_tensor(f(y)), x, create_graph=create_graph)
    check_finite(matrix.detach(), "the Jacobian")
    return matrix.reshape(-1, x.numel())


@validated
def check_attention(attention: Callable[[Tensor], Any], x: Tensor, *, rtol: float = ROUNDING) -> None:
    """Whether an attention map is what it says: its Jacobian, its heads and its masks, in float64.

    - J v and Jᵀ u of `howsmooth.jacobian` are those of autograd through the forward pass, and adjoint to each other;
    - the items of a batch do not see each other;
    - the outputs of the heads add up to that of the block, and so do their Jacobians;
    - where a mask hides token j from token i, the weight of j is zero and j moves nothing there.

    Args:
        attention: an attention map or a `torch.nn.MultiheadAttention`; of any other function only J and Jᵀ are checked.
        x: tokens, ``(n, d)``, small: the matrix of all derivatives is written out.

    Raises:
        AssertionError: one sentence that says which of these does not hold, and by how much.
    """
    x = check_tensor(x, "x", dims=(2,)).detach().double()
    known = as_attention_map(attention)
    if known is None:
        operator = jacobian(attention, x)
        _check_products(attention, dense_jacobian(attention, x), operator, rtol)
        return
    known = known.in_dtype(torch.float64)
    out, expected = known(x), dense_jacobian(known, x)
    _require(bool(out.isfinite().all()), f"the output of {_name(known)} is not finite.")
    _require(out.shape == (len(x), known.out_features), f"the output of {_name(known)} has shape {tuple(out.shape)}.")
    together = known(torch.stack([x, x.flip(0) - 1]))[0]
    _agree(together, out, rtol, f"an item of a batch is not what {_name(known)} gives for it alone")
    _check_products(known, expected, attention_jacobian(known, x), rtol)
    _check_heads(known, x, out, expected, rtol)
    _check_masks(known, x, expected)


@validated
def check_bound(
    bound: Bound | str,
    attention: nn.Module,
    *,
    starts: int = 4,
    steps: int = 60,
    seed: int = 0,
    rtol: float = ROUNDING,
    **where: Any,
) -> float:
    """Whether a bound holds against an attack, scales with the map and does not depend on the order of tokens.

    - An upper bound is not exceeded by ‖J‖ of autograd at the input; over a set or near an input not by the worst input
      that `howsmooth.worst_case` finds there. A lower bound is not above any upper bound that holds in the same place.
    - Three times the values, or three times the output matrix, make the bound three times as large.
    - Where a permutation of the tokens permutes the output, it leaves a bound at an input as it is.

    Args:
        bound: an entry of the catalogue, or its name.
        attention: the map.
        starts, steps, seed: of the attack.
        where: n and over, as in `howsmooth.bounds.setting`.

    Returns:
        For an upper bound the largest ‖J‖ found / bound, for a lower one bound / smallest upper bound: at most 1.

    Raises:
        AssertionError: one sentence that says what does not hold.
        DoesNotApply: the bound refuses this place.
    """
    bound = get(bound) if isinstance(bound, str) else bound
    known = as_attention_map(attention)
    attention = copy.deepcopy(attention).double() if known is None else known.in_dtype(torch.float64)
    case = setting(attention, **where)
    value = float(bound.at(case))
    _require(not math.isnan(value) and value >= 0, f"{bound.name} is {value}, and a bound is no less than 0.")
    if bound.side == "upper":
        reached, limit, subject = _attack(bound, case, starts, steps, seed), value, "‖J‖ at an input found there"
    else:
        reached, limit, subject = value, _smallest_upper(bound, case), "the lower bound"
    ratio = 0.0 if reached == 0 else reached / limit if limit else math.inf
    against = bound.name if bound.side == "upper" else f"the smallest upper bound, against {bound.name},"
    _require(ratio <= 1 + rtol, f"{subject} is {reached:.9g}, above {against} which says {limit:.9g}.")
    _check_scaling(bound, case, where, value, rtol)
    _check_order(bound, case, value, rtol)
    return ratio


def by_columns(operator: JacobianOperator) -> Tensor:
    """The matrix of an operator from ``matvec`` alone, without the short cuts that some have."""
    columns = JacobianOperator.columns(operator, torch.arange(operator.in_size))
    return columns.reshape(operator.in_size, operator.out_size).T


def by_rows(operator: JacobianOperator) -> Tensor:
    """The matrix of an operator from ``rmatvec`` alone, without the short cuts that some have."""
    rows = JacobianOperator.rows(operator, torch.arange(operator.out_size))
    return rows.reshape(operator.out_size, operator.in_size)


def _check_products(f: object, expected: Tensor, operator: JacobianOperator, rtol: float) -> None:
    columns, rows = by_columns(operator), by_rows(operator)
    _agree(columns, expected, rtol, f"J v of {_name(f)} is not the derivative of its forward pass")
    _agree(rows, expected, rtol, f"Jᵀ u of {_name(f)} is not the derivative of its forward pass")
    _agree(columns, rows, rtol, f"J v and Jᵀ u of {_name(f)} are not adjoint")


def _check_heads(attention: AttentionMap, x: Tensor, out: Tensor, expected: Tensor, rtol: float) -> None:
    bias = torch.zeros_like(out) if attention.output_bias is None else attention.output_bias
    outputs = torch.stack([_only_head(attention, h)(x) for h in range(attention.heads)])
    _agree(outputs.sum(0), out - bias, rtol, f"the heads of {_name(attention)} do not add up to the block")
    operator = attention_jacobian(attention, x, per_head=True)
    _agree(operator.dense().sum(0), expected, rtol, f"the Jacobians of the heads of {_name(attention)} do not add up")
    for h in range(attention.heads):
        head = dense_jacobian(_only_head(attention, h), x)
        _agree(operator.dense()[h], head, rtol, f"the Jacobian of head {h} of {_name(attention)} is not its derivative")


def _check_masks(attention: AttentionMap, x: Tensor, expected: Tensor) -> None:
    """The masks define the hidden pairs, term by term."""
    n, heads = len(x), attention.heads
    bias = x.new_zeros(heads, n, n)
    for term in attention.terms:
        block = term.block(slice(0, n), slice(0, n), Maps.every(1, heads, n, x))
        if block is not None:
            bias = bias + block
    hidden = bias == -math.inf
    seen = attention.weights(x).masked_fill(~hidden, 0.0)
    _require(not seen.any(), f"{_name(attention)} gives weight to a token that its mask hides.")
    moved = expected.reshape(n, -1, n, x.shape[1]).abs().amax((1, 3)) * hidden.all(0)
    if moved.any():
        i, j = divmod(int(moved.argmax()), n)
        raise AssertionError(f"token {j} moves the output of token {i} of {_name(attention)}, from which it is hidden.")


def _attack(bound: Bound, case: Setting, starts: int, steps: int, seed: int) -> float:
    """The largest norm of the Jacobian that is found where the bound holds, from the matrix written out."""
    f, x, over = case.attention, case.x, {"global": None}.get(bound.scope, case.tokens)
    still = bound.scope == "point" or (bound.scope == "neighbourhood" and not case.eps)
    if x is None or not still:
        near = bound.scope == "neighbourhood" and x is not None
        n = 8 if case.n is None or math.isinf(case.n) else int(case.n)
        where = Around(x, case.eps) if near else over  # type: ignore[arg-type]
        x = worst_case(f, n, over=where, norm=bound.norm, starts=starts, steps=steps, seed=seed).x
    if bound.norm == "token":
        return float(measure_map(f, x.double(), norm="token", exact_limit=2**40))
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x.double()), bound.norm))


def _smallest_upper(bound: Bound, case: Setting) -> float:
    """The smallest upper bound at this place: a bound for every n holds for one n, and not the other way round."""
    others = [other for other in applicable(case) if (other.side, other.norm) == ("upper", bound.norm)]
    every = bound.scope.startswith("mean-field")
    there = [o for o in others if (o.scope == bound.scope if every else o.scope not in ("point", "neighbourhood"))]
    return min((float(other.at(case)) for other in there), default=math.inf)


def _check_scaling(bound: Bound, case: Setting, where: dict[str, Any], value: float, rtol: float) -> None:
    attention = case.attention
    if not isinstance(attention, AttentionMap):
        return
    n = len(case.x) if case.x is not None else 3 if case.n is None or math.isinf(case.n) else int(case.n)
    x = torch.randn(n, attention.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = attention.replace(output_bias=None)
    for factor in ("value", "output"):  # every weight of that name: L2 attention keeps W^V with and without its factor
        weights = plain.named_buffers(recurse=False)
        scaled = plain.replace(**{name: _FACTOR * w for name, w in weights if factor in name.split("_")})
        if relative_error(scaled(x), _FACTOR * plain(x)) > rtol:
            continue  # a map that is not linear in them, such as one that normalises its values
        larger = float(bound(scaled, **where))
        same = larger == _FACTOR * value or abs(larger - _FACTOR * value) <= rtol * _FACTOR * value
        found = f"with {_FACTOR:g} times the {factor} matrix {bound.name} is {larger:.9g}"
        _require(same, f"{found}, not {_FACTOR:g} times {value:.9g}.")


def _check_order(bound: Bound, case: Setting, value: float, rtol: float) -> None:
    attention, x = case.attention, case.x
    if x is None or not isinstance(attention, AttentionMap):
        return
    turned = x.flip(0)
    if relative_error(attention(turned.double()), attention(x.double()).flip(0)) > rtol:
        return
    over = Point(turned, within=case.tokens) if case.eps is None else Around(turned, case.eps, within=case.tokens)
    after = float(bound(attention, over=over))
    same = after == value or abs(after - value) <= rtol * abs(value)
    _require(same, f"{bound.name} is {value:.9g} at an input and {after:.9g} at the same tokens in another order.")


def _only_head(attention: AttentionMap, head: int) -> AttentionMap:
    """The map with the output slices of all other heads zero, without the output bias."""
    alone = torch.zeros_like(attention.output_weight)
    alone[head] = attention.output_weight[head]
    return attention.replace(output_weight=alone, output_bias=None)


def _agree(value: Tensor, expected: Tensor, rtol: float, sentence: str) -> None:
    error = relative_error(value, expected)
    _require(error <= rtol, f"{sentence}: relative error {error:.2g}, at most {rtol:.2g}.")


def _require(holds: bool, sentence: str) -> None:
    """Also under ``python -O``, which leaves assert statements out."""
    if not holds:
        raise AssertionError(sentence)


def _name(f: object) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", type(f).__name__)
