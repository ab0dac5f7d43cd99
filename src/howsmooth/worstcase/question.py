"""What a search is asked for, checked: one sentence for every question that has no answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, map_of
from howsmooth.checks import check_callable, check_finite, check_tensor
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.checks import check_tokens
from howsmooth.sets import Embeddings, Everywhere, InputSet, TokenSet, as_set
from howsmooth.worstcase.one_head import one_head
from howsmooth.worstcase.sequences import sequence_starts
from howsmooth.worstcase.starts import Start, constructions, random_starts

_NORMS: dict[float | str, float] = {2: 2, "2": 2, math.inf: math.inf, "inf": math.inf}
_RESOLUTION = 1e-3
"""Rounding of logits above which weights, and with them every number of the search, mean nothing."""


@dataclass(frozen=True)
class Question:
    """A checked question; ``f`` is the map itself, of one head when a head was asked for."""

    f: Callable[[Tensor], Any]
    over: InputSet
    starts: list[Start]
    norm: float
    head: int | None
    steps: int
    seconds: float | None
    seed: int
    notes: tuple[str, ...]


def asked(
    f: Callable[[Tensor], Any],
    n: int | None,
    radius: float | None,
    over: InputSet | TokenSet | nn.Module | None,
    start: Tensor | Sequence[Tensor] | None,
    norm: float | str,
    head: int | None,
    starts: int,
    with_constructions: bool,
    steps: int,
    seconds: float | None,
    seed: int,
) -> Question:
    """The arguments of `howsmooth.worst_case` as a question."""
    if norm not in _NORMS:
        raise InvalidInput(f"norm={norm!r} cannot be searched: choose 2 or inf.")
    for name, count in (("starts", starts), ("steps", steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidInput(f"{name} must be a whole number, not negative, got {count!r}.")
    if seconds is not None and not seconds > 0:
        raise InvalidInput(f"seconds must be positive, got {seconds}.")
    region = as_set(over, radius)
    given = _given(start)
    n = _length(region, given, n)
    f = map_of(check_callable(f, "f"), n) or f
    attention = f if isinstance(f, AttentionMap) else None
    if attention is not None:
        f = attention = attention if head is None else one_head(attention, head)
        _check_map(attention, region)
    elif head is not None:
        raise InvalidInput(f"head={head} needs an attention map with heads, got {type(f).__name__}.")
    d = _width(f, region, given, n)
    region.check(n, d)
    count = starts + len(given) + 12
    _check_memory(attention, n, d, count)
    if attention is not None:
        attention.terms.check(n, attention.heads, 1)
        if not isinstance(region, Everywhere):
            check_resolution(attention, region.random(torch.Generator().manual_seed(0), n, d))
    chosen, notes = _own_starts(given, region, n, d)
    if isinstance(region, Embeddings):
        chosen += sequence_starts(attention if with_constructions else None, region, n, starts, seed)
    else:
        if with_constructions:
            chosen += constructions(f, region, n, d)
        chosen += random_starts(f, region, n, d, starts, seed)
    if not chosen:
        raise InvalidInput("there is nothing to set out from: ask for starts, or allow constructions.")
    if attention is not None:
        for s in chosen:
            check_resolution(attention, region.sequence(s.x) if isinstance(region, Embeddings) else s.x)
    return Question(f, region, chosen, _NORMS[norm], head, steps, seconds, seed, notes)


def largest_logit(f: object, x: Tensor) -> float:
    """A bound on the size of the logits of an attention map at x; 0 for other functions."""
    if not isinstance(f, AttentionMap):
        return 0.0
    with torch.no_grad():
        query, key, _ = f.in_dtype(torch.float64)._heads(x.double()[None])
    return float((query.norm(dim=-1).amax(-1) * key.norm(dim=-1).amax(-1)).max())


def resolved(f: object, x: Tensor) -> bool:
    """Whether float64 resolves differences of logits well below one at x.

    Where it does not, computed weights are those of some other input, and a search would climb rounding errors.
    """
    return largest_logit(f, x) * torch.finfo(torch.float64).eps <= _RESOLUTION


def check_resolution(f: object, x: Tensor) -> None:
    """Refuse inputs that are not `resolved`."""
    if not resolved(f, x):
        raise InvalidInput(
            f"logits of this set reach {largest_logit(f, x):.1e}, where float64 cannot resolve differences of order "
            "one: choose a smaller radius."
        )


def _check_map(attention: AttentionMap, region: InputSet) -> None:
    for name, buffer in attention.named_buffers():
        if buffer.is_floating_point() and not name.startswith("logit_biases"):
            check_finite(buffer, f"the weight {name}")
    lipschitz = attention.kind == "cosine" or (attention.kind == "l2" and getattr(attention, "tied", False))
    if isinstance(region, Everywhere) and not lipschitz:
        raise InvalidInput(
            f"this {attention.kind} attention has no Lipschitz constant on all inputs: give a radius, or a set (over)."
        )


def _given(start: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if start is None:
        return []
    given = [start] if isinstance(start, Tensor) else list(start)
    for x in given:
        check_tensor(x, "the start", dims=(1, 2), floating=False)
    return given


def _length(region: InputSet, given: list[Tensor], n: int | None) -> int:
    """n, from whoever knows it."""
    if n is None:
        n = region.length if region.length is not None else len(given[0]) if given else None
    if n is None:
        raise InvalidInput("how many tokens? Give n, a start, or a set that knows it.")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInput(f"n must be a whole number of tokens, at least 1, got {n!r}.")
    return n


def _width(f: object, region: InputSet, given: list[Tensor], n: int) -> int:
    """d, from whoever knows it."""
    d = getattr(f, "in_features", None)
    d = d if isinstance(d, int) else region.width
    if isinstance(region, Embeddings) and d is None:
        d = region.sequence(torch.zeros(n, dtype=torch.long)).shape[-1]
    if d is None and given and given[0].dim() == 2:
        d = given[0].shape[1]
    if d is None:
        raise InvalidInput("how wide are tokens? Give a start, or a set that knows it: Ball(1.0, width=d).")
    return d


def _own_starts(given: list[Tensor], region: InputSet, n: int, d: int) -> tuple[list[Start], tuple[str, ...]]:
    found, notes = [], []
    for i, x in enumerate(given):
        name = "given" if len(given) == 1 else f"given {i}"
        if isinstance(region, Embeddings):
            found.append(Start(name, _ids(x, region, n)))
            continue
        check_tokens(x, "the start")
        if x.shape != (n, d):
            raise InvalidInput(f"a start must have shape ({n}, {d}), got {tuple(x.shape)}.")
        x = x.detach().double().cpu().clone()
        outside = region.excess(x)
        if outside > 1e-9 * max(1.0, float(x.norm(dim=-1).max())):
            name = f"{name}, brought into the set"
            notes.append(f"a token of the start {name.split(',')[0]!r} lay {outside:.3g} outside the set")
        found.append(Start(name, region.project_(x)))
    return found, tuple(notes)


def _ids(ids: Tensor, region: Embeddings, n: int) -> Tensor:
    if ids.shape != (n,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidInput(f"a start among embeddings is a vector of {n} token ids, got shape {tuple(ids.shape)}.")
    if not bool(((ids >= 0) & (ids < len(region.matrix))).all()):
        raise InvalidInput(f"token ids must lie between 0 and {len(region.matrix) - 1}.")
    return ids.detach().long().cpu()


def _check_memory(attention: AttentionMap | None, n: int, d: int, starts: int) -> None:
    """Refuse what cannot fit: the tokens of all starts, their projections, and the bases of the last measurement."""
    numbers = n * d * (20 * starts + 100)
    if attention is not None:
        widths = 2 * attention.query_weight.shape[1] + attention.value_weight.shape[1]
        numbers += 16 * starts * n * attention.heads * widths
    needed, there = 8 * numbers, _memory()
    if needed > there / 2:
        raise InvalidInput(
            f"{n} tokens from {starts} starts need about {needed / 2**30:.3g} GiB, more than half of the "
            f"{there / 2**30:.3g} GiB of this machine: ask for fewer tokens or starts."
        )


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**33
