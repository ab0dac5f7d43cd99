"""A model as a sequence of pieces: normalisations, attention, MLPs and residual branches.

Torch's TransformerEncoder and BERT- and GPT-2-like models of transformers can be read. The pieces must reproduce the
model's own output before they are returned. Dropout is off, and the model is unchanged afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, SelfAttention
from howsmooth.attention.conversion import plain_map
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.forward_pass import temporary_hooks, use_eager_attention
from howsmooth.models.layer_wiring import WIRINGS, read_affine
from howsmooth.models.module_names import layer_modules

_READ = ("bert", "camembert", "roberta", "xlm-roberta", "gpt2")
_PROBE_LENGTH = 8
_TOLERANCE = 1e-3
"""Largest relative difference between the pieces and the model on a random input, in single precision."""


@dataclass(frozen=True)
class NormPiece:
    """x ↦ module(x), a normalisation of single tokens."""

    name: str
    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)


@dataclass(frozen=True)
class AttentionPiece:
    """An attention map, and the normalisation before it, or None."""

    name: str
    map: AttentionMap
    norm: nn.Module | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.map(x)


@dataclass(frozen=True)
class MLPPiece:
    """x ↦ W₂ act(W₁x + b₁) + b₂; the weights as in `torch.nn.Linear`."""

    name: str
    layers: tuple[nn.Module, nn.Module]
    weights: tuple[Tensor, Tensor]
    act: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[1](self.act(self.layers[0](x)))


@dataclass(frozen=True)
class ResidualPiece:
    """x ↦ x + branch(x)."""

    name: str
    branch: tuple[Piece, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return x + _run(self.branch, x)


Piece = NormPiece | AttentionPiece | MLPPiece | ResidualPiece


@dataclass(frozen=True)
class Reading:
    """A copy of a model, its pieces, and the module (entry) whose input is the input of the first piece."""

    model: Any
    pieces: tuple[Piece, ...]
    causal: bool = False
    entry: nn.Module | None = None

    @property
    def norms(self) -> list[NormPiece]:
        """Every normalisation, in order."""
        return list(_norms(self.pieces))

    def run(self, x: Tensor) -> Tensor:
        """The model's own output on one input, ``(n, d)`` or token ids ``(n,)``."""
        with torch.no_grad():
            if _is_torch(self.model):
                mask = nn.Transformer.generate_square_subsequent_mask(len(x), x.device, x.dtype)
                return self.model(x, mask) if self.causal else self.model(x)
            given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x[None]}
            no_cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
            return self.model(**given, **no_cache).last_hidden_state[0]

    def check(self, width: int) -> None:
        """Refuse the model when the pieces do not reproduce its output."""
        x = torch.randn(_PROBE_LENGTH, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = x.to(next(self.model.parameters()))
        seen = [x]
        entries = [] if self.entry is None else [self.entry]  # transformers add positions to the embeddings first
        hooks = [entry.register_forward_pre_hook(lambda module, args: seen.append(args[0][0])) for entry in entries]
        with temporary_hooks(hooks), torch.no_grad():
            output = self.run(x)
            error = float((_run(self.pieces, seen[-1]) - output).norm() / output.norm())
        if not error <= _TOLERANCE:
            raise UnsupportedModel(
                f"the layers as read from this {type(self.model).__name__} differ from what it computes by a relative "
                f"{error:.1e}, so something in it is not modelled: bound its layers one by one with "
                "hs.bounds.composition and hs.bounds.layers."
            )


def read_pieces(model: nn.Module, *, causal: bool = False) -> Reading:
    """The pieces of a model, or `UnsupportedModel` when its layers cannot be read.

    Args:
        causal: whether a torch encoder is called with the causal mask.

    >>> reading = read_pieces(nn.TransformerEncoderLayer(16, 2, 32, norm_first=True))
    >>> [piece.name for piece in reading.pieces]
    ['layer 0: x + attention', 'layer 0: x + MLP']
    """
    copied = _frozen(model)
    kind = getattr(getattr(copied, "config", None), "model_type", None)
    if causal and not _is_torch(copied):
        raise InvalidInput("causal is for torch encoders: models of transformers know their own mask.")
    if _is_torch(copied):
        reading, width = _torch_encoder(copied, causal)
    elif kind in _READ:
        reading, width = _transformers_model(copied, kind)
    else:
        raise UnsupportedModel(
            f"{type(copied).__name__} is not among the models whose layers can be read (nn.TransformerEncoder, "
            f"nn.TransformerEncoderLayer, {', '.join(_READ)}): bound its layers one by one with "
            "hs.bounds.layers and multiply them with hs.bounds.Stack."
        )
    reading.check(width)
    return reading


def _is_torch(model: nn.Module) -> bool:
    return isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer)


