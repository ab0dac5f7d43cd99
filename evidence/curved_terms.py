"""Every term of the proof for heads that are not linear on a ball, beside what moved inputs do to it.

Of `howsmooth.certificates.ball.nonlinear_ball`: q/k-norms, soft-caps, sigmoids, distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from evidence.juries import Example, Modules, largest
from evidence.moved_heads import size
from howsmooth.attention import AttentionMap
from howsmooth.attention.stages import UnitNorm
from howsmooth.bounds.three_paths import PathsAt

DRAWS = 400
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Ball:
    """A map at tokens ``(n, d)``, each of which moves by at most ``moves[j]``."""

    attention: AttentionMap
    x: Tensor
    moves: Tensor

    @cached_property
    def moved(self) -> Tensor:
        """The input itself, then inputs on the ball, ``(draws, n, d)``: corners, and a quarter inside."""
        generator = torch.Generator().manual_seed(0)
        steps = torch.randn(DRAWS, *self.x.shape, generator=generator).double()
        steps[1], steps[2] = 1.0, -1.0
        steps = steps / steps.norm(dim=-1, keepdim=True)
        depth = torch.ones(DRAWS, 1, 1, dtype=torch.float64)
        depth[::4] = torch.rand(len(depth[::4]), 1, 1, generator=generator).double()
        depth[0] = 0.0
        return self.x + depth * steps * self.moves[:, None]

    def features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``(draws, heads, n, k)``, behind the stages that belong to the input."""
        here = self.attention.project(self.x[None])
        found = []
        for stages, rows in zip(self.attention.stages(here[0], here[1]), self.attention.project(x), strict=True):
            for stage in stages:
                rows = stage(rows)
            found.append(rows)
        return found[0], found[1], found[2]

    def slopes(self, x: Tensor) -> list[Tensor]:
        """The derivatives of all three in their tokens, ``(draws, heads, n, k, d)``."""
        every = []
        for c in range(x.shape[-1]):
            along = torch.zeros_like(x)
            along[..., c] = 1
            every.append(torch.autograd.functional.jvp(self.features, x, along)[1])
        return [torch.stack(parts, -1) for parts in zip(*every, strict=True)]

    def outputs(self, x: Tensor) -> Tensor:
        """Heads behind their output matrices, ``(draws, heads, n, out)``."""
        query, key, value = self.attention.staged(x)
        return self.attention._weights(query, key) @ value @ self.attention.output_weight

    def jacobians(self, x: Tensor) -> Tensor:
        """Of every head, ``(draws, heads, n·out, n·d)``."""
        columns = []
        for token in range(x.shape[-2]):
            for c in range(x.shape[-1]):
                along = torch.zeros_like(x)
                along[..., token, c] = 1
                columns.append(torch.autograd.functional.jvp(self.outputs, x, along)[1].flatten(2))
        return torch.stack(columns, -1)

    def example(self, label: str) -> Example:
        """All of it."""
        return Example(label, self._proved, self._truths())

    def _proved(self, modules: Modules) -> Iterator[tuple[str, Tensor]]:
        ball = modules["certificates.ball.nonlinear_ball"].NonlinearBall(PathsAt(self.attention, self.x), self.moves)
        for name in NAMES:
            feature = getattr(ball, name)
            yield f"derivative of the {name}", feature.derivative
            yield f"change of the derivative of the {name}", feature.derivative_change
            yield f"move of the {name}", feature.moved
        yield "moves of logits", ball.logit_moves()
        yield "largest weights", ball.weights.high
        yield "smallest weights, from one", 1 - ball.weights.low
        yield "slopes", ball.weights.slopes
        seen = _Seen(ball.weights)
        ball.weights = seen
        bound = ball.bound()
        yield "spread of the values", seen.spreads[0]
        yield "spread of the keys", seen.spreads[1]
        yield "bound", bound

    def _truths(self) -> dict[str, Tensor]:
        features, slopes, found = self.features(self.moved), self.slopes(self.moved), {}
        for name, values, maps in zip(NAMES, features, slopes, strict=True):
            found[f"derivative of the {name}"] = largest(size(maps))
            found[f"change of the derivative of the {name}"] = largest(size(maps - maps[:1]))
            found[f"move of the {name}"] = largest((values - values[:1]).norm(dim=-1))
        query, key, _ = features
        attention, cap = self.attention, self.attention.softcap
        softmax, weights = attention.weighting == "softmax", attention._weights(*attention.staged(self.moved)[:2])
        plain = query @ key.mT
        shift = torch.zeros_like(plain)
        if softmax and cap is None:  # a shift of a row changes nothing: that of the mean key
            shift = ((query - query[:1]) * (weights[:1] @ key[:1])).sum(-1, keepdim=True)
        found["moves of logits"] = largest((plain - plain[:1] - shift).abs())
        found["largest weights"], found["smallest weights, from one"] = largest(weights), largest(1 - weights)
        flat = torch.ones_like(plain) if cap is None else 1 - torch.tanh(plain / cap).square()
        found["slopes"] = largest(weights * flat.square() if softmax else weights * (1 - weights) * flat)
        written = features[2] @ attention.output_weight
        felt = torch.einsum("bhikd,bhjk->bhijd", slopes[0], key)
        found["spread of the values"] = largest(self._spread(weights, torch.ones_like(flat), written[:, :, None]))
        found["spread of the keys"] = largest(self._spread(weights, flat, felt))
        found["bound"] = largest(size(self.jacobians(self.moved)))
        return found

    def _spread(self, weights: Tensor, flat: Tensor, vectors: Tensor) -> Tensor:
        """Deviations of vectors ``(draws, heads, i or 1, j, ·)`` under every row; for sigmoids about zero."""
        if self.attention.weighting == "softmax":
            vectors = flat[..., None] * vectors
            vectors = vectors - (weights[..., None] * vectors).sum(-2, keepdim=True)
            return size(weights.sqrt()[..., None] * vectors)
        return size((weights * (1 - weights) * flat).sqrt()[..., None] * vectors)


