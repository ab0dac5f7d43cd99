"""The values that a network computes between its operations: tokens made from tokens, and tensors of their entries.

A `Value` is a matrix of tokens, ``(rows, width)``, and knows how it was made from other values. A tensor of a
recording is `Entries`: each of its numbers is a sum of numbers of values, times factors, plus a constant. All that
only moves numbers about (views, transposes, slices, concatenation, repeated heads) happens to the positions of these
numbers, by the same operation of torch that moved the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.attention.stages import TokenStage
from howsmooth.jacobians.tokenwise import Affine, Diagonal, Norm

WIDEST_FOLD = 4096
"""Widest tokens for which a sum of linear maps becomes one matrix."""


@dataclass(frozen=True)
class Given:
    """The input of the network."""


@dataclass(frozen=True)
class Staged:
    """A stage on every token of one value."""

    stage: TokenStage


@dataclass(frozen=True)
class Attended:
    """Attention on the tokens of one value."""

    attention: AttentionMap | ComposedAttention


@dataclass(frozen=True)
class AttendedApart:
    """Attention on queries, keys and values made apart, which stand side by side as the tokens of ``attention``."""

    attention: AttentionMap | ComposedAttention


@dataclass(frozen=True)
class Combined:
    """Sums of entries of several values: factor · value.flat[index] of each (−1: nothing), plus a constant."""

    indices: tuple[Tensor, ...]
    factors: tuple[Tensor | None, ...]
    constant: Tensor | None


@dataclass(frozen=True)
class Mixed:
    """A matrix times one value: every token a sum of tokens."""

    matrix: Tensor


@dataclass(frozen=True)
class Multiplied:
    """The entries of two values, multiplied."""


@dataclass(frozen=True)
class Unknown:
    """An operation that is no part of the list, on the entries of its values."""

    operation: str
    function: Callable[..., Tensor]


Made = Given | Staged | Attended | AttendedApart | Combined | Mixed | Multiplied | Unknown


@dataclass(frozen=True, eq=False)
class Value:
    """Tokens ``(rows, width)``, how they were made from the parents, where, and as which in order."""

    rows: int
    width: int
    made: Made
    parents: tuple[Value, ...]
    place: str
    order: int

    @property
    def stage(self) -> TokenStage | None:
        """The stage that made it, if one did."""
        return self.made.stage if isinstance(self.made, Staged) else None


@dataclass(frozen=True)
class Term:
    """Numbers of one value: index into it (−1 for none) and factors, both of the shape of the tensor."""

    base: Value
    index: Tensor
    factor: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the term is there at every place."""
        return self.index.numel() == 0 or bool(self.index.min() >= 0)

    @property
    def scale(self) -> float | None:
        """The one factor that all its numbers have; None where they differ."""
        return 1.0 if self.factor is None else common_value(self.factor)

    def channels(self, rows: int) -> Tensor | None:
        """The channel of each column, where row r holds numbers of token r only, the same of every token."""
        if self.base.rows != rows or not self.index.numel():
            return None
        index = self.index.reshape(rows, -1)
        channels = index[0]
        if bool(channels.min() < 0) or bool(channels.max() >= self.base.width):
            return None
        expected = channels + self.base.width * torch.arange(rows)[:, None]
        return channels if torch.equal(index, expected) else None


