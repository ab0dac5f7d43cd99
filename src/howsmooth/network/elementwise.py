"""Rules of functions of single numbers, and what products of them amount to: activations, normalisations, gates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth.jacobians.tokenwise import Activation, Affine, Norm
from howsmooth.network.reading import RULES, Form, Reading, Rule, is_constant, rule
from howsmooth.network.values import Combined, Entries, Multiplied, Term, Value, common_value

ELEMENTWISE = (
    *(
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
    ),
    *("reciprocal", "square", "abs", "sin", "cos", "atan", "softplus", "elu", "leaky_relu", "hardswish", "hardsigmoid"),
    *("hardtanh", "mish", "clamp", "clamp_min", "clamp_max", "pow", "sign", "round", "floor", "ceil", "threshold"),
    *("log_sigmoid", "selu", "celu", "relu6", "softsign", "tan", "sinh", "cosh", "asinh"),
)


def _elementwise_rule(name: str) -> Rule:
    def apply(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
        if hasattr(x, "bent"):
            return x.bent(name)
        if not isinstance(x, Entries) or any(not is_constant(one) and not isinstance(one, str | None) for one in args):
            return None
        if any(isinstance(one, Tensor) and one.dim() for one in args):
            return None
        function = getattr(torch.ops.aten, name)
        x = _scaled_apart(reading, x) if name in _IN_ONE_PIECE else x
        return elementwise(reading, x, lambda t: function(t, *args, **kwargs))

    return apply


_IN_ONE_PIECE = ("relu", "gelu", "silu", "elu", "selu", "leaky_relu", "hardswish", "mish", "relu6", "softplus")
"""Activations that are nobody's part, as tanh is of GELU, so that a factor before them is a map of its own."""


def _scaled_apart(reading: Reading, x: Entries) -> Entries:
    """A factor of every number, or of every channel, as a linear map, so that what follows keeps its name."""
    if len(x.terms) != 1 or x.terms[0].factor is None or isinstance(x.terms[0].base.stage, Activation):
        return x
    base = x.terms[0].base
    if x.shape[-1:] != (base.width,) or x.shape.numel() != base.rows * base.width:
        return x
    return reading.whole(reading.values.tokens(x, reading.place), x.shape)


RULES.update({name: _elementwise_rule(name) for name in ELEMENTWISE})


@rule("log_sigmoid_forward")
def _log_sigmoid(reading: Reading, x: Form) -> Form:
    return [elementwise(reading, x, functional.logsigmoid), None] if isinstance(x, Entries) else None


Function = Callable[[Tensor], Tensor]


def function_of(x: Entries) -> tuple[Value, Tensor, Function] | None:
    """The numbers of one value of which every entry is a function, the same one; None where there is no such value.

    Sums of functions of the same numbers count: x + c·x³ is a function of x.
    """
    scales = [scale for term in x.terms if (scale := term.scale) is not None]
    shift = 0.0 if x.constant is None else common_value(x.constant)
    if not x.terms or shift is None or len(scales) < len(x.terms) or not all(term.complete for term in x.terms):
        return None
    if any(not torch.equal(term.index, x.terms[0].index) for term in x.terms[1:]):
        return None
    chains = [_functions_behind(term.base) for term in x.terms]
    root = next((base for base in reversed(chains[0]) if all(base in chain for chain in chains[1:])), None)
    if root is None:
        return None
    parts = [(scale, chain[root]) for scale, chain in zip(scales, chains, strict=True)]
    (scale, function), *others = parts
    if not others and shift == 0 and scale == 1:
        return root, x.terms[0].index, function

    def total(t: Tensor) -> Tensor:
        result = torch.full_like(t, shift)
        for factor, part in parts:
            result = result + factor * part(t)
        return result

    return root, x.terms[0].index, total


def _functions_behind(base: Value) -> dict[Value, Function]:
    """The values of which every number of a value is a function: itself, and those before its activations."""
    chain: dict[Value, Function] = {base: lambda t: t}
    while isinstance(base.stage, Activation):
        stage, outer, base = base.stage, chain[base], base.parents[0]
        chain[base] = lambda t, outer=outer, stage=stage: outer(stage.function(t))  # type: ignore[misc]
    return chain


def elementwise(reading: Reading, x: Entries, function: Function) -> Entries:
    """A function of every number."""
    found = function_of(x)
    if found is None:
        value = reading.values.tokens(x, reading.place)
        return reading.whole(reading.values.staged(Activation(function), value, value.width, reading.place), x.shape)
    root, index, inner = found
    return _applied(reading, root, index, lambda t: function(inner(t)))


def _applied(reading: Reading, root: Value, index: Tensor, function: Function) -> Entries:
    """A function of the numbers of a value at some places; of all of it only where all are wanted."""
    if index.numel() != root.rows * root.width or len(index.unique()) != index.numel():
        root = reading.values.tokens(Entries(index.shape, (Term(root, index),)), reading.place)
        index = torch.arange(index.numel()).reshape(index.shape)
    value = reading.values.staged(Activation(function), root, root.width, reading.place)
    return Entries(index.shape, (Term(value, index),))


