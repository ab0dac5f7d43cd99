"""The source tree as its files state it: packages, imports, public names."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "howsmooth"
NAMES = Path(__file__).parent / "data" / "public_names.json"


@dataclass(frozen=True)
class Import:
    """One import of one module of the package by another, wherever in the file it stands."""

    by: str
    of: str
    line: int

    @property
    def packages(self) -> tuple[str, str]:
        """The package that imports, and the one that is imported."""
        return package(self.by), package(self.of)


def package(module: str) -> str:
    """The first part of a module's path; that of the package itself is ``howsmooth``.

    >>> package("howsmooth.bounds.l2_bounds"), package("howsmooth.errors"), package("howsmooth")
    ('bounds', 'errors', 'howsmooth')
    """
    return module.split(".")[1] if "." in module else module


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    return {_dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


def imports(name: str, tree: ast.Module, known: frozenset[str], is_package: bool) -> Iterator[Import]:
    """Imports at the top, inside functions, under TYPE_CHECKING, relative ones, and by `import_module`."""
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            first = node.args[0]
            targets = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        for target in targets:
            if target == "howsmooth" or target.startswith("howsmooth."):
                yield Import(name, target, node.lineno)  # type: ignore[attr-defined]


@cache
def all_imports() -> list[Import]:
    """Those of the whole package."""
    trees = modules()
    known = frozenset(trees)
    packages = {_dotted(path) for path in SOURCES.rglob("__init__.py")}
    return [found for name, tree in trees.items() for found in imports(name, tree, known, name in packages)]


def defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and values that a module defines at its top."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id


def foreign_targets(tree: ast.Module) -> Iterator[str]:
    """Attributes that are assigned, those of ``self`` and ``cls`` apart."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Attribute):
                own = isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
                yield from () if own else (ast.unparse(target),)


def foreign_assignments() -> Counter[str]:
    """``file: attribute`` → how often it is assigned from outside its object."""
    found: Counter[str] = Counter()
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(f"{place}: {target}" for target in foreign_targets(tree))
    return found


@cache
def exported() -> dict[str, list[str]]:
    """Every public package → its ``__all__``, where it has one; a lazy package has it in its stub."""
    found: dict[str, list[str]] = {}
    for path in [*sorted(SOURCES.rglob("__init__.py")), SOURCES / "testing.py"]:
        stub = path.with_suffix(".pyi")
        for node in ast.parse((stub if stub.is_file() else path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AugAssign):  # written at once, or by groups: __all__ += […]
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if ast.unparse(target) == "__all__" and isinstance(node.value, ast.List):
                    found[_dotted(path)] = sorted([*found.get(_dotted(path), []), *ast.literal_eval(node.value)])
    return found


def commands() -> dict[str, list[str]]:
    """Command → its arguments and flags; the empty name is the program itself."""
    from typer.main import get_command

    from howsmooth.cli import app

    program = get_command(app)
    every = {"": program, **program.commands}  # type: ignore[attr-defined]
    return {
        name: sorted({flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)})
        for name, command in every.items()
    }


def public_names() -> dict[str, dict[str, list[str]]]:
    """What users may rely on."""
    from howsmooth.bounds import CATALOGUE

    return {"names": exported(), "commands": commands(), "catalogue": {"bounds": sorted(CATALOGUE)}}


def _dotted(path: Path) -> str:
    parts = ("howsmooth", *path.relative_to(SOURCES).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


if __name__ == "__main__":  # python -m tests.source_tree: the list of today, to be kept when names are added on purpose
    NAMES.write_text(json.dumps(public_names(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
