"""What a search is asked for, checked: one sentence for every question that has no answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.validation import check_finite, check_tensor, memory
from howsmooth.attention import AttentionMap, map_of
from howsmooth.errors import InvalidInput
from howsmooth.search.single_head import one_head
from howsmooth.search.witness_files import plain_json
from howsmooth.sets import Everywhere, InputSet, Tokens
from howsmooth.sets.near_sets import Over, as_set

_NORMS: dict[float | str, float] = {2: 2, "2": 2, math.inf: math.inf, "inf": math.inf}
Progress = Callable[[int, int, float], None]
_CONSTRUCTIONS = 12
"""More starts than theorems have ever given."""
_RESOLUTION = 1e-3
"""Rounding of logits above which weights, and with them every number of the search, mean nothing."""


class Question:
    """What `howsmooth.worst_case` was asked, checked, or one sentence on why it has no answer; nothing is searched yet.

    Attributes:
        f: the map itself, of one head when a head was asked for.
        over: the set. n, d: number of tokens and their width.
        given: inputs to set out from, as they were given.
        starts: how many more are drawn. constructions: whether the theorems' own are among them.
        norm, head, steps, seconds, seed, save, source, progress: as asked.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Any],
        n: int | None,
        over: Over | None,
        start: Tensor | Sequence[Tensor] | None,
        norm: float | str,
        head: int | None,
        starts: int,
        constructions: bool,
        steps: int,
        seconds: float | None,
        seed: int,
        save: str | os.PathLike[str] | None,
        source: Mapping[str, Any] | None,
        progress: Progress | None,
    ):
        if norm not in _NORMS:
            raise InvalidInput(f"norm={norm!r} cannot be searched: choose 2 or inf.")
        plain_json(source or {}, "source")
        self.norm, self.head, self.source, self.progress = _NORMS[norm], head, dict(source or {}), progress
        self.save = None if save is None else Path(save)
        self.starts, self.constructions = starts, constructions
        self.steps, self.seconds, self.seed = steps, seconds, seed
        self.over, self.given = as_set(over), _given(start)
        self.n = _length(self.over, self.given, n)
        self.f = map_of(f, self.n) or f
        if isinstance(self.f, AttentionMap):
            self.f = self.f if head is None else one_head(self.f, head)
            _check_map(self.f, self.over)
        elif head is not None:
            raise InvalidInput(f"head={head} needs an attention map with heads, got {type(self.f).__name__}.")
        self.d = _width(self.f, self.over, self.given, self.n)
        self.over.check(self.n, self.d)
        if not (self.given or starts or constructions):
            raise InvalidInput("there is nothing to set out from: ask for starts, or allow constructions.")
        _check_memory(self)
        if isinstance(self.f, AttentionMap):
            self.f.terms.check(self.n, self.f.heads, 1)
            if not isinstance(self.over, Everywhere):
                check_resolution(self.f, self.over.random(torch.Generator().manual_seed(0), self.n, self.d))


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
            f"this {attention.kind} attention has no Lipschitz constant on all inputs: give a set such as Ball(1.0)."
        )


def _given(start: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if start is None:
        return ()
    given = (start,) if isinstance(start, Tensor) else tuple(start)
    for x in given:
        check_tensor(x, "the start", dims=(1, 2), floating=False)
    return given


def _length(region: InputSet, given: tuple[Tensor, ...], n: int | None) -> int:
    """n, from whoever knows it."""
    if n is None:
        n = region.length if region.length is not None else len(given[0]) if given else None
    if n is None:
        raise InvalidInput("how many tokens? Give n, a start, or a set that knows it.")
    return n


def _width(f: object, region: InputSet, given: tuple[Tensor, ...], n: int) -> int:
    """d, from whoever knows it."""
    d = getattr(f, "in_features", None)
    d = d if isinstance(d, int) else region.width
    if isinstance(region, Tokens) and d is None:
        d = region.sequence(torch.zeros(n, dtype=torch.long)).shape[-1]
    if d is None and given and given[0].dim() == 2:
        d = given[0].shape[1]
    if d is None:
        raise InvalidInput("how wide are tokens? Give a start, or a set that knows it: Ball(1.0, width=d).")
    return d


def _check_memory(asked: Question) -> None:
    """Refuse what cannot fit: the tokens of all starts, their projections, and the bases of the last measurement."""
    n, starts = asked.n, asked.starts + len(asked.given) + _CONSTRUCTIONS
    numbers = n * asked.d * (20 * starts + 100)
    if isinstance(asked.f, AttentionMap):
        widths = 2 * asked.f.query_weight.shape[1] + asked.f.value_weight.shape[1]
        numbers += 16 * starts * n * asked.f.heads * widths
    needed, there = 8 * numbers, memory()
    if needed > there / 2:
        raise InvalidInput(
            f"{n} tokens from {starts} starts need about {min(needed, 2**1000) / 2**30:.3g} GiB, more than half of the "
            f"{there / 2**30:.3g} GiB of this machine: ask for fewer tokens or starts."
        )
