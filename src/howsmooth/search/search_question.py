"""The question of a search, checked: one sentence for every question that has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_finite, check_tensor, memory
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.errors import InvalidInput
from howsmooth.search.witness import plain_json
from howsmooth.sets import Everywhere, InputSet, Tokens
from howsmooth.sets.near_sets import Over, as_set

_NORMS: dict[float | str, float] = {2: 2, "2": 2, math.inf: math.inf, "inf": math.inf}
Progress = Callable[[int, int, float], None]
_CONSTRUCTIONS = 12
"""More starts than theorems have ever given."""
_RESOLUTION = 1e-3
"""Rounding of logits above which weights, and with them every number of the search, mean nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """A checked question of `howsmooth.worst_case`, with its options; no start is drawn yet.

    Attributes:
        f: the map, of one head when a head was requested; an attention map in float64, converted once.
        over: the set. n, d: number of tokens and their width. norm: 2 or inf.
        given: the inputs of ``start``. save: the path of the file of the best witness.
    """

    f: Callable[[Tensor], Any]
    over: InputSet
    n: int
    d: int
    norm: float
    given: tuple[Tensor, ...] = ()
    head: int | None = None
    starts: int = 8
    constructions: bool = True
    steps: int = 200
    seconds: float | None = None
    seed: int = 0
    save: Path | None = None
    source: dict[str, Any] = field(default_factory=dict)
    progress: Progress | None = None

    @classmethod
    def of(
        cls, f: Callable[[Tensor], Any], n: int | None, over: Over | None, norm: float | str = 2, **options: Any
    ) -> Question:
        """The question, or one sentence on why it has no answer."""
        if norm not in _NORMS:
            raise InvalidInput(f"norm={norm!r} cannot be searched: choose 2 or inf.")
        region, given, head = as_set(over), options.get("given", ()), options.get("head")
        plain_json(options.get("source", {}), "source")
        for x in given:
            check_tensor(x, "the start", dims=(1, 2), floating=False)
        n = _length(region, given, n)
        f = as_attention_map(f, n, kind=nn.Module) or f
        if isinstance(f, AttentionMap):
            f = (f if head is None else f.head(head)).in_dtype(torch.float64)
            _check_map(f, region)
        elif head is not None:
            raise InvalidInput(f"head={head} needs an attention map with heads, got {type(f).__name__}.")
        d = _width(f, region, given, n)
        region.check(n, d)
        question = cls(f=f, over=region, n=n, d=d, norm=_NORMS[norm], **options)
        if not (given or question.starts or question.constructions):
            raise InvalidInput("there is nothing to set out from: ask for starts, or allow constructions.")
        _check_memory(question)
        if isinstance(f, AttentionMap):
            f.terms.check(n, f.heads, 1)
            if not isinstance(region, Everywhere):
                check_resolution(f, region.random(torch.Generator().manual_seed(0), n, d))
        return question


def largest_logit(f: object, x: Tensor) -> float:
    """A bound on the size of the logits of an attention map in float64 at x; 0 for other functions."""
    if not isinstance(f, AttentionMap):
        return 0.0
    with torch.no_grad():
        query, key, _ = f.staged(x.double()[None])
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


def _length(region: InputSet, given: tuple[Tensor, ...], n: int | None) -> int:
    """n, from the argument, the set or a start."""
    if n is None:
        n = region.length if region.length is not None else len(given[0]) if given else None
    if n is None:
        raise InvalidInput("how many tokens? Give n, a start, or a set that knows it.")
    return n


def _width(f: object, region: InputSet, given: tuple[Tensor, ...], n: int) -> int:
    """d, from the map, the set or a start."""
    d = getattr(f, "in_features", None)
    d = d if isinstance(d, int) else region.width
    if isinstance(region, Tokens) and d is None:
        d = region.sequence(torch.zeros(n, dtype=torch.long)).shape[-1]
    if d is None and given and given[0].dim() == 2:
        d = given[0].shape[1]
    if d is None:
        raise InvalidInput("how wide are tokens? Give a start, or a set that knows it: Ball(1.0, width=d).")
    return d


def _check_memory(question: Question) -> None:
    """Refuse what cannot fit: the tokens of all starts, their projections, and the bases of the last measurement."""
    n, starts = question.n, question.starts + len(question.given) + _CONSTRUCTIONS
    numbers = n * question.d * (20 * starts + 100)
    if isinstance(question.f, AttentionMap):
        widths = 2 * question.f.query_weight.shape[1] + question.f.value_weight.shape[1]
        numbers += 16 * starts * n * question.f.heads * widths
    needed, there = 8 * numbers, memory()
    if needed > there / 2:
        raise InvalidInput(
            f"{n} tokens from {starts} starts need about {min(needed, 2**1000) / 2**30:.3g} GiB, more than half of the "
            f"{there / 2**30:.3g} GiB of this machine: ask for fewer tokens or starts."
        )