@dataclass(frozen=True)
class Entries:
    """A tensor whose numbers are sums of numbers of values."""

    shape: torch.Size
    terms: tuple[Term, ...]
    constant: Tensor | None = None

    @classmethod
    def of(cls, value: Value, shape: Sequence[int]) -> Entries:
        """A whole value in another shape."""
        return cls(torch.Size(shape), (Term(value, torch.arange(value.rows * value.width).reshape(shape)),))

    @property
    def plain(self) -> Term | None:
        """The only term, where the tensor holds numbers of one value and nothing else."""
        if self.constant is None and len(self.terms) == 1 and self.terms[0].factor is None and self.terms[0].complete:
            return self.terms[0]
        return None

    def moved(self, move: Callable[[Tensor], Tensor], fill: float | None = None) -> Entries:
        """The tensor after an operation that only moves numbers about; ``fill``: of places that it adds."""
        terms = tuple(
            Term(term.base, _moved_index(move, term.index), None if term.factor is None else move(term.factor))
            for term in self.terms
        )
        constant = None if self.constant is None else move(self.constant)
        shape = terms[0].index.shape if terms else constant.shape if constant is not None else self.shape
        return Entries(shape, tuple(t for t in terms if t.index.numel()), constant)

    def plus(self, other: Entries) -> Entries:
        """The sum of two tensors."""
        shape = torch.broadcast_shapes(self.shape, other.shape)
        one, two = self.expanded(shape), other.expanded(shape)
        constants = [c for c in (one.constant, two.constant) if c is not None]
        constant = constants[0] if len(constants) == 1 else constants[0] + constants[1] if constants else None
        return Entries(shape, _merged((*one.terms, *two.terms)), constant)

    def shifted(self, constant: Tensor | float) -> Entries:
        """The tensor plus a constant."""
        shape = self.shape if not isinstance(constant, Tensor) else torch.broadcast_shapes(self.shape, constant.shape)
        known = self.expanded(shape)
        constant = as_constant(constant)
        own = constant if known.constant is None else known.constant + constant
        return replace(known, constant=own.expand(shape))

    def scaled(self, factor: Tensor | float) -> Entries:
        """The tensor times a constant."""
        if isinstance(factor, float | int) and factor == 1:
            return self
        factor = as_constant(factor)
        shape = torch.broadcast_shapes(self.shape, factor.shape)
        known, factor = self.expanded(shape), factor.expand(shape)
        terms = tuple(
            replace(term, factor=factor if term.factor is None else _product(term.factor, factor))
            for term in known.terms
        )
        constant = None if known.constant is None else _product(known.constant, factor)
        return Entries(shape, terms, constant)

    def expanded(self, shape: Sequence[int]) -> Entries:
        """The tensor, broadcast to a shape."""
        return self if self.shape == torch.Size(shape) else self.moved(lambda tensor: tensor.expand(shape))


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The product of two factors in the wider of their dtypes."""
    return one * other.to(torch.promote_types(one.dtype, other.dtype))


def _moved_index(move: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
    return move(index)


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of one value as one, where they take the same numbers or stand at different places."""
    merged: list[Term] = []
    for term in terms:
        for place, known in enumerate(merged):
            joined = _joined(known, term) if known.base is term.base else None
            if joined is not None:
                merged[place] = joined
                break
        else:
            merged.append(term)
    return tuple(merged)


def _joined(one: Term, other: Term) -> Term | None:
    ones = torch.ones(())
    if torch.equal(one.index, other.index):
        factors = [ones if t.factor is None else t.factor for t in (one, other)]
        return replace(one, factor=(factors[0] + factors[1]).expand(one.index.shape))
    present = one.index >= 0
    if bool((present & (other.index >= 0)).any()):
        return None
    index = torch.where(present, one.index, other.index)
    if one.factor is None and other.factor is None:
        return Term(one.base, index)
    mine, its = (ones if t.factor is None else t.factor for t in (one, other))
    return Term(one.base, index, torch.where(present, mine, its))


def as_constant(number: Tensor | float) -> Tensor:
    """A tensor as it is; a number in float64."""
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


def common_value(numbers: Tensor) -> float | None:
    """The number that all entries of a tensor equal; None where they differ, or are weights that autograd follows."""
    if not numbers.numel() or numbers.requires_grad:
        return None
    first = numbers.reshape(-1)[0] if numbers.dim() else numbers
    return float(first) if bool((numbers == first).all()) else None


def common_row(numbers: Tensor) -> Tensor | None:
    """The entry that a tensor holds at every place of its first axis; None where they differ.

    Where autograd follows it, equal numbers may be several weights, unless they are the same in memory.
    """
    if numbers.requires_grad and len(numbers) > 1 and numbers.stride(0) != 0:
        return None
    return numbers[0] if bool((numbers.detach() == numbers.detach()[:1]).all()) else None


