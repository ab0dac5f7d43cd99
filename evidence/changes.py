"""Single changes to a module, and modules with such a change in place of those that are there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import howsmooth

ROOM = "howsmooth."
CHAINS = (
    (
        "certificates.ball.weight_perturbation",
        "certificates.ball.head_ball",
        "certificates.ball.block_ball",
        "certificates.ball.on_ball",
    ),
    (
        "certificates.network.taylor_remainders",
        "certificates.network.attention_remainder",
        "certificates.network.margins",
    ),
    ("certificates.ball.nonlinear_ball",),
    ("certificates.classifier.relu_relaxation",),
    ("certificates.classifier.cls_token",),
    ("rounding.output_error",),
    ("norms.lanczos_bound",),
)
"""The modules of a proof, each after those it builds on."""
SWAPS = {"minimum": "maximum", "amin": "amax", "fmin": "fmax", "clamp_min": "clamp_max", "min": "max"}
SWAPS |= {new: old for old, new in SWAPS.items()}
_PLACES = {
    *("amax", "amin", "argsort", "cat", "cumsum", "expand", "flatten", "full", "gamma", "gather", "index_copy"),
    *("mean", "movedim", "norm", "ones", "pad", "permute", "range", "repeat_interleave", "scatter", "softmax"),
    *("stack", "sum", "transpose", "unflatten", "view", "zeros"),
}
"""Calls whose numbers are axes, shapes or roundings."""


@dataclass(frozen=True)
class Mutant:
    """One change to one module, in a function or a constant of it."""

    module: str
    place: str
    what: str
    source: str


@cache
def source_of(module: str) -> str:
    """The text of a module."""
    return Path(howsmooth.__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def mutants(module: str, place: str | None = None) -> Iterator[Mutant]:
    """Every number halved and doubled, every sum a difference and back, every summand left out, every least a most.

    Of the whole module, or of one place in it.
    """
    tree = ast.parse(source_of(module))
    places, skipped = _places(tree), _skipped(tree)
    for node in list(ast.walk(tree)):
        if id(node) in skipped or place not in (None, places.get(id(node))):
            continue
        for kind in range(3):
            as_it_was = dict(vars(node))
            what = _change(node, kind)
            if what is not None:
                yield Mutant(module, places.get(id(node), ""), what, ast.unparse(tree))
            vars(node).update(as_it_was)


def _places(tree: ast.Module) -> dict[int, str]:
    """In which function or constant every node stands."""
    found: dict[int, str] = {}
    for node in ast.walk(tree):  # from the outside in, so that the innermost is kept
        name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.Assign) and node in tree.body:
            name = ast.unparse(node.targets[0])
        if name:
            found.update({id(inner): name for inner in ast.walk(node)})
    return found


def _skipped(tree: ast.AST) -> set[int]:
    """Numbers that are places, and not sizes."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            parts = [k.value for k in node.keywords if str(k.arg).startswith(("dim", "keepdim"))]
            parts += node.args if name in _PLACES else []
        inner = (inner for part in parts for inner in ast.walk(part))
        found |= {id(number) for number in inner if isinstance(number, ast.Constant | ast.UnaryOp)}
    return found


def _change(node: ast.AST, kind: int) -> str | None:
    """Changes a node in place and says how; None where there is no change of this kind."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value and kind < 2:
        old, node.value = node.value, node.value * (0.5, 2)[kind]
        return f"`{old}` → `{node.value}`"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and kind == 0:
        node.op = ast.UAdd()
        return f"`-{ast.unparse(node.operand)}` without its sign"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        was = ast.unparse(node)
        if kind == 0:
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            return f"`{was}` → `{ast.unparse(node)}`"
        kept, lost = (node.left, node.right) if kind == 1 else (node.right, node.left)
        if isinstance(kept, ast.Constant) or isinstance(lost, ast.Constant):
            return None
        node.op, node.left, node.right = ast.Mult(), ast.Constant(1), kept
        return f"`{was}` → `{ast.unparse(kept)}`"
    named = "attr" if isinstance(node, ast.Attribute) else "id" if isinstance(node, ast.Name) else None
    if named is not None and kind == 0 and getattr(node, named) in SWAPS:
        old, was = getattr(node, named), ast.unparse(node)
        setattr(node, named, SWAPS[old])
        return f"`{was}` → `{SWAPS[old]}`"
    return None


@contextmanager
def altered(mutant: Mutant) -> Iterator[Mapping[str, ModuleType]]:
    """The modules of all proofs, one of them changed and those that build on it with it."""
    chain = next(chain for chain in CHAINS if mutant.module in chain)
    before = {name: import_module(ROOM + name) for name in chain}
    made: dict[str, ModuleType] = {}
    try:
        for name in chain[chain.index(mutant.module) :]:
            made[name] = sys.modules[ROOM + name] = ModuleType(ROOM + name)
            source = mutant.source if name == mutant.module else source_of(name)
            exec(compile(source, f"<changed {name}>", "exec"), made[name].__dict__)
        yield {**unaltered(), **made}
    finally:
        sys.modules.update({ROOM + name: module for name, module in before.items()})


def unaltered() -> dict[str, ModuleType]:
    """The modules of all proofs as they are."""
    return {name: import_module(ROOM + name) for chain in CHAINS for name in chain}
