r"""Cross-attention: tokens of one sequence attend to those of another.

.. math:: f(x, y)_i = \sum_h \sum_j P_{ij}\,v(y_j)\,W_h, \qquad P_{ij} \propto \exp(q(x_i)\cdot k(y_j) + b_{ij}).

It has a derivative in each of the two. Both come from self-attention on the two sequences one after the other, (y, x),
of which only the tokens of x see, and only those of y are seen: hidden tiles are never computed. In x the map is token
by token (the weights move, keys and values stay); in y it mixes tokens, and has no part that moves through queries.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from howsmooth._util.validation import check_tensor, validated
from howsmooth.attention.attention_map import batched
from howsmooth.attention.composite_map import Composite, Parts, Placement
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.masks import DenseBias, LogitBias, Maps, softmax
from howsmooth.errors import InvalidInput

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
        attention = self.cross.attention.replace(logit_biases=across(self.cross.logit_biases, n, m))
        place = Placement(total, whole, rows, columns, of_decoder, of_encoder)
        return Parts(attention, self.cross.joined(decoder, encoder), place)


def across(bias: Tensor | None, n: int, m: int) -> list[LogitBias]:
    """The mask of m tokens that are seen and n that see, one after the other, and the bias of the visible pairs."""
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
