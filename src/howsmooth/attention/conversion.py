"""Conversion of modules into attention maps: `torch.nn.MultiheadAttention`, and modules with ``attention_map``.

A map, and a proof, reads the weights of a module and relies on the formula of its class. A subclass may override that
formula, an instance may shadow a method, and a hook may change its input or output: then the formula is that of another
map. `change_of` names such a change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, overload

from torch import nn
from torch.nn.modules import module as registry

from howsmooth._util.common import foreign_hooks
from howsmooth._util.validation import validated
from howsmooth.attention.attention_map import AttentionMap, MapModule
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.masks import LogitBias
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


_HARMLESS = {
    *("__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotations_cache__"),
    *("__dict__", "__weakref__", "__slots__", "__firstlineno__", "__static_attributes__", "__type_params__"),
    *("__parameters__", "__orig_bases__", "__classcell__", "__abstractmethods__", "_abc_impl"),
    *("__repr__", "__str__", "extra_repr", "_get_name", "__constants__", "reset_parameters", "__init_subclass__"),
    *("__getstate__", "__setstate__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
}
"""Names that a subclass may define without changing what its instances compute."""
_OURS = ("torch", "howsmooth")


def change_of(module: nn.Module, base: type) -> str | None:
    """A few words on why a module may compute something else than its base class does; None when it cannot.

    They follow the name of the module's class. Hooks that run on every module count.

    >>> class Doubled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> change_of(Doubled(2, 2), nn.Linear), change_of(nn.Linear(2, 2), nn.Linear)
    ('that overrides forward of Linear', None)
    """
    mro = type(module).__mro__
    below = mro[: mro.index(base)]
    overridden = [name for cls in below for name in vars(cls) if name not in _HARMLESS and hasattr(base, name)]
    if overridden:
        return f"that overrides {overridden[0]} of {base.__name__}"
    shadowed = [name for name in vars(module) if callable(getattr(type(module), name, None))]
    if shadowed:
        return f"whose {shadowed[0]} was replaced"
    if module._forward_hooks or module._forward_pre_hooks:
        return "with forward hooks"
    if registry._global_forward_hooks or registry._global_forward_pre_hooks:
        return "under forward hooks for all modules"
    return None


def known_base(module: nn.Module) -> type:
    """The class of torch or howsmooth that a module is an instance of, the last before classes of others.

    >>> Mine = type("Mine", (nn.Linear,), {"__module__": "mine"})
    >>> known_base(Mine(2, 2)).__name__
    'Linear'
    """
    mro = type(module).__mro__
    foreign = [index for index, cls in enumerate(mro) if not _known(cls)]
    return mro[max(foreign, default=-1) + 1]


def _known(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in (*_OURS, "builtins", "abc", "typing")


def check_unchanged(module: nn.Module, base: type, name: str) -> None:
    """Refuse a module that may compute something else than its base class does."""
    change = change_of(module, base)
    if change is not None:
        way_out = ": remove them first" if "hooks" in change else ""
        raise UnsupportedModel(f"{name}, a {type(module).__name__} {change}, has no certificate{way_out}.")


def check_map_unchanged(attention: nn.Module, name: str) -> None:
    """Refuse an attention map whose formula, or that of a stage inside it, was overridden.

    Masks may be of any class: certificates read the terms that they add to the logits.
    """
    check_unchanged(attention, known_base(attention), name)
    for inner_name, inner in attention.named_modules():
        if inner is attention or isinstance(inner, LogitBias):
            continue
        if known_base(inner) is nn.Module:
            raise UnsupportedModel(f"{name}.{inner_name}, a {type(inner).__name__}, has no certificate.")
        check_unchanged(inner, known_base(inner), f"{name}.{inner_name}")
