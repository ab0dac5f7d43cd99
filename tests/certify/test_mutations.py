"""Changed proofs: a sample of what `evidence.mutations` does to all of them."""

from __future__ import annotations

import ast

import pytest

from evidence.ball_terms import BLOCK, CASES, TILTS, Proof, Term
from evidence.mutations import Jury, Mutant, altered, mutants, source_of
from howsmooth.certify import around


def halved(module: str, place: str, what: str) -> list[Mutant]:
    """The mutants of a function that halve a number."""
    return [mutant for mutant in mutants(module, place) if mutant.what == what]


def outcomes(found: list[Mutant], terms: dict[str, Term], *cases: str) -> list[str]:
    jury = Jury(terms, {name: CASES[name] for name in cases})
    return [jury.verdict(mutant).outcome for mutant in found]


@pytest.mark.parametrize(
    ("place", "term", "case"),
    [
        ("_queries", "queries", "keys' tilt of a rare far token"),
        ("_rest", "values and keys but the first", "rare far token"),
        ("_column", "one token", "equal tokens"),
    ],
)
def test_half_of_a_path_of_heads_together_is_caught(place: str, term: str, case: str) -> None:
    found = halved("block_ball", place, "`2` → `1.0`")
    assert outcomes(found, {term: BLOCK[term]}, case) == ["caught"]


def test_half_of_the_hadamard_form_is_caught() -> None:
    found = halved("tilts", "own_step", "`0.5` → `0.25`")
    wrong = [m for m in found if "0.25 * (twisted" in m.source]
    assert outcomes(wrong, {"step 0: factor": TILTS["step 0: factor"]}, "drawn 50") == ["caught"]


def test_proofs_as_they_are_pass_and_come_back_after_a_change() -> None:
    here = ast.unparse(ast.parse(source_of("tilts")))
    names = ("step 0: factor", "high, own tilt")
    assert outcomes([Mutant("tilts", "", "nothing", here)], {name: TILTS[name] for name in names}, "drawn 50") == [
        "not smaller"
    ]
    with altered(Mutant("tilts", "", "nothing", here)) as modules:
        assert modules["around"] is not around
    assert Proof(CASES["drawn 50"]).around is around
