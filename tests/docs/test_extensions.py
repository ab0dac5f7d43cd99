"""What the site is built with, piece by piece."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytest.importorskip("sphinx", reason='needs the tools of the site: pip install -c constraints.txt -e ".[docs]"')
pytest.importorskip("latex2mathml")
EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_extensions"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(EXTENSIONS)
    return importlib.import_module(request.param)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("extension", [name], indirect=True)


@pytest.mark.parametrize("extension", ["docstrings", "mathml"], indirect=True)
def test_their_examples_print_what_they_say(extension: ModuleType) -> None:
    tried = doctest.testmod(extension)
    assert tried.attempted > 0
    assert tried.failed == 0


@of("docstrings")
def test_bars_stay_as_they_are_in_examples_formulas_and_code(extension: ModuleType) -> None:
    kept = "``a|b`` and :math:`|x|\n|y|` here\n\n.. math:: |z|\n          = |w|\n\n>>> 1 | 2\n3\n\nthen "
    assert extension.with_bars(kept + "|t|") == kept + r"\|t\|"


@of("mathml")
@pytest.mark.parametrize("tex", [r"\nonsense{x}", r"a & b", r"\frac{1"])
def test_a_formula_that_cannot_be_read_ends_the_build(extension: ModuleType, tex: str) -> None:
    with pytest.raises(extension.SphinxError, match="the formula"):
        extension.mathml(tex, "inline")


@of("mathml")
@pytest.mark.parametrize("norm", [r"\|x\|", r"\Bigl\|x\Bigr\|", r"\bigl\lVert x\bigr\rVert", r"\left\|x\right\|"])
def test_a_norm_keeps_close_to_what_it_encloses(extension: ModuleType, norm: str) -> None:
    signs = [node for node in ElementTree.fromstring(extension.mathml(norm, "block")).iter() if node.text == "‖"]
    assert [sign.get("lspace") for sign in signs] == ["0", "0"]


@of("mathml")
@pytest.mark.parametrize("tex", [r"\max_i x_i", r"\bigl(\sum_j x_j\bigr)^{1/2}"])
def test_limits_stand_below_where_there_is_room(extension: ModuleType, tex: str) -> None:
    assert '<munder><mo movablelimits="true">' in extension.mathml(tex, "block")


@of("mathml")
def test_an_exponent_belongs_to_the_whole_bracket(extension: ModuleType) -> None:
    power = ElementTree.fromstring(extension.mathml(r"\Bigl(x + y\Bigr)^2", "block"))[0][0]
    assert "".join(power[0].itertext()) == "(x+y)"


@of("reference_pages")
def test_a_public_constant_without_a_word_about_it_ends_the_build(
    extension: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "without the hub" in extension.said_of("howsmooth.models.NAMED")
    monkeypatch.setattr("howsmooth.models.SILENT", ("a", "b"), raising=False)
    with pytest.raises(extension.SphinxError, match="SILENT is public: say what it is"):
        extension.said_of("howsmooth.models.SILENT")
