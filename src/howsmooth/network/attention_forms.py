"""Attention among the operations: logits, weights and their product with the values, in whatever way it is spelled.

A product of two tensors that both depend on the input is taken for logits (`HeadLogits`); what may happen to logits on
their way to the weights (a scale, a mask, a bias, a soft-cap, learned sinks) is noted. Behind the softmax they are
`Weights`, and the product with a third tensor is attention: queries, keys and values are followed back through
rotations, normalisations and projections to the tokens that they have in common. Anything else that happens to logits
makes them what they are spelled as, a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.jacobians.tokenwise import Softmax
from howsmooth.network.attention_maps import HIDDEN, attended
from howsmooth.network.reading import Form, Reading, is_constant, rule
from howsmooth.network.values import Attended, Entries, common_value

Spelled = Callable[[], Entries]


@dataclass(frozen=True)
class ComplexEntries:
    """Complex numbers by real and imaginary part, as rotations are often written."""

    real: Entries
    imaginary: Entries
    spelled: Spelled | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the complex tensor."""
        return self.real.shape

    def moved(self, name: str, *args: Any) -> ComplexEntries | None:
        """A view of the complex tensor."""
        function = torch.reshape if name in ("view", "_unsafe_view") else getattr(torch.ops.aten, name)
        real, imaginary = (part.moved(lambda t: function(t, *args)) for part in (self.real, self.imaginary))
        return ComplexEntries(real, imaginary)

    def scaled(self, factor: Tensor | float) -> ComplexEntries:
        """The product with complex constants."""
        turn = torch.as_tensor(factor)
        cos, sin = (turn.real, turn.imag) if turn.is_complex() else (turn, torch.zeros(()))
        return ComplexEntries(
            self.real.scaled(cos).plus(self.imaginary.scaled(-sin)),
            self.real.scaled(sin).plus(self.imaginary.scaled(cos)),
        )


_VIEWS = ("view", "_unsafe_view", "reshape")
_UNCHANGED = ("clone", "contiguous", "alias", "lift_fresh")


