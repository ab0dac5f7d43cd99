"""The product bound of a whole model: torch's TransformerEncoder, and BERT- and GPT-2-like models of transformers.

A model is read into pieces (normalisations, attention, MLPs, residuals), which must reproduce the model's own output
before they are bounded. Dropout is off, and the model is left as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, SelfAttention
from howsmooth.bounds.catalogue import least_upper_bound
from howsmooth.bounds.composition import Stack, Stage
from howsmooth.bounds.layers import Activation, activation, mlp, normalisation
from howsmooth.bounds.settings import setting
from howsmooth.checks import door
from howsmooth.errors import DoesNotApply, InvalidInput, UnsupportedModel
from howsmooth.sets import TokenSet

_BERT_LIKE = ("bert", "camembert", "roberta", "xlm-roberta")
_PROBE_LENGTH = 8
_TOLERANCE = 1e-3
"""Largest relative difference between the pieces and the model on a random input, in single precision."""


@door
def stack(
    model: nn.Module,
    n: int,
    *,
    variance: float | Mapping[str, float] | None = None,
    radius: float | None = None,
    causal: bool = False,
) -> Stack:
    """The product bound on a model as a map of n tokens: from embeddings to the last hidden states.

    Args:
        model: a `torch.nn.TransformerEncoder` or `TransformerEncoderLayer`, or a BERT- or GPT-2-like model of
            transformers, whose input are then the word embeddings (``inputs_embeds``).
        n: number of tokens.
        variance: floors for the normalisations, by name as `measured_variances` gives them, or one for all. The bound
            then holds for the Jacobian at every input for which each normalisation sees tokens of at least its floor.
        radius: of the input tokens, for a torch encoder whose first attention sees them as they are (norm_first=False).
        causal: whether a torch encoder is called with the causal mask.

    >>> encoder = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
    >>> bound = stack(encoder, n=8)
    >>> [stage.name for stage in bound.stages]
    ['layer 0: x + attention', 'layer 0: x + MLP']
    >>> bound.worst.kind
    'normalisation'
    """
    pieces = _read(_frozen(model), radius, causal).pieces
    return Stack(tuple(piece.stage(n, _floors(pieces, variance)) for piece in pieces))


@door
def measured_variances(model: nn.Module, x: Tensor, *, causal: bool = False) -> dict[str, float]:
    """The smallest token variance (mean square for RMSNorm) that each normalisation sees when the model reads x.

    Args:
        x: tokens ``(n, d)`` or ``(batch, n, d)``, batch first whatever the module; for transformers also token ids,
            ``(n,)`` or ``(batch, n)``.

    >>> encoder = nn.TransformerEncoderLayer(4, 1, 8, norm_first=True)
    >>> found = measured_variances(encoder, torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.5, 0.5, -0.5, -0.5]]))
    >>> found["layer 0: norm before attention"]
    0.25
    """
    model = _frozen(model)
    reading = _read(model, 1.0, causal)
    smallest: dict[str, float] = {}
    handles = []
    for norm in _norms(reading.pieces):

        def listen(module: nn.Module, args: tuple[Tensor, ...], name: str = norm.name) -> None:
            tokens = args[0].double()
            found = tokens.square().mean(-1) if isinstance(module, nn.RMSNorm) else tokens.var(-1, correction=0)
            smallest[name] = min(smallest.get(name, math.inf), float(found.min()))

        handles.append(norm.module.register_forward_pre_hook(listen))
    if x.is_floating_point():
        x = x.to(next(model.parameters()).dtype)
    try:
        for item in x if x.dim() == (3 if x.is_floating_point() else 2) else [x]:
            reading.run(model, item)
    finally:
        for handle in handles:
            handle.remove()
    return smallest


@dataclass(frozen=True)
class _Norm:
    name: str
    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def stage(self, n: float, floors: Mapping[str, float]) -> Stage:
        floor = floors.get(self.name)
        eps = getattr(self.module, "eps", None)
        scope = "everywhere" if floor is None else f"token variance ≥ {floor:.3g}"
        lip = normalisation(self.module, floor)
        return Stage.of(self.name, lip, scope=scope, note=f"ε = {eps:g}" if eps else "", kind="normalisation")


@dataclass(frozen=True)
class _Attention:
    name: str
    map: AttentionMap
    tokens: TokenSet

    def __call__(self, x: Tensor) -> Tensor:
        return self.map(x)

    def stage(self, n: float, floors: Mapping[str, float]) -> Stage:
        where = setting(self.map, n=n, tokens=self.tokens)
        least = least_upper_bound(where)
        if least is None:
            raise DoesNotApply(f"{self.name}: no theorem bounds this {where.kind} attention on a set.")
        scope = f"{n:g} tokens, |x| ≤ {self.tokens.radius:.3g} ({self.tokens.origin})"
        return Stage.of(self.name, float(least[1]), scope=scope, note=least[0].name, kind="attention")


@dataclass(frozen=True)
class _MLP:
    name: str
    layers: tuple[nn.Module, nn.Module]
    weights: tuple[Tensor, Tensor]
    act: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[1](self.act.function(self.layers[0](x)))

    def stage(self, n: float, floors: Mapping[str, float]) -> Stage:
        return Stage.of(self.name, mlp(self.weights, self.act), note=f"‖W₂‖·Lip({self.act.name})·‖W₁‖", kind="MLP")


@dataclass(frozen=True)
class _Residual:
    name: str
    branch: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return x + _run(self.branch, x)

    def stage(self, n: float, floors: Mapping[str, float]) -> Stage:
        return Stage.around(self.name, [piece.stage(n, floors) for piece in self.branch])


@dataclass(frozen=True)
class _Reading:
    """The pieces of a model, how to call it on one input, and whose input is the input of the first piece."""

    pieces: tuple[Any, ...]
    causal: bool = False
    entry: nn.Module | None = None

    def run(self, model: nn.Module, x: Tensor) -> Tensor:
        """The model's own output on one input, ``(n, d)`` or token ids ``(n,)``."""
        with torch.no_grad():
            if _is_torch(model):
                mask = nn.Transformer.generate_square_subsequent_mask(len(x), x.device, x.dtype)
                return model(x, mask) if self.causal else model(x)
            given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x[None]}
            no_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
            return model(**given, **no_cache).last_hidden_state[0]

    def check(self, model: nn.Module, width: int) -> None:
        """Refuse the model when the pieces do not compute what it does."""
        parameter = next(model.parameters())
        x = torch.randn(_PROBE_LENGTH, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = x.to(parameter)
        seen = [x]
        handle = None
        if self.entry is not None:  # transformers add positions to the embeddings first
            handle = self.entry.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
        own = self.run(model, x)
        if handle is not None:
            handle.remove()
        with torch.no_grad():
            error = float((_run(self.pieces, seen[-1]) - own).norm() / own.norm())
        if not error <= _TOLERANCE:
            raise UnsupportedModel(
                f"the layers as read from this {type(model).__name__} differ from what it computes by a relative "
                f"{error:.1e}, so something in it is not modelled: bound its layers one by one with "
                "hs.bounds.composition and hs.bounds.layers."
            )


def _is_torch(model: nn.Module) -> bool:
    return isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer)


