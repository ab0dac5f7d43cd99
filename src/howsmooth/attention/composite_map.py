r"""Attention with something around the dot product: latent projections, learned sinks, output gates, two sequences.

Each is an `AttentionMap` on other tokens. Tokens go through token-wise features z = φ(x) first; tokens of zeros may
stand beside them; the outputs of the heads may be multiplied by a gate. So the Jacobian is that of plain attention at z
between token-wise maps (see `howsmooth.jacobians.composite_operator`):

.. math:: J = W\,[\,\mathrm{diag}(g)\,J_{\mathrm{heads}}(z)\,\varphi'(x) + \mathrm{diag}(O)\,g'(x)\,].

Theorems on attention say nothing of these maps unless they name them: their kinds are their own.

**Cross-attention**, where tokens of one sequence attend to those of another,

.. math:: f(x, y)_i = \sum_h \sum_j P_{ij}\,v(y_j)\,W_h, \qquad P_{ij} \propto \exp(q(x_i)\cdot k(y_j) + b_{ij}).

It has a derivative in each of the two. Both come from self-attention on the two sequences one after the other, (y, x),
of which only the tokens of x see, and only those of y are seen: hidden tiles are never computed. In x the map is token
by token (the weights move, keys and values stay); in y it mixes tokens, and has no part that moves through queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from howsmooth._util.validation import check_tensor, shown, validated
from howsmooth.attention.attention_map import MapModule, batched
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.masks import DenseBias, LogitBias, Maps, Terms, softmax
from howsmooth.attention.stages import IDENTITY, Behind, Chain, TokenDerivative, TokenStage
from howsmooth.errors import InvalidInput


class Feature(nn.Module):
    """One part of the features: x ↦ stages(W x + b); W = None stands for the identity."""

    weight: Tensor | None
    bias: Tensor | None

    @validated
    def __init__(self, weight: Tensor | None, bias: Tensor | None = None, stages: Sequence[TokenStage] = ()):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.stages = nn.ModuleList(stages)

    def linearize(self, x: Tensor) -> tuple[Tensor, Chain]:
        links = () if self.weight is None else (_Projected(self.weight.to(x)),)
        y = Chain(links).jvp(x)
        y = y if self.bias is None else y + self.bias.to(x)
        y, chain = Chain.through(self.stages, y)  # type: ignore[arg-type]
        return y, Chain(links + chain.links)


class Features(TokenStage):
    """z_i = (branch_1(x_i), branch_2(x_i), …): the features of which queries, keys and values are made."""

    @validated
    def __init__(self, *branches: Feature):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        parts = [branch.linearize(x) for branch in self.branches]  # type: ignore[operator]
        values, chains = zip(*parts, strict=True)
        return torch.cat(values, dim=-1), _FeaturesDerivative(chains, tuple(y.shape[-1] for y in values))


@dataclass(frozen=True)
class _Projected(TokenDerivative):
    weight: Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        return dx @ self.weight.mT

    def vjp(self, gy: Tensor) -> Tensor:
        return gy @ self.weight

    def size(self) -> Tensor:
        return torch.linalg.matrix_norm(self.weight.double(), 2)


@dataclass(frozen=True)
class _FeaturesDerivative(TokenDerivative):
    branches: tuple[Chain, ...]
    widths: tuple[int, ...]

    def jvp(self, dx: Tensor) -> Tensor:
        return torch.cat([branch.jvp(dx) for branch in self.branches], dim=-1)

    def vjp(self, gy: Tensor) -> Tensor:
        parts = gy.split(self.widths, dim=-1)
        return torch.stack([branch.vjp(part) for branch, part in zip(self.branches, parts, strict=True)]).sum(0)

    def size(self) -> Tensor | float:
        return sum(torch.as_tensor(branch.size()).square() for branch in self.branches) ** 0.5


@dataclass(frozen=True)
class Placement:
    """The places of the input among the tokens of the inner map: ``tokens`` of width ``width`` in all.

    Attributes:
        rows, columns: the places of the input's tokens, and of their features.
        outputs: the tokens whose outputs belong to the map.
        keys: the tokens that are attended to.
    """

    tokens: int
    width: int
    rows: slice
    columns: slice
    outputs: slice
    keys: slice

    def put(self, z: Tensor) -> Tensor:
        """Features ``(…, n, ·)`` at their places, zeros elsewhere."""
        whole = z.new_zeros(*z.shape[:-2], self.tokens, self.width)
        whole[..., self.rows, self.columns] = z
        return whole


@dataclass(frozen=True)
class Gate:
    """An output gate at an input: σ(Gx + c) of every head.

    Attributes:
        weight: G, ``(heads, v, d)``. output: W, ``(heads, v, d_out)``.
        value: the gate, ``(batch, heads, n, v)``. slope: its derivative in Gx + c.
    """

    weight: Tensor
    output: Tensor
    value: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Parts:
    """A composite map at an input, taken apart.

    Attributes:
        attention: plain attention; without its output projection where there is a gate.
        tokens: the input of it, ``(batch, tokens, width)``.
        derivative: of the features; the empty chain where they are the tokens themselves.
    """

    attention: SelfAttention
    tokens: Tensor
    placement: Placement
    derivative: TokenDerivative = IDENTITY
    gate: Gate | None = None


class Composite(MapModule, ABC):
    """A map made of plain attention and token-wise maps, whose Jacobian follows from theirs in closed form."""

    kind = "composite"

    @abstractmethod
    def parts(self, x: Tensor) -> Parts:
        """The map at x, ``(batch, n, d)``, taken apart."""

    @abstractmethod
    def weights(self, x: Tensor) -> Tensor:
        """The attention weights P, ``(…, heads, n, keys)``."""


class ComposedAttention(Composite):
    r"""Attention on features of the tokens, with learned sinks and an output gate, each of them optional.

    With z = φ(x) and q, k, v, s, W as in `SelfAttention` at z, for every head

    .. math:: P_{ij} = \frac{e^{s_{ij}}}{e^{b} + \sum_l e^{s_{il}}},\qquad
              f(x)_i = \sum_h \bigl(\sigma(G_hx_i + c_h) \circ \sum_j P_{ij}v_j\bigr)W_h.

    A sink b (gpt-oss) is one more key that every token sees, with a constant logit and value 0; entropies count it.

    Args:
        attention: q, k, v, mask and output, as functions of z.
        features: φ, by default z = x. Latent attention (DeepSeek) and norms over all heads (OLMo 2) are of this form.
        sinks: b of every head, ``(heads,)``.
        gate, gate_bias: G, ``(heads·v, d)``, and c (Qwen3-Next).

    >>> import torch, howsmooth as hs
    >>> sinks = ComposedAttention(hs.SelfAttention.random(8, heads=2), sinks=torch.zeros(2))
    >>> x = torch.zeros(3, 8)
    >>> sinks.weights(x)[0, 0]  # three tokens and the sink share the weight
    tensor([0.2500, 0.2500, 0.2500])
    >>> round(float(hs.measure(sinks, x)) / float(hs.measure(sinks.attention, x)), 2)
    0.75
    """

    kind = "composed"
    sinks: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None

    @validated
    def __init__(
        self,
        attention: SelfAttention,
        *,
        features: Features | None = None,
        sinks: Tensor | None = None,
        gate: Tensor | None = None,
        gate_bias: Tensor | None = None,
    ):
        super().__init__()
        if attention.weighting != "softmax":
            raise InvalidInput(f"sinks, gates and features are read for softmax weights, not {attention.kind}.")
        if sinks is not None and (sinks.shape != (attention.heads,) or not bool(torch.isfinite(sinks).all())):
            raise InvalidInput(f"sinks are one finite logit for each of {attention.heads} heads, got {shown(sinks)}.")
        self.attention, self.features, self.heads = attention, features, attention.heads
        self.register_buffer("sinks", sinks)
        mixed = attention.output_weight.shape[:2]
        if gate is not None and (gate.dim() != 2 or len(gate) != mixed.numel()):
            raise InvalidInput(f"the gate has shape {tuple(gate.shape)}, but must be ({mixed.numel()}, d).")
        if gate_bias is not None and (gate is None or len(gate_bias) != len(gate)):
            raise InvalidInput("the bias of a gate has one entry for each of its rows.")
        self.register_buffer("gate", None if gate is None else gate.reshape(*mixed, -1))
        self.register_buffer("gate_bias", None if gate_bias is None else gate_bias.reshape(mixed))

    @property
    def in_features(self) -> int:
        weights = [] if self.features is None else [branch.weight for branch in self.features.branches]
        known = [w.shape[-1] for w in (*weights, self.gate) if isinstance(w, Tensor)]
        return int(known[0]) if known else self.attention.in_features

    @property
    def out_features(self) -> int:
        return self.attention.out_features

    @property
    def dtype(self) -> torch.dtype:
        return self.attention.dtype

    @property
    def kv_heads(self) -> int:
        """Key–value heads."""
        return self.attention.kv_heads

    @property
    def output_bias(self) -> Tensor | None:
        """Bias of the output projection."""
        return self.attention.output_bias

    @property
    def terms(self) -> Terms:
        """Masks and additive biases of the logits, as one; sinks apart."""
        return self.attention.terms

    @property
    def query_stages(self) -> nn.ModuleList:
        """Stages of the queries."""
        return self.attention.query_stages

    def staged(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they enter the logits, ``(batch, heads, n, ·)``."""
        return self.attention.staged(x if self.features is None else self.features(x))

    def weights(self, x: Tensor) -> Tensor:
        return batched(lambda x: self._weights(*self.staged(x)[:2]), x)

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(n, d)`` or ``(batch, n, d)``."""
        return batched(lambda x: self.attention.projected_out(self.mixed(x)), x)

    def mixed(self, x: Tensor) -> Tensor:
        """The output of every head before the output projection, behind its gate, ``(batch, heads, n, v)``."""
        query, key, value = self.staged(x)
        mixed = self._weights(query, key) @ value
        return mixed if self.gate is None else mixed * torch.sigmoid(self._gate_logits(x))

    def _gate_logits(self, x: Tensor) -> Tensor:
        assert self.gate is not None
        logits = x[:, None] @ self.gate.to(x).mT
        return logits if self.gate_bias is None else logits + self.gate_bias.to(x)[:, None]

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        if self.sinks is None:
            return self.attention._weights(query, key)
        logits = self.attention._logits(query, key)
        sink = self.sinks.to(logits)[None, :, None, None].expand(*logits.shape[:3], 1)
        return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]

    def parts(self, x: Tensor) -> Parts:
        z, derivative = (x, IDENTITY) if self.features is None else self.features.linearize(x)
        n, width = z.shape[-2:]
        before = 0 if self.sinks is None else 1
        placed = slice(before, n + before)
        place = Placement(n + before, width + before, placed, slice(0, width), placed, placed)
        tokens, attention = z, self.attention
        if self.sinks is not None:
            # Biases become the weight of a coordinate that is one for the tokens and zero for the sink.
            tokens = place.put(z)
            tokens[..., placed, -1] = 1
            attention = self._with_sink()
        gate = None
        if self.gate is not None:
            attention = _without_output(attention)
            value = torch.sigmoid(self._gate_logits(x))
            gate = Gate(self.gate.to(x), self.attention.output_weight.to(x), value, value * (1 - value))
        return Parts(attention, tokens, place, derivative, gate)

    def _with_sink(self) -> SelfAttention:
        """Plain attention on the tokens and, before them, the sink."""
        assert self.sinks is not None
        inner, fields = self.attention, dict[str, Any]()
        for name in ("query", "key", "value"):
            weight, bias = getattr(inner, f"{name}_weight"), getattr(inner, f"{name}_bias")
            bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
            fields[f"{name}_weight"], fields[f"{name}_bias"] = torch.cat([weight, bias[..., None]], dim=-1), None
            fields[f"{name}_stages"] = [Behind(stage, 1) for stage in getattr(inner, f"{name}_stages")]
        return inner.replace(**fields, output_bias=None, logit_biases=[_SinkFirst(inner.terms, self.sinks)])


class _SinkFirst(LogitBias):
    """The terms of the tokens 1, 2, …, and a token 0 that all of them see with a logit of its own."""

    def __init__(self, terms: Terms, sinks: Tensor):
        super().__init__()
        self.terms = terms
        self.sinks: Tensor
        self.register_buffer("sinks", sinks, persistent=False)
        self.keeps_self, self.items = terms.keeps_self, terms.items

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        inner = replace(maps, n=maps.n - 1)
        spans = [slice(max(span.start - 1, 0), span.stop - 1) for span in (rows, cols)]
        real = None
        if all(span.stop > span.start for span in spans):
            real = self.terms.block(spans[0], spans[1], inner)
        above, left = int(rows.start == 0), int(cols.start == 0)
        block = maps.like.new_zeros(len(maps.heads), rows.stop - rows.start, cols.stop - cols.start)
        if real is not None:
            block[:, above:, left:] = real
        if left:
            block[:, above:, 0] = self.sinks.to(maps.like)[maps.heads, None]
        if above:
            block[:, 0, left:] = float("-inf")
        return block

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        if stop <= 1:
            return 0, 1
        return 0, self.terms.key_range(max(start - 1, 0), stop - 1, n - 1)[1] + 1

    def check(self, n: int, heads: int, batch: int) -> None:
        self.terms.check(n - 1, heads, batch)


def _without_output(attention: SelfAttention) -> SelfAttention:
    """The same attention with its heads side by side."""
    heads, width, _ = attention.output_weight.shape
    eye = torch.eye(heads * width, dtype=attention.dtype, device=attention.output_weight.device)
    return attention.replace(output_weight=eye.reshape(heads, width, -1), output_bias=None)


Side = Literal["decoder", "encoder"]


class CrossAttention(nn.Module):
    """Cross-attention of decoder tokens x to encoder tokens y, as in a transformer with an encoder and a decoder.

    Args:
        query: ``(heads·k, d_x)``. key, value: ``(kv_heads·k, d_y)`` and ``(kv_heads·v, d_y)``.
        output: ``(d_out, heads·v)``; None leaves the heads side by side.
        heads, kv_heads, scale: as in `SelfAttention`.
        query_bias, key_bias, value_bias, output_bias: optional vectors.
        bias: added to the logits, ``(n, m)`` or ``(heads, n, m)``, −∞ hides; for one pair of lengths.

    Each side by itself is a map for `howsmooth.measure`, `measure_heads` and `explain`:

    >>> import torch, howsmooth as hs
    >>> draw = torch.Generator().manual_seed(0)
    >>> weights = [torch.randn(4, d, generator=draw) for d in (3, 5, 5)]
    >>> cross = CrossAttention(*weights, heads=2)
    >>> x, y = torch.randn(6, 3, generator=draw), torch.randn(7, 5, generator=draw)
    >>> torch.allclose(cross.in_decoder(y)(x), cross(x, y)), torch.allclose(cross.in_encoder(x)(y), cross(x, y))
    (True, True)
    >>> J = hs.jacobian(cross.in_encoder(x), y)
    >>> tuple(J.in_shape), tuple(J.out_shape)
    ((7, 5), (6, 4))
    """

    logit_biases: Tensor | None

    @validated
    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        heads: int = 1,
        kv_heads: int | None = None,
        scale: float | None = None,
        **biases: Any,
    ):
        super().__init__()
        for weight, name in ((query, "query"), (key, "key"), (value, "value")):
            check_tensor(weight, name, dims=(2,))
        self.decoder_width, self.encoder_width = query.shape[-1], key.shape[-1]
        self.attention = SelfAttention(
            pad(query, (0, self.encoder_width)),
            pad(key, (self.decoder_width, 0)),
            pad(value, (self.decoder_width, 0)),
            output,
            heads=heads,
            kv_heads=kv_heads,
            scale=scale,
            **biases,
        )
        self.heads = heads
        self.register_buffer("logit_biases", bias)

    @property
    def out_features(self) -> int:
        """Width of an output token."""
        return self.attention.out_features

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        """The two sequences one after the other, encoder first, each at its own coordinates."""
        return torch.cat([pad(y, (self.decoder_width, 0)), pad(x, (0, self.encoder_width))], dim=-2)

    def staged(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of y, ``(batch, heads, ·, ·)``."""
        query, key, value = self.attention.staged(self.joined(x, y))
        m = y.shape[-2]
        return query[..., m:, :], key[..., :m, :], value[..., :m, :]

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        """The attention weights, ``(batch, heads, n, m)``, for x and y with a batch axis."""
        return self._weights(*self.staged(x, y)[:2])

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        logits = query @ key.mT
        return softmax(logits if self.logit_biases is None else logits + self.logit_biases.to(logits))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The map at decoder tokens ``(n, d_x)`` and encoder tokens ``(m, d_y)``, or batches of both."""
        return batched(self._forward, x, y)

    def _forward(self, x: Tensor, y: Tensor) -> Tensor:
        query, key, value = self.staged(x, y)
        return self.attention.projected_out(self._weights(query, key) @ value)

    @validated
    def in_decoder(self, encoder: Tensor) -> CrossSide:
        """x ↦ f(x, y): the map of the decoder's tokens, those of the encoder ``(m, d_y)`` held fixed."""
        return CrossSide(self, "decoder", encoder)

    @validated
    def in_encoder(self, decoder: Tensor) -> CrossSide:
        """y ↦ f(x, y): the map of the encoder's tokens, those of the decoder ``(n, d_x)`` held fixed."""
        return CrossSide(self, "encoder", decoder)


