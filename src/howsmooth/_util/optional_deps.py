"""Optional dependencies: packages that few features need, each with its extra."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from howsmooth.errors import MissingPackage

EXTRAS = {
    "ot": ("POT", "ot"),
    "pandas": ("pandas", "frames"),
    "pyarrow": ("pyarrow", "frames"),
    "gguf": ("gguf", "gguf"),
    "accelerate": ("accelerate", "gguf"),
    "matplotlib": ("matplotlib", "figures"),
    "PIL": ("pillow", "images"),
    "peft": ("peft", "adapters"),
    "normflows": ("normflows", "flows"),
    "submitit": ("submitit", "slurm"),
    "ray": ("ray", "ray"),
    "onnx": ("onnx", "onnx"),
}
"""Module → its package, and the extra of howsmooth that brings it."""


def need(module: str, why: str = "this") -> ModuleType:
    """The module, or one line that says what to install.

    >>> need("json").__name__
    'json'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is there, and lacks something itself
        raise MissingPackage(f"{why} {lacking(module)}.") from None


def require(modules: Iterable[str], why: str) -> None:
    """One line that says what to install, unless all modules are there; none of them is imported."""
    for module in modules:
        if not is_there(module):
            raise MissingPackage(f"{why} {lacking(module)}.")


def lacking(module: str) -> str:
    """The sentence for a module that is not installed.

    >>> lacking("ot.lp")
    "needs the package POT, which is not installed: pip install 'howsmooth[ot]'"
    """
    package, extra = EXTRAS.get(module.split(".")[0], (module, ""))
    requirement = f"'howsmooth[{extra}]'" if extra else package
    return f"needs the package {package}, which is not installed: pip install {requirement}"


def is_there(module: str) -> bool:
    """True when a module could be imported; it is not imported."""
    try:
        return find_spec(module) is not None
    except ValueError:  # already imported in an odd way
        return False
