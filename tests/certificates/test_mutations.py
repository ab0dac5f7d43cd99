"""Changed proofs: a sample of what `evidence.mutations` does to all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from evidence import answer_terms, curved_terms, network_terms, pooled_terms
from evidence.ball_terms import BLOCK, CASES, PERTURBATION, Proof, examples
from evidence.changes import Mutant, altered, mutants, source_of
from evidence.juries import Example, Jury, Modules
from evidence.mutations import CHOICES, FRAGMENTS, JUDGED, WHY, judged
from howsmooth.certificates.ball import on_ball


def changed(module: str, place: str, what: str, source: str = "") -> list[Mutant]:
    """The mutants of a function with this change, and with this text in what becomes of the module."""
    return [mutant for mutant in mutants(module, place) if mutant.what == what and source in mutant.source]


def outcomes(found: list[Mutant], *given: Example) -> list[str]:
    jury = Jury(given)
    return [jury.verdict(mutant).outcome for mutant in found]


@pytest.mark.parametrize(
    ("place", "term", "case"),
    [
        ("query_change", "queries", "keys' shift of a rare far token"),
        ("other_tokens_change", "values and keys but the first", "rare far token"),
        ("one_token_change", "one token", "equal tokens"),
    ],
)
def test_half_of_a_path_of_heads_together_is_caught(place: str, term: str, case: str) -> None:
    found = changed("certificates.ball.block_ball", place, "`2` → `1.0`")
    assert outcomes(found, *examples({term: BLOCK[term]}, {case: CASES[case]})) == ["caught"]


def test_half_of_the_hadamard_form_is_caught() -> None:
    wrong = changed("certificates.ball.weight_perturbation", "query_step", "`0.5` → `0.25`", "0.25 * (product_norm")
    given = examples({"step 0: factor": PERTURBATION["step 0: factor"]}, {"drawn 50": CASES["drawn 50"]})
    assert outcomes(wrong, *given) == ["caught"]


@pytest.mark.parametrize(
    ("module", "place", "what", "source", "example"),
    [
        (
            "certificates.network.taylor_remainders",
            "numbers",
            "`0.5` → `0.25`",
            "0.25 * moved.square()",
            network_terms.SINGLE["gelu at 0 by 0.01"],
        ),
        (
            "certificates.network.taylor_remainders",
            "numbers",
            "`3` → `6`",
            "",
            network_terms.SINGLE["division, tight across"],
        ),
        (
            "certificates.network.taylor_remainders",
            "multiply",
            "`a.value[..., None, None] * of_u + u.value[..., None, None] * of_a` → `a.value[..., None, None] * of_u`",
            "",
            network_terms.PRODUCTS["a square"],
        ),
        (
            "certificates.network.taylor_remainders",
            "_largest_bend",
            "`2` → `1.0`",
            "1.0 * torch.tanh(far)",
            network_terms.SINGLE["tanh at 2.5 by 0.01"],
        ),
        ("certificates.network.margins", "_decrease", "`0.5` → `0.25`", "", network_terms.SINGLE["corner of a cube"]),
        (
            "certificates.network.attention_remainder",
            "_second_order",
            "`0.5` → `0.25`",
            "0.25 * farthest",
            network_terms.HEADS["rare far tokens in two directions"],
        ),
        (
            "certificates.ball.nonlinear_ball",
            "of",
            "`2` → `4`",
            "flat ** 4",
            curved_terms.BALLS["soft-cap, tokens far apart, keys"],
        ),
        (
            "certificates.ball.nonlinear_ball",
            "_derivatives",
            "`2` → `1.0`",
            "1.0 / 3 ** 0.5",
            curved_terms.BALLS["rms 1 by 0.05"],
        ),
        (
            "certificates.classifier.cls_token",
            "_SKEW",
            "`6` → `12`",
            "",
            pooled_terms.POOLS["two tokens whose values move"],
        ),
        (
            "certificates.classifier.relu_relaxation",
            "_parabola",
            "`4` → `8`",
            "",
            pooled_terms.Box(-1.0, 1.0, -2.0, 0.8, 0.0),
        ),
        (
            "rounding.output_error",
            "of_keys",
            "`2` → `4`",
            "torch.tanh(half / 4)",
            answer_terms.WINDOWS["two tokens, 0.5 by 0.001"],
        ),
    ],
)
def test_half_of_a_term_is_caught(
    module: str,
    place: str,
    what: str,
    source: str,
    example: network_terms.Ball | curved_terms.Ball | pooled_terms.Pool | pooled_terms.Box | answer_terms.Window,
) -> None:
    assert outcomes(changed(module, place, what, source), example.example("one")) == ["caught"]


def test_proofs_as_they_are_pass_and_come_back_after_a_change() -> None:
    here = Mutant(
        "certificates.ball.weight_perturbation",
        "",
        "nothing",
        ast.unparse(ast.parse(source_of("certificates.ball.weight_perturbation"))),
    )
    terms = {name: PERTURBATION[name] for name in ("step 0: factor", "high, query shift")}
    assert outcomes([here], *examples(terms, {"drawn 50": CASES["drawn 50"]})) == ["not smaller"]
    with altered(here) as modules:
        assert modules["certificates.ball.on_ball"] is not on_ball
    assert Proof(CASES["drawn 50"]).around is on_ball


def test_a_jury_refuses_an_example_on_which_the_proof_as_it_is_fails() -> None:
    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        yield "bound", torch.ones(1)

    with pytest.raises(AssertionError, match="the proof as it is fails"):
        Jury([Example("one", proved, {"bound": 2 * torch.ones(1)})])


def test_choices_are_not_tried() -> None:
    free = changed("certificates.classifier.cls_token", "_PIECES", "`16` → `32`")
    assert [judged(Jury([]), mutant).outcome for mutant in free] == ["any proves"]
    shifts = [
        mutant
        for mutant in mutants("certificates.network.attention_remainder", "moves")
        if "`logits - torch" in mutant.what
    ]
    assert {judged(Jury([]), mutant).by for mutant in shifts} == {"any shift of a row"}


@pytest.mark.slow
def test_choices_and_reasons_stand_in_modules_that_are_judged() -> None:
    assert {module for module, *_ in (*CHOICES, *FRAGMENTS, *WHY)} <= set(JUDGED)
    assert [(module, place) for module, place, *_ in WHY if not any(mutants(module, place))] == []
    assert all(any(mutants(module, place)) for module, place in CHOICES)
    assert all(any(text in m.what for m in mutants(module, place)) for module, place, text in FRAGMENTS)
