"""Rules of sums and products with constants: linear maps, convolutions, means, normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.jacobians.tokenwise import Norm
from howsmooth.network.elementwise import elementwise, function_of, product_of_entries, settled
from howsmooth.network.moves import joined_entries, windows, with_border
from howsmooth.network.reading import RULES, Form, Reading, Rule, is_constant, rule
from howsmooth.network.values import Entries, Mixed, common_row


def _signed(sign: float) -> Rule:
    def add(reading: Reading, x: Form, y: Form, alpha: float = 1) -> Form:
        for form, other, first in ((x, y, True), (y, x, False)):
            if hasattr(form, "added"):
                return form.added(other, sign * alpha, first)
        if is_constant(x) and isinstance(y, Entries):
            return _shifted(reading, y.scaled(sign * alpha), x)
        if is_constant(y) and isinstance(x, Entries):
            return _shifted(reading, x, sign * alpha * y)
        if isinstance(x, Entries) and isinstance(y, Entries):
            return _summed(reading, x.plus(y.scaled(float(sign * alpha))))
        return None

    return add


def _shifted(reading: Reading, x: Entries, shift: Tensor | float) -> Entries:
    """A tensor plus a constant: a bias of what made it, or, as positions are, one of each token."""
    moved = settled(reading, x.shifted(shift))
    constant = moved.constant
    if constant is None or constant.dim() < 2 or bool((constant.detach() == constant.detach()[..., :1, :]).all()):
        return moved
    return reading.whole(reading.values.tokens(moved, reading.place), moved.shape)


def _summed(reading: Reading, total: Entries) -> Entries:
    """A sum of several values as a value of its own, so that a stream of residuals stays a stream."""
    if len({id(term.base) for term in total.terms}) < 2 or function_of(total) is not None:
        return total
    return reading.whole(reading.values.tokens(total, reading.place), total.shape)


RULES["add"], RULES["sub"], RULES["subtract"] = _signed(1), _signed(-1), _signed(-1)


@rule("rsub")
def _rsub(reading: Reading, x: Form, y: Form, alpha: float = 1) -> Form:
    return RULES["sub"](reading, y, x, alpha) if alpha == 1 else None


@rule("neg")
def _neg(reading: Reading, x: Form) -> Form:
    return x.scaled(-1.0)


@rule("mul", "multiply")
def _mul(reading: Reading, x: Form, y: Form) -> Form:
    if is_constant(x):
        x, y = y, x
    if is_constant(y):
        if not isinstance(x, Entries):
            return x.scaled(y)
        return settled(reading, x.scaled(y))
    if not isinstance(x, Entries) or not isinstance(y, Entries):
        return None
    if not y.terms or not x.terms:
        x, y = (x, y) if x.terms else (y, x)
        return x.scaled(torch.zeros(()) if y.constant is None else y.constant)
    return product_of_entries(reading, x, y)


@rule("div", "divide", "true_divide")
def _div(reading: Reading, x: Form, y: Form, rounding_mode: str | None = None) -> Form:
    if rounding_mode is not None or (not isinstance(y, Tensor | Entries) and y == 0):
        return None
    if is_constant(y):
        inverse = 1 / y.double() if isinstance(y, Tensor) else 1.0 / y
        return _mul(reading, x, inverse)
    if not isinstance(y, Entries):
        return None
    return _mul(reading, x, elementwise(reading, y, torch.reciprocal))


@rule("addcmul")
def _addcmul(reading: Reading, x: Form, y: Form, z: Form, value: float = 1) -> Form:
    product = _mul(reading, y, z) if not (is_constant(y) and is_constant(z)) else y * z
    if isinstance(product, Entries):
        product = product.scaled(float(value))
    return None if product is None else RULES["add"](reading, x, product)


@rule("addmm")
def _addmm(reading: Reading, bias: Form, x: Form, y: Form, beta: float = 1, alpha: float = 1) -> Form:
    if not isinstance(bias, Tensor):
        return None
    if isinstance(x, Entries) and isinstance(y, Tensor) and beta == alpha == 1 and bias.dim() == 1:
        return _linear(reading, x, y.mT, bias)
    product = _mm(reading, x, y)
    return (
        None if not isinstance(product, Entries) else RULES["add"](reading, product.scaled(float(alpha)), beta * bias)
    )


@rule("linear")
def _linear(reading: Reading, x: Form, weight: Form, bias: Form = None) -> Form:
    if not isinstance(x, Entries) or not isinstance(weight, Tensor) or not x.terms:
        return None
    value = reading.values.affine(x, weight, bias, reading.place)
    return reading.whole(value, (*x.shape[:-1], len(weight)))


@rule("mm", "matmul")
def _mm(reading: Reading, x: Form, y: Form) -> Form:
    if isinstance(y, Tensor) and isinstance(x, Entries):
        return _linear(reading, x, y.mT) if y.dim() == 2 else None
    if isinstance(x, Tensor) and isinstance(y, Entries) and x.dim() == 2 and len(y.shape) == 2:
        return mixed(reading, x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return None
    products = _bmm(
        reading,
        x.moved("unsqueeze", 0) if hasattr(x, "kept") else x.moved(lambda t: t[None]),
        y.moved(lambda t: t[None]),
    )
    return None if products is None else RULES["squeeze"](reading, products, 0)


@rule("mv")
def _mv(reading: Reading, x: Form, y: Form) -> Form:
    if isinstance(x, Entries) and isinstance(y, Tensor):
        return _linear(reading, x, y[None]).moved(lambda t: t[..., 0])
    if isinstance(x, Tensor) and isinstance(y, Entries):
        return _linear(reading, y, x)
    return None


def mixed(reading: Reading, matrix: Tensor, x: Entries) -> Entries:
    """A matrix times tokens ``(n, d)``."""
    tokens = reading.values.tokens(x, reading.place)
    value = reading.values.make(len(matrix), tokens.width, Mixed(matrix), (tokens,), reading.place)
    return reading.whole(value, (len(matrix), tokens.width))


@rule("bmm")
def _bmm(reading: Reading, x: Form, y: Form) -> Form:
    from howsmooth.network.attention_forms import scores_of

    if isinstance(x, Entries) and isinstance(y, Entries):
        return scores_of(reading, x, y)
    if hasattr(x, "times"):
        return x.times(reading, y)
    if isinstance(x, Entries) and isinstance(y, Tensor):
        return _batched(reading, x, y)
    if isinstance(x, Tensor) and isinstance(y, Entries) and x.dim() == 3 and not reading.plainly:
        return scores_of(reading, Entries(x.shape, (), x), y)  # queries that do not move, until it shows otherwise
    if isinstance(x, Tensor) and isinstance(y, Entries):
        turned = _batched(reading, y.moved(lambda t: t.mT), x.mT)
        return None if turned is None else turned.moved(lambda t: t.mT)
    return None


@rule("baddbmm")
def _baddbmm(reading: Reading, bias: Form, x: Form, y: Form, beta: float = 1, alpha: float = 1) -> Form:
    product = _bmm(reading, x, y)
    if product is None or not isinstance(bias, Tensor):
        return None
    return RULES["add"](reading, product.scaled(float(alpha)), beta * bias)


def _batched(reading: Reading, x: Entries, weights: Tensor) -> Entries | None:
    """x_b W_b for every item b: one linear map where all items are alike, or each acts on its own part of a token."""
    count, n, k = x.shape
    m = weights.shape[-1]
    alike = common_row(weights)
    if alike is not None:
        return _linear(reading, x, alike.mT)
    first = x.moved(lambda t: t[:1])
    if all(_equal(first, x.moved(lambda t, b=b: t[b : b + 1])) for b in range(1, count)):  # type: ignore[misc]
        value = reading.values.affine(x.moved(lambda t: t[0]), weights.mT.reshape(count * m, k), None, reading.place)
        return reading.whole(value, (n, count, m)).moved(lambda t: t.transpose(0, 1))
    if count * m * count * k > 2**26:
        return None
    beside = x.moved(lambda t: t.transpose(0, 1).reshape(n, count * k))
    value = reading.values.affine(beside, torch.block_diag(*weights.mT), None, reading.place)
    return reading.whole(value, (n, count, m)).moved(lambda t: t.transpose(0, 1))


def _equal(one: Entries, other: Entries) -> bool:
    same = len(one.terms) == len(other.terms) and one.constant is None and other.constant is None
    return same and all(
        a.base is b.base and torch.equal(a.index, b.index) and a.factor is None and b.factor is None
        for a, b in zip(one.terms, other.terms, strict=True)
    )


def _reduction(is_mean: bool) -> Rule:
    def reduce(reading: Reading, x: Form, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Form:
        if not isinstance(x, Entries) or not x.terms:
            return None
        rank = len(x.shape)
        chosen = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        axes = sorted({axis % rank for axis in chosen})
        kept = [axis for axis in range(rank) if axis not in axes]
        width, rest = math.prod(x.shape[a] for a in axes), [x.shape[a] for a in kept]
        weight = torch.full((1, width), 1 / width if is_mean else 1.0, dtype=torch.float64)
        shape = [1 if a in axes else x.shape[a] for a in range(rank)] if keepdim else rest
        if width == 1:
            return x.moved(lambda t: t.reshape(shape))
        real = [a for a in range(rank) if x.shape[a] > 1]
        over_tokens = len(real) == 2 and set(axes) & set(real) == {real[0]}
        if over_tokens:
            tokens = x.moved(lambda t: t.reshape(x.shape[real[0]], x.shape[real[1]]))
            return mixed(reading, weight, tokens).moved(lambda t: t.reshape(shape))
        last = x.moved(lambda t: t.permute(*kept, *axes).reshape(*rest, width))
        return reading.whole(reading.values.affine(last, weight, None, reading.place), shape)

    return reduce


RULES["mean"], RULES["sum"] = _reduction(True), _reduction(False)


@rule("convolution")
def _convolution(
    reading: Reading,
    x: Form,
    weight: Form,
    bias: Form,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Form:
    if not isinstance(x, Entries) or not isinstance(weight, Tensor) or transposed:
        return None
    axes = weight.dim() - 2
    if len(x.shape) != axes + 2 or x.shape[0] != 1:
        return None
    whole = with_border(reading, x, padding)

    spread = whole.moved(lambda t: windows(t[0], weight.shape[2:], stride, dilation))
    if groups == 1:
        rows: Any = _linear(reading, spread, weight.flatten(1), bias)
    else:
        width, outs = spread.shape[-1] // groups, len(weight) // groups
        parts = [
            _linear(
                reading,
                spread.moved(lambda t, g=g: t[..., g * width : (g + 1) * width]),  # type: ignore[misc]
                weight[g * outs : (g + 1) * outs].flatten(1),
                None if bias is None else bias[g * outs : (g + 1) * outs],
            )
            for g in range(groups)
        ]
        rows = joined_entries(parts, lambda tensors: torch.cat(tensors, -1))
    return rows.moved(lambda t: t.movedim(-1, 0)[None])


@rule("native_layer_norm", "layer_norm")
def _layer_norm(
    reading: Reading, x: Form, shape: Sequence[int], weight: Form, bias: Form, eps: float, *rest: Any
) -> Form:
    if not isinstance(x, Entries) or len(shape) != 1:
        return None
    tokens = reading.values.tokens(x, reading.place)
    value = reading.values.staged(Norm(shape[0], eps, weight, bias, centred=True), tokens, tokens.width, reading.place)
    return [reading.whole(value, x.shape), None, None]


@rule("_fused_rms_norm", "rms_norm")
def _rms_norm(reading: Reading, x: Form, shape: Sequence[int], weight: Form, eps: float | None) -> Form:
    if not isinstance(x, Entries) or len(shape) != 1:
        return None
    like = torch.float32 if weight is None else weight.dtype
    small = torch.finfo(torch.promote_types(like, torch.float32)).eps if eps is None else eps
    tokens = reading.values.tokens(x, reading.place)
    value = reading.values.staged(Norm(shape[0], small, weight), tokens, tokens.width, reading.place)
    return [reading.whole(value, x.shape), None]


@rule("native_group_norm")
def _group_norm(
    reading: Reading, x: Form, weight: Form, bias: Form, items: int, channels: int, places: int, groups: int, eps: float
) -> Form:
    if not isinstance(x, Entries) or items != 1:
        return None
    tokens = reading.values.tokens(x, reading.place, rows=groups)
    value = reading.values.staged(Norm(tokens.width, eps, centred=True), tokens, tokens.width, reading.place)
    result = reading.whole(value, x.shape)
    shape = (channels, *[1] * (len(x.shape) - 2))
    result = result if weight is None else result.scaled(weight.reshape(shape))
    return [result if bias is None else result.shifted(bias.reshape(shape)), None, None]


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def _batch_norm(reading: Reading, x: Form, weight: Form, bias: Form, mean: Form, variance: Form, *rest: Any) -> Form:
    *training, _, eps = rest
    if not isinstance(x, Entries) or not isinstance(mean, Tensor) or any(training):
        return None
    gain = (variance + eps).rsqrt() * (1 if weight is None else weight)
    shift = -mean * gain + (0 if bias is None else bias)
    shape = (-1, *[1] * (len(x.shape) - 2))
    return [x.scaled(gain.reshape(shape)).shifted(shift.reshape(shape)), None, None]


def _variance(reading: Reading, x: Form, dims: Any, correction: float, keepdim: bool) -> Entries | None:
    """The mean square about the mean, along the last axis."""
    if not isinstance(x, Entries) or not x.terms or dims is None:
        return None
    rank = len(x.shape)
    axes = [dims] if isinstance(dims, int) else list(dims)
    if [axis % rank for axis in axes] != [rank - 1]:
        return None
    mean = RULES["mean"](reading, x, [-1], True)
    centred = reading.whole(reading.values.tokens(x.plus(mean.scaled(-1.0)), reading.place), x.shape)
    square = RULES["mean"](reading, elementwise(reading, centred, torch.square), [-1], keepdim)
    width = x.shape[-1]
    return square if correction == 0 else square.scaled(width / (width - correction))


def _var_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    given = list(args)
    dims = given.pop(0) if given else kwargs.get("dim")
    if given and isinstance(given[0], bool):
        correction: Any = int(given.pop(0))
    else:
        correction = kwargs.get("correction", kwargs.get("unbiased", True))
    keepdim = kwargs.get("keepdim", bool(given[0]) if given else False)
    return dims, float(1 if correction is None else correction), keepdim


def _var_rule(finish: Callable[[Reading, Entries, Form, Any, bool], Form]) -> Rule:
    def apply(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
        dims, correction, keepdim = _var_arguments(args, kwargs)
        found = _variance(reading, x, dims, correction, keepdim)
        return None if found is None else finish(reading, found, x, dims, keepdim)

    return apply


RULES["var"] = _var_rule(lambda reading, found, x, dims, keepdim: found)
RULES["std"] = _var_rule(lambda reading, found, x, dims, keepdim: elementwise(reading, found, torch.sqrt))
RULES["var_mean"] = _var_rule(
    lambda reading, found, x, dims, keepdim: [found, RULES["mean"](reading, x, dims, keepdim)]
)


@rule("linalg_vector_norm", "norm")
def _vector_norm(
    reading: Reading, x: Form, order: Any = 2, dims: Any = None, keepdim: bool = False, **kwargs: Any
) -> Form:
    if not isinstance(x, Entries) or order != 2 or dims is None:
        return None
    total = RULES["sum"](reading, elementwise(reading, x, torch.square), dims, keepdim)
    return None if total is None else elementwise(reading, total, torch.sqrt)
