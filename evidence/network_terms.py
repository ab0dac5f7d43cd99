"""Every remainder of a network of several layers, and its margins, beside what moved inputs leave.

Of `howsmooth.certificates.network.margins`, `howsmooth.certificates.network.taylor_remainders` and
`howsmooth.certificates.network.attention_remainder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence import ball_terms
from evidence.deep_networks import bends, draw_network, true_remainders
from evidence.juries import Example, Modules, agreement, largest
from evidence.moved_heads import Case, apart, drawn
from howsmooth.attention import AttentionMap
from howsmooth.certificates import SequenceClassifier
from howsmooth.certificates.read_module import read_classifier
from howsmooth.jacobians.tokenwise import Activation, Affine, GatedActivation, Norm
from howsmooth.network.activations import ACTIVATIONS
from howsmooth.network.nodes import (
    Attend,
    Beside,
    MixTokens,
    Multiply,
    Node,
    Parallel,
    Rearrange,
    Series,
    Skip,
    Tokenwise,
)

DRAWS = 1500
NORMS = (2, 1, torch.inf)


@dataclass(frozen=True)
class Ball:
    """A network at tokens ``(n, d)``, each of which moves by at most ``moves[j]``, ``(n,)``.

    Attributes:
        classed: whether it ends in logits, of which the margins of the first class are bounded.
    """

    root: Node
    x: Tensor
    moves: Tensor
    classed: bool = False

    def moved(self, norm: float = 2) -> Tensor:
        """Inputs on the ball in a norm of the tokens, ``(draws, n, d)``: corners, and a quarter inside."""
        generator = torch.Generator().manual_seed(0)
        steps = torch.randn(DRAWS, *self.x.shape, generator=generator).double()
        steps[1], steps[2] = 1.0, -1.0
        if norm == torch.inf:
            steps = steps.sign()
        elif norm == 1:
            steps = nn.functional.one_hot(steps.abs().argmax(-1), steps.shape[-1]) * steps.sign()
        steps = steps / torch.linalg.vector_norm(steps, ord=norm, dim=-1, keepdim=True)
        depth = torch.ones(DRAWS, 1, 1, dtype=torch.float64)
        depth[::4] = torch.rand(len(depth[::4]), 1, 1, generator=generator).double()
        return self.x + depth * steps * self.moves[:, None]

    @cached_property
    def remainders(self) -> list[Tensor]:
        """The true ones, ``(draws, n, numbers)`` of all that is not linear."""
        return true_remainders(self.root, self.x, self.moved())

    def example(self, label: str) -> Example:
        """All of it."""
        return Example(label, self._proved, self._truths())

    def _proved(self, modules: Modules) -> Iterator[tuple[str, Tensor]]:
        lines = modules["certificates.network.margins"].LinearisedNetwork(self.root, self.x, range(len(self.x)))
        form, reach = lines.form, torch.cat([self.moves.new_ones(1), self.moves])
        for number, left in enumerate(lines.remainders):
            lower, upper = left.numbers(reach)
            lengths = left.lengths(reach)
            yield f"remainder {number}, upwards", upper
            yield f"remainder {number}, downwards", -lower
            yield f"remainder {number}, length", lengths
            reach = torch.cat([reach, lengths])
        yield "value", agreement(form.value, self.root(self.x))
        sources = [self.moved() - self.x, *self.remainders]
        line = form.value + sum(
            torch.einsum("ndmb,rmb->rnd", slope, source.flatten(1).unflatten(1, slope.shape[2:]))
            for slope, source in zip(form.slopes, sources, strict=True)
        )
        yield "line and remainders", agreement(line, self.root(self.moved()))
        if self.classed:
            for norm in NORMS:
                yield f"margin lost, {norm}-norm", lines.logits[0] - lines.logits - lines.margins(0, self.moves, norm)

    def _truths(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        bent = bends(self.root)
        for number, (true, kind) in enumerate(zip(self.remainders, bent, strict=True)):
            count = _groups(kind)
            apart = true.unflatten(-1, (-1, 1) if count is None else (count, -1))
            up, down = (apart[..., 0], -apart[..., 0]) if count is None else (apart.norm(dim=-1),) * 2
            found[f"remainder {number}, upwards"], found[f"remainder {number}, downwards"] = largest(up), largest(down)
            found[f"remainder {number}, length"] = largest(true.norm(dim=-1))
            if isinstance(kind, Norm):  # one length for all numbers
                for way in ("upwards", "downwards"):
                    found[f"remainder {number}, {way}"] = largest(true.norm(dim=-1, keepdim=True))
        here = self.root(self.x)
        found["value"] = torch.ones_like(here)
        found["line and remainders"] = torch.ones(DRAWS, *here.shape, dtype=torch.float64)
        if self.classed:
            for norm in NORMS:
                there = self.root(self.moved(norm))
                lost = (here[0, 0] - here[0]) - (there[:, 0, :1] - there[:, 0])
                found[f"margin lost, {norm}-norm"] = largest(lost).clamp_min(0.0)
        return found


def _groups(bent: object) -> int | None:
    """Into how many norms a bound takes numbers together; None where each has its own."""
    return bent.heads if isinstance(bent, AttentionMap) else 1 if isinstance(bent, Norm) else None


def _double(*numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _affine(weight: Tensor, bias: Tensor | None = None) -> Node:
    return Tokenwise(Affine(weight, bias))


def _division(width: int, eps: float, **options: Any) -> Node:
    return Tokenwise(Norm(width, eps, **options))


def _bend(name: str) -> Activation:
    return Activation(ACTIVATIONS[name].function, name)


def _activation(name: str) -> Node:
    return Tokenwise(_bend(name))


def _mean(n: int) -> Node:
    return MixTokens(torch.full((1, n), 1 / n, dtype=torch.float64))


def _first(d: int) -> Node:
    return Rearrange(torch.arange(d)[None])


def _tokens(*nodes: Node, x: Sequence[Sequence[float]], move: float, classed: bool = False) -> Ball:
    tokens = _double(*x)
    return Ball(Series(*nodes), tokens, torch.full((len(tokens),), move, dtype=torch.float64), classed)


def _attention(case: Case) -> Ball:
    """The map of a case on a ball, alone."""
    return Ball(Attend(case.attention.in_dtype(torch.float64)), case.x, case.moves)


def _one_row(
    shares: Sequence[float], keys: Sequence[Sequence[float]], values: Sequence[float], moves: Sequence[float]
) -> Case:
    """The first token looks at others with these shares, its query zero; tokens have coordinates of their own for all.

    Args:
        keys: of the others, each of one or two numbers. moves: of all tokens, the first included.
    """
    width, n = len(keys[0]), 1 + len(shares)
    d = 2 * width + 1
    ask, tell = torch.eye(d, dtype=torch.float64)[:width], torch.eye(d, dtype=torch.float64)[width:-1]
    give = torch.zeros(width, d, dtype=torch.float64)
    give[0, -1] = 1
    x = torch.zeros(n, d, dtype=torch.float64)
    x[1:, width:-1], x[1:, -1] = _double(*keys), _double(*values)
    mask = torch.full((n, n), -torch.inf, dtype=torch.float64)
    mask[1:, 0], mask[0, 1:] = 0, _double(*shares).log()
    return Case(ask[None], tell[None], give[None], torch.eye(1, width).double(), x, _double(*moves), mask=mask)


def _behind_a_kink(share: float, gap: float, move: float, beside: bool = False) -> Ball:
    """One row whose query is zero, and grows behind a ReLU that is at its kink: its line knows nothing of it.

    With ``beside`` the ReLU is a branch, so that the line knows half of it.
    """
    case = _one_row((1 - share, share), ((0.0,), (gap,)), (0.0, gap), (move / gap, 0.0, 0.0))
    kink = Parallel(Skip(), _activation("relu")) if beside else _activation("relu")
    return Ball(Series(kink, Attend(case.attention.in_dtype(torch.float64))), case.x, case.moves)


def _with_biases() -> Ball:
    """Every projection with a bias."""
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(4, 2, 2, generator=generator), torch.randn(4, 2, generator=generator)
    names = ("query_bias", "key_bias", "value_bias", "output_bias")
    attention = hs.SelfAttention(*weights, heads=2, **dict(zip(names, biases, strict=True)))
    return _tokens(Attend(attention.in_dtype(torch.float64)), x=[[0.3, -1.0], [0.5, 0.2]], move=0.05)


def _network(seed: int, move: float) -> Ball:
    """A random network, the label its first class."""
    case = draw_network(seed)
    order = [case.label, *(c for c in range(3) if c != case.label)]
    root = Series(read_classifier(case.network, case.x).root, _affine(torch.eye(3, dtype=torch.float64)[order]))
    return Ball(root, case.x, torch.full((len(case.x),), move, dtype=torch.float64), classed=True)


SPREAD = _affine(torch.ones(1, 16, dtype=torch.float64))
"""One number from sixteen: a corner of a cube moves it four times as far as a Euclidean ball does."""
MARGIN = _affine(_double([-1.0], [0.0]), _double(1.0, 0.0))
"""The margin of the first class falls with a number."""
WIDE = _affine(_double([1.0, 0.5], [0.0, 1.0], [-1.0, 1.0]), _double(0.1, -0.2, 0.0))
SINGLE = {
    "division, tight across": _tokens(_division(2, 1e-12), x=[[1.0, 0.0]], move=0.01),
    "division, tight along": _tokens(_division(1, 1.0), x=[[0.5**0.5]], move=0.01),
    "division, far": _tokens(_division(3, 1e-3), x=[[1.0, 0.0, 0.0]], move=0.5),
    "division through zero": _tokens(_division(1, 1.0), x=[[0.05]], move=2.0),
    **{
        f"{name} at {start:g} by {move:g}": _tokens(_activation(name), x=[[start]], move=move)
        for name in ("relu", "gelu", "silu", "gelu_tanh", "tanh", "sigmoid")
        for start, move in ((0.0, 0.01), (0.5, 0.6), (-0.5, 0.6), (2.5, 0.01), (-3.0, 0.5), (1.0, 3.0))
    },
    **{
        f"{name} at {start:g} by {move:g}": _tokens(_activation(name), x=[[start]], move=move)
        for name, start, move in (
            ("gelu", 0.0, 1.4), ("gelu", 1.9, 0.3), ("gelu", 2.8, 1.2),
            ("silu", 0.0, 2.4), ("silu", 3.2, 0.7), ("silu", 5.0, 2.2),
            ("gelu_tanh", 0.0, 1.4), ("gelu_tanh", 1.9, 0.3), ("gelu_tanh", 2.8, 1.2),
            ("tanh", 0.66, 0.01), ("tanh", 0.0, 1.5), ("sigmoid", 1.32, 0.01), ("sigmoid", 0.0, 3.0),
        )
    },
    "activations of two numbers": _tokens(_activation("gelu"), x=[[0.0, 0.0]], move=0.01),
    "activations of a wide map": _tokens(WIDE, _activation("relu"), x=[[0.1, -0.1]], move=0.4),
    "one activation behind another": _tokens(
        _activation("gelu"), WIDE, _activation("silu"), _affine(torch.ones(2, 3).double()),
        _activation("gelu"), x=[[0.0, 0.1]], move=0.3,
    ),
    "division behind a kink": _tokens(_activation("relu"), _division(2, 0.1), x=[[0.0, 0.5]], move=0.2),
    "a kink behind a kink": _tokens(_activation("relu"), _affine(_double([-1.0, 2.0]), _double(-0.1)),
                                    _activation("relu"), x=[[0.0, 0.0]], move=0.2),
    "a kink behind a kink beside a number that cannot switch": _tokens(
        _activation("relu"), _affine(torch.eye(2).double(), _double(0.0, 5.0)), _activation("relu"),
        x=[[0.0, 0.0]], move=0.2,
    ),
    "a margin that rises": _tokens(_activation("gelu"), _mean(1), _affine(_double([1.0], [0.0])),
                                   x=[[2.5]], move=0.3, classed=True),
    "corner of a cube": _tokens(SPREAD, _activation("gelu"), _mean(1), MARGIN, x=[[0.0] * 16], move=0.1,
                                classed=True),
    "edge of a cross": _tokens(_affine(_double([3.0, 1.0])), _activation("silu"), _first(1), MARGIN,
                               x=[[0.0, 0.0]], move=0.05, classed=True),
}  # fmt: skip
"""Parts by themselves, and one behind another."""
_ROWS = _double([1.0, 0.0]), _double([0.0, 1.0])
_SPREAD_OUT = Rearrange(
    torch.tensor([[0, 0, -1], [3, 1, 1], [2, 0, 3]]),
    _double([2.0, -1.0, 5.0], [0.5, 1.0, 1.0], [1.0, 3.0, -2.0]),
    _double([0.0, 0.1, 0.2], [0.0, -0.3, 0.0], [0.0, 0.0, 0.4]),
)
"""Two tokens as three: numbers repeated, scaled, left out, and shifted."""
PRODUCTS = {
    "a square": _tokens(Multiply(Skip(), Skip()), x=[[0.3]], move=0.2),
    "squares of two numbers": _tokens(Multiply(Skip(), Skip()), x=[[0.3, -0.1]], move=0.2),
    "a product of two numbers": _tokens(Multiply(*map(_affine, _ROWS)), x=[[0.3, -0.2]], move=0.2),
    "a cube": _tokens(Multiply(Multiply(Skip(), Skip()), Skip()), x=[[0.0]], move=0.5),
    "a product that falls": _tokens(Multiply(Skip(), Skip()), _mean(1), MARGIN, x=[[0.0]], move=0.5, classed=True),
    "products of a cube": _tokens(
        SPREAD, Multiply(Skip(), Skip()), _mean(1), MARGIN, x=[[0.0] * 16], move=0.1, classed=True
    ),
    "a gate at its kink": _tokens(
        Tokenwise(Affine(_double([1.0], [1.0])), GatedActivation(torch.relu, "relu")), x=[[0.0]], move=0.3
    ),
    "a gate and what it opens apart": _tokens(
        Tokenwise(Affine(torch.eye(2).double(), _double(0.0, 0.1)), GatedActivation(torch.relu, "relu")),
        x=[[0.0, 0.0]], move=0.3,
    ),
    **{
        f"gate by {name}": _tokens(
            Tokenwise(
                Affine(_double([1.0, 0.5], [0.0, 1.0], [0.5, -1.0], [1.0, 1.0]), _double(0.1, 0.0, -0.2, 0.3)),
                GatedActivation(ACTIVATIONS[name].function, name),
            ),
            x=[[0.2, -0.4], [1.0, 0.3]], move=0.2,
        )
        for name in ("relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid")
    },
    "a gated MLP behind a division": _tokens(
        Parallel(Skip(), Series(
            _division(2, 0.1, gain=_double(1.5, -0.5), shift=_double(0.1, 0.2)),
            Tokenwise(
                Affine(_double([1.0, 0.5], [0.0, 1.0], [0.5, -1.0], [1.0, 1.0])),
                GatedActivation(torch.nn.functional.silu, "silu"),
                Affine(_double([1.0, -1.0], [0.5, 2.0])),
            ),
        )),
        _mean(2), _affine(_double([-1.0, 1.0], [0.0, 0.5]), _double(3.0, 0.0)),
        x=[[0.4, -0.7], [1.0, 0.3]], move=0.1, classed=True,
    ),
    "a product behind a product": _tokens(
        Multiply(_activation("gelu"), _affine(_double([1.0, 1.0], [0.0, 1.0]))),
        Multiply(Skip(), _affine(_double([0.5, -1.0], [1.0, 0.0]))), x=[[0.3, 0.1]], move=0.2,
    ),
    "attention that is gated": Ball(
        Multiply(_affine(torch.eye(3, dtype=torch.float64)), Attend(
            hs.SelfAttention(*torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(1))).in_dtype(torch.float64)
        )),
        _double([0.3, -1.0, 0.2], [0.5, 0.2, 1.0]), _double(0.05, 0.1),
    ),
}  # fmt: skip
"""Products of what moves together."""
MOVED = {
    "side by side": _tokens(
        Beside(Skip(), _activation("relu"), _activation("gelu")), _affine(_double([1.0, 1.0, 2.0], [1.0, -1.0, 0.0])),
        _activation("silu"), x=[[0.0]], move=0.3,
    ),
    "kinks side by side": _tokens(Beside(_activation("relu"), _affine(_double([-1.0]))), _activation("relu"),
                                  x=[[0.0]], move=0.3),
    "numbers repeated and scaled": _tokens(_SPREAD_OUT, _activation("relu"), x=[[0.0, 0.3], [0.2, 0.0]], move=0.2),
    "numbers repeated behind a kink": _tokens(
        _activation("relu"), _SPREAD_OUT, _activation("gelu"), x=[[0.0, 0.3], [0.2, 0.0]], move=0.2
    ),
    "a token of all numbers": _tokens(
        Rearrange(torch.arange(4)[None]), _division(4, 1e-3, centred=True), _affine(_double([1.0, 2.0, 0.0, -1.0])),
        MARGIN, x=[[0.0, 0.3], [0.2, 0.1]], move=0.05, classed=True,
    ),
    "tokens mixed": _tokens(
        MixTokens(_double([1.0, 1.0], [2.0, -1.0], [0.0, 0.5])), _activation("relu"), x=[[0.0], [0.0]], move=0.2
    ),
    "tokens mixed behind a kink": _tokens(
        _activation("relu"), MixTokens(_double([1.0, 1.0], [2.0, -1.0])), _activation("gelu"), _mean(2), MARGIN,
        x=[[0.0], [0.1]], move=0.2, classed=True,
    ),
    "a spatial gate": _tokens(
        Multiply(Skip(), Series(MixTokens(_double([1.0, 0.5], [-1.0, 1.0])), Rearrange(
            torch.tensor([[0, 1], [2, 3]]), None, _double([1.0, 1.0], [0.5, 0.5])
        ))),
        x=[[0.3, -0.5], [0.2, 0.9]], move=0.1,
    ),
}  # fmt: skip
"""Numbers and tokens that are moved about, between parts that are not linear."""
HEADS = {label: _attention(case) for label, case in ball_terms.CASES.items()}
HEADS |= {f"drawn {seed}, farther": _attention(drawn(seed)) for seed in (1, 3, 6, 8, 10, 11)}
HEADS |= {
    "small shift by the keys of a rare far token": _attention(apart(0.02, own=False, move=0.05)),
    "large query shift of far tokens": _attention(apart(0.5, own=True, move=10.0)),
    "rare weight that grows while its value moves": _attention(
        _one_row((0.98, 0.02), ((0.0,), (1.0,)), (0.0, 0.0), (3.0, 0.0, 0.01))
    ),
    "large weight that falls while its value moves": _attention(
        _one_row((0.02, 0.98), ((0.0,), (1.0,)), (0.0, 0.0), (6.0, 0.0, 0.01))
    ),
    "rare far tokens in two directions": _attention(
        _one_row((0.98, 0.01, 0.01), ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), (0.0, 100.0, 100.0), (0.05, 0.0, 0.0, 0.0))
    ),
    "a query behind a kink": _behind_a_kink(0.02, gap=100.0, move=0.05),
    "a query beside a kink": _behind_a_kink(0.02, gap=10.0, move=0.01, beside=True),
    "biases": _with_biases(),
}
"""Attention by itself."""
NETWORKS = {f"network {seed}": _network(seed, move) for seed, move in ((0, 0.05), (2, 0.1), (4, 0.02), (6, 0.02))}


def _radii() -> Example:
    """Networks whose radii are known: a line, and a kink."""
    line = SequenceClassifier([nn.Identity()], nn.Linear(4, 2), pool="first").double().requires_grad_(False)
    kink = SequenceClassifier([nn.Linear(1, 1), nn.ReLU()], nn.Linear(1, 2)).double().requires_grad_(False)
    with torch.no_grad():
        for tensor, values in zip(line.parameters(), ([[3.0, 0, 4, 0], [0.0] * 4], [1.0, 0.0]), strict=True):
            tensor.copy_(_double(*values))
        for tensor, values in zip(kink.parameters(), ([[1.0]], [-0.5], [[-10.0], [0.0]], [1.0, 0.0]), strict=True):
            tensor.copy_(_double(*values))

    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        deep, zeros = modules["certificates.network.margins"], torch.zeros(3, 4, dtype=torch.float64)
        flat = deep.LinearisedNetwork(read_classifier(line, zeros).root, zeros, [0])
        bent = deep.LinearisedNetwork(read_classifier(kink, zeros[:1, :1]).root, zeros[:1, :1], [0])
        found = [*(flat.radius(0, norm)[0] for norm in NORMS), bent.radius(0)[0], flat.radius(1)[0]]
        yield "inverse radius", 1 / _double(*found).clamp_min(1e-9)
        yield "margins, tokens together", 1 - deep.certified_margins(line, zeros, 0, 0.05)

    # Class 1 is not the class of the input, so that its radius is zero.
    return Example("known radii", proved, {"inverse radius": _double(5.0, 4.0, 7.0, 1 / 0.6, 1e9),
                                           "margins, tokens together": _double(1.0, 0.25)})  # fmt: skip


def examples(which: str) -> list[Example]:
    """Examples for the changes of a module."""
    heads = [ball.example(label) for label, ball in HEADS.items()] if which == "attention" else []
    alone = SINGLE | PRODUCTS | MOVED
    single = [ball.example(label) for label, ball in alone.items()] if which != "attention" else []
    networks = [ball.example(label) for label, ball in NETWORKS.items()]
    return [*heads, *single, *networks, *([_radii()] if which == "margins" else [])]