@dataclass(frozen=True)
class HeadLogits:
    """HeadLogits q·k, or with ``weighting`` the weights made of them.

    Attributes:
        query, key: ``(heads, n, k)`` and ``(heads, m, k)``.
        shape, axes: of the tensor, and what each of its axes counts: "h" heads, "q" queries, "k" keys, "1" nothing.
        spelled: the product as what it is, for what is no attention after all.
        scale: of the logits, one for each head or for all. softcap: as in `AttentionMap`. bias: ``(heads or 1, n, m)``.
        sink: a logit of each head beside those of the keys. capped: tanh has been taken, its factor is still to come.
        weighting: whether the softmax has been taken. with_sink: whether the sink still stands behind the keys.
    """

    query: Entries
    key: Entries
    shape: torch.Size
    axes: str
    spelled: Spelled | None = None
    scale: Tensor | float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    capped: bool = False
    weighting: bool = False
    with_sink: bool = False

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.query.shape[0]

    def moved(self, name: str, *args: Any) -> HeadLogits | None:
        """A view; None for one that takes rows and columns apart."""
        if name in _UNCHANGED:
            return self
        if name not in (*_VIEWS, "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select"):
            return None
        like = torch.empty(self.shape, device="meta")
        function = torch.reshape if name in _VIEWS else getattr(torch.ops.aten, name)
        shape, rank = function(like, *args).shape, len(self.shape)
        if name == "slice":
            return self._without_sink(shape, *args) if shape != self.shape else self
        if name in ("permute", "transpose", "t"):
            order = list(args[0]) if name == "permute" else _swapped(list(range(rank)), *(args or (0, 1)))
            return replace(self, shape=shape, axes="".join(self.axes[axis] for axis in order))
        axes = _viewed(self.shape, self.axes, shape)
        return None if axes is None else replace(self, shape=shape, axes=axes)

    def _without_sink(self, shape: torch.Size, dim: int = 0, start: int | None = None, *rest: Any) -> HeadLogits | None:
        """The weights without that of the sink behind them."""
        dim %= len(shape)
        last = shape[dim] == self.shape[dim] - 1 and not start
        if not (last and self.axes[dim] == "k" and self.with_sink and self.weighting):
            return None
        return replace(self, shape=shape, with_sink=False)

    def scaled(self, factor: Tensor | float) -> HeadLogits | None:
        """HeadLogits times a constant, of all or of each head."""
        own = self._per_head(factor)
        if self.weighting or self.sink is not None or own is None:
            return None
        if self.bias is not None:
            each = own[:, None, None] if isinstance(own, Tensor) else own
            positive = bool((torch.as_tensor(own) > 0).all()) and self.softcap is None
            return replace(self, scale=self.scale * own, bias=self.bias * each) if positive else None
        if self.capped:
            cap = common_value(own) if isinstance(own, Tensor) else own
            if cap is None or cap <= 0:
                return None
            return replace(self, scale=self.scale * cap, softcap=cap, capped=False)
        return None if self.softcap is not None else replace(self, scale=self.scale * own)

    def _per_head(self, factor: Tensor | float) -> Tensor | float | None:
        if not isinstance(factor, Tensor):
            return float(factor)
        alike = common_value(factor)
        if alike is not None:
            return alike
        table = self._as_heads(factor)
        if table is None or not bool((table.detach() == table.detach()[:, :1, :1]).all()):
            return None
        return table[:, 0, 0]

    def added(self, constant: Form, sign: float, first: bool) -> HeadLogits | None:
        """HeadLogits plus a constant, or less their own maximum."""
        if isinstance(constant, RowMaximum):
            same = _same_logits(constant.of, self) and sign < 0 and first
            return self if same else None
        if self.weighting or self.capped or not is_constant(constant) or not (first or sign > 0):
            return None
        own = self._as_heads(torch.as_tensor(constant))
        if own is None:
            return None
        own = sign * own
        return replace(self, bias=own if self.bias is None else self.bias + own)

    def _as_heads(self, constant: Tensor) -> Tensor | None:
        """A constant of the shape of the tensor as ``(heads or 1, n, m)``."""
        rank = len(self.shape)
        if (
            constant.dim() > rank
            or self.axes.count("q") != 1
            or torch.broadcast_shapes(self.shape, constant.shape) != self.shape
        ):
            return None
        constant = constant[(None,) * (rank - constant.dim())]
        order = [i for i, axis in enumerate(self.axes) if axis in "h1"] + [self.axes.index("q"), self.axes.index("k")]
        constant, sizes = constant.permute(order), [self.shape[i] for i in order]
        leading = sizes[:-2] if any(size > 1 for size in constant.shape[:-2]) else [1] * (rank - 2)
        return constant.expand(*leading, *sizes[-2:]).reshape(-1, *sizes[-2:])

    def kept(self, keep: Tensor, constant: Any) -> HeadLogits | None:
        """HeadLogits where ``keep`` says so, a very small constant elsewhere."""
        alike = common_value(torch.as_tensor(constant))
        if bool(keep.all()):
            return self
        if self.weighting or self.capped or alike is None or alike > HIDDEN:
            return None
        return self.added(torch.zeros(keep.shape).masked_fill(~keep, float("-inf")), 1.0, True)

    def bent(self, name: str) -> HeadLogits | None:
        """HeadLogits through tanh."""
        plain = self.bias is None and self.softcap is None and not self.capped and not self.weighting
        return replace(self, capped=True) if name == "tanh" and plain else None

    def beside(self, tensors: Sequence[Form], dim: int) -> HeadLogits | None:
        """HeadLogits with a constant column behind them: a learned sink."""
        if len(tensors) != 2 or tensors[0] is not self or self.weighting or self.sink is not None:
            return None
        column, rank = tensors[1], len(self.shape)
        if not isinstance(column, Tensor) or self.axes[dim % rank] != "k" or column.shape[dim % rank] != 1:
            return None
        each = replace(self, shape=torch.Size([*self.shape[: dim % rank], 1, *self.shape[dim % rank + 1 :]]))
        table = each._as_heads(column)
        if table is None or not bool((table.detach() == table.detach()[:, :1]).all()):
            return None
        shape = [size + (i == dim % rank) for i, size in enumerate(self.shape)]
        sink = table[:, 0, 0].expand(self.heads)
        return replace(self, sink=sink, shape=torch.Size(shape), with_sink=True)

    def softmax(self, dim: int) -> HeadLogits | None:
        """The weights, where the softmax runs over the keys."""
        if self.weighting or self.axes[dim % len(self.axes)] != "k":
            return None
        return replace(self, softcap=1.0 if self.capped else self.softcap, capped=False, weighting=True)

    def times(self, reading: Reading, values: Form) -> Entries | None:
        """Weights times values: attention."""
        values = Entries(values.shape, (), values) if isinstance(values, Tensor) else values
        if not self.weighting or self.with_sink or not isinstance(values, Entries):
            return None
        if self.axes not in ("hqk", "1qk") or len(values.shape) != 3 or values.shape[0] != self.heads:
            return None
        return attended(reading, self, values)


def _viewed(old: Sequence[int], axes: str, new: Sequence[int]) -> str | None:
    """The axes of a view by what they count; None where it takes keys apart, or joins them with others.

    >>> _viewed((6, 5, 5), "hqk", (1, 2, 3, 5, 5)), _viewed((2, 5, 5), "hqk", (2, 25))
    ('1hhqk', None)
    """
    runs: list[list[Any]] = []
    for axis, size in zip(axes, old, strict=True):
        if axis not in "qk" and size == 1:
            continue
        if runs and runs[-1][0] == axis and axis != "k":
            runs[-1][1] *= size
        else:
            runs.append([axis, size])
    found = ""
    for size in new:
        while runs and runs[0][1] == 1 and size != 1 and found[-1:] == runs[0][0]:
            runs.pop(0)
        if size == 1 and not (runs and runs[0][1] == 1):
            found += "1"
            continue
        if not runs or runs[0][1] % size or (runs[0][0] == "k" and runs[0][1] != size):
            return None
        found += runs[0][0]
        runs[0][1] //= size
        if runs[0][1] == 1:
            runs.pop(0)
    return None if any(size > 1 for _, size in runs) else found


