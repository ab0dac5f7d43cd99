"""The answer of a report: the same for a model and its gauge-transformed twin, whose σ differs; and nothing unknown."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from howsmooth.reports import groups
from howsmooth.reports.headline_answer import GAUGE, answer, compared, picture, relative_conditions
from howsmooth.reports.page import page

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 3
GAIN = 4.0
OPTIONS: dict[str, Any] = {"lengths": 8, "dtype": "float64", "bounds": "none"}


def twins(folder: Path) -> tuple[Path, Path]:
    """Two saved models that compute the same: gain and bias of the normalisation × 4, the weights behind it ÷ 4."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=300, n_positions=32))
    model.save_pretrained(folder / "one")
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        before = model.eval()(ids).logits
        for block in model.transformer.h:
            block.ln_1.weight.mul_(GAIN)
            block.ln_1.bias.mul_(GAIN)
            block.attn.c_attn.weight.div_(GAIN)
        assert torch.allclose(model(ids).logits, before, rtol=1e-4, atol=1e-6)
    model.save_pretrained(folder / "twin")
    return folder / "one", folder / "twin"


@pytest.mark.slow
def test_a_model_and_its_gauge_transformed_twin_have_the_same_relative_numbers(tmp_path: Path) -> None:
    one, other = (
        hs.scan(GPT2LMHeadModel.from_pretrained(path), TEXT, what="head,attention,layer,model", **OPTIONS)
        for path in twins(tmp_path)
    )
    assert len(one) == len(other) == 2 * 2 + 2 + 2 + 1
    for row, twin in zip(one.rows, other.rows, strict=True):
        factor = GAIN if row["what"] in ("head", "attention") else 1.0
        assert twin["value"] == pytest.approx(row["value"] / factor, rel=2e-3)
        assert twin["relative"] == pytest.approx(row["relative"], rel=2e-3)
    first, second = groups(one)[0], groups(other)[0]
    numbers = [
        [(scale.kind, f"{scale.middle:.2g}") for scale in relative_conditions(group)] for group in (first, second)
    ]
    assert numbers[0] == numbers[1]
    shown = page([second])
    assert "Why two numbers?" in shown
    assert GAUGE.split("?")[1].strip()[:60] in shown


@pytest.mark.slow
def test_the_answer_names_the_whole_a_layer_and_a_head_and_compares() -> None:
    scanned = hs.scan(
        "random:gpt2[layers=2,width=16,seed=3]",
        TEXT,
        lengths=[6, 8],
        what="head,layer,model",
        reference="random",
        bounds="none",
    )
    (group,) = groups(scanned)
    said = answer(group)
    for part in ("If the input changes by 1 %", "the whole model", "a layer by", "an attention head by", "n = 8"):
        assert part in said
    assert "Compared with the same architecture with random weights" in compared(group)
    drawn = picture(group)
    assert drawn.startswith("<svg")
    assert drawn.count("<circle") == 1 + 2 + 8
    assert "dashed" in page([group])


def test_rows_without_relative_numbers_keep_the_headline() -> None:
    row = {"model": "old", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 2.0}
    (group,) = groups([row])
    assert (answer(group), compared(group), picture(group)) == ("", "", "")
    assert "is the only head measured" in page([group])


@pytest.mark.parametrize("largest", [2.0, 30.0, 340.0, 2e4, 1e9])
def test_labels_of_the_picture_have_room(largest: float) -> None:
    row = {"model": "tiny", "precision": "float32", "what": "head", "layer": 0, "length": 8, "value": 2.0}
    rows = [row | {"head": head, "relative": value} for head, value in enumerate((0.7, 3.0, largest))]
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">[^<]*%</text>', picture(groups(rows)[0]))
    places = [float(place) for place in labels]
    assert len(places) >= 2
    assert all(right - left >= 40 for left, right in pairwise(places))
