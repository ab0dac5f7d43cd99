"""Rules of operations that only move numbers about: views, slices, concatenation, masks, writes, windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth.network.reading import RULES, Form, Reading, Rule, is_constant, rule
from howsmooth.network.values import Entries, Term, common_value


def _moving(name: str, function: Callable[..., Any] | None = None) -> None:
    function = function or getattr(torch.ops.aten, name)

    def move(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
        if not isinstance(x, Entries):
            return x.moved(name, *args) if hasattr(x, "moved") else None
        kwargs.pop("memory_format", None)
        like = torch.empty(x.shape, device="meta")
        result = function(like, *args, **kwargs)
        if isinstance(result, Tensor):
            return x.moved(lambda tensor: function(tensor, *args, **kwargs))
        return [x.moved(lambda tensor, i=i: function(tensor, *args, **kwargs)[i]) for i in range(len(result))]  # type: ignore[misc]

    RULES[name] = move


for _name in (
    *("permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "unbind", "split", "chunk"),
    *("split_with_sizes", "unsafe_split", "flip", "roll", "repeat", "index_select", "narrow", "diagonal", "unfold"),
    *("movedim", "alias", "swapaxes", "pixel_shuffle", "tensor_split", "gather", "repeat_interleave", "expand_as"),
):
    _moving(_name)
for _name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
    _moving(_name, lambda tensor, size, *rest: tensor.reshape(size))
for _name in ("clone", "contiguous", "lift_fresh"):
    _moving(_name, lambda tensor: tensor)


@rule("index")
def _index(reading: Reading, x: Form, indices: Sequence[Any]) -> Form:
    if not isinstance(x, Entries) or not all(one is None or isinstance(one, Tensor) for one in indices):
        return None
    return x.moved(lambda tensor: torch.ops.aten.index(tensor, indices))


@rule("_to_copy", "to")
def _cast(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
    dtype = kwargs.get("dtype")
    return x if dtype is None or dtype.is_floating_point else None


@rule("cat", "concat")
def _cat(reading: Reading, tensors: Sequence[Form], dim: int = 0) -> Form:
    if any(hasattr(one, "beside") for one in tensors):
        return next(one for one in tensors if hasattr(one, "beside")).beside(tensors, dim)
    joined = joined_entries(tensors, lambda parts: torch.cat(parts, dim))
    return solid(reading, joined) if isinstance(joined, Entries) else None


def solid(reading: Reading, x: Entries) -> Entries:
    """A tensor with places that hold nothing but constants, such as a class token, as a value of its own."""
    if not x.terms:
        return x
    present = x.terms[0].index >= 0
    for term in x.terms[1:]:
        present = present | (term.index >= 0)
    if bool(present.all()):
        return x
    return reading.whole(reading.values.tokens(x, reading.place), x.shape)


@rule("stack")
def _stack(reading: Reading, tensors: Sequence[Form], dim: int = 0) -> Form:
    return joined_entries(tensors, lambda parts: torch.stack(parts, dim))


def joined_entries(tensors: Sequence[Form], join: Callable[[list[Tensor]], Tensor]) -> Form:
    """Tensors one beside the other: terms of one tensor are absent in the places of the others."""
    known: list[Entries] = []
    for one in tensors:
        if isinstance(one, Tensor):
            one = Entries(one.shape, (), one)
        if not isinstance(one, Entries):
            return None
        known.append(one)
    known = [one for one in known if one.shape.numel() or len(one.shape) > 1]
    total: Entries | None = None
    for place, one in enumerate(known):
        if not one.shape.numel():
            continue

        def spread(tensor: Tensor, fill: float, place: int = place) -> Tensor:
            parts = [tensor.new_full(other.shape, fill) for other in known]
            parts[place] = tensor
            return join(parts)

        terms = tuple(
            Term(t.base, spread(t.index, -1), None if t.factor is None else spread(t.factor, 0.0)) for t in one.terms
        )
        constant = None if one.constant is None else spread(one.constant, 0.0)
        shape = join([torch.empty(other.shape, device="meta") for other in known]).shape
        piece = Entries(shape, terms, constant)
        total = piece if total is None else total.plus(piece)
    return total


@rule("constant_pad_nd")
def padded(reading: Reading, x: Form, pad: Sequence[int], value: float = 0.0) -> Form:
    if not isinstance(x, Entries):
        return None
    terms = tuple(
        Term(
            t.base, functional.pad(t.index, pad, value=-1), None if t.factor is None else functional.pad(t.factor, pad)
        )
        for t in x.terms
    )
    known = torch.zeros(x.shape) if x.constant is None else x.constant
    constant = None if x.constant is None and value == 0 else functional.pad(known, pad, value=value)
    shape = functional.pad(torch.empty(x.shape, device="meta"), pad).shape
    return Entries(shape, terms, constant)


@rule("where")
def _where(reading: Reading, condition: Form, one: Form, other: Form) -> Form:
    if not isinstance(condition, Tensor):
        return None
    for form, constant, keep in ((one, other, condition), (other, one, ~condition)):
        if hasattr(form, "kept") and is_constant(constant):
            return form.kept(keep, constant)
    here, there = _kept(one, condition), _kept(other, ~condition)
    return None if here is None or there is None else here.plus(there)


@rule("masked_fill")
def _masked_fill(reading: Reading, x: Form, mask: Form, value: Any) -> Form:
    return _where(reading, mask, value, x) if isinstance(mask, Tensor) else None


@rule("index_put")
def _index_put(reading: Reading, x: Form, indices: Sequence[Any], value: Form, accumulate: bool = False) -> Form:
    if accumulate or not all(one is None or isinstance(one, Tensor) for one in indices) or not is_constant(value):
        return None
    alike = common_value(value) if isinstance(value, Tensor) else float(value)
    mask = torch.zeros(x.shape, dtype=torch.bool)
    torch.ops.aten.index_put_(mask, indices, torch.tensor(True))
    return None if alike is None else _where(reading, mask, alike, x)


def _kept(x: Form, keep: Tensor) -> Entries | None:
    """A tensor at some places, zero elsewhere."""
    if is_constant(x):
        return Entries(keep.shape, (), torch.where(keep, torch.as_tensor(x), torch.zeros(())))
    if not isinstance(x, Entries):
        return None
    shape = torch.broadcast_shapes(x.shape, keep.shape)
    known, keep = x.expanded(shape), keep.expand(shape)
    terms = tuple(Term(t.base, torch.where(keep, t.index, -1), t.factor) for t in known.terms)
    constant = None if known.constant is None else torch.where(keep, known.constant, 0.0)
    return Entries(shape, terms, constant)


@rule("zeros_like", "new_zeros", "empty_like", "new_empty")
def _zeros(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
    shape = args[0] if args else x.shape
    return Entries(torch.Size(shape), (), torch.zeros(shape))


@rule("ones_like", "new_ones")
def _ones(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
    shape = args[0] if args else x.shape
    return Entries(torch.Size(shape), (), torch.ones(shape))


@rule("full_like", "new_full")
def _full(reading: Reading, x: Form, *args: Any, **kwargs: Any) -> Form:
    shape, value = (x.shape, args[0]) if len(args) == 1 else args[:2]
    return Entries(torch.Size(shape), (), torch.full(tuple(shape), value))


@rule("im2col")
def _im2col(
    reading: Reading, x: Form, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Any
) -> Form:
    if not isinstance(x, Entries) or len(x.shape) != 4 or x.shape[0] != 1:
        return None
    whole = with_border(reading, x, padding)
    return whole.moved(lambda t: windows(t[0], kernel, stride, dilation).flatten(0, 1).mT[None])


def with_border(reading: Reading, x: Entries, padding: Sequence[int]) -> Entries:
    """The tensor with zeros around its last axes."""
    return padded(reading, x, [pad for one in reversed(padding) for pad in (one, one)]) if any(padding) else x


def windows(tensor: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Windows of ``(channels, places…)`` as ``(places…, channels · kernel)``."""
    axes = len(kernel)
    for axis, size in enumerate(kernel):
        tensor = tensor.unfold(1 + axis, (size - 1) * dilation[axis] + 1, stride[axis])[..., :: dilation[axis]]
    return tensor.movedim(0, axes).flatten(axes)


