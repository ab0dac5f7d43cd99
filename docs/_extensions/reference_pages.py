"""Pages of reference: one for every public package, made from its `__all__`, and one with all bounds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import textwrap
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import SphinxError
from sphinx.pycode import ModuleAnalyzer

FOLDER = Path(__file__).resolve().parents[1] / "reference"
TOP = "howsmooth"
TESTING = "howsmooth.testing"
NOT_FOR_USERS = {"howsmooth.cli"}


def packages() -> dict[str, list[str]]:
    """Every package that says what is public, the top one first → its public names."""
    top = importlib.import_module(TOP)
    found = (info.name for info in pkgutil.walk_packages(top.__path__, f"{TOP}.") if info.ispkg or info.name == TESTING)
    modules = [top, *(importlib.import_module(name) for name in found if name not in NOT_FOR_USERS)]
    return {module.__name__: sorted(module.__all__, key=str.lower) for module in modules if hasattr(module, "__all__")}


@dataclass(frozen=True)
class Entry:
    """A public name, and the public name under which it is described."""

    name: str
    home: str
    kind: str

    @property
    def is_home(self) -> bool:
        return self.name == self.home

    @property
    def text(self) -> str:
        if self.kind == "data":
            package, _, name = self.name.rpartition(".")
            said = textwrap.indent(said_of(self.name), "   ")
            return f".. py:data:: {name}\n   :module: {package}\n\n{said}\n"
        members = "   :members:\n" if self.kind in ("class", "exception", "module") else ""
        return f".. auto{self.kind}:: {self.name}\n{members}"


def kind_of(thing: object) -> str:
    if isinstance(thing, ModuleType):
        return "module"
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    return "function" if inspect.isroutine(thing) else "data"


def said_of(full: str) -> str:
    """What is written below a constant where it is defined, which may be deeper than where it is public."""
    package, _, name = full.rpartition(".")
    thing = getattr(importlib.import_module(package), name)
    for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "howsmooth"]:
        if getattr(module, name, None) is thing:
            said = ModuleAnalyzer.for_module(module.__name__).find_attr_docs().get(("", name))
            if said:
                return "\n".join(said)
    raise SphinxError(f"{full} is public: say what it is in a docstring below its definition.")


def entries() -> dict[str, list[Entry]]:
    """Package → its entries; what is public in several packages is described in the first."""
    homes: dict[int, str] = {}
    made: dict[str, list[Entry]] = {}
    for package, names in packages().items():
        module = importlib.import_module(package)
        made[package] = []
        for name in names:
            thing, full = getattr(module, name), f"{package}.{name}"
            kind = kind_of(thing)
            home = full if kind == "data" else homes.setdefault(id(thing), full)
            made[package].append(Entry(full, home, kind))
    return made


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def package_page(package: str, names: list[Entry]) -> str:
    """What a package is for, its names, then the modules that are public themselves."""
    parts = [heading(f"``{package}``", "="), f".. automodule:: {package}\n"]
    parts += [one.text for one in names if one.is_home and one.kind != "module"]
    elsewhere = ", ".join(f"`{one.home}`" for one in names if not one.is_home)
    if elsewhere:
        parts.append(f"Also here, and described elsewhere: {elsewhere}.\n")
    for one in names:
        if one.kind == "module" and package != TOP and one.name not in packages():  # those have pages of their own
            parts += [heading(f"``{one.name.removeprefix(TOP + '.')}``", "-"), one.text]
    return "\n".join(parts)


def catalogue_page() -> str:
    """Every bound of the catalogue with its formula, by where it holds."""
    from howsmooth.bounds.catalogue import CATALOGUE, SCOPES
    from howsmooth.reports.theory_links import theory_links

    theory = theory_links(None).bounds
    parts = [
        heading("Catalogue of bounds", "="),
        "Every bound that ``howsmooth.bounds.get(name)`` and ``howsmooth bounds`` know, as its module states it. The "
        "symbols are those of :doc:`the theory </theory/index>`.\n",
    ]
    for scope, words in SCOPES.items():
        parts.append(heading(words[0].upper() + words[1:], "-"))
        for name, bound in CATALOGUE.items():
            if bound.scope == scope:
                proof = f" Proof: :doc:`/{theory[name]['page']}`." if name in theory else ""
                norm = {float("inf"): "∞", "token": "token"}.get(bound.norm) or f"{bound.norm:g}"
                said = f"{bound.side.capitalize()} bound in the {norm}-norm; {bound.reference}.{proof}"
                parts += [heading(f"``{name}``", "~"), f".. math:: {bound.statement}\n", f"{said}\n"]
    return "\n".join(parts)


def add_aliases(app: Sphinx, env: BuildEnvironment) -> None:
    """Enter every public name that is described under another one into the index of names."""
    objects = env.domains.python_domain.objects
    for one in chain(*entries().values()):
        if not one.is_home and one.home in objects:
            objects[one.name] = objects[one.home]._replace(aliased=True)


def write_pages(app: Sphinx) -> None:
    """Write the pages that have changed, and remove those of packages that are gone."""
    pages = {f"{name.removeprefix(TOP + '.')}.rst": package_page(name, names) for name, names in entries().items()}
    pages["catalogue.rst"] = catalogue_page()
    for path in FOLDER.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("env-updated", add_aliases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
