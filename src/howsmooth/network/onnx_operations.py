"""The operations of ONNX in terms of torch: a table of small functions, one for each name.

A function takes the node, for its attributes and the version of the operations (opset), and the tensors that the node
reads, None for one left out. What layers are made of calls `torch.nn.functional` and `torch.matmul`, so that whoever
follows the operations meets those of the network that was exported. Sizes, axes and indices are read from integer
tensors as numbers: ``Shape`` gives such a tensor.

A size that a file asks for is compared with `LARGEST` before any memory is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from howsmooth._util.validation import shown

Operation = Callable[..., "Tensor | tuple[Tensor, ...]"]
"""(node, tensors that it reads) → tensors that it gives."""
LARGEST = 2**28
"""Most numbers of a tensor whose shape stands in the file as a value: constants, copies, ranges, padding."""
LARGEST_RESULT = 2**30
"""Most numbers of a tensor whose shape follows from those of the operands."""
_UNBOUNDED = 3.4e38
"""Before opset 11 a `Clip` without a bound has the largest number of float32."""


@dataclass(frozen=True)
class OnnxNode:
    """One operation of the graph.

    Attributes:
        operation: its name in ONNX. number: its place in the file. name: of the node, often empty.
        inputs, outputs: names of the values that it reads, empty for one left out, and of those that it gives.
        attributes: those of the node, and the defaults of its opset for others.

    >>> node = OnnxNode("Softmax", 0, "", ("x",), ("y",), {"axis": -1}, opset=13)
    >>> OPERATIONS[node.operation](node, torch.zeros(2, 4))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> print(node)
    the operation 'Softmax' (node number 0)
    """

    operation: str
    number: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int

    def __str__(self) -> str:
        return (
            f"the operation {shown(self.operation)} (node {shown(self.name) if self.name else f'number {self.number}'})"
        )

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]

    def get(self, attribute: str, default: Any = None) -> Any:
        """An attribute, or another value where it is not given."""
        return self.attributes.get(attribute, default)


def _room(sizes: Iterable[int], most: int | None = None) -> None:
    """Refuse a result before it takes memory."""
    count, most = math.prod(sizes), most or LARGEST_RESULT
    if count > most:
        raise ValueError(f"the result would have {count:.0e} numbers, more than the {most:.0e} that are allowed")


def _axis(axis: int, dims: int) -> int:
    if not -dims <= axis < dims:
        raise ValueError(f"axis {axis} does not exist among {dims}")
    return axis % dims


def _axes(axes: Iterable[int], dims: int) -> list[int]:
    chosen = [_axis(axis, dims) for axis in axes]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"an axis stands twice in {chosen}")
    return chosen


def _whole(values: Tensor) -> list[int]:
    return [int(value) for value in values.reshape(-1).tolist()]


def _integers(values: int | Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _optional(node: OnnxNode, attribute: str, given: Tensor | None) -> Any:
    """Whole numbers that are an attribute in some opsets and an input in others; None when they are left out."""
    return node.get(attribute) if given is None else _whole(given)


# Entry by entry


def _each(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda node, x: function(x)


def _shaped(function: Callable[..., Tensor], *attributes: str) -> Operation:
    """A function with numbers that are attributes."""
    return lambda node, x: function(x, *(node[name] for name in attributes))


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    def operation(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
        _room(torch.broadcast_shapes(a.shape, b.shape))
        return function(a, b)

    return operation


def _several(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    step = _pair(function)
    return lambda node, *tensors: reduce(lambda a, b: step(node, a, b), tensors)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.div(a, b)
    # Dividing the smallest integer by −1 ends the process: torch leaves it to the processor.
    negated = b == -1
    return torch.where(negated, -a, torch.div(a, b.masked_fill(negated, 1), rounding_mode="trunc"))


def _power(node: OnnxNode, base: Tensor, exponent: Tensor) -> Tensor:
    _room(torch.broadcast_shapes(base.shape, exponent.shape))
    number = type(exponent) is Tensor and exponent.numel() == 1 and exponent.dim() <= base.dim()
    return torch.pow(base, exponent.item() if number else exponent).to(base.dtype)


def _clip(node: OnnxNode, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [None if bound is None else bound.item() for bound in (low, high)]
    if node.opset < 11:
        bounds = [None if abs(node[name]) > _UNBOUNDED else node[name] for name in ("min", "max")]
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _where(node: OnnxNode, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    _room(torch.broadcast_shapes(condition.shape, a.shape, b.shape))
    return torch.where(condition, a, b)


def _dropout(
    node: OnnxNode, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> tuple[Tensor, ...]:
    if training is not None and bool(training):
        raise ValueError("it drops numbers at random, as in training")
    return (x, torch.ones(x.shape, dtype=torch.bool, device=x.device)) if len(node.outputs) > 1 else (x,)


def _gelu(node: OnnxNode, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node["approximate"])


def _softplus(node: OnnxNode, x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40.0)  # beyond it the difference from x is below the roundoff of float64


# Along axes


def _soft(function: Callable[..., Tensor]) -> Operation:
    def operation(node: OnnxNode, x: Tensor) -> Tensor:
        axis = _axis(node["axis"], x.dim())
        if node.opset >= 13 or math.prod(x.shape[axis + 1 :]) == 1:
            return function(x, dim=axis)
        return function(x.flatten(axis), dim=-1).reshape(x.shape)  # over all axes from this one on together

    return operation


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operation:
    def operation(node: OnnxNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = _optional(node, "axes", axes)
        if not chosen and node.get("noop_with_empty_axes"):
            return x
        return function(x, _axes(chosen or range(x.dim()), x.dim()), bool(node["keepdims"]))

    return operation


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return reduce(lambda y, axis: y.prod(axis, keepdim=keep, dtype=x.dtype), sorted(axes, reverse=True), x)


def _arg_max(node: OnnxNode, x: Tensor) -> Tensor:
    return x.argmax(_axis(node["axis"], x.dim()), keepdim=bool(node["keepdims"]))


def _cumulated(node: OnnxNode, x: Tensor, axis: Tensor) -> Tensor:
    along = _axis(int(axis), x.dim())
    if node["reverse"]:
        x = x.flip(along)
    total = x.cumsum(along, dtype=x.dtype)
    if node["exclusive"]:
        total = total - x
    return total.flip(along) if node["reverse"] else total


# Matrices


def _matmul(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    if a.dim() > 1 and b.dim() > 1:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        (rows, inner), columns = a.shape[-2:], b.shape[-1]
        spread = inner if a.dim() > 2 and b.dim() > 2 else 0  # then the factors are repeated like the result
        _room((*batch, max(rows * columns, rows * spread, columns * spread)))
    return torch.matmul(a, b)


def _gemm(node: OnnxNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a, b = a.T if node["transA"] else a, b if node["transB"] else b.T
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError("it multiplies matrices")
    _room((len(a), len(b)))
    alpha, beta = node["alpha"], node["beta"]
    if c is not None and alpha == beta == 1 and c.shape == b.shape[:1]:
        return F.linear(a, b, c)
    product = F.linear(a, b) if alpha == 1 else alpha * F.linear(a, b)
    if c is None or beta == 0:
        return product
    if torch.broadcast_shapes(c.shape, product.shape) != product.shape:
        raise ValueError(f"an addend of shape {tuple(c.shape)} does not fit a product of {tuple(product.shape)}")
    return product + (c if beta == 1 else beta * c)


def _einsum(node: OnnxNode, *tensors: Tensor) -> Tensor:
    equation = node["equation"].replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if [len(term) for term in terms.split(",")] != [tensor.dim() for tensor in tensors] or "." in equation:
        raise ValueError(f"its equation {equation} does not name every axis of its operands by a letter")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), tensors, strict=True):
        sizes |= {letter: max(size, sizes.get(letter, 1)) for letter, size in zip(term, tensor.shape, strict=True)}
    kept = result if arrow and len(tensors) < 3 else sizes
    _room(sizes[letter] for letter in kept)
    return torch.einsum(equation, *tensors)


# Shapes


def _shape(node: OnnxNode, x: Tensor) -> Tensor:
    return _integers(tuple(x.shape)[node.get("start", 0) : node.get("end")])


def _reshape(node: OnnxNode, x: Tensor, shape: Tensor) -> Tensor:
    copied, wanted = not node.get("allowzero"), _whole(shape)
    if max(map(abs, wanted), default=0) > LARGEST_RESULT:
        raise ValueError(f"a shape {wanted} does not fit its {x.numel()} numbers")
    return x.reshape([x.shape[i] if copied and size == 0 else size for i, size in enumerate(wanted)])


def _flatten(node: OnnxNode, x: Tensor) -> Tensor:
    axis = node["axis"] if node["axis"] == x.dim() else _axis(node["axis"], x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(node: OnnxNode, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or list(range(x.dim()))[::-1])


def _squeeze(node: OnnxNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _optional(node, "axes", axes)
    if chosen is None:
        return x.squeeze()
    for axis in sorted(_axes(chosen, x.dim()), reverse=True):
        if x.shape[axis] != 1:
            raise ValueError(f"axis {axis} has size {x.shape[axis]}, not 1")
        x = x.squeeze(axis)
    return x


def _unsqueeze(node: OnnxNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _optional(node, "axes", axes)
    for axis in sorted(_axes(chosen, x.dim() + len(chosen))):
        x = x.unsqueeze(axis)
    return x


def _expand(node: OnnxNode, x: Tensor, shape: Tensor) -> Tensor:
    sizes = torch.broadcast_shapes(x.shape, tuple(_whole(shape)))
    _room(sizes, LARGEST)
    return x.expand(sizes)


def _tile(node: OnnxNode, x: Tensor, repeats: Tensor) -> Tensor:
    counts = _whole(repeats)
    if len(counts) != x.dim() or min(counts, default=0) < 0:
        raise ValueError(f"{counts} are no numbers of copies along {x.dim()} axes")
    _room((size * count for size, count in zip(x.shape, counts, strict=True)), LARGEST)
    return x.repeat(counts)


def _filled(node: OnnxNode, shape: Tensor, value: Tensor) -> Tensor:
    sizes = _whole(shape)
    _room(sizes, LARGEST)
    return value.new_full(sizes, value.item())


def _range(node: OnnxNode, start: Tensor, limit: Tensor, step: Tensor) -> Tensor:
    first, last, by = start.item(), limit.item(), step.item()
    if by == 0 or not all(map(math.isfinite, (first, last, by))):
        raise ValueError(f"there is no range from {first} to {last} in steps of {by}")
    count = max(math.ceil((last - first) / by) if start.is_floating_point() else -int((first - last) // by), 0)
    _room([count], LARGEST)
    return start + step * torch.arange(count, device=start.device).to(start.dtype)


def _concatenate(node: OnnxNode, *tensors: Tensor) -> Tensor:
    _room([sum(tensor.numel() for tensor in tensors)])
    return torch.cat(tensors, _axis(node["axis"], tensors[0].dim()))


def _split(node: OnnxNode, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis, parts = _axis(node["axis"], x.dim()), len(node.outputs)
    lengths = _optional(node, "split", sizes)
    if lengths is None:
        most = -(-x.shape[axis] // parts)
        lengths = [max(min(most, x.shape[axis] - i * most), 0) for i in range(parts)]
        if node.opset < 18 and len(set(lengths)) > 1:
            raise ValueError(f"{x.shape[axis]} do not divide into {parts} equal parts")
    if sum(lengths) != x.shape[axis] or min(lengths) < 0:
        raise ValueError(f"{x.shape[axis]} do not divide into {lengths}")
    return tuple(torch.split(x, lengths, axis))


def _slice(node: OnnxNode, x: Tensor, *inputs: Tensor | None) -> Tensor:
    names = ("starts", "ends", "axes", "steps")
    given = (*inputs, None, None, None, None)  # before opset 10 all are attributes
    starts, ends, axes, steps = (_optional(node, name, given[i]) for i, name in enumerate(names))
    axes = _axes(range(len(starts)) if axes is None else axes, x.dim())
    steps = [1] * len(axes) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ValueError("it has different numbers of starts, ends, axes and steps")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if step < 0:
            if end >= 2**31 - 1:  # above the axis for some readers, its beginning for others
                raise ValueError(f"it runs backwards to {end}")
            start = max(start + size if start < 0 else start, 0)  # unlike in Python, never before the axis
        part = range(size)[slice(start, end, step)]
        if step == 1 and len(part) < size:
            x = x.narrow(axis, min(part.start, size), len(part))
        elif step != 1:
            x = x.index_select(axis, _integers(part).to(x.device))
    return x


def _pad(
    node: OnnxNode, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Any = None
) -> Tensor:
    widths = _optional(node, "pads", pads)
    chosen = _axes(range(x.dim()) if axes is None else _whole(axes), x.dim())
    if len(widths) != 2 * len(chosen):
        raise ValueError(f"{len(widths)} widths do not pad {len(chosen)} axes on both sides")
    ends = {axis: (widths[i], widths[i + len(chosen)]) for i, axis in enumerate(chosen)}
    sizes = [size + sum(ends.get(axis, (0, 0))) for axis, size in enumerate(x.shape)]
    if min(sizes, default=0) < 0:
        raise ValueError(f"{widths} cut off more than there is")
    _room((max(size, 1) for size in sizes), LARGEST)
    flat = [width for axis in reversed(range(x.dim())) for width in ends.get(axis, (0, 0))]
    return F.pad(x, flat, value=node.get("value", 0.0) if value is None else value.item())


# Entries by index


def _from_start(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


def _gather(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    axis = _axis(node["axis"], x.dim())
    if index.dim() == 0:
        return x.select(axis, int(index))
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    _room((*before, *index.shape, *after))
    found = x.index_select(axis, _from_start(index, x.shape[axis]).reshape(-1).to(x.device))
    return found if index.dim() == 1 else found.reshape(*before, *index.shape, *after)


def _gather_elements(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    axis = _axis(node["axis"], x.dim())
    return x.gather(axis, _from_start(index, x.shape[axis]).long())


def _places(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Indices along the first axes, which stand beside each other on the last axis of one tensor."""
    if not 1 <= index.shape[-1] <= x.dim():
        raise ValueError(f"{index.shape[-1]} indices do not find entries among {x.dim()} axes")
    return index.long().unbind(-1)


