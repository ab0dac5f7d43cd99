r"""The question of a search, checked, and the inputs where it sets out: constructions of theorems, and random ones.

Plain Gaussian inputs lead to poor optima: the roughest inputs have few distinct tokens, one of them alone against all
others, along directions that the weights single out. So the random starts are of four kinds in turn: independent
directions, a few clusters, tokens in the plane of leading directions of the weights, and directions nearer the centre.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import random_stream
from howsmooth._util.validation import check_finite, check_tensor, memory
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.bounds import get
from howsmooth.bounds.l2_bounds import tight_input
from howsmooth.bounds.lower_bounds import real_eigenpairs, two_cluster_input
from howsmooth.bounds.question_setting import Setting, query_key, value_matrices
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.norms.small_matrices import spectral
from howsmooth.search.witness import plain_json
from howsmooth.sets import Ball, Everywhere, InputSet, Tokens
from howsmooth.sets.ellipsoid import Ellipsoid
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
        sizes = [size for size in (n, region.length, *map(len, given)) if size is not None]
        if not sizes:
            raise InvalidInput("how many tokens? Give n, a start, or a set that knows it.")
        n = sizes[0]
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


_MOST_HEADS = 3
"""Heads of a block whose constructions are tried: those with the largest lower bounds, all only of the first."""
KINDS = ("directions", "clusters", "leading plane", "nearer the centre")


@dataclass(frozen=True)
class Start:
    """An input to set out from, ``(n, d)``; ``exact`` ones are not drawn at random, and are tried as they are."""

    name: str
    x: Tensor
    exact: bool = True


def starts_for(question: Question) -> tuple[list[Start], tuple[str, ...]]:
    """Where to set out from: inputs given, the theorems' own and random ones, and what is to be noted about them."""
    f, over, n, d = question.f, question.over, question.n, question.d
    starts, notes = _given(question)
    if isinstance(over, Tokens):
        attention = f if question.constructions and isinstance(f, AttentionMap) else None
        starts += _sequences(attention, over, n, question.starts, question.seed)
    else:
        if question.constructions:
            starts += constructions(f, over, n, d)
        starts += random_starts(f, over, n, d, question.starts, question.seed)
    for start in starts:
        check_resolution(f, over.sequence(start.x) if isinstance(over, Tokens) else start.x)
    return starts, notes


def _given(question: Question) -> tuple[list[Start], tuple[str, ...]]:
    starts, notes, over = [], [], question.over
    for i, x in enumerate(question.given):
        name = "given" if len(question.given) == 1 else f"given {i}"
        if isinstance(over, Tokens):
            starts.append(Start(name, _ids(x, over, question.n)))
            continue
        check_tokens(x, "the start")
        if x.shape != (question.n, question.d):
            raise InvalidInput(f"a start must have shape ({question.n}, {question.d}), got {tuple(x.shape)}.")
        x = x.detach().double().cpu().clone()
        outside = over.excess(x)
        if outside > 1e-9 * max(1.0, float(x.norm(dim=-1).max())):
            notes.append(f"a token of the start {name!r} lay {outside:.3g} outside the set")
            name = f"{name}, brought into the set"
        starts.append(Start(name, over.project_(x)))
    return starts, tuple(notes)