@dataclass
class Values:
    """All values of one reading; equal steps from equal values give the same value.

    Attributes:
        every: in order of making.
    """

    every: list[Value] = field(default_factory=list)
    _known: dict[tuple[Any, ...], list[Value]] = field(default_factory=dict)

    def make(self, rows: int, width: int, made: Made, parents: Sequence[Value], place: str) -> Value:
        """A value, or the one that was made in the same way before."""
        known = self._known.setdefault((type(made), rows, width, *(id(parent) for parent in parents)), [])
        for value in known:
            if _same(value.made, made):
                return value
        value = Value(rows, width, made, tuple(parents), place, len(self.every))
        self.every.append(value)
        known.append(value)
        return value

    def staged(self, stage: TokenStage, parent: Value, width: int, place: str) -> Value:
        """A stage on every token of a value."""
        return self.make(parent.rows, width, Staged(stage), (parent,), place)

    def tokens(self, entries: Entries, place: str, rows: int | None = None) -> Value:
        """The tensor as tokens along its last axis, or in a number of rows."""
        width = entries.shape[-1] if entries.shape else 1
        if rows is None:
            rows = entries.shape.numel() // max(width, 1)
        width = entries.shape.numel() // rows
        plain = entries.plain
        if plain is not None:
            base, flat = plain.base, plain.index.reshape(-1)
            if (base.rows, base.width) == (rows, width) and torch.equal(flat, torch.arange(len(flat))):
                return base
        if len(entries.terms) > 1:
            entries = self._in_rows(entries, rows, width, place)
        channels = [term.channels(rows) for term in entries.terms]
        if entries.terms and all(one is not None for one in channels):
            found = self._tokenwise(entries, [one for one in channels if one is not None], rows, width, place)
            if found is not None:
                return found
        indices = tuple(term.index.reshape(rows, width) for term in entries.terms)
        factors = tuple(None if t.factor is None else t.factor.reshape(rows, width) for t in entries.terms)
        constant = None if entries.constant is None else entries.constant.reshape(rows, width)
        parents = [term.base for term in entries.terms]
        return self.make(rows, width, Combined(indices, factors, constant), parents, place)

    def _in_rows(self, entries: Entries, rows: int, width: int, place: str) -> Entries:
        """The same sum with terms in rows of their own, where another term is made of them: heads less their mean."""
        roots = {id(parent) for term in entries.terms for parent in term.base.parents}
        terms = []
        for term in entries.terms:
            if term.base.rows != rows and term.complete:
                alone = self.tokens(Entries(entries.shape, (Term(term.base, term.index),)), place, rows)
                if id(alone) in roots:
                    term = Term(alone, torch.arange(rows * width).reshape(entries.shape), term.factor)
            terms.append(term)
        return replace(entries, terms=tuple(terms))

    def _tokenwise(
        self, entries: Entries, channels: Sequence[Tensor], rows: int, width: int, place: str
    ) -> Value | None:
        """The tensor as a stage on the tokens of one value, where it is one: its rows hold tokens, all alike."""
        terms, constant = entries.terms, entries.constant
        factors = [None if t.factor is None else common_row(t.factor.reshape(rows, width)) for t in terms]
        shift = None if constant is None else common_row(constant.reshape(rows, width))
        if any(t.factor is not None and f is None for t, f in zip(terms, factors, strict=True)):
            return None
        if constant is not None and shift is None:
            return None
        if len(terms) == 1:
            return self._one_term(terms[0].base, channels[0], factors[0], shift, place)
        return self._folded(entries, channels, factors, shift, place)

    def _one_term(
        self, base: Value, channels: Tensor, factor: Tensor | None, shift: Tensor | None, place: str
    ) -> Value | None:
        whole = torch.equal(channels, torch.arange(base.width))
        if isinstance(base.stage, Affine):
            stage = _chosen_rows(base.stage, channels, whole, factor, shift)
            return self.staged(stage, base.parents[0], len(channels), base.place)
        if whole and isinstance(base.stage, Norm) and (factor is not None or shift is not None):
            return self.staged(base.stage.followed_by(factor, shift), base.parents[0], base.width, base.place)
        if whole:
            gain = 1.0 if factor is None else factor
            return self.staged(Diagonal(gain, shift), base, base.width, place)
        return None

    def _folded(
        self,
        entries: Entries,
        channels: Sequence[Tensor],
        factors: Sequence[Tensor | None],
        shift: Tensor | None,
        place: str,
    ) -> Value | None:
        """One linear map for a sum of linear maps of the same tokens, such as x less its mean."""
        linear = [term.base for term in entries.terms if isinstance(term.base.stage, Affine)]
        roots = {id(base.parents[0]): base.parents[0] for base in linear}
        if len(roots) != 1:
            return None
        (root,) = roots.values()
        if any(term.base is not root and term.base not in linear for term in entries.terms):
            return None
        if root.width > WIDEST_FOLD or any(base.width == root.width for base in linear):
            return None  # x + W x stays a residual
        total: Any = 0
        bias = shift
        dtype = next(base.stage.weight.dtype for base in linear if isinstance(base.stage, Affine))
        for term, chosen, factor in zip(entries.terms, channels, factors, strict=True):
            scale = torch.ones(()) if factor is None else factor[:, None]
            if term.base is root:
                total = total + torch.eye(root.width, dtype=dtype)[chosen] * scale
                continue
            stage = term.base.stage
            assert isinstance(stage, Affine)
            total = total + stage.weight[chosen] * scale
            if stage.bias is not None:
                own = stage.bias[chosen] * scale.squeeze(-1)
                bias = own if bias is None else bias + own
        return self.staged(Affine(total, bias), root, len(total), place)

    def affine(self, entries: Entries, weight: Tensor, bias: Tensor | None, place: str) -> Value:
        """W x + b of the tokens along the last axis; a choice of channels becomes one of columns of W."""
        rows, plain = entries.shape.numel() // entries.shape[-1], entries.plain
        channels = None if plain is None else plain.channels(rows)
        if plain is not None and channels is not None and not isinstance(plain.base.stage, Affine):
            base = plain.base
            ordered = torch.equal(channels, torch.arange(base.width))
            if ordered or (len(channels) == base.width and len(channels.unique()) == base.width):
                columns = weight if ordered else weight[:, channels.argsort()]
                return self.staged(Affine(columns, bias), base, len(weight), place)
        return self.staged(Affine(weight, bias), self.tokens(entries, place), len(weight), place)


