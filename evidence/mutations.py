"""Single changes to the proofs on balls, and whether a comparison of their terms with the truth notices them."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor

from evidence.ball_terms import BLOCK, CASES, HEAD, ROUNDING, SEARCH, TILTS, Proof, Term, proof_of
from evidence.moved_heads import Case, against
from evidence.tables import table
from howsmooth.certify import around

TITLE = "Changed proofs"
ROOM = "howsmooth.certify."
ORDER = ("rows", "tilts", "apart", "others", "ball", "together", "block_ball", "around")
"""The modules of a proof on a ball, each after those it builds on."""
JUDGED: dict[str, dict[str, Term]] = {
    "rows": HEAD,
    "tilts": {**TILTS, **{name: HEAD[name] for name in ("high", "low", "drift", "query blocks")}},
    "apart": {name: HEAD[name] for name in ("change",)},
    "others": {name: HEAD[name] for name in ("mean of all others", "directed change", "key blocks")},
    "ball": {**HEAD, **{name: TILTS[name] for name in ("step 0: factor", "step 1: factor")}},
    "block_ball": BLOCK,
}
"""The modules that are changed, and the terms that are compared."""
OUTCOMES = ("caught", "any proves", "not smaller", "smaller")
SMALL = 1e-6
"""What a term may lose, or be, without being counted: the allowances for rounding are far below."""
CHOICES = {
    ("tilts", "STEPS"): "any number of steps",
    ("tilts", "_LEAST_SHARE"): "any ϑ",
    ("apart", "_STEPS"): "any λ and μ",
    ("ball", "_POWERS"): "any weights of the keys",
    ("ball", "_SINKS"): "any number of sinks",
    ("ball", "_TWISTED"): "any size",
    ("ball", "_key_weights"): "any weights of the keys up to 1",
    ("ball", "_bounded"): "any weights θ",
    ("block_ball", "_SINKS"): "any number of sinks",
    ("block_ball", "_STEPS"): "any weights a",
    ("block_ball", "_SHARP"): "any weights a",
    ("block_ball", "sizes"): "any weights a",
    ("block_ball", "row_by_row"): "any weights a",
    ("block_ball", "over_keys"): "any weights a",
    ("block_ball", "_parts"): "any weights a",
    ("block_ball", "_quick"): "any guesses of what is then proved",
    ("block_ball", "shares"): "any guesses of what is then proved",
}
"""Where every number gives a proof: what is chosen is only how good it is."""
_BINDING = {("block_ball", "row_by_row", "`-best` without its sign"), ("ball", "_key_weights", "`1.0` → `2.0`")}
"""What is no choice there."""
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


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    ``outcome`` is "caught" (some truth is above the changed term, or nothing is computed at all), "any proves" (what is
    changed is a choice of which each gives a proof; not tried), "not smaller" (no term of any case is smaller than
    before: the proof is as good or looser) or "smaller".
    """

    mutant: Mutant
    outcome: str
    by: str


@cache
def source_of(module: str) -> str:
    return Path(around.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


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
def altered(mutant: Mutant) -> Iterator[dict[str, ModuleType]]:
    """The modules of a proof, one of them changed and those that build on it with it."""
    before = {name: import_module(ROOM + name) for name in ORDER}
    made: dict[str, ModuleType] = {}
    try:
        for name in ORDER[ORDER.index(mutant.module) :]:
            made[name] = sys.modules[ROOM + name] = ModuleType(ROOM + name)
            source = mutant.source if name == mutant.module else source_of(name)
            exec(compile(source, f"<changed {name}>", "exec"), made[name].__dict__)
        yield {**before, **made}
    finally:
        sys.modules.update({ROOM + name: module for name, module in before.items()})


class Jury:
    """Cases with the largest truths that a search met, found once, to judge many mutants by."""

    def __init__(self, terms: dict[str, Term], cases: dict[str, Case]):
        self.terms, self.cases, self.caught = terms, cases, Counter(dict.fromkeys(cases, 0))
        self.known: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for label, case in cases.items():
            for name, term in terms.items():
                self.known[label, name] = term.proved(proof_of(case)), term.worst(case, SEARCH)

    def verdict(self, mutant: Mutant) -> Verdict:
        """Cases that caught most so far go first."""
        smaller, least = "", 1 - SMALL
        here = mutant.module, mutant.place
        if here in CHOICES and (*here, mutant.what) not in _BINDING:
            return Verdict(mutant, "any proves", CHOICES[here])
        try:
            with altered(mutant) as modules:
                for label, _ in self.caught.most_common():
                    proof = Proof(self.cases[label], modules["around"], modules["block_ball"])
                    for name, term in self.terms.items():
                        (bound, worst), changed = self.known[label, name], term.proved(proof)
                        if bool((against(worst, changed) > 1 + ROUNDING).any()):
                            self.caught[label] += 1
                            return Verdict(mutant, "caught", f"{name} ({label})")
                        counted = (bound > SMALL) & bound.isfinite()
                        left = float((changed / bound)[counted].min()) if bool(counted.any()) else 1.0
                        if left < least:
                            smaller, least = f"{name} ({label}): {left:.2g} of it", left
        except Exception as error:  # whatever it is, nothing is proved
            return Verdict(mutant, "caught", type(error).__name__)
        return Verdict(mutant, "smaller" if smaller else "not smaller", smaller)


def verdicts(module: str, every: int = 1, cases: dict[str, Case] = CASES) -> Iterator[Verdict]:
    """Of every mutant of a module, or of some."""
    jury = Jury(JUDGED[module], cases)
    for number, mutant in enumerate(mutants(module)):
        if number % every == 0:
            yield jury.verdict(mutant)


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    found = {}
    for module in JUDGED:
        progress(module)
        found[module] = list(verdicts(module))
    rows = [[module, len(some), *(Counter(v.outcome for v in some)[name] for name in OUTCOMES)]
            for module, some in found.items()]  # fmt: skip
    left = [
        [f"`{v.mutant.module}.{v.mutant.place}`", v.mutant.what, v.by]
        for some in found.values()
        for v in some
        if v.outcome == "smaller"
    ]
    return [
        "One change at a time to the modules that prove bounds on balls: every number halved and doubled, every sum a "
        "difference and back, every summand left out, every least a most. On small maps the terms of the changed proof "
        f"are compared with the largest true change of their own part that a search meets ({len(CASES)} balls). A "
        "change is caught where a truth is above its term; it is not smaller where no term of any ball has lost more "
        f"than {SMALL:g} of itself, which leaves changes that make the proof looser, or concern rounding alone.",
        table(["module", "changes", *OUTCOMES], rows),
        "Changes that make a term smaller and pass no truth that was found, with the smallest that became of a term. "
        "They concern corrections of second order in the radius (products of two drifts, what a drift adds to a "
        "spread, log E e^β beside the largest tilt), for which no ball here is large enough; what rounding adds; "
        "exponents of weights that are free; and alternatives that are not the least, of which a part is smaller.",
        table(["where", "change", "smallest term"], left),
    ]
