"""A network in words: a tree of its nodes with shapes and numbers of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from howsmooth.attention.attention_map import AttentionMap
from howsmooth.attention.composite_map import ComposedAttention
from howsmooth.attention.stages import Rotary, TokenStage
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation, Norm
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
    Unread,
)

if TYPE_CHECKING:
    from howsmooth.network.reader import Network


def describe(network: Network) -> str:
    """The network as lines of text."""
    shapes = f"{_shape(network.in_shape)} → {_shape(network.out_shape)}"
    count = sum(parameters(node) for node in network.root.walk())
    lines = [f"{network.name}: {shapes}, {count:,} parameters", *_lines(network.root, 1, network.x)]
    compared = not math.isnan(network.difference)
    agreed = f"agrees with its own output and derivative to {network.difference:.0e}" if compared else ""
    unread = [f"left to automatic differentiation: {', '.join(map(str, network.unread))}"] if network.unread else []
    return "\n".join([*lines, *unread, *([agreed] if agreed else [])])


def _shape(shape: torch.Size) -> str:
    return " × ".join(map(str, shape)) or "1"


def _lines(node: Node, depth: int, x: Tensor) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(node, Series):
        for one in node.nodes:
            yield from _lines(one, depth, x)
        return
    if isinstance(node, Parallel) and any(isinstance(one, Skip) for one in node.nodes):
        yield f"{pad}x +{_place(node)[1:]}"
        for one in node.nodes:
            if not isinstance(one, Skip):
                yield from _lines(one, depth + 1, x)
        return
    if node.children:
        kinds: dict[type[Node], str] = {Parallel: "sum of", Beside: "side by side", Multiply: "product of"}
        yield f"{pad}{kinds.get(type(node), type(node).__name__)}{_place(node)}"
        for one in node.children:
            yield from _lines(one, depth + 1, x)
        return
    for words in phrases(node):
        yield f"{pad}{words}{_place(node)}"


def _place(node: Node) -> str:
    return f"  ({node.place})" if node.place else ""


def phrases(node: Node) -> list[str]:
    """A node without children, as one phrase for each of its steps."""
    match node:
        case Tokenwise():
            return [", ".join(map(_stage, node.stages))]
        case Attend():
            return [_attention(node.attention)]
        case Rearrange():
            return [_rearranged(node)]
        case MixTokens():
            m, n = node.matrix.shape
            mean = m == 1 and bool((node.matrix == node.matrix[0, 0]).all())
            return [f"mean of {n} tokens" if mean else f"mixture of {n} tokens into {m}"]
        case Unread():
            return [f"{node.operation}, by automatic differentiation"]
        case Skip():
            return ["x"]
    return [type(node).__name__]


def _stage(stage: TokenStage) -> str:
    match stage:
        case Affine():
            out, width = stage.weight.shape
            return f"linear {width} → {out}"
        case Norm():
            return f"{'LayerNorm' if stage.centred else 'RMSNorm'} of {stage.width}"
        case Activation():
            return stage.name or "function of each number"
        case GatedActivation():
            return f"gate by {stage.name or 'a function'}"
        case Diagonal():
            shift = "" if stage.shift is None else " + shift"
            scaled = isinstance(stage.gain, Tensor) or stage.gain != 1
            return f"{'γ·x' if isinstance(stage.gain, Tensor) else f'{stage.gain:.4g}·x' if scaled else 'x'}{shift}"
    return type(stage).__name__


def _attention(attention: Any) -> str:
    inner: AttentionMap = attention.attention if isinstance(attention, ComposedAttention) else attention
    facts = [f"{inner.heads} heads"] if inner.heads > 1 else ["1 head"]
    facts += [f"{inner.kv_heads} of keys and values"] if inner.kv_heads != inner.heads else []
    facts += ["rotary"] * any(isinstance(stage, Rotary) for stage in inner.query_stages)
    facts += [type(term).__name__ for term in inner.logit_biases]
    facts += ["sinks"] * (isinstance(attention, ComposedAttention) and attention.sinks is not None)
    facts += [f"soft-cap {inner.softcap:g}"] if inner.softcap is not None else []
    kind = "" if inner.kind == "dot_product" else f"{inner.kind} "
    return f"{kind}attention {attention.in_features} → {attention.out_features}, {', '.join(facts)}"


def _rearranged(node: Rearrange) -> str:
    n, d = node.index.shape
    moved = "numbers rearranged" if node.factor is None else "numbers rearranged and scaled"
    identity = torch.equal(node.index.flatten(), torch.arange(node.index.numel()))
    if identity and node.constant is not None and node.factor is None:
        return f"positions added to {n} tokens"
    return f"{moved} into {n} tokens of {d}{'' if node.constant is None else ', a constant added'}"


def parameters(node: Node) -> int:
    """The numbers that a node itself holds."""
    tensors: list[Tensor] = []
    if isinstance(node, Tokenwise):
        for stage in node.stages:
            for owner in (stage, getattr(stage, "unit", None)):
                tensors += (
                    [t for t in (vars(owner) | owner._buffers).values() if isinstance(t, Tensor)]
                    if owner is not None
                    else []
                )
    elif isinstance(node, Attend):
        inner = node.attention.attention if isinstance(node.attention, ComposedAttention) else node.attention
        if isinstance(inner, AttentionMap):
            tensors = [*inner.input_weights, inner.output_weight, *inner.input_biases, inner.output_bias]  # type: ignore[list-item]
    elif isinstance(node, MixTokens):
        tensors = [node.matrix] if not bool((node.matrix == node.matrix[0, 0]).all()) else []
    elif isinstance(node, Rearrange):
        tensors = [] if node.constant is None else [node.constant]
    return sum(t.numel() for t in tensors if t is not None)
