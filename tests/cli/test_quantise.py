"""`howsmooth quantise` prints what the library finds, in both spellings, and says in one line what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from howsmooth.models import open_model
from howsmooth.rounding import quantisation
from howsmooth.rounding.quantisation import quantise
from tests.cli.command import Command

TINY = "random:llama[layers=2,width=32,heads=4,kv_heads=2]"
QUICK = ("--length", 12, "--windows", 1, "--samples", 2)
COMMAND = Command("quantise")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["quantise", "quantize"])
def test_json_is_the_rows_of_the_library(name: str) -> None:
    found = Command(name).json(TINY, *QUICK, "--formats", "int8,int4[per=channel]")
    assert found == quantise(TINY, formats="int8,int4[per=channel]", length=12, windows=1, samples=2).rows()
    fields = {"layer", "head", "what", "format", "actual", "predicted", "proved", "kl"}
    assert all(fields <= set(row) for row in found)


def test_tables_show_formats_checks_the_choice_and_the_export() -> None:
    done = COMMAND.run(TINY, *QUICK, "--formats", "fp8_e4m3,bf16", "--budget", 12, "--per", "layer", "--for", "vllm")
    assert done.exit_code == 0, done.output
    for said in ("fp8_e4m3", "first order ÷ actual", "Run on other windows", "uniform", "The choice", "vllm serve"):
        assert said in done.stdout
    written = Path("howsmooth-output/kv-random-llama-layers-2-width-32-heads-4-kv_heads-2.vllm").read_text()
    assert written.startswith(f"vllm serve {TINY} --kv-cache-dtype fp8_e4m3")
    assert Path("howsmooth-output/quantise-random-llama-layers-2-width-32-heads-4-kv_heads-2.sqlite").is_file()


@pytest.mark.slow
def test_exports_and_pictures_go_where_they_are_told() -> None:
    asked = ("--budget", 6, "--for", "json", "--export", "kv.json", "--figure", "kv.png")
    COMMAND.json(TINY, *QUICK, *asked)
    assert len(json.loads(Path("kv.json").read_text())["layers"]) == 2
    assert Path("kv.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_a_page_with_the_section() -> None:
    done = COMMAND.run(TINY, *QUICK, "--budget", 6, "--report", "kv.html")
    assert "report: kv.html" in done.stdout
    page = Path("kv.html").read_text()
    assert "Alice in Wonderland: 1 windows of 12 tokens, 2 samples" in page
    assert "What may be rounded in random:llama" in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_encoders_are_told_what_is_measured_instead(kind: str) -> None:
    done = COMMAND.run(f"random:{kind}[layers=1,width=32]", *QUICK)
    assert done.exit_code == 0, done.output
    assert "without a KV cache: damage is 1 − cosine of its embedding" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--formats", "int5"], "choose from int8, int6, int4"),
        (["--budget", "2"], "below the smallest format"),
        (["--budget", "20"], "above the largest format"),
        (["--formats", "int4[group=3]", "--budget", "6"], "do not divide"),
        (["--for", "vllm"], "add --budget"),
        (["--for", "vllm", "--budget", "6"], "vllm has no int8"),
        (["--export", "x"], "--export needs --for"),
        (["--figure", "kv.txt"], "does not end like a picture"),
        (["--report", "kv.txt"], "use .html"),
        (["--report", "there.html"], "is no report of howsmooth"),
        (["--report", "folder/kv.html"], "does not exist"),
        (["--per", "token"], "'token' is not one of 'model', 'layer', 'part', 'head'"),
        (["--text", "missing.txt"], "there is no file missing.txt"),
        (["--length", "100000"], "at most"),
    ],
)
def test_bad_requests_are_one_line(args: list[str], said: str) -> None:
    Path("there.html").write_text("<p>mine")
    assert said in COMMAND.refusal(TINY, *QUICK, *args)


def test_short_texts_and_models_of_images_are_refused() -> None:
    Path("short.txt").write_text("Hi")
    assert "give more text or ask for less" in COMMAND.refusal(TINY, *QUICK, "--text", "short.txt")
    assert "rounding is measured on models of text" in COMMAND.refusal("random:vit[layers=1,width=32]", *QUICK)


@pytest.mark.parametrize(
    ("names", "factor", "said"),
    [
        (["self_attn.k_proj"], float("nan"), "layers.0.self_attn.k_proj.weight holds NaN or infinity, which cannot"),
        (["mlp.up_proj", "mlp.down_proj"], 1e30, "layer 1"),
    ],
)
def test_nan_in_the_cache_is_one_line_that_says_where(
    names: list[str], factor: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the weights, or in what a layer makes of finite ones."""
    opened = open_model(TINY, head=True)
    for name in names:
        opened.model.get_submodule(f"model.layers.0.{name}").weight.mul_(factor)
    monkeypatch.setattr(quantisation, "open_model", lambda name, **options: opened)
    assert said in COMMAND.refusal(TINY, *QUICK)