def _of_one_root(reading: Reading, x: Entries, y: Entries) -> Entries | None:
    """The product of two functions of the same numbers, such as x·σ(x)."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    one, two = function_of(x.expanded(shape)), function_of(y.expanded(shape))
    if one is None or two is None or not torch.equal(one[1], two[1]):
        return None
    chains = _functions_behind(one[0]), _functions_behind(two[0])
    root = next((base for base in reversed(chains[0]) if base in chains[1]), None)
    if root is None:
        return None
    first, second = ((lambda t, o=o, c=c: o[2](c[root](t))) for o, c in zip((one, two), chains, strict=True))
    return _applied(reading, root, one[1], lambda t: first(t) * second(t))


def settled(reading: Reading, x: Entries) -> Entries:
    """A factor or a shift behind a normalisation as its own gain or shift, a shift behind a linear map as its bias."""
    if len(x.terms) != 1:
        return x
    base, factor = x.terms[0].base, x.terms[0].factor
    foldable = isinstance(base.stage, Norm) or (isinstance(base.stage, Affine) and factor is None)
    if not foldable or x.shape[-1:] != (base.width,) or x.shape.numel() != base.rows * base.width:
        return x
    found = reading.values.tokens(x, reading.place)
    return reading.whole(found, x.shape) if type(found.stage) is type(base.stage) else x


def product_of_entries(reading: Reading, x: Entries, y: Entries) -> Entries:
    """The product of two tensors: a function of the same numbers, a normalisation, or two values multiplied."""
    known = _of_one_root(reading, x, y) or _normalised(reading, x, y) or _normalised(reading, y, x)
    return known or _times(reading, x, y)


def _times(reading: Reading, x: Entries, y: Entries) -> Entries:
    """The product of two tensors that are both made of the input."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    one, two = (reading.values.tokens(form.expanded(shape), reading.place) for form in (x, y))
    value = reading.values.make(one.rows, one.width, Multiplied(), (one, two), reading.place)
    return reading.whole(value, shape)


_GRID = torch.cat([torch.zeros(1), torch.logspace(-60, 60, 481, dtype=torch.float64)]).double()


def _normalised(reading: Reading, x: Entries, y: Entries) -> Entries | None:
    """x divided by a root of its own mean square plus ε, with y = 1/√(…): LayerNorm or RMSNorm written out."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if x.shape != shape or not shape:
        return None
    factor = x.terms[0].factor if len(x.terms) == 1 and x.constant is None else None
    if factor is not None:
        plain = _normalised(reading, replace(x, terms=(replace(x.terms[0], factor=None),)), y)
        if plain is not None:
            return settled(reading, plain.scaled(factor))
    width = shape[-1]
    found = function_of(y.expanded(shape))
    if found is None:
        return None
    sums, places, inverse = found
    mean = sums.stage
    if not isinstance(mean, Affine) or sums.width != 1:
        return None
    rows = shape.numel() // width
    if sums.rows != rows or not torch.equal(places.reshape(rows, width), torch.arange(rows)[:, None].expand(-1, width)):
        return None
    weight, summed = common_value(mean.weight), sums.parents[0]
    squares = function_of(_numbers(summed))
    if weight is None or weight <= 0 or squares is None:
        return None
    root, index, square = squares
    if index.numel() != rows * width:
        return None
    tokens = reading.values.tokens(x, reading.place)
    ramp = torch.cat([-_GRID, _GRID])
    for form in (x, Entries.of(tokens, (rows, width)), _numbers(tokens)):
        own = function_of(form)
        if own is None or own[0] is not root or not torch.equal(own[1].flatten(), index.flatten()):
            continue
        if torch.allclose(square(ramp), own[2](ramp).square(), rtol=1e-14, atol=0, equal_nan=True):
            break
    else:
        return None
    offset = 0.0 if mean.bias is None else float(mean.bias)
    outcome = inverse(weight * _GRID + offset).double().square().reciprocal()  # (|x|²·a + b), linear in |x|²
    offset = float(outcome[0])
    slope = float(outcome[(_GRID == 1.0).nonzero()[0, 0]]) - offset
    if not slope > 0 or not offset >= 0 or not math.isfinite(offset):
        return None
    if not torch.allclose(outcome, offset + slope * _GRID, rtol=1e-12, atol=0):
        return None
    factor = (slope * width) ** -0.5
    gain = None if abs(factor - 1) < 1e-12 else torch.full((width,), factor, dtype=torch.float64)
    eps, centred = offset / (slope * width), False
    if isinstance(tokens.stage, Affine) and _centres(tokens.stage):
        tokens, centred = tokens.parents[0], True
    value = reading.values.staged(Norm(width, eps, gain, centred=centred), tokens, width, reading.place)
    return reading.whole(value, shape)


def _numbers(value: Value) -> Entries:
    """The numbers of a value; of one that only moves those of another, the numbers of the other."""
    made = value.made
    if isinstance(made, Combined) and len(made.indices) == 1 and made.factors[0] is None and made.constant is None:
        return Entries(made.indices[0].shape, (Term(value.parents[0], made.indices[0]),))
    return Entries.of(value, (value.rows, value.width))


def _centres(stage: Affine) -> bool:
    """Whether a linear map takes the mean off a token."""
    weight = stage.weight.detach().double()
    d = len(weight)
    return (
        stage.bias is None
        and weight.shape == (d, d)
        and bool(
            (
                (weight - torch.eye(d, dtype=torch.float64) + 1 / d).abs()
                < 1e-12 + 1e-7 * (stage.weight.dtype != torch.float64) / d
            ).all()
        )
    )
