"""One home for every idea: who may import whom, one definition for every public name, and all names of before."""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from importlib import import_module
from types import ModuleType

import pytest

from tests import source_tree

PACKAGES = (
    # Shared by every package.
    *("errors", "_util", "engines"),
    # From a map to a number.
    *("attention", "jacobians", "norms"),
    # Where maps and inputs come from, and what is known about them.
    *("models", "sets", "bounds", "meanfield", "search", "certificates", "rounding"),
    # Built on these.
    *("nn", "scans", "reports", "testing"),
    # The entrances: `import howsmooth`, the reproduced experiments, which use it as anybody would, the command line.
    *("howsmooth", "papers", "cli", "__main__"),
)
"""A package imports those before it, never those after it."""

EXPLAINED = {
    ("howsmooth.search.sandwich_result", "reports"): (
        "Sandwich.figure() is a public name: the picture is drawn, and matplotlib loaded, only when it is asked for."
    ),
    ("howsmooth.scans.scan_result", "reports"): (
        "Scan.report() is a public name: the page is made, and its figures loaded, only when it is asked for."
    ),
    ("howsmooth.attention.dot_product_map", "models"): (
        "SelfAttention.from_transformers is a public name: what reads a model is loaded only when one is given."
    ),
    ("howsmooth.models.pretrained_files", "nn"): (
        "a folder that says that its attention was replaced opens as what it is: nn builds the layers it names."
    ),
}
"""(module, package after it that it imports) → why."""

SAME_NAME = {
    "CosineAttention": "the map that is measured, and the layer of nn that is trained, which offers the map.",
    "GradientStepAttention": "the map that is measured, and the layer of nn that is trained, which offers the map.",
    "LipschitzNormAttention": "the map that is measured, and the layer of nn that is trained, which offers the map.",
    "Row": "of a table of bounds, of a store, of a report: a class, and two mappings as JSON has them.",
    "SigmoidAttention": "the map that is measured, and the layer of nn that is trained, which offers the map.",
}
"""Public names that two modules define → what each of them is. The command line is left out: a command is called like
what it runs."""


def against(found: source_tree.Import) -> bool:
    """Whether an import goes against the order."""
    by, of = found.packages
    return PACKAGES.index(of) > PACKAGES.index(by)


@pytest.mark.slow
def test_every_module_has_a_package() -> None:
    missing = {source_tree.package(name) for name in source_tree.modules()} - set(PACKAGES)
    assert not missing, f"give {sorted(missing)} a place in PACKAGES, and in the table of CONTRIBUTING.md"


def test_no_package_imports_one_after_it() -> None:
    wrong = [
        one
        for one in source_tree.all_imports()
        if against(one) and (one.by, source_tree.package(one.of)) not in EXPLAINED
    ]
    assert not wrong, "\n".join(f"{one.by}, line {one.line}, imports {one.of}, which comes after it" for one in wrong)


def test_no_exception_outlives_its_import() -> None:
    real = {(one.by, source_tree.package(one.of)) for one in source_tree.all_imports() if against(one)}
    assert not EXPLAINED.keys() - real


@pytest.mark.parametrize(
    "source",
    [
        "import howsmooth.cli.console",
        "from howsmooth.cli import console",
        "from howsmooth import cli",
        "from ..cli import console",
        "def late():\n    from howsmooth.cli.console import out",
        "if TYPE_CHECKING:\n    from howsmooth.cli.console import out",
        "import_module('howsmooth.cli.console')",
        "importlib.import_module('howsmooth.cli')",
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str) -> None:
    """A negative control: each of these in a module of bounds is against the order."""
    known = frozenset(source_tree.modules())
    (found,) = source_tree.imports("howsmooth.bounds.l2", ast.parse(source), known, is_package=False)
    assert found.packages == ("bounds", "cli")
    assert against(found)


def test_an_import_of_a_name_is_one_of_its_module() -> None:
    known = frozenset(source_tree.modules())
    (found,) = source_tree.imports("howsmooth.bounds", ast.parse("from .l2 import lip_2"), known, is_package=True)
    assert found.of == "howsmooth.bounds.l2"
    assert not against(found)


def defined_twice() -> dict[str, list[str]]:
    """Public names → the modules that define them, where there are several."""
    public = {name for names in source_tree.exported().values() for name in names}
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in source_tree.modules().items():
        if source_tree.package(module) != "cli":
            for name in public.intersection(source_tree.defined(tree)):
                homes[name].append(module)
    return {name: places for name, places in homes.items() if len(places) > 1}


def test_a_public_name_is_defined_once_or_both_are_explained() -> None:
    found = defined_twice()
    assert not found.keys() - SAME_NAME.keys(), {name: found[name] for name in found.keys() - SAME_NAME.keys()}
    assert not SAME_NAME.keys() - found.keys()


def test_no_file_name_stands_twice() -> None:
    names = [path.name for path in source_tree.SOURCES.rglob("*.py") if path.name != "__init__.py"]
    assert not {name for name in names if names.count(name) > 1}


def test_no_public_function_is_called_like_a_module_beside_it() -> None:
    """`howsmooth.scan` would else be the function or the module, depending on the import that came first."""
    modules = source_tree.modules()
    for package, names in source_tree.exported().items():
        beside = {name for name in names if f"{package}.{name}" in modules}
        assert all(isinstance(getattr(import_module(package), name), ModuleType) for name in beside), beside


@pytest.mark.slow
def test_exports_are_there() -> None:
    for module, names in source_tree.exported().items():
        import_module(module)
        assert all(hasattr(sys.modules[module], name) for name in names), module
        assert len(set(names)) == len(names), module


def test_the_names_of_before_are_still_there() -> None:
    """`tests/data/public_names.json` holds them; ``python -m tests.source_tree`` writes those of today."""
    before, today = json.loads(source_tree.NAMES.read_text(encoding="utf-8")), source_tree.public_names()
    gone = {
        f"{kind}: {place} {name}"
        for kind, places in before.items()
        for place, names in places.items()
        for name in set(names) - set(today[kind].get(place, []))
    }
    assert not gone, sorted(gone)
    assert len(before["names"]["howsmooth"]) > 30
    assert "--rtol" in before["commands"]["measure"]
