"""The grid of attention maps that every closed form is checked on: kinds × masks × heads × positions × biases × extras.

Weights are drawn in float64 from seed 0. Sizes are small, so that the dense autograd Jacobian is the oracle everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap, UnitNorm

N, WIDTH, HEAD_WIDTH, OUT = 6, 7, 4, 5
KINDS = ("dot_product", "sigmoid", "cosine", "l2")
MASKS = ("none", "causal", "window", "two-sided window", "padding", "boolean", "additive", "per head", "blind rows")
HEADS = ((1, 1), (4, 4), (4, 2), (4, 1))
POSITIONS = ("none", "rotary", "partial interleaved rotary", "alibi", "relative")
EXTRAS = ("plain", "rms qk-norm", "l2 qk-norm with gain", "softcap", "scale", "rms qk-norm and softcap")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mask(name: str, heads: int) -> hs.Causal | Tensor | str | None:
    return {
        "none": None,
        "causal": "causal",
        "window": hs.SlidingWindow(3),
        "two-sided window": hs.SlidingWindow(2, causal=False),
        "padding": hs.Padding(torch.arange(N) < N - 2),
        "boolean": torch.rand(N, N) > 0.4,
        "additive": draw(N, N),
        "per head": torch.where(torch.rand(heads, N, N) > 0.3, draw(heads, N, N), float("-inf")),
        "blind rows": (torch.arange(N) % 2 == 0)[:, None] & (torch.rand(N, N) > 0.3),
    }[name]


def dot_product_options(mask_name: str, heads: int, position: str, extra: str) -> dict[str, object]:
    options: dict[str, object] = {"mask": mask(mask_name, heads)}
    if position == "rotary":
        options["rotary"] = hs.Rotary.standard(HEAD_WIDTH, base=50.0)
    elif position == "partial interleaved rotary":
        options["rotary"] = hs.Rotary.standard(2, interleaved=True)
    elif position == "alibi":
        options["logit_biases"] = [hs.ALiBi.standard(heads)]
    elif position == "relative":
        options["logit_biases"] = [hs.RelativeBias(draw(heads, 5))]
    if extra.startswith("rms qk-norm"):
        options["qk_norm"] = "rms"
    elif extra.startswith("l2 qk-norm"):
        options["qk_norm"] = (UnitNorm(1e-3, gain=draw(HEAD_WIDTH)), UnitNorm(1e-3, gain=draw(HEAD_WIDTH)))
    if extra.endswith("softcap"):
        options["softcap"] = 1.5
    if extra == "scale":
        options["scale"] = 0.3
    return options


def build(
    kind: str, mask_name: str, heads: int, kv_heads: int, position: str, biased: bool, extra: str
) -> AttentionMap:
    torch.manual_seed(0)
    wide, shared = heads * HEAD_WIDTH, kv_heads * HEAD_WIDTH
    weights = [draw(wide, WIDTH), draw(shared, WIDTH), draw(shared, WIDTH), draw(OUT, wide)]
    if kind == "l2":
        return hs.L2SelfAttention(
            0.5 * weights[0], draw(wide, WIDTH), weights[3], heads=heads, mask=mask(mask_name, heads)
        )
    options = dot_product_options(mask_name, heads, position, extra)
    options |= {"heads": heads, "kv_heads": kv_heads}
    if biased:
        sizes = {"query_bias": wide, "key_bias": shared, "value_bias": shared, "output_bias": OUT}
        options |= {name: draw(size) for name, size in sizes.items()}
    if kind == "cosine":
        options.pop("qk_norm", None)
        options.pop("scale", None)
        return hs.CosineAttention(*weights, temperature=3.0, value_scale=2.0, eps=0.1, **options)
    return (hs.SigmoidAttention if kind == "sigmoid" else hs.SelfAttention)(*weights, **options)


def grid(kind: str, mask_name: str) -> Iterator[tuple[str, AttentionMap]]:
    """Every combination for one kind and mask, with a name for messages."""
    if kind == "l2":
        for heads, kv_heads in HEADS[:2]:
            yield f"heads={heads}", build(kind, mask_name, heads, kv_heads, "none", False, "plain")
        return
    extras = ("plain", "softcap") if kind == "cosine" else EXTRAS
    for (heads, kv_heads), position, biased, extra in itertools.product(HEADS, POSITIONS, (False, True), extras):
        name = f"heads={heads}/{kv_heads}, positions={position}, biases={biased}, {extra}"
        yield name, build(kind, mask_name, heads, kv_heads, position, biased, extra)


def tokens(*batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch, N, WIDTH, dtype=torch.float64, generator=generator)