def _frozen(model: nn.Module) -> Any:
    """A copy without dropout, at least in single precision, with the attention that defines the model."""
    copied: Any = copy.deepcopy(getattr(model, "base_model", model)).eval()
    if hasattr(copied, "config"):
        copied.config._attn_implementation = "eager"
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in copied.parameters())
    return copied.float() if half else copied


def _read(model: Any, radius: float | None, causal: bool) -> _Reading:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if causal and not _is_torch(model):
        raise InvalidInput("causal is for torch encoders: models of transformers know their own mask.")
    if _is_torch(model):
        reading, width = _torch_encoder(model, radius, causal)
    elif kind in _BERT_LIKE:
        reading, width = _bert(model)
    elif kind == "gpt2":
        reading, width = _gpt2(model)
    else:
        raise UnsupportedModel(
            f"{type(model).__name__} is not among the models whose layers can be read (nn.TransformerEncoder, "
            f"nn.TransformerEncoderLayer, {', '.join(_BERT_LIKE)}, gpt2): bound its layers one by one with "
            "hs.bounds.layers and multiply them with hs.bounds.Stack."
        )
    reading.check(model, width)
    return reading


def _torch_encoder(model: Any, radius: float | None, causal: bool) -> tuple[_Reading, int]:
    layers = list(model.layers) if isinstance(model, nn.TransformerEncoder) else [model]
    width = layers[0].self_attn.embed_dim
    last: nn.Module | None = None
    pieces: list[Any] = []
    for index, layer in enumerate(layers):
        fed = layer.norm1 if layer.norm_first else last
        if fed is None and index > 0:
            raise UnsupportedModel(
                f"layer {index} normalises last and the layer before it first, so that its attention sees tokens of "
                "any size: give all layers the same norm_first."
            )
        if fed is None and radius is None:
            raise DoesNotApply(
                "the first attention of this encoder sees the tokens as they come (norm_first=False), and dot-product "
                "attention is not Lipschitz on all inputs: give the radius of the ball tokens lie in."
            )
        tokens = TokenSet.ball(cast(float, radius), width) if fed is None else TokenSet.after(fed)
        attention = SelfAttention.from_torch(layer.self_attn, causal=causal)
        parts = (layer.linear1, layer.linear2), (layer.linear1.weight, layer.linear2.weight), layer.activation
        pieces += _layer(index, attention, tokens, parts, (layer.norm1, layer.norm2), layer.norm_first)
        last = None if layer.norm_first else layer.norm2
    if getattr(model, "norm", None) is not None:
        pieces.append(_Norm("end: norm", model.norm))
    return _Reading(tuple(pieces), causal), width


