"""From queries, keys and values to an attention map: stages and projections followed back to the tokens they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from howsmooth.attention import Causal, ComposedAttention, DenseBias, LogitBias, Rotary, SelfAttention, SlidingWindow
from howsmooth.attention.cross_attention import across
from howsmooth.attention.stages import HeadNorm, RotaryTable, Scale, TokenStage, UnitNorm
from howsmooth.jacobians.tokenwise import Affine, Norm
from howsmooth.network.moves import padded
from howsmooth.network.reading import Reading
from howsmooth.network.values import Attended, AttendedApart, Combined, Entries, Term, Value

if TYPE_CHECKING:
    from howsmooth.network.attention_forms import HeadLogits

HIDDEN = -1e6
"""A logit at or below this is hidden: its weight is zero beside any other."""
_WIDEST_APART = 4096


@dataclass(frozen=True)
class Projected:
    """Queries, keys or values as stages behind a projection of tokens: ``(heads, k, d)``, its bias ``(heads, k)``."""

    weight: Tensor
    bias: Tensor | None
    stages: tuple[TokenStage, ...]
    source: Value


def attended(reading: Reading, scores: HeadLogits, values: Entries) -> Entries | None:
    """The output of the heads, ``(heads, n, v)``, as entries of one value."""
    heads, n, width = values.shape[0], scores.query.shape[1], values.shape[2]
    three = (scores.query, scores.key, values)
    sides = (
        [followed_back(reading, one) for one in three]
        if all(one.terms for one in three) and values.shape[1] == n
        else [None]
    )
    if isinstance(scores.scale, Tensor) and sides[0] and not all(stage.linear for stage in sides[0].stages):
        sides = [None]  # a scale of each head cannot move in front of a normalisation
    made = None if None in sides else _self_attention(scores, sides)  # type: ignore[arg-type]
    if made is not None:
        attention, source = made
        value = reading.values.make(n, heads * width, Attended(attention), (source,), reading.place)
        return reading.whole(value, (n, heads, width)).moved(lambda t: t.transpose(0, 1))
    if None not in sides and all(side.source.rows == n for side in sides):  # type: ignore[union-attr]
        placed, sources = _of_sources(sides)  # type: ignore[arg-type]
        if sum(one.width for one in sources) <= _WIDEST_APART:
            attention = _map(scores, placed)
            value = reading.values.make(n, heads * width, AttendedApart(attention), sources, reading.place)
            return reading.whole(value, (n, heads, width)).moved(lambda t: t.transpose(0, 1))
    flat = [one.moved(lambda t: t.transpose(0, 1).flatten(1)) for one in three]
    widths = [one.shape[-1] for one in flat]
    if sum(widths) > _WIDEST_APART:
        return None
    if all(one.terms for one in flat) and values.shape[1] == n:
        parts = [reading.values.tokens(one, reading.place) for one in flat]
        value = reading.values.make(
            n, heads * width, AttendedApart(_attention_of_parts(scores, widths)), parts, reading.place
        )
        return reading.whole(value, (n, heads, width)).moved(lambda t: t.transpose(0, 1))
    return _across_sequences(reading, scores, flat, widths, heads)


def _of_sources(sides: Sequence[Projected]) -> tuple[list[Projected], list[Value]]:
    """Projections of the tokens of several values, each of which stands at its own place in wider tokens."""
    sources = list({id(side.source): side.source for side in sides}.values())
    total = sum(source.width for source in sources)
    placed = []
    for side in sides:
        before = sum(one.width for one in sources[: sources.index(side.source)])
        weight = torch.nn.functional.pad(side.weight, (before, total - before - side.source.width))
        placed.append(replace(side, weight=weight))
    return placed, sources


def _across_sequences(
    reading: Reading, scores: HeadLogits, flat: Sequence[Entries], widths: Sequence[int], heads: int
) -> Entries | None:
    """Attention of n tokens to m others: of n + m tokens, of which the last n alone see, and the first m are seen."""
    if scores.sink is not None:
        return None
    n, m, start, places = len(flat[0].shape) and flat[0].shape[0], flat[1].shape[0], 0, list[Entries]()
    for which, one in enumerate(flat):
        above, below = (m, 0) if which == 0 else (0, n)
        placed = padded(reading, one, (start, sum(widths) - start - widths[which], above, below))
        start += widths[which]
        places.append(placed)
    joined = places[0].plus(places[1]).plus(places[2])
    tokens = reading.values.tokens(joined, reading.place)
    bias = scores.bias
    if bias is not None and len(bias) == 1:
        bias = bias[0]
    attention = _attention_of_parts(replace(scores, bias=None), widths)
    assert isinstance(attention, SelfAttention)
    attention = attention.replace(logit_biases=across(bias, n, m))
    width = widths[2] // heads
    value = reading.values.make(m + n, widths[2], Attended(attention), (tokens,), reading.place)
    whole = reading.whole(value, (m + n, heads, width))
    return whole.moved(lambda t: t[m:].transpose(0, 1))


def _attention_of_parts(scores: HeadLogits, widths: Sequence[int]) -> SelfAttention | ComposedAttention:
    """Attention that finds its queries, keys and values side by side in its tokens."""
    whole = torch.eye(sum(widths), dtype=torch.float64)
    blocks = whole.split(list(widths))
    sides = [Projected(block.unflatten(0, (scores.heads, -1)), None, (), None) for block in blocks]  # type: ignore[arg-type]
    return _map(scores, sides)


def _self_attention(
    scores: HeadLogits, sides: Sequence[Projected]
) -> tuple[SelfAttention | ComposedAttention, Value] | None:
    source = sides[0].source
    if any(side.source is not source for side in sides) or source.rows != scores.query.shape[1]:
        return None
    return _map(scores, sides), source


def _map(scores: HeadLogits, sides: Sequence[Projected]) -> SelfAttention | ComposedAttention:
    query, key, value = sides
    kv_heads = _shared(key, value, scores.heads)
    key, value = (_of_groups(side, kv_heads) for side in (key, value))
    scale = scores.scale
    if isinstance(scale, Tensor):  # one for each head
        own = scale.to(query.weight)[:, None]
        bias = None if query.bias is None else query.bias * own
        query, scale = replace(query, weight=query.weight * own[..., None], bias=bias), 1.0
    names = {"query": query, "key": key, "value": value}
    dtype = max((side.weight.dtype for side in names.values()), key=lambda kind: kind.itemsize)
    biases: dict[str, Any] = {
        f"{name}_bias": None if side.bias is None else side.bias.flatten().to(dtype) for name, side in names.items()
    }
    attention = SelfAttention(
        *(side.weight.flatten(0, 1).to(dtype) for side in (query, key, value)),
        heads=scores.heads,
        kv_heads=kv_heads,
        logit_biases=masks(scores.bias),
        softcap=scores.softcap,
        scale=float(scale),
        **biases,
    )
    staged = {f"{name}_stages": [*side.stages] for name, side in names.items()}
    staged["query_stages"] += [Scale(float(scale))]
    attention = attention.replace(**staged)
    return attention if scores.sink is None else ComposedAttention(attention, sinks=scores.sink.to(dtype))


def _shared(key: Projected, value: Projected, heads: int) -> int:
    """The number of key–value heads: query heads share those that are alike."""
    for group in range(heads, 1, -1):
        if heads % group == 0 and all(_repeats(side, group) for side in (key, value)):
            return heads // group
    return heads


def _repeats(side: Projected, group: int) -> bool:
    tensors = [side.weight] if side.bias is None else [side.weight, side.bias]
    split = [t.detach().unflatten(0, (-1, group)) for t in tensors]
    return all(bool((t == t[:, :1]).all()) for t in split)


def _of_groups(side: Projected, kv_heads: int) -> Projected:
    step = len(side.weight) // kv_heads
    return replace(side, weight=side.weight[::step], bias=None if side.bias is None else side.bias[::step])


def masks(bias: Tensor | None) -> list[LogitBias]:
    """Terms of the logits from their table ``(heads or 1, n, m)``: a mask by its rule where it has one."""
    if bias is None:
        return []
    table = bias.detach()
    hidden = table <= HIDDEN
    hidden = hidden & ~hidden.all(-1, keepdim=True)
    terms: list[LogitBias] = []
    rest = torch.where(hidden, torch.zeros((), dtype=table.dtype), table)
    if bool(hidden.any()):
        one = hidden[0]
        known = _rule_of(~one) if bool((hidden == one).all()) else None
        if known is None:
            filled = bias.masked_fill(hidden, float("-inf"))
            return [DenseBias(filled if len(filled) > 1 else filled[0])]
        terms.append(known)
    if bool((rest != 0).any()):
        dense = torch.where(hidden, torch.zeros((), dtype=bias.dtype), bias)
        terms.append(DenseBias(dense if len(dense) > 1 else dense[0]))
    return terms


def _rule_of(seen: Tensor) -> LogitBias | None:
    """The causal mask or a window, where the table is one."""
    n = len(seen)
    places = torch.arange(n)
    distance = places[:, None] - places
    if torch.equal(seen, distance >= 0):
        return Causal()
    for causal in (True, False):
        window = int((distance.abs() * seen).max()) + 1
        if torch.equal(seen, (distance.abs() < window) & ((distance >= 0) if causal else torch.ones_like(seen))):
            return SlidingWindow(window, causal=causal)
    return None


_MOST_STAGES = 12


def followed_back(reading: Reading, x: Entries) -> Projected | None:
    """Queries, keys or values ``(heads, n, k)`` followed back to the tokens that they project."""
    heads, n, width = x.shape
    stages: list[TokenStage] = []
    for _ in range(_MOST_STAGES):
        turned = _rotation(x)
        if turned is not None:
            x, stage = turned
            stages.insert(0, stage)
            continue
        if len(x.terms) != 1 or not x.terms[0].complete:
            return None
        term = x.terms[0]
        if term.factor is not None or x.constant is not None:
            if term.scale is None or x.constant is not None:
                tokens = reading.values.tokens(x.moved(lambda t: t.transpose(0, 1).flatten(1)), reading.place)
                if not isinstance(tokens.stage, Affine):
                    return None
                x = reading.whole(tokens, (n, heads, width)).moved(lambda t: t.transpose(0, 1))
                continue
            stages.insert(0, Scale(term.scale))
            x = replace(x, terms=(replace(term, factor=None),))
            continue
        base, made = term.base, term.base.made
        if isinstance(made, Combined) and len(made.indices) == 1 and made.factors[0] is None and made.constant is None:
            x = replace(x, terms=(Term(base.parents[0], made.indices[0].reshape(-1)[term.index]),))
            continue
        if isinstance(base.stage, Norm) and base.width == width and _whole_rows(term.index, width):
            stage_of_norm = _head_norm(base.stage)
            if stage_of_norm is None:
                return None
            stages.insert(0, stage_of_norm)
            x = replace(x, terms=(Term(base.parents[0], term.index),))
            continue
        channels = _channels(term.index, base, n)
        if channels is None:
            return None
        if isinstance(base.stage, Affine):
            flat = channels.reshape(-1)
            weight, bias = base.stage.weight, base.stage.bias
            first = int(flat[0])
            if torch.equal(flat, torch.arange(first, first + len(flat))):
                chosen = slice(first, first + len(flat))
                weight, bias = weight[chosen], None if bias is None else bias[chosen]
            else:
                weight, bias = weight[flat], None if bias is None else bias[flat]
            bias = None if bias is None else bias.reshape(heads, width)
            return Projected(weight.reshape(heads, width, -1), bias, tuple(stages), base.parents[0])
        eye = torch.eye(base.width)
        return Projected(eye[channels.reshape(-1)].reshape(heads, width, -1), None, tuple(stages), base)
    return None


def _channels(index: Tensor, base: Value, n: int) -> Tensor | None:
    """The channels of each head, ``(heads, k)``, where query i takes them from token i."""
    if base.rows != n:
        return None
    channels = index[:, 0]
    if bool((channels >= base.width).any()):
        return None
    expected = channels[:, None] + base.width * torch.arange(n)[None, :, None]
    return channels if torch.equal(index, expected) else None


def _whole_rows(index: Tensor, width: int) -> bool:
    """Whether every vector is a whole row of a value, in its order."""
    return torch.equal(index, index[..., :1] + torch.arange(width)) and bool((index[..., 0] % width == 0).all())


def _head_norm(norm: Norm) -> TokenStage | None:
    if norm.centred:
        return HeadNorm(norm.eps, norm.gain, norm.shift)
    return UnitNorm.rms(norm.width, norm.eps, norm.gain) if norm.shift is None else None


def _rotation(x: Entries) -> tuple[Entries, TokenStage] | None:
    """Rotary positions: pairs of coordinates turned by an angle of the token; the entries before, and the stage."""
    if len(x.terms) != 2 or x.constant is not None or x.terms[0].base is not x.terms[1].base:
        return None
    _, n, width = x.shape
    one, two = x.terms
    factors = [torch.ones(()).expand(x.shape) if t.factor is None else t.factor.expand(x.shape) for t in x.terms]
    factors = [
        torch.where(t.index >= 0, f, torch.zeros((), dtype=f.dtype)) for t, f in zip(x.terms, factors, strict=True)
    ]
    if any(not bool((f == f[:1]).all()) for f in factors):
        return None
    places: dict[tuple[int, ...], list[int]] = {}
    at_start = torch.stack([one.index[0, 0], two.index[0, 0]], -1).sort(-1).values.tolist()
    for channel, pair in enumerate(map(tuple, at_start)):
        places.setdefault(pair, []).append(channel)
    cos, sin = (torch.ones(n, width, dtype=factors[0].dtype), torch.zeros(n, width, dtype=factors[0].dtype))
    own = torch.where(one.index >= 0, one.index, two.index)
    pairs: list[tuple[int, int]] = []
    for (low, _), channels in places.items():
        if low < 0:  # a coordinate that does not turn
            for c in channels:
                if bool((factors[0][0, :, c] + factors[1][0, :, c] != 1).any()):
                    return None
            continue
        if len(channels) != 2:
            return None
        turned = _turn_of_pair(one, two, factors, *channels)
        if turned is None:
            return None
        a, b = channels
        cos[:, a], sin[:, a], first, second = turned
        own[:, :, a], own[:, :, b] = first, second
        pairs.append((a, b))
    m = len(pairs)
    pairs.sort()
    halves = pairs == [(j, j + m) for j in range(m)]
    interleaved = pairs == [(2 * j, 2 * j + 1) for j in range(m)]
    if not m or not (halves or interleaved):
        return None
    firsts = [a for a, _ in pairs]
    rotary = rotary_of_table(cos[:, firsts], sin[:, firsts], interleaved and not halves)
    return Entries(x.shape, (Term(one.base, own),)), rotary


def _turn_of_pair(
    one: Term, two: Term, factors: Sequence[Tensor], a: int, b: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """cos and sin of each token, and the places of both coordinates before the turn; None where it is no turn."""
    index = [(one.index[:, :, c], two.index[:, :, c]) for c in (a, b)]
    for flipped_a in (False, True):
        for flipped_b in (False, True):
            own_a, other_a = index[0][::-1] if flipped_a else index[0]
            own_b, other_b = index[1][::-1] if flipped_b else index[1]
            if not (torch.equal(own_a, other_b) and torch.equal(own_b, other_a)):
                continue
            f_a = [factors[i][0, :, a] for i in (0, 1)]
            f_b = [factors[i][0, :, b] for i in (0, 1)]
            cos_a, cross_a = (f_a[1], f_a[0]) if flipped_a else (f_a[0], f_a[1])
            cos_b, cross_b = (f_b[1], f_b[0]) if flipped_b else (f_b[0], f_b[1])
            if torch.equal(cos_a, cos_b) and torch.equal(cross_a, -cross_b):
                return cos_a, cross_b, own_a, own_b
    return None


def rotary_of_table(cos: Tensor, sin: Tensor, interleaved: bool) -> Rotary:
    """Rotary positions from their cosines and sines ``(n, pairs)``, with frequencies where these give the same."""
    cos, sin = cos.detach(), sin.detach()
    lengths = torch.hypot(cos.double(), sin.double())
    amplitude = float(lengths.mean())
    amplitude = 1.0 if abs(amplitude - 1) < 1e-6 else amplitude
    angle = torch.atan2(sin.double(), cos.double())
    n = len(cos)
    frequency = torch.remainder(angle[-1 if n < 2 else 1] - angle[0] * (n > 1) + torch.pi, 2 * torch.pi) - torch.pi
    far = 1
    while n > 2 and far < n - 1:  # farther tokens know the frequency better
        far = min(2 * far, n - 1)
        predicted = frequency * far + angle[0]
        wrapped = torch.remainder(angle[far] - predicted + torch.pi, 2 * torch.pi) - torch.pi
        frequency = frequency + wrapped / far
    for start in (0, 1, 2):
        positions = None if start == 0 else torch.arange(start, start + n)
        for dtype in (torch.float32, torch.float64):
            candidate = Rotary(frequency.to(dtype), interleaved, amplitude, positions)
            table = RotaryTable.tables_of(candidate, n)
            if all(
                float((one - other.double()).abs().max()) < 3e-7 for one, other in zip(table, (cos, sin), strict=True)
            ):
                exact = RotaryTable(cos, sin, interleaved, candidate.frequencies, amplitude, positions)
                return exact
    return RotaryTable(cos, sin, interleaved, None, float(lengths.max()), None)
