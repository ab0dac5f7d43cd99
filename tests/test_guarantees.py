"""Every end of every result carries a guarantee and prints it, and only what is proved is called so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import howsmooth as hs
from howsmooth import meanfield
from howsmooth._util.guarantee import Guarantee, weakest, with_guarantees
from howsmooth.bounds.composition import Stack, Stage
from howsmooth.certificates import SequenceClassifier
from howsmooth.certificates.ball.on_ball import ladder
from howsmooth.certificates.point import enclosure
from howsmooth.cli import app
from howsmooth.jacobians import MatrixOperator
from howsmooth.norms import operator_norm
from howsmooth.reports.page import page
from howsmooth.reports.scan_groups import groups
from howsmooth.reports.sections import certificates_section
from howsmooth.rounding import quantise
from howsmooth.rounding.output_error import OutputErrors
from howsmooth.scans.compare_scans import compare
from howsmooth.search.worst_measure_search import worst_measure

SOURCE = Path(hs.__file__).parent
PROVED, MODELLED, MEASURED = Guarantee.PROVED, Guarantee.MODELLED, Guarantee.MEASURED
HOLDS = ("lower_holds", "upper_holds", "radius_holds", "worst_holds")
CLAIMS = re.compile(r"\b(proved|proves?|proofs?|certif\w+|guaranteed|always)\b", re.IGNORECASE)
RANDOM = ["random", "--width", "8", "--heads", "2", "--length", "5"]


def attention() -> hs.SelfAttention:
    return hs.SelfAttention.random(8, heads=2)


def tokens(n: int = 5) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(0))


def head() -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))


def radius() -> Any:
    network = SequenceClassifier([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], nn.Linear(8, 3)).eval()
    x = tokens().double()
    return hs.certify(network.double(), x, int(network(x).argmax()))


def large(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The certificate of maps that are too large to be proved from below."""
    for limit in ("DEFLATION", "CHOLESKY", "BLOCK", "STACKED"):
        monkeypatch.setattr(enclosure, limit, 3)
    return hs.certify(attention(), hs.sets.Around(tokens(), 0.01), **options)


def stack() -> Stack:
    return Stack((Stage.of("layer 0: MLP", 2.0, kind="MLP"),))


RESULTS: dict[str, tuple[Callable[[], Any], set[Guarantee]]] = {
    "attention": (lambda: hs.measure(attention(), tokens()), {MODELLED}),
    "attention with a probability": (lambda: hs.measure(attention(), tokens(), dense_limit=0), {MODELLED}),
    "heads": (lambda: hs.measure_heads(attention(), tokens()), {MODELLED}),
    "largest token": (lambda: hs.measure(attention(), tokens(), norm="token"), {MODELLED}),
    "matrix": (lambda: operator_norm(MatrixOperator(torch.eye(3))), {MODELLED}),
    "function": (lambda: hs.measure(torch.sin, tokens()), {MEASURED}),
    "certificate at an input": (lambda: hs.certify(attention(), tokens()), {PROVED}),
    "certificate of heads on a ball": (
        lambda: hs.certify(attention(), hs.sets.Around(tokens(), 0.01), per_head=True),
        {PROVED},
    ),
    "radius": (radius, {PROVED}),
    "witness": (lambda: hs.worst_case(head(), 3, over=hs.sets.Ball(1.0), starts=1, steps=5), {MODELLED}),
    "local constant": (
        lambda: meanfield.local_constant(head(), meanfield.Measure(torch.eye(2), [0.5, 0.5])),
        {MODELLED},
    ),
    "worst measure": (lambda: worst_measure(head(), over=hs.sets.Ball(1.0), starts=1, steps=3).constant, {MODELLED}),
    "bound of a head at an input": (lambda: _upper(over=tokens(), per_head=True), {PROVED}),
    "bound of a block at an input": (lambda: _upper(over=tokens()), {MODELLED}),
    "bound on a set": (lambda: _upper(n=5, over=hs.sets.Ball(1.0), per_head=True), {MODELLED}),
    "stack": (stack, {MODELLED}),
}


def _upper(per_head: bool = False, **where: Any) -> Any:
    found = hs.bounds.table(attention(), per_head=per_head, **where).tightest("upper")
    assert found is not None
    return found