def _gather_nd(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    places = _places(x, index)
    _room((*index.shape[:-1], *x.shape[index.shape[-1] :]))
    return x[places]


def _scatter_elements(node: OnnxNode, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis = _axis(node["axis"], x.dim())
    places = _from_start(index, x.shape[axis]).long()
    return (x.scatter_add if node.get("reduction") == "add" else x.scatter)(axis, places, updates)


def _scatter_nd(node: OnnxNode, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    return torch.index_put(x, _places(x, index), updates, accumulate=node.get("reduction") == "add")


def _triangle(node: OnnxNode, x: Tensor, diagonal: Tensor | None = None) -> Tensor:
    k = 0 if diagonal is None else int(diagonal)
    return x.triu(k) if node["upper"] else x.tril(k)


# Windows


@dataclass(frozen=True)
class _Windows:
    """How a kernel moves over the last axes, which are padded before and after."""

    sizes: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    fit: bool
    """Whether the last window ends where the padded input does, on every axis."""

    @property
    def own(self) -> bool:
        """Whether the pools of torch pad like this themselves: evenly, and by half of a window at most."""
        return self.before == self.after and all(2 * w <= k for w, k in zip(self.before, self.sizes, strict=True))

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        ends = reversed(list(zip(self.before, self.after, strict=True)))
        return F.pad(x, [width for pair in ends for width in pair], value=value)


def _windows(node: OnnxNode, x: Tensor, kernel: Sequence[int]) -> _Windows:
    sizes, dims = list(x.shape[2:]), len(kernel)
    strides, dilations = (list(node.get(name) or [1] * dims) for name in ("strides", "dilations"))
    if not 1 <= dims <= 3 or {len(sizes), len(strides), len(dilations)} != {dims}:
        raise ValueError(f"a window of sizes {list(kernel)} does not move over an input of shape {tuple(x.shape)}")
    if min(*kernel, *strides, *dilations) < 1:
        raise ValueError("sizes, strides and dilations of windows are at least 1")
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    before, after = _widths(node, sizes, strides, spans)
    if min(*before, *after) < 0 or {len(before), len(after)} != {dims}:
        raise ValueError(f"{before} and {after} are no widths to pad {dims} axes")
    full = [sum(widths) for widths in zip(before, sizes, after, strict=True)]
    _room((*x.shape[:2], *full), max(LARGEST, 4 * x.numel()))
    rest = [size - span for size, span in zip(full, spans, strict=True)]
    if min(rest) < 0:  # torch would search for it until the end of time
        raise ValueError(f"a window of sizes {spans} is larger than the padded input of {full}")
    fit = all(left % stride == 0 for left, stride in zip(rest, strides, strict=True))
    return _Windows(list(kernel), strides, dilations, before, after, fit)


def _widths(node: OnnxNode, sizes: list[int], strides: list[int], spans: list[int]) -> tuple[list[int], list[int]]:
    if node["auto_pad"] == "NOTSET" and node.get("pads"):
        pads = list(node["pads"])
        return pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if not node["auto_pad"].startswith("SAME"):
        return [0] * len(sizes), [0] * len(sizes)
    if set(node.get("dilations") or [1]) != {1}:
        raise ValueError(f"dilations are not read together with auto_pad = {node['auto_pad']}")
    steps = zip(sizes, strides, spans, strict=True)
    total = [(-(-size // stride) - 1) * stride + span - size for size, stride, span in steps]
    if node.operation == "Conv":  # a pool with strides longer than its windows is refused: readers differ
        total = [max(width, 0) for width in total]
    less = [width // 2 for width in total]
    more = [width - half for width, half in zip(total, less, strict=True)]
    return (less, more) if node["auto_pad"] == "SAME_UPPER" else (more, less)


def _conv(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = list(weight.shape[2:])
    if node.get("kernel_shape", kernel) != kernel:
        raise ValueError(f"its kernel has sizes {kernel}, not {node['kernel_shape']}")
    windows = _windows(node, x, kernel)
    x, pads = (x, windows.before) if windows.before == windows.after else (windows.padded(x), [0] * len(kernel))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    return convolve(x, weight, bias, windows.strides, pads, windows.dilations, node["group"])


def _pool_windows(node: OnnxNode, x: Tensor) -> tuple[_Windows, bool]:
    """The windows of a pool, and whether one that sticks out of the padded input counts."""
    windows = _windows(node, x, node["kernel_shape"])
    beyond = bool(node.get("ceil_mode")) and not windows.fit
    if beyond and not windows.own:
        raise ValueError("ceil_mode is not read together with padding that differs between the sides or is wide")
    return windows, beyond


def _max_pool(node: OnnxNode, x: Tensor) -> Tensor:
    windows, beyond = _pool_windows(node, x)
    x, pads = (x, windows.before) if windows.own else (windows.padded(x, -math.inf), [0] * len(windows.sizes))
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(windows.sizes) - 1]
    return pool(x, windows.sizes, windows.strides, pads, windows.dilations, ceil_mode=beyond)


def _average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    windows, beyond = _pool_windows(node, x)
    if set(windows.dilations) != {1}:
        raise ValueError("a mean over dilated windows is not read")
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(windows.sizes) - 1]
    counted = bool(node["count_include_pad"])
    if windows.own:
        return pool(x, windows.sizes, windows.strides, windows.before, beyond, counted)
    mean = pool(windows.padded(x), windows.sizes, windows.strides)
    if counted:
        return mean
    inside = windows.padded(torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device))
    return mean / pool(inside, windows.sizes, windows.strides)


def _over_places(function: Callable[..., Tensor]) -> Operation:
    return lambda node, x: function(x, dim=list(range(2, x.dim())), keepdim=True)


# Normalisation


def _layer_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[_axis(node["axis"], x.dim()) :]
    if scale.shape == shape and (bias is None or bias.shape == shape):
        return F.layer_norm(x, shape, scale, bias, node["epsilon"])
    scaled = F.layer_norm(x, shape, None, None, node["epsilon"]) * scale
    return scaled if bias is None else scaled + bias


def _batch_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, bias, training=False, momentum=0.0, eps=node["epsilon"])


def _instance_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=node["epsilon"])


def _group_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = node["num_groups"]
    if node.opset < 21 and groups > 0:  # then they are one number for each group
        scale, bias = (each.repeat_interleave(x.shape[1] // groups) for each in (scale, bias))
    return F.group_norm(x, groups, scale, bias, node["epsilon"])


def _like(node: OnnxNode, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


OPERATIONS: dict[str, Operation] = {
    **{name: _each(getattr(torch, name.lower())) for name in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "IsNaN")},
    **{name: _each(getattr(torch, name.lower())) for name in ("Log", "Neg", "Reciprocal", "Round", "Sigmoid", "Sign")},
    **{name: _each(getattr(torch, name.lower())) for name in ("Sin", "Sqrt", "Tanh")},
    "Not": _each(torch.logical_not),
    "Identity": _each(lambda x: x),
    "Relu": _each(F.relu),
    "Softsign": _each(F.softsign),
    "HardSwish": _each(F.hardswish),
    "LeakyRelu": _shaped(F.leaky_relu, "alpha"),
    "Elu": _shaped(F.elu, "alpha"),
    "Celu": _shaped(F.celu, "alpha"),
    "Selu": _shaped(lambda x, alpha, gamma: gamma * F.elu(x, alpha), "alpha", "gamma"),
    "HardSigmoid": _shaped(lambda x, slope, offset: (slope * x + offset).clamp(0, 1), "alpha", "beta"),
    "PRelu": _pair(lambda x, slope: torch.where(x < 0, slope * x, x)),
    "Softplus": _softplus,
    "Gelu": _gelu,
    "Clip": _clip,
    "Dropout": _dropout,
    "Cast": _like,
    "CastLike": _like,
    "Add": _pair(torch.add),
    "Sub": _pair(torch.sub),
    "Mul": _pair(torch.mul),
    "Div": _pair(_divide),
    "Pow": _power,
    "Mod": lambda node, a, b: _pair(torch.fmod if node["fmod"] else torch.remainder)(node, a, b),
    "Min": _several(torch.minimum),
    "Max": _several(torch.maximum),
    "Sum": _several(torch.add),
    "Equal": _pair(torch.eq),
    "Less": _pair(torch.lt),
    "LessOrEqual": _pair(torch.le),
    "Greater": _pair(torch.gt),
    "GreaterOrEqual": _pair(torch.ge),
    "And": _pair(torch.logical_and),
    "Or": _pair(torch.logical_or),
    "Xor": _pair(torch.logical_xor),
    "Where": _where,
    "Softmax": _soft(F.softmax),
    "LogSoftmax": _soft(F.log_softmax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype)),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: x.square().sum(axes, keep, dtype=x.dtype)),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMin": _reduction(torch.amin),
    "ReduceProd": _reduction(_product),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(axes, keep, dtype=x.dtype)),
    "ReduceL2": _reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceLogSumExp": _reduction(torch.logsumexp),
    "ArgMax": _arg_max,
    "CumSum": _cumulated,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Shape": _shape,
    "Size": lambda node, x: _integers(x.numel()),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": _tile,
    "ConstantOfShape": _filled,
    "Range": _range,
    "Concat": _concatenate,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Trilu": _triangle,
    "Conv": _conv,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _over_places(torch.mean),
    "GlobalMaxPool": _over_places(torch.amax),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
}
"""Name in ONNX → what computes it."""
ONLY: dict[tuple[str, str], tuple[object, ...]] = {
    ("ArgMax", "select_last_index"): (0,),
    ("BatchNormalization", "training_mode"): (0,),
    ("Conv", "auto_pad"): ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    ("MaxPool", "auto_pad"): ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    ("AveragePool", "auto_pad"): ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    ("Gelu", "approximate"): ("none", "tanh"),
    ("GatherND", "batch_dims"): (0,),
    ("LayerNormalization", "stash_type"): (1,),
    ("Pad", "mode"): ("constant",),
    # Applied to no axes, onnxruntime takes the absolute value in some of these and nothing in others.
    ("ReduceL1", "noop_with_empty_axes"): (0,),
    ("ReduceL2", "noop_with_empty_axes"): (0,),
    ("ReduceSumSquare", "noop_with_empty_axes"): (0,),
    ("ScatterElements", "reduction"): ("none", "add"),
    ("ScatterND", "reduction"): ("none", "add"),
}
"""(name, attribute) → the values that are read, where there are others."""
SEVERAL = {"Split": LARGEST, "Dropout": 2}
"""Operations that may give more than one value → how many."""
