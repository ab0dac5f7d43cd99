"""The masks of one call of a layer, as `torch.nn.MultiheadAttention` takes them, as terms of the logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from howsmooth.attention import Causal, DenseBias, LogitBias, Padding
from howsmooth.attention.masks import HIDDEN, Terms
from howsmooth.errors import InvalidInput


@dataclass(frozen=True)
class CallMasks:
    """Masks and padding of one call.

    Attributes:
        n: number of tokens, padded ones included.
        terms: masks and other additive terms, without padding.
        keep: ``(batch, n)``, False for padded tokens; None when there are none.
    """

    n: int
    terms: Terms = field(default_factory=Terms)
    keep: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        attn_mask: Tensor | LogitBias | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
    ) -> CallMasks:
        """Read the arguments of a layer; ``shape`` is (batch, n, heads).

        >>> list(CallMasks.of((1, 3, 2), torch.ones(3, 3).triu(1).bool(), False, None).terms)
        [Causal()]
        """
        batch, n, heads = shape
        mask = _dense(attn_mask, batch, heads) if isinstance(attn_mask, Tensor) else attn_mask
        repeated = is_causal and mask is not None and mask.is_causal  # torch then reads the flag, not the mask
        terms = Terms([] if mask is None or repeated else [mask])
        if any(isinstance(term, Padding) for term in terms):
            raise InvalidInput("padding cannot be an attn_mask here: pass key_padding_mask, True for padded tokens.")
        terms.check(n, heads, batch)
        if terms.is_causal or is_causal:
            terms = Terms([Causal(), *(term for term in terms if not term.is_causal)])
        return cls(n, terms, None if key_padding_mask is None else _keep(key_padding_mask, batch, n))

    @property
    def padded_keys(self) -> Tensor | None:
        """``(batch, n)``: padded tokens, except where an item holds nothing else (its outputs are zero anyway)."""
        return None if self.keep is None else ~self.keep & self.keep.any(-1, keepdim=True)

    def zero_padding(self, tokens: Tensor) -> Tensor:
        """Set padded tokens to zero; ``tokens`` is ``(batch, n, ·)``."""
        return tokens if self.keep is None else tokens.masked_fill(~self.keep[..., None], 0.0)

    def require_self(self, heads: int, batch: int) -> None:
        """Refuse masks that hide a token from itself, or that add numbers: L2 attention is then not Lipschitz.

        The bounds need P_ii > 0: the weight of the token itself keeps Σ_j P_ij|z_i − z_j|² below φ⁻¹(n − 1).
        """
        if not self.terms.hides_only:
            raise InvalidInput(
                "L2 attention takes masks that hide (booleans, or 0 and −inf), but this one adds other numbers to "
                "the logits, and no Lipschitz bound holds then."
            )
        if not self.terms.sees_itself(self.n, heads, batch):
            raise InvalidInput(
                "this mask hides a token from itself, and L2 attention is then not Lipschitz: let every token see "
                "itself (padded tokens belong in key_padding_mask)."
            )


def _dense(mask: Tensor, batch: int, heads: int) -> DenseBias:
    """Convert a mask of torch, where True hides, to a term."""
    if mask.dim() == 3:
        if len(mask) != batch * heads:
            raise InvalidInput(
                f"a mask of three axes has one matrix for each of the {batch} item(s) and {heads} head(s), got "
                f"{tuple(mask.shape)}: give (n, n) or (batch, 1, n, n) instead."
            )
        mask = mask.unflatten(0, (batch, heads))
    return DenseBias(~mask if mask.dtype == torch.bool else mask)


def _keep(padding: Tensor, batch: int, n: int) -> Tensor:
    """Return True for real tokens, from torch's mask of padded ones (True, or −∞)."""
    padding = padding[None] if padding.dim() == 1 else padding
    if padding.shape != (batch, n):
        raise InvalidInput(f"the padding mask has shape {tuple(padding.shape)}, but there are {batch} × {n} tokens.")
    if padding.dtype == torch.bool:
        return ~padding
    if not padding.is_floating_point() or not bool(((padding == 0) | (padding == HIDDEN)).all()):
        raise InvalidInput("a padding mask holds booleans (True = padded), or 0 and −inf.")
    return padding == 0
