"""Who offers an attention map: maps, `torch.nn.MultiheadAttention`, and modules with a method ``attention_map``."""

from __future__ import annotations

from torch import nn

from howsmooth.attention.base import AttentionMap
from howsmooth.attention.composite import Composite
from howsmooth.attention.dot_product import SelfAttention
from howsmooth.checks import door
from howsmooth.errors import InvalidInput, UnsupportedModel


@door
def map_of(f: object, n: float | None = None) -> nn.Module | None:
    """The map x ↦ f(x) of one sequence without padding, in closed form or at least with a ``kind``; None without one.

    A module says what it computes by a method ``attention_map(n)``: the layers of `howsmooth.nn` have it. A wrapper
    (a residual, a normalisation before it) is another function, and offers nothing unless it says so itself. In
    training mode with dropout f is no fixed map, and is refused.

    Args:
        f: anything.
        n: number of tokens, for layers that depend on it.

    >>> from howsmooth.nn import L2Attention
    >>> type(map_of(L2Attention(8, num_heads=2))).__name__, map_of(nn.Linear(8, 8))
    ('L2SelfAttention', None)
    """
    if isinstance(f, AttentionMap | Composite):
        return f
    if isinstance(f, nn.MultiheadAttention):
        if type(f).forward is not nn.MultiheadAttention.forward:
            return None
        check_no_dropout(f, f.dropout)
        return SelfAttention.from_torch(f)
    offer = getattr(f, "attention_map", None) if isinstance(f, nn.Module) else None
    return offer(int(n) if n is not None and n < float("inf") else None) if callable(offer) else None


def as_attention(f: object, n: float | None = None) -> AttentionMap | None:
    """`map_of` when its Jacobian has a closed form; None when f must be treated as a function."""
    offered = map_of(f, n)
    return offered if isinstance(offered, AttentionMap) else None


def closed_form(f: object, n: float | None = None) -> AttentionMap | Composite | None:
    """As `as_attention`, maps with something around the attention included."""
    offered = map_of(f, n)
    return offered if isinstance(offered, AttentionMap | Composite) else None


@door
def plain_map(attention: AttentionMap | Composite, wanted: str) -> AttentionMap:
    """The map itself, when nothing is around its dot product; ``wanted`` says what does not know more than that.

    >>> plain_map(SelfAttention.random(4), "a certificate").kind
    'dot_product'
    """
    if isinstance(attention, Composite):
        raise UnsupportedModel(
            f"{wanted} knows attention of queries, keys and values alone, but this one is {attention.kind}: it has "
            "learned sinks, an output gate, latent projections, norms over all heads, or two sequences."
        )
    return attention


def check_no_dropout(module: nn.Module, share: float) -> None:
    """Refuse a module whose output is drawn at random."""
    if module.training and share > 0:
        raise InvalidInput(f"this {type(module).__name__} is in training mode with dropout: call .eval() first.")