def _chosen_rows(stage: Affine, channels: Tensor, whole: bool, factor: Tensor | None, shift: Tensor | None) -> Affine:
    """The linear map to some of its outputs, times a factor, plus a shift; a range of rows is a view."""
    weight, bias = stage.weight, stage.bias
    if not whole:
        first, last = int(channels[0]), int(channels[-1]) + 1
        ranged = torch.equal(channels, torch.arange(first, last))
        weight = weight[first:last] if ranged else weight[channels]
        bias = None if bias is None else bias[first:last] if ranged else bias[channels]
    if factor is not None:
        scale = factor.to(weight.dtype)
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    if shift is not None:
        shift = shift.to(weight.dtype)
        bias = shift if bias is None else bias + shift
    return Affine(weight, bias)


def _same(one: Made, other: Made) -> bool:
    """Whether two values of the same parents are made in the same way."""
    match one, other:
        case Staged(a), Staged(b):
            return a is b or (type(a) is type(b) and _same_fields(vars(a), vars(b)))
        case Combined(), Combined():
            return _same_fields(vars(one), vars(other))
        case Mixed(a), Mixed(b):
            return a is b or (a.shape == b.shape and torch.equal(a, b))
        case Multiplied(), Multiplied():
            return True
        case Given(), Given():
            return True
    return False


def _same_fields(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        if both and (one.requires_grad or other.requires_grad) and one.data_ptr() != other.data_ptr():
            return False  # equal as they are, and not for autograd
        return one is other or (
            both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_fields(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same_fields, one, other))
    return bool(one is other or one == other)
