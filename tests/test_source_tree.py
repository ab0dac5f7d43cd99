"""One home for every idea: who may import whom, one definition for every public name, and all names of before."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from importlib import import_module
from types import ModuleType

import pytest

from howsmooth.cli.program import COMMANDS
from tests import source_tree

PACKAGES = (
    # Shared by every package.
    *("errors", "_util", "engines", "numerics"),
    # From a map to a number.
    *("attention", "jacobians", "network", "norms"),
    # Where maps and inputs come from, and what is known about them.
    *("models", "sets", "bounds", "meanfield", "search", "certificates", "rounding"),
    # Built on these.
    *("nn", "scans", "reports", "testing"),
    # The entrances: `import howsmooth`, the reproduced experiments, which use it as anybody would, the command line.
    *("howsmooth", "papers", "cli", "__main__"),
)
"""A package imports those before it, never those after it."""

EXPLAINED = {
    ("howsmooth.search.sandwich_search", "reports"): (
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

PAIRS = {"CosineAttention", "GradientStepAttention", "LipschitzNormAttention", "SigmoidAttention"}
"""Names of two classes: the map that is measured, and the layer of `nn` that is trained and offers the map."""

FOREIGN = {
    "_util/common.py: inner.training": "a module is put into evaluation, and restored.",
    "_util/torch_globals.py: loader.cache": "torch.fx keeps every traced source for ever otherwise.",
    "certificates/read_module.py: inner.eps": "a copy of the network keeps the eps that the dtype of the first had.",
    "cli/terminal.py: sys.unraisablehook": "a broken pipe is no traceback, and the hook is restored.",
    "models/forward_pass.py: model.config._attn_implementation": "transformers offers no other switch.",
    "nn/hosting/replacement.py: model.generation_config": "transformers keeps it beside the configuration.",
    "nn/hosting/replacement.py: module.enable_nested_tensor": "the fast path of torch would skip the new layers.",
    "nn/hosting/replacement.py: module.use_nested_tensor": "the fast path of torch would skip the new layers.",
}
"""Assignments to attributes of objects that the assigning code does not own → why there is no other way."""


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
        "import howsmooth.cli.terminal",
        "from howsmooth.cli import terminal",
        "from howsmooth import cli",
        "from ..cli import terminal",
        "def late():\n    from howsmooth.cli.terminal import out",
        "if TYPE_CHECKING:\n    from howsmooth.cli.terminal import out",
        "import_module('howsmooth.cli.terminal')",
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
    """Public functions and classes → the modules that define them, where there are several; commands apart."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in source_tree.modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    commands = {name.replace("-", "_") for name in COMMANDS}
    for name in commands & homes.keys():
        homes[name] = [module for module in homes[name] if source_tree.package(module) != "cli"]
    return {name: places for name, places in homes.items() if len(set(places)) > 1}


def test_a_public_name_is_defined_once() -> None:
    assert defined_twice().keys() == PAIRS  # a negative control too: names that stand twice are found


def test_attributes_of_foreign_objects_are_assigned_in_few_places() -> None:
    found = source_tree.foreign_assignments()
    assert set(found) == FOREIGN.keys()
    assert sum(found.values()) <= 15


@pytest.mark.parametrize("source", ["a.b = 1", "a.b[0].c = 1", "def f(x):\n    x.y = x.z = 2"])
def test_an_assignment_to_a_foreign_attribute_is_seen(source: str) -> None:
    """A negative control."""
    assert list(source_tree.foreign_targets(ast.parse(source)))
    assert not list(source_tree.foreign_targets(ast.parse("self.a = 1\ncls.b = 2\nc = 3\nd[0] = 4")))


def test_docstrings_begin_with_a_thing() -> None:
    for module, tree in source_tree.modules().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value.strip()
                assert not re.match(r"(What|Who|Whoever|Those|That which|Which|How far|How much)\b", text), (
                    module,
                    text,
                )


def test_there_are_at_most_250_public_names() -> None:
    assert 100 < sum(map(len, source_tree.exported().values())) <= 250


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