def _ids(ids: Tensor, region: Tokens, n: int) -> Tensor:
    if ids.shape != (n,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidInput(f"a start among embeddings is a vector of {n} token ids, got shape {tuple(ids.shape)}.")
    if not ((ids >= 0) & (ids < len(region.matrix))).all():
        raise InvalidInput(f"token ids must lie between 0 and {len(region.matrix) - 1}.")
    return ids.detach().long().cpu()


def constructions(f: object, over: InputSet, n: int, d: int) -> list[Start]:
    """The theorems' inputs for this map, brought into the set.

    Two clusters (`lower_bounds`): one token at −Ru and the others at Ru, or one at Ru and the others at Ru/2,
    u a real eigenvector of A (Castin et al. 2024), and the best pair and scale of this project's bound. One token in
    the middle of two clusters at ±Ru (Kim et al. 2021). Two poles (`two_poles`). For L2 attention the input that is
    tight in the ∞-norm. All tokens equal, where ‖J‖ ≥ ‖V‖. In a neighbourhood its centre.
    """
    if over.x is not None and over.centre is not None:
        return [Start("the centre", over.centre.clone())]
    z = torch.zeros(n, over.rank(d), dtype=torch.float64)
    z[:, 0] = over.body == "sphere"
    starts = [Start("equal tokens", over.at(z))]
    if isinstance(f, AttentionMap) and n > 1:
        tokens = over.ellipsoid(d)
        if f.kind == "l2":
            starts += _l2(f, n)
        elif tokens is not None:
            starts += _two_clusters(f, tokens, n)
    return [Start(start.name, over.project_(start.x)) for start in starts]


def _two_clusters(attention: AttentionMap, tokens: Ellipsoid, n: int) -> Iterator[Start]:
    values = get("howsmooth.two_cluster").evaluate(Setting(attention, n, tokens), True)
    eigenvalues, eigenvectors = real_eigenpairs(attention)
    order = values.argsort(descending=True)[:_MOST_HEADS].tolist()
    for head in order:
        of = f", head {head}" if attention.heads > 1 else ""
        yield Start(f"two clusters, best scale{of}", two_cluster_input(attention, tokens, n, head))
        if n > 2:
            yield Start(f"two poles{of}", two_poles(attention, tokens, n, head))
        if head != order[0]:
            continue
        real = eigenvalues[head]
        if not real.isnan().all():
            for sign, near, name in ((-1.0, -1.0, "−γ branch"), (1.0, 0.5, "γ/8 branch")):
                u = tokens.radius * eigenvectors[head, int((sign * real).nan_to_num(nan=-math.inf).argmax())]
                outlier, others = (u, near * u) if sign > 0 else (near * u, u)
                yield Start(f"two clusters, {name}{of}", torch.stack([outlier] + [others] * (n - 1)))
        yield Start(f"one between two clusters{of}", _between(attention, tokens, n, head))


def _between(attention: AttentionMap, tokens: Ellipsoid, n: int, head: int) -> Tensor:
    """The last token in the centre, half of the others on either side of it along the top direction of A."""
    query, key, _ = query_key(attention)
    u, _ = _top_pair(key[head] @ tokens.axes, query[head] @ tokens.axes)
    z = torch.zeros(n, len(u), dtype=torch.float64)
    z[: n - 1] = u
    z[: (n - 1) // 2] = -u
    return tokens.at(z)


def two_poles(attention: AttentionMap, tokens: Ellipsoid, n: int, head: int = 0) -> Tensor:
    r"""Two tokens far apart that all others look at alike, ``(n, d)``: rougher than two clusters by a factor like a.

    In coordinates z of the set, the others stand where they push hardest, :math:`w = \|A\|R\,l` with a unit vector l,
    and the poles at :math:`\alpha l \pm \beta e`, :math:`\alpha^2 + \beta^2 = 1`, with e orthogonal to l, so that both
    have the logit they need to outweigh the others, and no more. With weight p on each pole, moving them apart along l
    moves every other output by :math:`V(x_1 - x_2)`, so that on the ball

    .. math:: \|J\| \ge \sqrt{2(n-2)}\;p\,\beta\,|Ve|\,\|A\|R^2 \to \sqrt{n/2}\;|Ve|\,\|A\|R^2,

    against :math:`\|V\|\sqrt n` for two clusters whose outlier has all the weight.
    """
    query, key, bias = (t[head] for t in query_key(attention))
    side = key @ tokens.axes  # w in coordinates is sideᵀ(Q x_o + b_q)
    _, opposite = _top_pair(side, query @ tokens.axes)
    pushes = [(tokens.reach * side.mT @ (query @ tokens.at(z) + bias), z) for z in (opposite, -opposite)]
    push, others = max(pushes, key=lambda pair: float(pair[0].norm()))
    along = push / push.norm().clamp(min=1e-300)
    value = value_matrices(attention)[head] @ tokens.axes
    apart = torch.linalg.svd(value - (value @ along)[:, None] * along, full_matrices=False).Vh[0]
    apart = apart - along * (along @ apart)
    alpha = torch.linspace(0, 1, 101, dtype=torch.float64)
    lead = push.norm() * alpha - push @ others  # by how much the logits of the poles exceed those of the others
    weight = torch.sigmoid(lead + math.log(2 / (n - 2))) / 2
    best = alpha[(weight * (1 - alpha.square()).sqrt()).argmax()]
    middle, offset = best * along, (1 - best.square()).sqrt() * apart / apart.norm().clamp(min=1e-300)
    return tokens.at(torch.stack([middle + offset, middle - offset] + [others] * (n - 2)))


def _l2(attention: AttentionMap, n: int) -> Iterator[Start]:
    """`tight_input` along the direction in which each head's A_hW^V_hW^O_h is largest: W_hᵀx runs along W_hᵀu."""
    query = attention.query_weight.double()
    temperature = query.shape[1] ** 0.5
    top = torch.linalg.svd(value_matrices(attention), full_matrices=False)
    for head in top.S[:, 0].argsort(descending=True)[:_MOST_HEADS].tolist():
        u = top.Vh[head, 0]
        length = float((query[head] @ u).norm())
        if length > 0:
            of = f", head {head}" if attention.heads > 1 else ""
            yield Start(f"tight input{of}", tight_input(n) * temperature**0.5 / length * u)


def random_starts(f: object, over: InputSet, n: int, d: int, count: int, seed: int) -> list[Start]:
    """Random inputs of the kinds above in turn, the same for the same seed whatever the count."""
    planes = _leading_directions(f, over) if isinstance(f, AttentionMap) else None
    unit = _natural_length(f) if isinstance(over, Everywhere) else 1.0
    starts = []
    for i in range(count):
        generator = random_stream(seed, f"worst-case start {i}")
        kind = KINDS[i % len(KINDS)]
        z = _random(kind, generator, n, over.rank(d), planes)
        size = 1.0
        if kind == "nearer the centre":
            size = 10 ** (-1.5 * float(torch.rand((), generator=generator, dtype=torch.float32)))
        if isinstance(over, Everywhere):
            size *= unit * 4 ** (2 * float(torch.rand((), generator=generator, dtype=torch.float32)) - 0.5)
        if over.body == "all tokens":
            z /= z.norm()
        starts.append(Start(f"random {i}, {kind}", over.at(over.restrict_(size * z)), exact=False))
    return starts


def _sequences(attention: AttentionMap | None, over: Tokens, n: int, count: int, seed: int) -> list[Start]:
    """Token ids to set out from: the theorems' inputs rounded to the nearest embeddings, and random sequences.

    Random sequences are in turn drawn token by token, and made of one token throughout but for a rare one in front.
    """
    starts = []
    if attention is not None and over.transform is None:
        radius = float(over.matrix.norm(dim=-1).max())
        for start in constructions(attention, Ball(radius), n, over.matrix.shape[1]):
            starts.append(Start(f"{start.name}, nearest tokens", over.nearest(start.x)))
    for i in range(count):
        generator = random_stream(seed, f"worst-case sequence {i}")
        ids = torch.randint(len(over.matrix), (n,), generator=generator)
        if i % 2:
            ids[1:] = ids[-1].clone()
        starts.append(Start(f"random {i}", ids, exact=False))
    return starts


def _random(kind: str, generator: torch.Generator, n: int, rank: int, planes: Tensor | None) -> Tensor:
    """Unit vectors, ``(n, rank)``."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "clusters":
        count = 2 + int(torch.randint(3, (), generator=generator))
        shares = torch.softmax(2 * normal(count), 0)
        member = torch.multinomial(shares, n, replacement=True, generator=generator)
        member[0] = shares.argmin()  # a rare token first, where a causal mask lets everyone see it
        z = normal(count, rank)[member]
    elif kind == "leading plane" and planes is not None:
        chosen = planes[int(torch.randint(len(planes), (), generator=generator))]
        z = normal(n, chosen.shape[1]) @ chosen.mT
    else:
        z = normal(n, rank)
    return z / z.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _leading_directions(attention: AttentionMap, over: InputSet) -> Tensor:
    """For every head, in coordinates of the set, the top singular directions of A on both sides: ``(heads, r, 2)``."""
    query, key, _ = query_key(attention)
    if over.axes is not None:
        query, key = query @ over.axes, key @ over.axes
    return torch.stack(_top_pair(key, query), dim=-1)


def _top_pair(key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """The top left and right singular vectors of KᵀQ, both factors ``(…, k, r)``: starts in k dimensions, not r."""
    left, right = torch.linalg.qr(key.mT), torch.linalg.qr(query.mT)
    inner = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    return (left.Q @ inner.U)[..., 0], (right.Q @ inner.Vh.mT)[..., 0]


def _natural_length(f: object) -> float:
    """The distance that tokens move for logits to change by about one."""
    if not isinstance(f, AttentionMap):
        return 1.0
    query, key, _ = query_key(f)
    score = float(spectral(key.mT @ query).max())
    if f.kind == "l2":
        score /= f.query_weight.shape[1] ** 0.5
    return score**-0.5 if score > 0 else 1.0