class _Seen:
    """Weights that remember which spreads they were asked for."""

    def __init__(self, weights: Any):
        self.weights, self.high, self.slopes = weights, weights.high, weights.slopes
        self.spreads: list[Tensor] = []

    def spread(self, vectors: Tensor, rest: Tensor) -> Tensor:
        self.spreads.append(self.weights.spread(vectors, rest))
        return self.spreads[-1]


def _random(kind: str, seed: int, move: float) -> Ball:
    """A small map of two heads that see all tokens."""
    torch.manual_seed(seed)
    query, key, value, output = (torch.randn(4, 2, dtype=torch.float64) for _ in range(4))
    weights, x = (query, key, value, output.T), torch.randn(3, 2, dtype=torch.float64)
    makers = {
        "soft-cap": lambda: hs.SelfAttention(*weights, heads=2, softcap=1.5),
        "rms": lambda: hs.SelfAttention(*weights, heads=2, qk_norm="rms"),
        "norms": lambda: hs.SelfAttention(
            *weights, heads=2, qk_norm=(_norm(0.3), _norm(0.1)), rotary=hs.Rotary.standard(2)
        ),
        "cosine": lambda: hs.CosineAttention(*weights, heads=2),
        "sigmoid": lambda: hs.SigmoidAttention(*weights, heads=2),
        "distances": lambda: hs.L2SelfAttention(query, value, output.T, heads=2),
        "plain": lambda: hs.SelfAttention(*weights, heads=2, mask="causal", rotary=hs.Rotary.standard(2)),
    }
    return Ball(makers[kind]().in_dtype(torch.float64), x, torch.full((3,), move, dtype=torch.float64))


def _tokens_apart(kind: str, keys: tuple[float, float], move: float, own: bool = False) -> Ball:
    """Two tokens (k, v) far apart in v that look at both with one constant query, or, with ``own``, with that of k."""
    one = torch.eye(2, dtype=torch.float64)
    query = 3.0 * one[:1] if own else 0 * one[:1]
    weights = query, one[:1], one[1:], torch.ones(1, 1, dtype=torch.float64)
    bias = None if own else torch.ones(1, dtype=torch.float64)
    options = {"soft-cap": {"softcap": 1.5}}.get(kind, {})
    maker = hs.SigmoidAttention if kind == "sigmoid" else hs.SelfAttention
    attention = maker(*weights, query_bias=bias, scale=1.0, **options)
    x = torch.tensor([[keys[0], -500.0], [keys[1], 500.0]], dtype=torch.float64)
    return Ball(attention.in_dtype(torch.float64), x, torch.full((2,), move, dtype=torch.float64))


def _turning(own: bool, move: float, gap: float = 1e4) -> Ball:
    """Two tokens with normalised queries and keys, where one of them lies along the other and can only turn away.

    Derivatives are zero at the input in the only direction that counts, so that all there is is their change.
    """
    one = torch.eye(4, dtype=torch.float64)  # coordinates: two of a query or key, a number of its own, the value
    still, bias = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    query, key = (one[:2], torch.stack([one[2], 0 * one[2]])) if own else (still, one[:2])
    value, output = torch.stack([one[3], 0 * one[3]]), torch.eye(1, 2, dtype=torch.float64)
    attention = hs.SelfAttention(query, key, value, output, scale=1.0, qk_norm=(UnitNorm(1e-3), UnitNorm(1e-3)),
                                 query_bias=None if own else bias)  # fmt: skip
    x = torch.tensor([[1.0, 0.0, -1.0, -gap], [1.0, 0.0, 1.0, gap]], dtype=torch.float64)
    return Ball(attention.in_dtype(torch.float64), x, torch.full((2,), move, dtype=torch.float64))


def _lone(move: float) -> Ball:
    """One token, which sees itself alone: all that counts is the derivative of its value, which is normalised."""
    weights = torch.zeros(2, 2), torch.zeros(2, 2), torch.eye(2), torch.eye(2)
    attention = hs.CosineAttention(*(weight.double() for weight in weights))
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    return Ball(attention.in_dtype(torch.float64), x, torch.full((1,), move, dtype=torch.float64))


def _norm(eps: float) -> UnitNorm:
    return UnitNorm(eps, 0.8, torch.tensor([1.5, -0.5], dtype=torch.float64))


KINDS = ("soft-cap", "rms", "norms", "cosine", "sigmoid", "distances", "plain")
BALLS = {
    **{
        f"{kind} {seed} by {move:g}": _random(kind, seed, move)
        for kind in KINDS
        for seed, move in ((0, 1e-3), (1, 0.05), (2, 0.4))
    },
    **{
        f"{kind}, tokens far apart, {'own' if own else 'keys'}": _tokens_apart(kind, keys, 1e-3, own)
        for kind in ("soft-cap", "sigmoid", "plain")
        for own, keys in ((False, (1.0, 1.0)), (True, (0.9, -0.9)))
    },
    "keys that turn away": _turning(own=False, move=0.01),
    "queries that turn away": _turning(own=True, move=0.01),
    "queries and keys that begin at zero": _tokens_apart("plain", (0.0, 0.0), 1e-3, own=True),
    "a token alone": _lone(0.3),
}


def examples() -> list[Example]:
    """Examples of all kinds."""
    return [ball.example(label) for label, ball in BALLS.items()]
