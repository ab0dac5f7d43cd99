"""Every layer of `howsmooth.nn` under joint ascent over tokens and weights, and the L2 attentions known to be wrong."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import howsmooth as hs
from evidence.ascent import ROUNDING, Case, Free, ascend, exact
from evidence.bound_ascents import Record
from evidence.bound_cases import Draw, coordinates
from evidence.tables import table
from howsmooth import nn as layers
from howsmooth.bounds import Setting
from howsmooth.bounds.l2_bounds import block_lip_2, l2_weights
from howsmooth.nn.layers.attention_layer import AttentionLayer, CallMasks
from howsmooth.norms.small_matrices import spectral
from howsmooth.sets.ellipsoid import Ellipsoid

TITLE = "Layers under joint ascent over tokens and weights"
SHAPES = [(2, 2, 1), (3, 2, 2), (5, 2, 1), (6, 4, 2), (9, 2, 2), (12, 2, 1), (8, 4, 2), (4, 8, 4)]
"""n, d, heads; a full run takes each once."""
ALL = ("none", "causal", "window", "array", "padding")


@dataclass(frozen=True)
class View:
    """A mask as a layer is called with it, and as its bound is asked for."""

    call: dict[str, Any] = field(default_factory=dict)
    mask: Any = None


def view(name: str, n: int, draw: Draw) -> View:
    """One of the masks `ALL` for n tokens."""
    window = hs.SlidingWindow(max(2, n // 2))
    seen = (draw.normal(n, n) > 0) | torch.eye(n, dtype=torch.bool)
    return {
        "none": View(),
        "causal": View({"is_causal": True}, "causal"),
        "window": View({"attn_mask": window}, window),
        "array": View({"attn_mask": ~seen}, seen),
        "padding": View({"key_padding_mask": torch.arange(n)[None] >= max(1, n - 2)}),
    }[name]


@dataclass(frozen=True)
class Kind:
    """A layer to attack.

    Attributes:
        make: the layer, from width and heads.
        climbed: what ‖J‖ is divided by while climbing, a bound or something like it; None for ‖J‖ alone.
        norm: in which it is attacked.
        masks: names of `view`.
        ball: whether its bound needs a radius.
        of: the layer that is climbed instead; it has the same weights, and ‖J‖/bound of the one is ‖J‖ of the other.
    """

    words: str
    make: Callable[[int, int], AttentionLayer]
    climbed: Callable[[Setting], Tensor] | None
    norm: float = 2
    masks: tuple[str, ...] = ALL
    ball: bool = False
    of: Callable[[int, int], AttentionLayer] | None = None


class Called(nn.Module):
    """x ↦ layer(x)/size on weights given from outside."""

    def __init__(self, layer: AttentionLayer, weights: Free, call: dict[str, Any], size: Tensor | float = 1.0):
        super().__init__()
        self.call = lambda x: functional_call(layer, weights, (x,), call)[0] / size

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class MapOf(nn.Module):
    """The map of a layer, as a module, so that weights can be given from outside."""

    def __init__(self, layer: AttentionLayer):
        super().__init__()
        self.layer = layer

    def forward(self, mask: Any, n: int) -> nn.Module:
        return self.layer.attached_map(mask, n)


def _weights(free: Free) -> Free:
    return {name: value for name, value in free.items() if name != "z"}


def draw_case(kind: Kind, mask: str, number: int, starts: int) -> tuple[Case, AttentionLayer, View]:
    """A random shape with random starts, to be climbed over the bound; the layer itself and its mask."""
    draw = Draw(1000 * number + zlib.crc32(kind.words.encode()) % 1000)
    n, d, heads = SHAPES[number % len(SHAPES)]
    look, layer = view(mask, n, draw), (kind.of or kind.make)(d, heads).double().eval()
    size = torch.tensor([draw.between(0.2, 6.0) for _ in range(starts)], dtype=torch.float64)[:, None, None]
    start = {"z": (1.0 if kind.ball else size) * coordinates(draw, n, d, starts)}
    for name, weight in layer.named_parameters():
        start[name] = draw.between(0.3, 3.0) * d**-0.5 * draw.normal(starts, *weight.shape)
    tokens = Ellipsoid.ball(draw.between(0.4, 2.0), d) if kind.ball else None
    named = MapOf(layer)

    def climbed(free: Free) -> Tensor | float:
        if kind.climbed is None:
            return 1.0
        weights = {f"layer.{name}": value for name, value in _weights(free).items()}
        return kind.climbed(Setting(functional_call(named, weights, (look.mask, n)), n, tokens))

    def attention(free: Free) -> nn.Module:
        return Called(layer, _weights(free), look.call, climbed(free))

    case = Case(f"n={n}, d={d}, {heads} head(s), mask {mask}", start, attention, tokens)
    return case, kind.make(d, heads).double().eval(), look


def attack(kind: Kind, mask: str, least: int, starts: int = 25, steps: int = 60) -> Record:
    """At least so many ascents on one layer under one mask; the measured value is a dense float64 Jacobian's."""
    record = Record()
    for number in range(math.ceil(least / starts)):
        case, layer, look = draw_case(kind, mask, number, starts)
        free = ascend(case, None, kind.norm, steps)
        final = replace(case, attention=lambda free, layer=layer, look=look: Called(layer, _weights(free), look.call))
        measured, n = exact(final, free, kind.norm), case.start["z"].shape[-2]
        radius = None if case.tokens is None else case.tokens.radius
        bounds = []
        for i in range(starts):
            layer.load_state_dict({name: value[i] for name, value in _weights(free).items()}, strict=False)
            bounds.append(layer.lipschitz_bound(n, radius, kind.norm, look.mask))
        record.add(measured / torch.stack(bounds), case)
    return record


