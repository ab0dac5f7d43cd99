"""The cache of attention: queries, keys and values of every head at one layer, and their rounded values.

Keys are cached as they enter the logits, after rotary positions. A format that rounds them before is applied to keys
turned back to position zero, which are then turned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth._util.validation import check_tensor
from howsmooth.attention import AttentionMap, Rotary
from howsmooth.attention.conversion import plain_map
from howsmooth.attention.masks import HIDDEN, Maps, softmax
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.models import CapturedSite
from howsmooth.rounding.number_formats import Format

PARTS = ("key", "value")
"""The parts of a cache."""
Choice = Format | None
"""A format, or None for numbers kept as they are."""


@dataclass(frozen=True)
class Cache:
    """One layer at one text, in float64.

    Attributes:
        query: ``(heads, n, k)``, the scale of the logits inside.
        key, value: ``(kv_heads, n, ·)``: what is stored.
        bias: mask and position bias of the logits, ``(heads or 1, n, n)``; −∞ hides.
        output: ``(heads, v, r)``: a factor of each head's output matrix, |o·output| = |o W_h|.
        softcap: of the logits, or None.
        rotary: that has turned the keys, or None.
        layer: for messages.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    output: Tensor
    softcap: float | None
    rotary: Rotary | None
    layer: int

    @classmethod
    @torch.no_grad()
    def of(cls, site: CapturedSite) -> Cache:
        """The cache of a captured attention block."""
        return cls.at(plain_map(site.attention, "rounding"), site.x, site.layer)

    @classmethod
    @torch.no_grad()
    def at(cls, attention: AttentionMap, x: Tensor, layer: int = 0) -> Cache:
        """The cache of dot-product attention with softmax weights at tokens ``(n, d)``.

        >>> import howsmooth as hs
        >>> Cache.at(hs.SelfAttention.random(8, heads=4, kv_heads=2), torch.randn(5, 8)).key.shape
        torch.Size([2, 5, 2])
        """
        if attention.kind != "dot_product":
            raise DoesNotApply(
                f"the effect of rounded keys is proved for softmax weights of dot products, not for {attention.kind} "
                "attention: use hs.jacobian(attention, x, wrt='keys') for its first order."
            )
        x = check_tensor(x, "x", dims=(2,))
        query, key, value = (part[0].double() for part in attention.staged(x[None]))
        group = attention.heads // attention.kv_heads
        factor = torch.linalg.qr(attention.output_weight.double().mT).R.mT
        heads, n, _ = query.shape
        attention.terms.check(n, heads, 1)
        bias = attention.terms.added_to(query.new_zeros(1, n, n), Maps.every(1, heads, n, query))
        return cls(query, key[::group], value[::group], bias, factor, attention.softcap, key_rotary(attention), layer)

    @property
    def group(self) -> int:
        """The number of query heads that share a key."""
        return len(self.query) // len(self.key)

    @property
    def causal(self) -> bool:
        """True when no token attends to a later one."""
        n = self.bias.shape[-1]
        ahead = torch.ones(n, n, dtype=torch.bool, device=self.bias.device).triu(1)
        return bool((self.bias[..., ahead] == HIDDEN).all())

    def shared(self, tokens: Tensor) -> Tensor:
        """Keys or values as every query head sees them, ``(heads, n, ·)``."""
        return tokens.repeat_interleave(self.group, dim=0)

    def logits(self, key: Tensor) -> Tensor:
        """The logits of all heads for keys ``(kv_heads, n, k)``, without mask and bias."""
        products = self.query @ self.shared(key).mT
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def weights(self, key: Tensor) -> Tensor:
        """P for these keys, zero for queries that see nothing."""
        return softmax(self.logits(key) + self.bias)

    def rounded(self, part: str, choices: Choice | Sequence[Choice]) -> Tensor:
        """Keys or values as they are read back, one format for all heads or one for each."""
        held = self.key if part == "key" else self.value
        return read_back(held, part, choices, self.rotary, self.layer)


def key_rotary(attention: AttentionMap) -> Rotary | None:
    """The rotary positions of the keys."""
    return next((stage for stage in attention.key_stages if isinstance(stage, Rotary)), None)


def read_back(
    held: Tensor, part: str, choices: Choice | Sequence[Choice], rotary: Rotary | None = None, layer: int = 0
) -> Tensor:
    """Keys or values ``(…, kv_heads, n, width)`` as they are read back from a cache in the chosen formats.

    A format with one scale for all heads of a layer has one for every head when heads differ in format.
    """
    what = f"the {part}s of layer {layer}"
    if choices is None or isinstance(choices, Format):
        return _turned(held, part, choices, rotary, what)
    heads = held.shape[-3]
    if len(choices) != heads:
        raise InvalidInput(f"{what} have {heads} heads, but {len(choices)} formats were given.")
    if len(set(choices)) == 1:
        return _turned(held, part, choices[0], rotary, what)
    parts = held.split(1, dim=-3)
    return torch.cat([_turned(one, part, choice, rotary, what) for one, choice in zip(parts, choices, strict=True)], -3)


def _turned(held: Tensor, part: str, choice: Choice, rotary: Rotary | None, what: str) -> Tensor:
    if choice is None:
        return held
    if part == "value" or rotary is None or choice.rotary == "after":
        return choice.rounded(held, what)
    turn = rotary.linearize(held)[1]
    back = turn.vjp(held)
    pairs = 2 * len(rotary.frequencies)
    back = torch.cat([back[..., :pairs] / rotary.amplitude**2, back[..., pairs:]], dim=-1)
    again = turn.jvp(choice.rounded(back, what))
    return torch.cat([held[..., : choice.first, :], again[..., choice.first :, :]], dim=-2)
