"""An adapter from the call of a transformers attention, with its masks and cache, to a layer of `howsmooth.nn`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import check_no_dropout
from howsmooth.attention.masks import HIDDEN
from howsmooth.errors import InvalidInput
from howsmooth.nn.layers.attention_layer import AttentionLayer


class AttentionAdapter(nn.Module):
    """A layer with the call of a transformers attention.

    **Masks** may have every form that transformers makes (none, additive, boolean, per token). A token that no token
    sees is padding: its output is zero before the output bias. Other masks reach the layer unchanged, so that L2
    attention refuses those that hide a token from itself.

    **Cache.** The cache stores the inputs of the attention, not keys and values: every kind of layer computes from
    tokens, and some (L2) centre them. A step of generation then costs one attention over the sequence so far, while the
    rest of the model processes the new tokens only; outputs equal those without a cache.

    Args:
        layer: the attention.
        causal: whether the model's attention is causal, which not every model states by a mask.
        layer_idx: number of the block in the model's cache.
        dropout: dropout on the output, as in the old block.
        names: names of the old block's arguments after the tokens, for models that pass them by position.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        causal: bool,
        layer_idx: int,
        dropout: float = 0.0,
        names: Sequence[str] = ("attention_mask",),
    ):
        super().__init__()
        self.names = tuple(names)
        self.layer, self.layer_idx = layer, layer_idx
        self.is_causal = causal  # an attribute of transformers' own attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the output of the new tokens, ``(batch, new, d)``; weights are available from the layer's map."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if given.get("encoder_hidden_states") is not None:
            raise InvalidInput(
                "this attention was replaced by self-attention: it cannot attend to an encoder's output."
            )
        cache, position_ids = given.get("past_key_values"), given.get("position_ids")
        new = hidden_states.shape[1]
        tokens = hidden_states if cache is None else self._with_past(hidden_states, cache)
        seen = TransformersMask.of(given.get("attention_mask"), tokens.shape[:2], new, self.is_causal)
        if getattr(self.layer, "rotary", None) is not None and position_ids is not None:
            _check_consecutive(position_ids, seen)
        out, _ = self.layer(
            tokens if self.layer.batch_first else tokens.transpose(0, 1),
            key_padding_mask=seen.padding,
            attn_mask=seen.mask,
            is_causal=seen.causal,
        )
        out = out if self.layer.batch_first else out.transpose(0, 1)
        return self.dropout(out[:, -new:]), None

    def _with_past(self, tokens: Tensor, cache: Any) -> Tensor:
        """Return all tokens so far; the cache stores the new ones as keys, with values of width 0."""
        token_cache = getattr(cache, "self_attention_cache", cache)
        before = int(token_cache.get_seq_length(self.layer_idx))
        stored, _ = token_cache.update(tokens[:, None], tokens[:, None, :, :0], self.layer_idx)
        if stored.shape[-2] > before + tokens.shape[1]:
            raise InvalidInput(
                "replaced attention needs a cache that grows with the text, but this one has a fixed length: generate "
                'with cache_implementation="dynamic", or with use_cache=False.'
            )
        return stored[:, 0]

    def attention_map(self, n: int | None = None) -> AttentionMap:
        """Return the map of a text of n tokens without padding or cache; see `AttentionLayer.attention_map`."""
        check_no_dropout(self, self.dropout.p)
        return self.layer.attention_map(n, "causal" if self.is_causal else None)

    def extra_repr(self) -> str:
        return "causal" if self.is_causal else ""


@dataclass(frozen=True)
class TransformersMask:
    """A mask of transformers as arguments of a layer's call.

    Attributes:
        mask: ``(batch, heads or 1, n, n)``, booleans (True hides) or logits to add; None when ``causal`` is enough.
        causal: whether token i sees all tokens j ≤ i that are not padded, and no other.
        padding: ``(batch, n)``, True for tokens that no token sees; None when there are none.
    """

    mask: Tensor | None
    causal: bool
    padding: Tensor | None

    @classmethod
    def of(cls, mask: Tensor | None, shape: tuple[int, int] | torch.Size, new: int, causal: bool) -> TransformersMask:
        """Read a mask of transformers for the last ``new`` of n tokens; ``shape`` is (batch, n).

        Rows of earlier tokens are missing in such a mask and arbitrary, because their outputs are not used.

        >>> TransformersMask.of(torch.tensor([[1, 1, 0]]), (1, 3), 3, causal=False)
        TransformersMask(mask=None, causal=False, padding=tensor([[False, False,  True]]))
        """
        batch, n = shape
        if mask is None:
            return cls(None, causal, None)
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise InvalidInput(
                'replaced attention cannot read this mask: choose model.set_attn_implementation("sdpa") or "eager".'
            )
        if mask.dim() == 2:
            padding = ~mask[:, -n:].bool().expand(batch, n)
            return cls(None, causal, padding if bool(padding.any()) else None)
        mask = mask[..., :n]
        if mask.shape[-2:] != (new, n) or len(mask) not in (1, batch):
            raise InvalidInput(f"the mask has shape {tuple(mask.shape)}, but {new} token(s) of {batch} attend to {n}.")
        # Additive masks hide with the smallest number of a dtype, not always with −∞.
        sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        adds = mask.dtype != torch.bool and bool(mask.masked_fill(~sees, 0.0).any())
        sees = sees.expand(batch, -1, -1, -1)
        padding = ~sees.any(-2).any(1)
        past = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
        earlier = past[: n - new].expand(*sees.shape[:2], -1, -1)
        # Rows and columns of padded tokens do not matter: the padding hides them.
        free = padding[:, None, :, None] | padding[:, None, None]
        sees = torch.cat([earlier, sees], dim=-2) | free
        padded = None if not bool(padding.any()) else padding
        # A single token fits both; layers that divide by a bound must see the same mask as in a longer text.
        simple = {True: past | free, False: torch.ones_like(sees)}
        for known in (causal, not causal):
            if not adds and bool((sees == simple[known]).all()):
                return cls(None, known, padded)
        if not adds:
            return cls(~sees, False, padded)
        added = torch.cat([torch.zeros_like(earlier, dtype=mask.dtype), mask.expand(batch, -1, -1, -1)], dim=-2)
        return cls(added.masked_fill(free, 0.0).masked_fill(~sees, HIDDEN), False, padded)


def _check_consecutive(positions: Tensor, seen: TransformersMask) -> None:
    """Refuse positions that jump between tokens that see each other: layers rotate by the number of tokens between."""
    new = positions.shape[-1]
    jumps = nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0))
    if seen.padding is not None:
        padding = seen.padding[:, -new:]
        jumps = jumps & ~(padding | nn.functional.pad(padding[:, :-1], (1, 0)))
    if not bool(jumps.any()):
        return
    run = jumps.cumsum(-1)  # runs of consecutive positions: packed texts, when a mask separates them
    apart = run[:, None, :, None] != run[:, None, None]
    hides = None if seen.mask is None else seen.mask if seen.mask.dtype == torch.bool else seen.mask == HIDDEN
    if hides is None or bool((apart & ~hides[..., -new:, -new:]).any()):
        raise InvalidInput(
            "rotary positions are counted by the layer here, so position_ids must not jump between tokens that see "
            "each other: leave them out, or give packed texts with use_cache=False, which masks them."
        )