class WithoutFactor(layers.L2Attention):
    """L2 attention without A_h, as often seen; it claims the bound of the real one."""

    def attend(self, x: Tensor, masks: CallMasks, need_weights: bool = False) -> tuple[Tensor, None]:
        weights = self.qk_proj.weight, self.v_proj.weight, self.out_proj.weight
        return hs.L2SelfAttention(*weights, heads=self.num_heads, **self.options(masks.n))(x), None

    def options(self, n: int) -> dict[str, Any]:
        """How it differs from L2 attention."""
        return {"value_factor": False}


class Untied(WithoutFactor):
    """L2 attention with keys of their own."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__(embed_dim, num_heads)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def options(self, n: int) -> dict[str, Any]:
        return {"key": self.k_proj.weight}


class SelfHidden(WithoutFactor):
    """L2 attention in which no token sees itself."""

    def options(self, n: int) -> dict[str, Any]:
        return {"mask": ~torch.eye(n, dtype=torch.bool)}


def of_catalogue(name: str) -> Callable[[Setting], Tensor]:
    """A bound of the catalogue for the block, heads added up."""
    bound = hs.bounds.get(name)
    return bound.evaluate if bound.combine == "block" else lambda where: bound.evaluate(where, True).sum()


def block(where: Setting) -> Tensor:
    """The bound of L2 attention but for a constant of n."""
    return block_lip_2(*l2_weights(where), average=1.0)


def on_ball(where: Setting) -> Tensor:
    """‖V‖(a + (1 + a)√n), heads added up."""
    found, root = where.map, where.count**0.5
    value = spectral(found.value_weight.mT @ found.output_weight)
    a = where.radius**2 * found.query_stages[-1].factor * spectral(found.key_weight.mT @ found.query_weight)
    return (value * (a + (1 + a) * root)).sum()


INF, L2 = math.inf, layers.L2Attention
KINDS = [
    Kind("L2Attention", L2, block),
    Kind("L2Attention", L2, of_catalogue("howsmooth.l2_lip_inf"), INF),
    Kind("ContractiveL2Attention, norm 2", layers.ContractiveL2Attention, block, of=L2),
    *(
        Kind(
            f"ContractiveL2Attention, norm ∞, bound {bound}",
            lambda d, heads, bound=bound: layers.ContractiveL2Attention(d, heads, norm="inf", bound=bound),
            of_catalogue(name),
            INF,
            of=L2,
        )
        for bound, name in (("howsmooth", "howsmooth.l2_lip_inf"), ("kim2021", "kim2021.lip_inf"))
    ),
    Kind("CosineAttention", layers.CosineAttention, of_catalogue("howsmooth.cosine")),
    Kind(
        "LipschitzNormAttention",
        layers.LipschitzNormAttention,
        of_catalogue("howsmooth.lipschitz_norm"),
        2,
        ("none", "padding"),
    ),
    Kind(
        "GradientStepAttention",
        lambda d, h: layers.GradientStepAttention(d, h, context_size=5, step=1.0),
        None,
        2,
        ("none",),
    ),
    Kind("DotProductAttention", layers.DotProductAttention, on_ball, ball=True),
    Kind("NormControlledAttention", layers.NormControlledAttention, on_ball, ball=True),
    Kind("SigmoidAttention", layers.SigmoidAttention, of_catalogue("howsmooth.sigmoid"), ball=True),
]
WRONG = [
    Kind("A_h dropped", WithoutFactor, block, masks=("none",)),
    Kind("queries and keys untied", Untied, block, masks=("none",)),
    Kind("self masked out", SelfHidden, block, masks=("none",)),
]


def rows(kinds: Iterable[Kind], least: int, progress: Callable[[str], None]) -> list[list[object]]:
    """A row for every layer and mask."""
    found: list[list[object]] = []
    for kind in kinds:
        for mask in kind.masks:
            progress(f"{kind.words}, mask {mask}")
            r = attack(kind, mask, least)
            norm = "∞" if kind.norm == INF else "2"
            found.append([kind.words, mask, norm, r.maximisations, r.violations, f"{r.largest:.4f}", r.where])
    return found


def parts(progress: Callable[[str], None], least: int = 200) -> list[str]:
    """The page."""
    head = ["layer", "mask", "norm", "ascents", "violations", "largest measured/bound", "where"]
    return [
        "Each ascent climbs in the tokens and in all weights of the layer at once, from random starts, in 60 steps. "
        "What is climbed is ‖J‖ over the bound or over a simpler expression that scales like it (dot-product and "
        "norm-controlled attention: ‖V‖(a + (1 + a)√n); L2 attention in the 2-norm: the block bound without its "
        "constant of n; gradient steps: ‖J‖ alone). Measured is the norm of the dense float64 autograd Jacobian of the "
        "layer itself, and the bound is what `lipschitz_bound` says for the weights found. Shapes are n = 2 to 12, "
        "d = 2 to 8, one to four heads, eight of them with 25 starts each. A violation is a ratio above "
        f"1 + {ROUNDING:g}. Contractive layers are climbed as the L2 attention they divide, and measured as they are. "
        "Layers that need a radius keep their tokens in a ball.",
        table(head, rows(KINDS, least, progress)),
        "The same ascent on three L2 attentions that are not Lipschitz, with the bound of the real one as their claim:",
        table(head, rows(WRONG, least, progress)),
    ]