def held(result: Any) -> set[Guarantee]:
    """The guarantees of all ends of a result."""
    names = [name for name in (*HOLDS, "guarantee") if hasattr(result, name)]
    return {getattr(result, name) for name in names}


def texts(result: Any) -> list[str]:
    html = [result._repr_html_()] if hasattr(result, "_repr_html_") else []
    return [str(result), *([] if type(result) is Stack else [repr(result)]), *html]


@pytest.mark.parametrize("name", RESULTS)
def test_ends_carry_their_guarantees_and_print_them(name: str) -> None:
    make, known = RESULTS[name]
    result = make()
    assert held(result) == known
    confidence = getattr(result, "confidence", 1.0)
    for text in texts(result):
        for guarantee in known:
            assert guarantee.words(confidence) in text
        assert bool(CLAIMS.search(text)) == (PROVED in known)
        assert len(text.splitlines()) <= 10
    if hasattr(result, "to_dict"):
        plain = json.loads(json.dumps(result.to_dict()))
        assert {plain[key] for key in (*HOLDS, "guarantee") if key in plain} == {one.name.lower() for one in known}


@pytest.mark.parametrize("per_head", [False, True])
def test_a_certificate_of_a_large_map_says_that_its_lower_end_is_not_proved(
    monkeypatch: pytest.MonkeyPatch, per_head: bool
) -> None:
    found = large(monkeypatch, per_head=per_head)
    assert (found.lower_holds, found.upper_holds) == (MODELLED, PROVED)
    assert (found.to_dict()["lower_holds"], found.to_dict()["upper_holds"]) == ("modelled", "proved")
    for text in texts(found):
        assert re.search(r"≥ [\d.]+ \(rounding modelled\), ≤ [\d.]+ \(proved\)", text)


def test_a_certificate_of_many_heads_shows_few_lines() -> None:
    found = hs.certify(hs.SelfAttention.random(16, heads=16), torch.eye(2, 16), per_head=True)
    assert len(repr(found).splitlines()) == 10
    assert repr(found).endswith("… 8 more heads")
    assert len(found.methods) == 16


def test_every_measurement_of_an_explanation_prints_its_guarantee() -> None:
    story = hs.explain(attention(), tokens())
    assert held(story.total) == held(story.value_path) == held(story.score_path) == {MODELLED}
    assert repr(story).count("rounding modelled") == 3
    assert story._repr_html_().count("rounding modelled") == 3
    assert not any(CLAIMS.search(text) for text in texts(story))


@pytest.mark.parametrize("per_head", [False, True])
def test_every_row_of_a_table_of_bounds_prints_its_guarantee(per_head: bool) -> None:
    found = hs.bounds.table(attention(), over=tokens(), per_head=per_head)
    proved = {row.name for row in found if row.guarantee is PROVED}
    assert ("howsmooth.three_path" in proved) == per_head
    assert "measured" not in proved
    assert "castin2024.sqrt_n" not in proved
    printed = [row.guarantee.words() for row in found]
    assert [row["guarantee"] for row in found.to_dict()["rows"]] == [row.guarantee.name.lower() for row in found]
    for text in (repr(found), found._repr_html_(), found.to_latex()):
        for words in set(printed):
            assert text.count(words) == printed.count(words)
        assert bool(CLAIMS.search(text)) == per_head


def test_both_ends_of_a_sandwich_print_their_guarantees() -> None:
    found = hs.search.sandwich(head(), [3], over=hs.sets.Ball(1.0), starts=1, steps=5)
    (cell,) = found
    assert (cell.lower_holds, cell.upper_holds) == (MODELLED, MODELLED)
    assert cell.lower == float(cell.witness.measurement.lower) <= cell.witness.value
    assert (cell.to_dict()["lower_holds"], cell.to_dict()["upper_holds"]) == ("modelled", "modelled")
    assert " ".join(repr(found).split()).count("rounding modelled") == 2
    assert not CLAIMS.search(repr(found))


def test_what_is_found_on_balls_is_told_from_what_is_proved() -> None:
    found = ladder(attention().in_dtype(torch.float64), tokens().double(), (0.01,), steps=3)
    assert (found.lower_holds, found.worst_holds) == (PROVED, MODELLED)
    section = certificates_section(found, "a map", "")
    for words in ("at the input ≥, proved", "worst found ≥, rounding modelled", "certified ≤, proved"):
        assert words in section


