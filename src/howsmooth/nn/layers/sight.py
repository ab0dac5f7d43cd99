"""Who sees whom in one call of a layer: the masks of `torch.nn.MultiheadAttention` as terms of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import Causal, DenseBias, LogitBias, Padding, SlidingWindow
from howsmooth.attention.masks import HIDDEN
from howsmooth.bounds.kim2021 import only_hides
from howsmooth.errors import InvalidInput


@dataclass(frozen=True)
class Sight:
    """Masks and padding of one call.

    Attributes:
        n: number of tokens, padded ones included.
        terms: masks and other additive terms, without padding.
        keep: ``(batch, n)``, False for padded tokens; None when there are none.
    """

    n: int
    terms: tuple[LogitBias, ...] = ()
    keep: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        attn_mask: Tensor | LogitBias | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
    ) -> Sight:
        """From the arguments of a layer; ``shape`` is (batch, n, heads).

        >>> Sight.of((1, 3, 2), torch.ones(3, 3).triu(1).bool(), False, None).terms
        (Causal(),)
        """
        batch, n, heads = shape
        terms: list[LogitBias] = [Causal()] if is_causal else []
        if isinstance(attn_mask, Padding):
            raise InvalidInput("padding is no attn_mask here: pass key_padding_mask, True for padded tokens.")
        if attn_mask is not None:
            terms.append(attn_mask if isinstance(attn_mask, LogitBias) else _dense(attn_mask, batch, heads))
            terms[-1].check(n, heads, batch)
        if any(isinstance(term, Causal) for term in terms[1:]):
            terms = terms[1:]
        return cls(n, tuple(terms), None if key_padding_mask is None else _keep(key_padding_mask, batch, n))

    @property
    def hidden_keys(self) -> Tensor | None:
        """``(batch, n)``: padded tokens, except where an item holds nothing else (its outputs are zero anyway)."""
        return None if self.keep is None else ~self.keep & self.keep.any(-1, keepdim=True)

    def logit_terms(self) -> Iterator[LogitBias]:
        """The masks, as an attention map gives them."""
        return iter(self.terms)

    def silence(self, tokens: Tensor) -> Tensor:
        """Zero at padded tokens; ``tokens`` is ``(batch, n, ·)``."""
        return tokens if self.keep is None else tokens.masked_fill(~self.keep[..., None], 0.0)

    def require_self(self) -> None:
        """Refuse masks that hide a token from itself, or that add numbers: L2 attention is then not Lipschitz.

        The bounds need P_ii > 0: the weight of the token itself keeps Σ_j P_ij|z_i − z_j|² below φ⁻¹(n − 1).
        """
        for term in self.terms:
            if isinstance(term, Causal | SlidingWindow):
                continue
            if not isinstance(term, DenseBias) or not only_hides(term):
                raise InvalidInput(
                    "L2 attention takes masks that hide (booleans, or 0 and −inf), but this one adds other numbers to "
                    "the logits, and no Lipschitz bound holds then."
                )
            seen = term.bias if term.bias.dtype == torch.bool else term.bias == 0
            if not bool(seen.diagonal(dim1=-2, dim2=-1).all()):
                raise InvalidInput(
                    "this mask hides a token from itself, and L2 attention is then not Lipschitz: let every token see "
                    "itself (padded tokens belong in key_padding_mask)."
                )


def _dense(mask: Tensor, batch: int, heads: int) -> LogitBias:
    """A mask of torch, where True hides, as a term; a causal one is recognised, for it has better bounds."""
    if mask.dim() == 3:
        if len(mask) != batch * heads:
            raise InvalidInput(
                f"a mask of three axes has one matrix for each of the {batch} item(s) and {heads} head(s), got "
                f"{tuple(mask.shape)}: give (n, n) or (batch, 1, n, n) instead."
            )
        mask = mask.unflatten(0, (batch, heads))
    bias = ~mask if mask.dtype == torch.bool else mask
    if mask.dim() == 2 and len(mask) == mask.shape[1]:
        past = torch.ones_like(mask, dtype=torch.bool).tril()
        wanted = past if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~past, HIDDEN)
        if torch.equal(bias, wanted):
            return Causal()
    return DenseBias(bias)


def _keep(padding: Tensor, batch: int, n: int) -> Tensor:
    """True for real tokens, from torch's mask of padded ones (True, or −∞)."""
    padding = padding[None] if padding.dim() == 1 else padding
    if padding.shape != (batch, n):
        raise InvalidInput(f"the padding mask has shape {tuple(padding.shape)}, but there are {batch} × {n} tokens.")
    if padding.dtype == torch.bool:
        return ~padding
    if not padding.is_floating_point() or not bool(((padding == 0) | (padding == HIDDEN)).all()):
        raise InvalidInput("a padding mask holds booleans (True = padded), or 0 and −inf.")
    return padding == 0