def _frozen(model: nn.Module) -> Any:
    """A copy without dropout, at least in single precision, with the attention that defines the model."""
    copied: Any = copy.deepcopy(getattr(model, "base_model", model)).eval()
    if hasattr(copied, "config"):
        use_eager_attention(copied)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in copied.parameters())
    return copied.float() if half else copied


def _torch_encoder(model: Any, causal: bool) -> tuple[Reading, int]:
    layers = list(model.layers) if isinstance(model, nn.TransformerEncoder) else [model]
    width = layers[0].self_attn.embed_dim
    last: nn.Module | None = None
    pieces: list[Piece] = []
    for index, layer in enumerate(layers):
        fed = layer.norm1 if layer.norm_first else last
        if fed is None and index > 0:
            raise UnsupportedModel(
                f"layer {index} normalises last and the layer before it first, so that its attention sees tokens of "
                "any size: give all layers the same norm_first."
            )
        attention = SelfAttention.from_torch(layer.self_attn, causal=causal)
        parts = (layer.linear1, layer.linear2), (layer.linear1.weight, layer.linear2.weight), layer.activation
        pieces += _layer(index, attention, fed, parts, (layer.norm1, layer.norm2), layer.norm_first)
        last = None if layer.norm_first else layer.norm2
    if getattr(model, "norm", None) is not None:
        pieces.append(NormPiece("end: norm", model.norm))
    return Reading(model, tuple(pieces), causal), width


def _transformers_model(model: Any, kind: str) -> tuple[Reading, int]:
    """Layers by the table of wirings; BERT normalises its embeddings, GPT-2 the output of its last layer."""
    (wiring,) = WIRINGS[kind]
    norm_first = wiring.orders == ("before",)
    last = None if norm_first else model.embeddings.LayerNorm
    pieces: list[Piece] = [] if last is None else [NormPiece("embeddings: norm", last)]
    entry = last
    for index, layer in enumerate(layer_modules(model) or ()):
        first, second = map(layer.get_submodule, wiring.norms)
        maps = tuple(map(layer.get_submodule, (*wiring.inner, wiring.outer)))
        weights = tuple(read_affine(each).weight for each in maps)
        attention = plain_map(SelfAttention.from_transformers(model, index), "a bound of layers")
        fed = first if norm_first else last
        entry = entry or first
        parts: Any = maps, weights, attrgetter(wiring.act)(layer)
        pieces += _layer(index, attention, fed, parts, (first, second), norm_first)
        last = second
    if norm_first:
        pieces.append(NormPiece("end: norm", model.ln_f))
    return Reading(model, tuple(pieces), entry=entry), model.config.hidden_size


def _layer(
    index: int,
    attention: AttentionMap,
    fed: nn.Module | None,
    parts: tuple[tuple[Any, Any], tuple[Tensor, Tensor], Any],
    norms: tuple[nn.Module, nn.Module],
    norm_first: bool,
) -> list[Piece]:
    """One layer: x + f(norm(x)) twice, or norm(x + f(x)) twice."""
    pieces: list[Piece] = []
    maps: tuple[tuple[str, Piece], ...] = (
        ("attention", AttentionPiece(f"layer {index}: attention", attention, fed)),
        ("MLP", MLPPiece(f"layer {index}: MLP", *parts)),
    )
    for (name, piece), norm in zip(maps, norms, strict=True):
        order = "before" if norm_first else "after"
        normed = NormPiece(f"layer {index}: norm {order} {name}", norm)
        skip = f"layer {index}: x + {name}"
        pieces += [ResidualPiece(skip, (normed, piece))] if norm_first else [ResidualPiece(skip, (piece,)), normed]
    return pieces


def _run(pieces: Iterable[Piece], x: Tensor) -> Tensor:
    for piece in pieces:
        x = piece(x)
    return x


def _norms(pieces: Iterable[Piece]) -> Iterator[NormPiece]:
    for piece in pieces:
        if isinstance(piece, NormPiece):
            yield piece
        elif isinstance(piece, ResidualPiece):
            yield from _norms(piece.branch)
