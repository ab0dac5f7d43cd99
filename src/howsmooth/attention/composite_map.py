r"""Attention with something around the dot product: latent projections, learned sinks, output gates.

Each is an `AttentionMap` on other tokens. Tokens go through token-wise features z = φ(x) first; tokens of zeros may
stand beside them; the outputs of the heads may be multiplied by a gate. So the Jacobian is that of plain attention at z
between token-wise maps (see `howsmooth.jacobians.composite_operator`):

.. math:: J = W\,[\,\mathrm{diag}(g)\,J_{\mathrm{heads}}(z)\,\varphi'(x) + \mathrm{diag}(O)\,g'(x)\,].

Theorems on attention say nothing of these maps unless they name them: their kinds are their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import shown, validated
from howsmooth.attention.attention_map import MapModule, batched
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.masks import LogitBias, Maps, Terms
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