@rule("copy")
def _copy(reading: Reading, x: Form, source: Form, non_blocking: bool = False) -> Form:
    return source.expanded(x.shape) if isinstance(source, Entries) else Entries(x.shape, (), source.expand(x.shape))


def _scattering(name: str) -> Rule:
    function = getattr(torch.ops.aten, name)

    def scatter(reading: Reading, x: Form, source: Form, *place: Any) -> Form:
        base, part = (Entries(one.shape, (), one) if isinstance(one, Tensor) else one for one in (x, source))
        if not isinstance(base, Entries) or not isinstance(part, Entries):
            return None
        put = lambda tensor, fill: function(tensor.new_full(base.shape, fill), tensor.contiguous(), *place)  # noqa: E731
        written = put(torch.ones(part.shape, dtype=torch.bool), False)
        terms = tuple(
            Term(t.base, put(t.index, -1), None if t.factor is None else put(t.factor, 0.0)) for t in part.terms
        )
        constant = None if part.constant is None else put(part.constant, 0.0)
        rest = _kept(base, ~written)
        return None if rest is None else rest.plus(Entries(base.shape, terms, constant))

    return scatter


RULES["slice_scatter"], RULES["select_scatter"] = _scattering("slice_scatter"), _scattering("select_scatter")


@rule("native_dropout")
def _dropout(reading: Reading, x: Form, p: float, train: bool | None) -> Form:
    return [x, None]


@rule("dropout")
def _plain_dropout(reading: Reading, x: Form, p: float, train: bool) -> Form:
    return None if train else x


@rule("view_as_complex")
def _complex(reading: Reading, x: Form) -> Form:
    from howsmooth.network.attention_forms import ComplexEntries

    if not isinstance(x, Entries):
        return None
    return ComplexEntries(x.moved(lambda t: t[..., 0]), x.moved(lambda t: t[..., 1]))


@rule("view_as_real")
def _real(reading: Reading, x: Form) -> Form:
    from howsmooth.network.attention_forms import ComplexEntries

    if not isinstance(x, ComplexEntries):
        return None
    return joined_entries([x.real, x.imaginary], lambda parts: torch.stack(parts, -1))