def _bert(model: Any) -> tuple[_Reading, int]:
    last = model.embeddings.LayerNorm
    pieces: list[Any] = [_Norm("embeddings: norm", last)]
    for index, layer in enumerate(model.encoder.layer):
        norms = layer.attention.output.LayerNorm, layer.output.LayerNorm
        inner, outer = layer.intermediate.dense, layer.output.dense
        parts = (inner, outer), (inner.weight, outer.weight), layer.intermediate.intermediate_act_fn
        attention = SelfAttention.from_transformers(model, index)
        pieces += _layer(index, attention, TokenSet.after(last), parts, norms, norm_first=False)
        last = norms[1]
    return _Reading(tuple(pieces), entry=model.embeddings.LayerNorm), model.config.hidden_size


def _gpt2(model: Any) -> tuple[_Reading, int]:
    pieces: list[Any] = []
    for index, block in enumerate(model.h):
        inner, outer = block.mlp.c_fc, block.mlp.c_proj
        parts = (inner, outer), (inner.weight.T, outer.weight.T), block.mlp.act
        attention = SelfAttention.from_transformers(model, index)
        pieces += _layer(index, attention, TokenSet.after(block.ln_1), parts, (block.ln_1, block.ln_2), norm_first=True)
    pieces.append(_Norm("end: norm", model.ln_f))
    return _Reading(tuple(pieces), entry=model.h[0].ln_1), model.config.hidden_size


def _layer(
    index: int,
    attention: AttentionMap,
    tokens: TokenSet,
    parts: tuple[tuple[Any, Any], tuple[Tensor, Tensor], Any],
    norms: tuple[nn.Module, nn.Module],
    norm_first: bool,
) -> list[Any]:
    """One layer: x + f(norm(x)) twice, or norm(x + f(x)) twice."""
    layers, weights, act = parts
    try:
        known = activation(act)
    except InvalidInput as error:
        raise UnsupportedModel(f"layer {index}: {error}") from error
    found: list[Any] = []
    maps = (
        ("attention", _Attention(f"layer {index}: attention", attention, tokens)),
        ("MLP", _MLP(f"layer {index}: MLP", layers, weights, known)),
    )
    for (name, piece), norm in zip(maps, norms, strict=True):
        order = "before" if norm_first else "after"
        normed = _Norm(f"layer {index}: norm {order} {name}", norm)
        skip = f"layer {index}: x + {name}"
        found += [_Residual(skip, (normed, piece))] if norm_first else [_Residual(skip, (piece,)), normed]
    return found


def _run(pieces: Iterable[Any], x: Tensor) -> Tensor:
    for piece in pieces:
        x = piece(x)
    return x


def _norms(pieces: Iterable[Any]) -> Iterator[_Norm]:
    for piece in pieces:
        if isinstance(piece, _Norm):
            yield piece
        elif isinstance(piece, _Residual):
            yield from _norms(piece.branch)


def _floors(pieces: Iterable[Any], variance: float | Mapping[str, float] | None) -> dict[str, float]:
    names = [norm.name for norm in _norms(pieces)]
    if variance is None:
        return {}
    if not isinstance(variance, Mapping):
        return dict.fromkeys(names, float(variance))
    unknown = sorted(set(variance) - set(names))
    if unknown:
        raise InvalidInput(f"there is no normalisation {unknown[0]!r}: choose from {', '.join(names)}.")
    return dict(variance)
