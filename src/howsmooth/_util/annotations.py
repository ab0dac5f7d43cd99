"""Annotations as checks: whether a value fits one, and the annotation in words.

Numbers, paths and arrays are judged here, because a number of numpy is one and a tensor is a sequence of numbers;
`beartype` judges everything else.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from beartype.door import is_bearable
from torch import Tensor

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    os.PathLike: "a path",
    Tensor: "a torch.Tensor",
    None: "None",
    type(None): "None",
    torch.dtype: "a dtype of torch",
    torch.device: "a device of torch",
    torch.nn.Module: "a module of torch",
}


PlainText = Annotated[str, lambda value, name: None]
"""A string argument that must not be interpreted as a path."""


class _Names(dict[str, Any]):
    """The names of a module; a name that it imports for type checkers only stands for any object."""

    def __missing__(self, name: str) -> Any:
        return object


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters, evaluated; of ``*args`` those of a tuple."""
    plain = inspect.unwrap(function)
    found = get_type_hints(plain, _Names(vars(builtins) | plain.__globals__), include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    many = {p.name: types.GenericAlias(tuple, (found[p.name], ...)) for p in parameters if p.kind is p.VAR_POSITIONAL}
    taken = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    return {name: hint for name, hint in (found | many).items() if name in taken}


def field_hints(record: type) -> dict[str, Any]:
    """The annotations of the fields of a dataclass, evaluated."""
    found = get_type_hints(record, _Names(vars(builtins) | vars(sys.modules[record.__module__])), include_extras=True)
    return {field.name: found[field.name] for field in fields(record)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the kind itself; beside a path a text is meant as one, unless it is `PlainText`."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return tuple(one for one in members if one is not str) if any(map(_is_path_kind, members)) else members


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of a kind: numbers of numpy and torch are numbers, and arrays are sequences of theirs.

    >>> fits(2, float), fits("2", float | None), fits([1, 2], Sequence[int]), fits([1, "x"], Sequence[int])
    (True, False, True, False)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(value, inner[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in alternatives(kind))
    if kind is int:
        return whole_number(value) is not None
    if kind is float:
        return plain_number(value) is not None
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if _is_path_kind(kind):
        return isinstance(value, str | os.PathLike) and _can_be_a_file(os.fspath(value))
    if origin in (list, tuple, Sequence, Iterable):
        return _holds(value, origin, inner)
    if isinstance(origin, type):
        return isinstance(value, origin)
    return is_bearable(value, kind)


def in_words(kind: Any) -> str:
    """The kind in words.

    >>> in_words(int | None), in_words(Sequence[float]), in_words(Literal["a", "b"])
    ('a whole number or None', 'a sequence of which each is a number', "'a' or 'b'")
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return in_words(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in alternatives(kind)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if (origin or kind) is Callable:
        return "a function or a module"
    if origin in (list, tuple, Sequence, Iterable):
        each = [in_words(one) for one in inner if one is not Ellipsis]
        return "a sequence" + (f" of which each is {' or '.join(each)}" if each else "")
    if (origin or kind) in (Mapping, dict):
        return "a dictionary"
    known = _WORDS.get(origin or kind)
    return known or f"a {getattr(origin or kind, '__name__', kind)}"


def _holds(value: object, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Whether a value can be iterated over and, where it is a list, whether each item fits."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    if isinstance(value, Tensor) and value.is_nested:
        return False
    if isinstance(value, Tensor | np.ndarray):
        numbers = all(one in (int, float, Any, Ellipsis) or get_origin(one) in (Annotated, Sequence) for one in inner)
        if not inner or 0 in value.shape or value.ndim == 0:
            return value.ndim > 0 and numbers
        return fits(value[0], inner[0])
    if not isinstance(value, list | tuple):
        return True
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(fits(item, one) for item, one in zip(value, inner, strict=True))
    return not inner or all(fits(item, inner[0]) for item in value)


def _is_path_kind(kind: Any) -> bool:
    return kind is Path or (get_origin(kind) or kind) is os.PathLike


def _can_be_a_file(path: str | bytes) -> bool:
    """No file system takes an empty name, a NUL in it, half a letter, or more than 255 bytes between two strokes."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return 0 < len(name) < 4096 and b"\0" not in name and max(map(len, name.split(b"/"))) <= 255


def whole_number(value: object) -> int | None:
    """The whole number that a value of whatever type is; None for anything else, True and False included."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and (value.dim() or value.is_meta)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # arrays and tensors have errors of their own
        return None


def plain_number(value: object) -> float | None:
    """A real number of Python or numpy, or a tensor of one, as a float; None for anything else."""
    if isinstance(value, Tensor):
        real = not (value.dim() or value.is_meta or value.is_complex() or value.dtype is torch.bool)
    else:
        real = isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
    try:
        return float(value) if real else None  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