class CrossSide(Composite):
    """Cross-attention as a map of one of its sequences; build it with `CrossAttention.in_decoder` or `in_encoder`."""

    kind = "cross"
    other: Tensor

    @validated
    def __init__(self, cross: CrossAttention, side: Side, other: Tensor):
        super().__init__()
        expected = cross.encoder_width if side == "decoder" else cross.decoder_width
        if other.dim() != 2 or other.shape[-1] != expected:
            raise InvalidInput(f"the other sequence has shape {tuple(other.shape)}, but must be (tokens, {expected}).")
        self.cross, self.side, self.heads = cross, side, cross.heads
        self.register_buffer("other", other.detach(), persistent=False)

    @property
    def in_features(self) -> int:
        return self.cross.decoder_width if self.side == "decoder" else self.cross.encoder_width

    @property
    def out_features(self) -> int:
        return self.cross.out_features

    @property
    def dtype(self) -> torch.dtype:
        return self.cross.attention.dtype

    def _pair(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        other = self.other.to(tokens)
        other = other if tokens.dim() == 2 else other.expand(len(tokens), -1, -1)
        return (tokens, other) if self.side == "decoder" else (other, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """The map at ``(n, d)`` or ``(batch, n, d)``."""
        return self.cross(*self._pair(tokens))

    def weights(self, x: Tensor) -> Tensor:
        return batched(self.cross.weights, *self._pair(x))

    def parts(self, x: Tensor) -> Parts:
        decoder, encoder = self._pair(x)
        n, m, total = decoder.shape[-2], encoder.shape[-2], decoder.shape[-2] + encoder.shape[-2]
        width, whole = self.cross.decoder_width, self.cross.decoder_width + self.cross.encoder_width
        of_encoder, of_decoder = slice(0, m), slice(m, total)
        mine = self.side == "decoder"
        rows, columns = (of_decoder, slice(0, width)) if mine else (of_encoder, slice(width, whole))
        attention = self.cross.attention.replace(logit_biases=_across(self.cross.logit_biases, n, m))
        place = Placement(total, whole, rows, columns, of_decoder, of_encoder)
        return Parts(attention, self.cross.joined(decoder, encoder), place)


def _across(bias: Tensor | None, n: int, m: int) -> list[LogitBias]:
    """The mask of the joined sequences, and the bias of the visible pairs."""
    if bias is None:
        return [_Across(m)]
    if bias.shape[-2:] != (n, m):
        raise InvalidInput(f"the bias of the logits is for {tuple(bias.shape[-2:])} tokens, but there are {(n, m)}.")
    whole = bias.new_full((*bias.shape[:-2], n + m, n + m), float("-inf"))
    whole[..., m:, :m] = bias
    return [_Across(m), DenseBias(whole)]


class _Across(LogitBias):
    """The first m tokens see nothing; the others see them."""

    hides_only = True

    def __init__(self, m: int):
        super().__init__()
        self.m = m

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return (0, self.m) if stop > self.m else (0, 0)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        if rows.start >= self.m >= cols.stop:
            return None
        return maps.hide((maps.positions(rows)[:, None] >= self.m) & (maps.positions(cols) < self.m))[None]

    def most_seen(self, n: float) -> float:
        return max(self.m, n - self.m)
