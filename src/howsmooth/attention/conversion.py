"""Conversion of modules into attention maps: `torch.nn.MultiheadAttention`, and modules with ``attention_map``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, overload

from torch import nn

from howsmooth._util.common import foreign_hooks
from howsmooth._util.validation import validated
from howsmooth.attention.attention_map import AttentionMap, MapModule
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.errors import InvalidInput, UnsupportedModel

_M = TypeVar("_M", bound=nn.Module)


@overload
def as_attention_map(f: object, n: float | None = None) -> AttentionMap | None: ...


@overload
def as_attention_map(f: object, n: float | None = None, *, kind: type[_M]) -> _M | None: ...


@validated
def as_attention_map(f: object, n: float | None = None, *, kind: type[nn.Module] = AttentionMap) -> nn.Module | None:
    """The map x ↦ f(x) of one sequence without padding, where f offers one of this kind; None where it does not.

    A module offers its map by a method ``attention_map(n)``: the layers of `howsmooth.nn` have it. A wrapper (a
    residual, a normalisation before it) is another function, and offers nothing unless it has such a method itself; so
    is a subclass with a forward of its own. A module that `torch.compile` has wrapped is the module itself. In training
    mode with dropout f is no fixed map, and with hooks it computes something else than its weights: both are refused.

    Args:
        f: any object.
        n: number of tokens, for layers that depend on it.
        kind: `AttentionMap`; `MapModule` for every map with a Jacobian in closed form, composite ones included;
            `torch.nn.Module` for any map, in closed form or not.

    >>> from howsmooth.nn import L2Attention
    >>> type(as_attention_map(L2Attention(8, num_heads=2))).__name__, as_attention_map(nn.Linear(8, 8))
    ('L2SelfAttention', None)
    """
    offered = _offered(f, n)
    return offered if isinstance(offered, kind) else None


def _offered(f: object, n: float | None) -> nn.Module | None:
    f = getattr(f, "_orig_mod", f) if isinstance(f, nn.Module) else f
    if isinstance(f, MapModule):
        _check_unchanged(f, f.modules())
        return f
    if not isinstance(f, nn.Module) or _overrides_call(type(f)):
        return None
    if isinstance(f, nn.MultiheadAttention):
        _check_unchanged(f, [f])  # it calls none of its parts
        check_no_dropout(f, f.dropout)
        return SelfAttention.from_torch(f)
    offer = getattr(f, "attention_map", None)
    if not callable(offer):
        return None
    _check_unchanged(f, f.modules())
    return offer(int(n) if n is not None and n < float("inf") else None)


def _check_unchanged(f: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Refuse a module whose output is not what its weights say, because a hook or a replaced forward may change it."""
    if any("forward" in vars(part) or foreign_hooks(part) for part in parts):
        call = "module(x, x, x)[0]" if isinstance(f, nn.MultiheadAttention) else "module(x)"
        raise InvalidInput(
            f"this {type(f).__name__} has forward hooks or a forward replaced from outside, which may change what it "
            f"computes: remove them, or measure it as a function, hs.measure(lambda x: {call}, x)."
        )


def _overrides_call(kind: type[nn.Module]) -> bool:
    """Whether a subclass has a call of its own, and no ``attention_map`` that was written with or after it."""
    if issubclass(kind, nn.MultiheadAttention):
        return kind.forward is not nn.MultiheadAttention.forward
    for cls in kind.__mro__:
        if {"attention_map", "attached_map"} & vars(cls).keys():
            return False
        if {"forward", "__call__"} & vars(cls).keys():
            return True
    return False


@validated
def plain_map(attention: MapModule, wanted: str) -> AttentionMap:
    """The map itself, when nothing is around its dot product; ``wanted`` names the task that needs this.

    >>> plain_map(SelfAttention.random(4), "a bound").kind
    'dot_product'
    """
    if not isinstance(attention, AttentionMap):
        raise UnsupportedModel(
            f"{wanted} knows attention of queries, keys and values alone, but this one is {attention.kind}: it has "
            "learned sinks, an output gate, latent projections, norms over all heads, or two sequences."
        )
    return attention


def check_no_dropout(module: nn.Module, share: float) -> None:
    """Refuse a module whose output is drawn at random."""
    if module.training and share > 0:
        raise InvalidInput(f"this {type(module).__name__} is in training mode with dropout: call .eval() first.")
