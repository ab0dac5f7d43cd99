"""Texts that name sets: every form, one unit rule, and one sentence with examples for every other text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from howsmooth.errors import InvalidInput
from howsmooth.sets import Around, Ball, Normalised, Point, SetText, Sphere
from howsmooth.sets.ellipsoid import Ellipsoid

X = torch.tensor([[3.0, 4.0], [0.0, 15.0]])  # of mean token norm 10


def test_every_form_names_its_set() -> None:
    norm = Ellipsoid.after(nn.LayerNorm(2))
    kinds = {"point": Point, "around:0.5": Around, "together:0.5": Around, "ball:2": Ball, "sphere:2": Sphere}
    kinds |= {"norm": Normalised, "norm:h.0.ln_1": Normalised, "rms:h.0.ln_1": Normalised}
    for text, kind in kinds.items():
        (found,) = SetText.parse(text).sets(x=X, norm=norm)
        assert type(found) is kind
    assert SetText.parse("norm:h.0.ln_1").name == "h.0.ln_1"


def test_sizes_are_absolute_unless_they_say_percent() -> None:
    for text, eps in (("around:0.5", 0.5), ("around:5%", 0.5), ("together: 20 %", 2.0), ("around:1e-3", 1e-3)):
        (found,) = SetText.parse(text).sets(x=X)
        assert isinstance(found, Around)
        assert found.eps == pytest.approx(eps, rel=1e-15)
        assert found.per_token == text.startswith("around")
    assert [over.size for over in SetText.parse("ball:5,1,2").sets()] == [1, 2, 5]
    assert SetText.parse("around:10%,1%").absolute(X) == pytest.approx((0.1, 1.0))


@pytest.mark.parametrize(
    "text",
    [
        *("", "ball", "ball:", "ball:0", "ball:-1", "ball:nan", "ball:inf", "ball:1,,2", "ball:two", "disc:1"),
        *("point:1", "around", "around:%", "around:0%", "rms", "norm:", "Ball:1", "0.01", "ball:2:3"),
    ],
)
def test_another_text_is_refused_in_one_sentence_with_examples(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"names no set: write for example point, around:0\.01, around:1%") as caught:
        SetText.parse(text)
    assert "\n" not in str(caught.value)


def test_units_are_not_mixed() -> None:
    for text in ("around:1%,2", "ball:1%", "sphere:5%"):
        with pytest.raises(InvalidInput, match="mixes units"):
            SetText.parse(text)


def test_a_set_about_an_input_needs_one() -> None:
    for text in ("point", "around:1"):
        with pytest.raises(InvalidInput, match="about an input"):
            SetText.parse(text).sets()
    with pytest.raises(InvalidInput, match="share of the mean token norm"):
        SetText.parse("around:1%").absolute()
