"""The cases every upper bound is attacked on: kinds of attention × masks × positions × shapes × sets of tokens.

A case is drawn at random; a bound takes those that its assumptions allow. One stream of cases serves all bounds of a
place: on a set of tokens (`set`), on measures with unequal masses (`atoms`), near an input (`near`), or with tokens and
weights free (`free`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.ascent import Case, Free
from howsmooth.attention import ComposedAttention, UnitNorm
from howsmooth.attention.autodiff_maps import GradientStepAttention, LipschitzNormAttention
from howsmooth.bounds import Bound
from howsmooth.sets.ellipsoid import Ellipsoid

SCOPES = {
    "set": ("ball", "mean-field W2", "mean-field d2"),
    "atoms": ("mean-field W2", "mean-field d2"),
    "near": ("neighbourhood",),
    "free": ("point", "global"),
}
MAPS = ("dot_product", "sigmoid", "cosine", "l2")
SHAPES = [(2, 1), (3, 1), (9, 1), (2, 2), (4, 2), (6, 3), (8, 2), (12, 4), (16, 2), (24, 5), (32, 1), (48, 3), (64, 8)]
_SHAPES_AT = {
    "set": SHAPES,
    "atoms": [(n, d) for n, d in SHAPES if n <= 12],
    "near": [(n, d) for n, d in SHAPES if n * d <= 48],
    "free": [(n, d) for n, d in SHAPES if n * d <= 48],
}
T = TypeVar("T")


class Draw:
    """Seeded choices and numbers."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options: T) -> T:
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def between(self, low: float, high: float) -> float:
        """Log-uniform."""
        return low * (high / low) ** float(torch.rand((), generator=self.generator))

    def square(self, kind: str, d: int) -> Tensor:
        """A matrix of norm one of the given kind."""
        m = self.normal(d, d)
        matrix = {
            "random": m,
            "skew": m - m.mT,
            "negative definite": -m @ m.mT,
            "positive definite": m @ m.mT,
            "low rank": m[:, :1] * m[:1],
            "minus identity": -torch.eye(d, dtype=torch.float64),
        }[kind]
        return _one(matrix)


@dataclass
class Blueprint:
    """A map to be: how to build it from free weights (its own where none are free), and where those start."""

    words: str
    build: Callable[[Free], nn.Module]
    weights: Free = field(default_factory=dict)


def _one(matrix: Tensor) -> Tensor:
    """The matrix brought to norm one (zero stays zero)."""
    return matrix / torch.linalg.matrix_norm(matrix, 2).clamp(min=1e-12)


