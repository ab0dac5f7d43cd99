"""Whether a module still computes what its class does.

A proof reads the weights of a module and relies on the formula of its class. A subclass may override that formula, an
instance may shadow a method, and a hook may change its input or output: then the formula is that of another map.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as registry

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