def test_bounds_on_rounded_caches_are_proved() -> None:
    found = quantise("random:llama[layers=1,width=16]", formats="int8", length=8, windows=1, samples=2)
    assert OutputErrors.proved_holds is PROVED
    assert {row["proved_holds"] for row in found.rows()} == {"proved"}
    assert repr(found).count(", proved") == 2


@pytest.fixture(scope="module")
def scan() -> hs.Scan:
    return hs.scan("random:gpt2", "Down the rabbit hole. " * 20, lengths=8, what="head,attention,layer", bounds="none")


def test_cells_of_a_scan_have_the_guarantee_of_their_kind(scan: hs.Scan) -> None:
    known = {"head": "modelled", "attention": "modelled", "layer": "measured"}
    assert {row["what"] for row in scan.rows} == {*known}
    for row in json.loads(scan.json()):
        assert (row["lower_holds"], row["upper_holds"]) == (known[row["what"]], known[row["what"]])
    (first, *_) = compare(scan, scan).changes
    assert first.guarantee.words() in compare(scan, scan)._repr_html_()
    assert first.to_dict()["guarantee"] == first.guarantee.name.lower()


def test_the_report_of_a_scan_prints_guarantees_and_claims_no_proof(scan: hs.Scan) -> None:
    visible = re.sub(r"<(script|style).*?</\1>", "", page(groups(scan)), flags=re.DOTALL)
    assert "rounding modelled" in visible
    assert [match[0] for match in CLAIMS.finditer(visible)] == []


COMMANDS: dict[str, tuple[list[str], bool]] = {
    "measure": (["measure", *RANDOM, "--explain"], False),
    "bounds": (["bounds", *RANDOM], False),
    "bounds of heads": (["bounds", *RANDOM, "--per-head"], True),
    "certify": (["certify", *RANDOM], True),
    "worst-case": (["worst-case", *RANDOM, "--over", "ball:1", "--starts", "1", "--steps", "3"], False),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_guarantees_and_calls_proved_only_what_is(name: str, tmp_path: Path) -> None:
    command, proves = COMMANDS[name]
    out = ["--out", str(tmp_path)] if name == "worst-case" else []
    done = CliRunner().invoke(app, [*command, *out])
    assert done.exit_code == 0, done.output
    assert ("proved" if proves else "rounding modelled") in done.stdout
    assert bool(CLAIMS.search(done.stdout)) == proves


def test_guarantees_are_ordered_from_the_strongest() -> None:
    assert [one.name for one in Guarantee] == ["PROVED", "PROBABLE", "MODELLED", "MEASURED"]
    assert weakest(PROVED, Guarantee.PROBABLE, MODELLED) is MODELLED


def test_ends_that_differ_in_their_guarantees_print_both() -> None:
    assert with_guarantees("≥ 1", "≤ 2", PROVED, Guarantee.PROBABLE, 0.99) == (
        "≥ 1 (proved), ≤ 2 (with probability 99 %)"
    )
    assert with_guarantees("≥ 1", "≤ 2", MEASURED) == "≥ 1, ≤ 2, rounding measured"
    assert with_guarantees("", "≤ 2", MODELLED, confidence=0.9) == "≤ 2, with probability 90 %, rounding modelled"
    assert with_guarantees("", "", MODELLED) == ""


OUTSIDE = {
    "__init__.pyi": "names hs.certify and its results",
    "attention/conversion.py": "refuses, for certificates, a map whose formula was overridden",
    "cli/certify.py": "the command that prints certificates",
    "cli/networks.py": "prints those of networks",
    "cli/program.py": "names that command",
    "reports/sections.py": "the section on certificates",
    "reports/assets/certificates.html.jinja": "its page",
    "reports/assets/report.css": "its style",
    "norms/measurement.py": "says that hs.certify proves what a measurement does not",
}
"""Files outside of `howsmooth.certificates` that speak of certificates, each with its reason."""


def test_only_certificates_are_called_certified() -> None:
    """An upper end with a probability, a theorem in float64 and a trusted constant have other words."""
    kinds = {".py", ".pyi", ".jinja", ".js", ".css"}
    files = [file for file in SOURCE.rglob("*") if file.suffix in kinds and "certificates" not in file.parts]
    speaking = {file.relative_to(SOURCE).as_posix() for file in files if re.search("certif", file.read_text(), re.I)}
    assert speaking == set(OUTSIDE)