def _swapped(order: list[int], one: int, other: int) -> list[int]:
    order[one], order[other] = order[other], order[one]
    return order


def _same_logits(one: HeadLogits, other: HeadLogits) -> bool:
    fields = ("query", "key", "shape", "axes", "scale", "softcap", "bias", "sink", "capped", "weighting")
    return all(getattr(one, name) is getattr(other, name) or name in ("scale",) for name in fields)


@dataclass(frozen=True)
class RowMaximum:
    """The largest logit of every query, which is taken off all of them before a softmax."""

    of: HeadLogits
    spelled: Spelled | None = None


FORMS = (HeadLogits, ComplexEntries, RowMaximum)
"""The forms of a tensor besides `Entries`; each knows the entries that it is when its form does not help."""


def scores_of(reading: Reading, query: Entries, key: Entries) -> HeadLogits:
    """The product of ``(heads, n, k)`` and ``(heads, k, m)``, taken for logits."""
    shape = torch.Size((*query.shape[:2], key.shape[2]))
    return HeadLogits(query, key.moved(lambda t: t.mT), shape, "hqk")


@rule("_softmax", "_safe_softmax", "softmax")
def _softmax(reading: Reading, x: Form, dim: int, *rest: Any) -> Form:
    if isinstance(x, HeadLogits):
        return x.softmax(dim)
    if not isinstance(x, Entries) or not x.shape:
        return None
    last = x.moved(lambda t: t.movedim(dim, -1))
    tokens = reading.values.tokens(last, reading.place)
    value = reading.values.staged(Softmax(), tokens, tokens.width, reading.place)
    return reading.whole(value, last.shape).moved(lambda t: t.movedim(-1, dim))


@rule("isnan", "isinf")
def _isnan(reading: Reading, x: Form) -> Form:
    """False: of finite inputs, at which networks are read and asked about."""
    return Entries(x.shape, (), torch.zeros(x.shape, dtype=torch.bool))


@rule("amax")
def _amax(reading: Reading, x: Form, dims: Any = (), keepdim: bool = False) -> Form:
    return _maximum(x, dims, keepdim)


@rule("max")
def _max(reading: Reading, x: Form, dim: Any = None, keepdim: bool = False) -> Form:
    found = _maximum(x, [dim], keepdim)
    return None if found is None else [found, None]


def _maximum(x: Form, dims: Any, keepdim: bool) -> Form:
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    over_keys = isinstance(x, HeadLogits) and len(axes) == 1 and x.axes[axes[0] % len(x.axes)] == "k" and keepdim
    return RowMaximum(x) if over_keys else None


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)
def _fused(
    reading: Reading,
    query: Form,
    key: Form,
    value: Form,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Form = None,
    scale: float | None = None,
    **kwargs: Any,
) -> Form:
    sides = [Entries(one.shape, (), one) if isinstance(one, Tensor) else one for one in (query, key, value)]
    if dropout or not all(isinstance(one, Entries) and len(one.shape) == 4 and one.shape[0] == 1 for one in sides):
        return None
    query, key, value = sides
    heads, n, k = query.shape[1:]
    each = [one.moved(lambda t: t[0].repeat_interleave(heads // t.shape[1], 0)) for one in sides]
    scores: Any = scores_of(reading, each[0], each[1].moved(lambda t: t.mT)).scaled(k**-0.5 if scale is None else scale)
    if is_causal:
        m = key.shape[2]
        scores = scores.kept(torch.ones(n, m, dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            return None
        mask = attn_mask[0] if attn_mask.dim() == 4 and len(attn_mask) == 1 else attn_mask
        scores = scores.kept(mask, float("-inf")) if mask.dtype == torch.bool else scores.added(mask, 1.0, True)
    if scores is None:
        return None
    result = scores.softmax(-1).times(reading, each[2])
    return None if result is None else [result.moved(lambda t: t[None]), None]


def offered_form(reading: Reading, module: object, x: Entries, place: str, shape: torch.Size) -> Entries | None:
    """The output of a module that offers its own attention map; None where the map is not of these tokens."""
    from howsmooth.attention.attention_map import MapModule
    from howsmooth.attention.conversion import as_attention_map

    tokens = reading.values.tokens(x, place)
    attached = getattr(module, "attached_map", None)
    attention = attached(None, tokens.rows) if callable(attached) and torch.is_grad_enabled() else None
    attention = attention or as_attention_map(module, tokens.rows, kind=MapModule)
    if attention is None or attention.in_features != tokens.width:
        return None
    if shape.numel() != tokens.rows * attention.out_features:
        return None
    value = reading.values.make(tokens.rows, attention.out_features, Attended(attention), (tokens,), place)  # type: ignore[arg-type]
    return reading.whole(value, shape)