def dot_product(
    draw: Draw, n: int, d: int, starts: int, make: Callable[..., nn.Module] = hs.SelfAttention
) -> Blueprint:
    """One head of any shape of A, half of the time with A and V free at fixed norms; or two heads that share keys."""
    heads = draw.pick(1, 1, 1, 2 if d % 2 == 0 else 1)
    words, options = _options(draw, n, d, heads)
    if heads == 2:
        weights = [draw.normal(d, d), draw.normal(d // 2, d), draw.normal(d // 2, d), draw.normal(d, d)]
        return Blueprint(f"two heads, {words}", lambda free: make(*weights, heads=2, kv_heads=1, **options))
    shape = draw.pick("random", "skew", "negative definite", "positive definite", "low rank", "minus identity")
    shape = "random" if d == 1 and shape == "skew" else shape  # a skew number is zero
    score, value, key = draw.square(shape, d), _one(draw.normal(d, d)), torch.eye(d, dtype=torch.float64)
    strength = draw.between(0.3, 4.0)

    def build(free: Free) -> nn.Module:
        query = strength * _one(free.get("query", score))
        return make(query, key, _one(free.get("value", value)), scale=1.0, **options)

    free = {"query": score + 0.1 * draw.normal(starts, d, d), "value": draw.normal(starts, d, d)}
    return Blueprint(f"{shape} A, ‖A‖={strength:.2f}, {words}", build, free if draw.pick(True, False) else {})


def sigmoid(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    return dot_product(draw, n, d, starts, hs.SigmoidAttention)


def composed(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    """Dot-product attention with learned sinks, a gate on its output, or both."""
    plain = dot_product(draw, n, d, starts)
    sinks, gate = draw.pick((True, False), (False, True), (True, True))
    logit, weight = draw.normal(2), draw.between(0.1, 2.0) * draw.normal(2 * d, d)

    def build(free: Free) -> nn.Module:
        attention = plain.build(free)
        heads, width = attention.heads, attention.value_weight.shape[1]
        around = {"sinks": logit[:heads]} if sinks else {}
        return ComposedAttention(attention, **around, **({"gate": weight[: heads * width]} if gate else {}))

    words = " and ".join(["sinks"] * sinks + ["gate"] * gate)
    return Blueprint(f"{words}, {plain.words}", build, plain.weights)


def cosine(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    """Free weights of fixed norms."""
    words, options = _options(draw, n, d, norms=False)
    options |= {"temperature": draw.between(0.3, 5), "value_scale": draw.between(0.5, 2), "eps": draw.between(0.01, 3)}
    options["normalize_values"] = draw.pick(True, True, False)
    sizes = {name: draw.between(0.3, 3) for name in ("query", "key", "value")}
    return Blueprint(
        f"{words}, τ={options['temperature']:.2f}, ε={options['eps']:.2f}",
        lambda free: hs.CosineAttention(*(size * _one(free[name]) for name, size in sizes.items()), **options),
        {name: draw.normal(starts, d, d) for name in sizes},
    )


def l2(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    """Free weights W and W^V; W^O is fixed."""
    heads, mask = draw.pick(1, 2 if d % 2 == 0 else 1), draw.pick("none", "none", "causal", "window")
    output, size = _one(draw.normal(d, d)), draw.between(0.3, 3)
    return Blueprint(
        f"{heads} head(s), mask {mask}",
        lambda free: hs.L2SelfAttention(free["query"], free["value"], output, heads=heads, mask=_masks(n)[mask]),
        {"query": size * draw.normal(starts, d, d), "value": draw.normal(starts, d, d)},
    )


def lipschitz_norm(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    """Free weights of all sizes."""
    names = ("query", "key", "value")
    return Blueprint(
        "one head",
        lambda free: LipschitzNormAttention(*(free[name] for name in names)),
        {name: draw.between(0.1, 3) * draw.normal(starts, d, d) for name in names},
    )


def gradient_step(draw: Draw, n: int, d: int, starts: int) -> Blueprint:
    """A free context, at a size for which η = 1 is a given share of the largest step that is known to be safe."""
    matrix, share = draw.normal(d, d), draw.pick(0.25, 0.999, 0.999, 3.0)
    context = draw.normal(starts, draw.pick(2, 5, 9), d) + draw.pick(0.0, 2.0) * draw.normal(d)

    def build(free: Free) -> nn.Module:
        longest = (free["context"] @ matrix.mT).norm(dim=-1).amax()
        return GradientStepAttention(matrix, free["context"] * (2 * share) ** 0.5 / longest, step=1.0)

    return Blueprint(f"η·max‖Ay‖² = {2 * share:g}", build, {"context": context})


KINDS: dict[str, Callable[[Draw, int, int, int], Blueprint]] = {
    "dot_product": dot_product,
    "sigmoid": sigmoid,
    "cosine": cosine,
    "l2": l2,
    "lipschitz_norm": lipschitz_norm,
    "gradient_step": gradient_step,
    "composed": composed,
}


def kinds(bound: Bound) -> tuple[str, ...]:
    """The kinds of attention a bound covers, as names of `KINDS`."""
    return bound.kinds or MAPS


def places(bound: Bound) -> list[str]:
    """Where a bound is attacked."""
    return [place for place, scopes in SCOPES.items() if bound.scope in scopes]


def stream(names: Sequence[str], place: str, starts: int, seed: int = 0) -> Iterator[Case]:
    """Random cases without end, the kinds in turn."""
    for number in itertools.count(seed):
        draw = Draw(number)
        kind = names[number % len(names)]
        n, d = draw.pick(*_SHAPES_AT[place])
        yield _place(place, draw, n, d, starts, kind, KINDS[kind](draw, n, d, starts))


def _place(place: str, draw: Draw, n: int, d: int, starts: int, kind: str, plan: Blueprint) -> Case:
    z = coordinates(draw, n, d, starts)
    words = f"{kind}, n={n}, d={d}, {plan.words}"
    if place == "free":
        size = torch.tensor([draw.between(0.2, 4.0) for _ in range(starts)], dtype=torch.float64)
        return Case(words, {"z": size[:, None, None] * z, **plan.weights}, plan.build)
    if place == "near":
        centre = draw.between(0.2, 2.0) * draw.normal(n, d)
        eps = draw.pick(0.01, 0.1, 0.3, 0.5) * float(centre.norm(dim=-1).max())
        return Case(f"{words}, ε={eps:.2g}", {"z": z, **plan.weights}, plan.build, centre=centre, eps=eps)
    if place == "set" and d > 1 and draw.pick(True, False, False, False):
        make = draw.pick(Ellipsoid.rms_norm, Ellipsoid.layer_norm)
        tokens = make(draw.between(0.2, 1.5) * draw.normal(d), draw.pick(0.0, 0.5) * draw.normal(d))
        return Case(f"{words}, after {tokens.origin}", {"z": z, **plan.weights}, plan.build, tokens)
    radius = draw.between(0.4, 2.0)
    start = {"z": z, **plan.weights}
    if place == "atoms":
        start["log_mass"] = 2 * draw.normal(starts, n)
    ordered = "mask causal" in plan.words
    return Case(f"{words}, R={radius:.2f}", start, plan.build, Ellipsoid.ball(radius, d), ordered=ordered)


def coordinates(draw: Draw, n: int, d: int, starts: int) -> Tensor:
    """Coordinates in the unit ball: a quarter each on the sphere, inside, and the two constructions of the theory.

    The constructions are an outlier first and all others opposite (−u; u, …, u) or half-way (u; u/2, …, u/2).
    """
    z = draw.normal(starts, n, d)
    z = z / z.norm(dim=-1, keepdim=True)
    z[1::4] *= torch.rand(len(z[1::4]), n, 1, generator=draw.generator, dtype=torch.float64)
    for first, rest, share in ((-1.0, 1.0, slice(2, None, 4)), (1.0, 0.5, slice(3, None, 4))):
        u = z[share, :1].clone()
        z[share] = rest * u + 0.03 * draw.normal(*z[share].shape)
        z[share, :1] = first * u
    return z


def _masks(n: int) -> dict[str, Any]:
    return {
        "none": None,
        "causal": "causal",
        "window": hs.SlidingWindow(max(2, n // 2)),
        "two-sided": hs.SlidingWindow(2, causal=False),
    }


def _options(draw: Draw, n: int, d: int, heads: int = 1, norms: bool = True) -> tuple[str, dict[str, Any]]:
    """A mask, and half of the time one more thing that attention may have."""
    mask = draw.pick("none", "none", "causal", "causal", "window", "two-sided")
    extra = draw.pick("", "", "", "query bias", "rotary", "ALiBi", "soft-cap", "q/k norm")
    options: dict[str, Any] = {"mask": _masks(n)[mask]}
    if extra == "query bias":
        options["query_bias"] = draw.normal(d)
    elif extra == "rotary" and d // heads % 2 == 0:
        options["rotary"] = hs.Rotary.standard(d // heads, base=50.0)
    elif extra == "ALiBi":
        options["logit_biases"] = [hs.ALiBi(draw.between(0.05, 1.0) * torch.ones(heads, dtype=torch.float64))]
    elif extra == "soft-cap":
        options["softcap"] = draw.between(0.5, 5.0)
    elif extra == "q/k norm" and norms:
        options["qk_norm"] = UnitNorm(draw.between(1e-2, 1.0)), UnitNorm(draw.between(1e-2, 1.0))
    return f"mask {mask}" + (f", {extra}" if len(options) > 1 else ""), options
