"""Whole runs: rows that are what the library finds, stores that go on, exports that engines can read."""

from __future__ import annotations

import ast
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.rounding import parse_formats, quantising
from howsmooth.rounding.allocation import Allocation
from howsmooth.rounding.answers import answers
from howsmooth.rounding.exports import EXPORTS, check_engine
from howsmooth.rounding.quantising import quantise
from howsmooth.rounding.running import Reader
from howsmooth.rounding.scores import sampled_scores
from howsmooth.rounding.store import WindowStore, run_name

TINY = "random:llama[layers=2,width=32,heads=4,kv_heads=2]"
QUICK = {"formats": "int8,int4,int2", "length": 12, "windows": 2, "samples": 3}


def test_rows_are_what_answers_and_scores_give() -> None:
    rows = quantise(TINY, **QUICK | {"windows": 1}).rows()
    assert len(rows) == 2 * 4 * 2 * 3
    opened, formats = open_model(TINY, head=True), parse_formats("int8,int4,int2")
    from howsmooth.models import alice

    [window] = opened.windows(alice(), 12, 1, 0)
    reader = Reader.of(opened.model, opened.inputs(window))
    found = [answers(site, formats) for site in reader.sites]
    scores = sampled_scores(reader, formats, 3, 0).by_head
    for row in rows:
        part, form = ("key", "value").index(row["what"]), ["int8", "int4", "int2"].index(row["format"])
        here = (part, form, row["head"])
        assert row["kv_head"] == row["head"] // 2
        assert row["actual"] == pytest.approx(float(found[row["layer"]].actual[here]))
        assert row["proved"] == pytest.approx(float(found[row["layer"]].proved[here]))
        assert row["kl"] == pytest.approx(float(scores[(row["layer"], *here)]))
        assert row["actual"] <= row["proved"]


def test_a_budget_is_kept_and_checked_on_windows_that_were_not_learnt_from() -> None:
    found = quantise(TINY, budget=5.0, per="head", **QUICK)
    names = [check.name for check in found.checks]
    assert names == ["exact", "uniform", "first and last", "allocation"]
    assert found.checks[0].mean == 0
    for check in found.checks[1:]:
        assert check.allocation is not None
        assert check.allocation.bits <= 5.0
        assert len(check.damage) == len(check.loss) == 2
        assert check.perplexity is not None
        assert check.mean > 0


@pytest.mark.parametrize(("letters", "windows", "tried"), [(48, 2, 2), (75, 1, 4), (75, 4, 1), (100, 3, 3)])
def test_no_token_is_in_a_window_of_each_kind(letters: int, windows: int, tried: int) -> None:
    """Drawn windows would overlap in so short a text."""
    opened = open_model(TINY, head=True)
    learnt, held_out = quantising._cut(opened, "x" * letters, 12, windows, tried, seed=0)
    assert (len(learnt), len(held_out)) == (windows, tried)
    read = [{place for w in some for place in range(w.start, w.start + 12)} for some in (learnt, held_out)]
    assert not read[0] & read[1]


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, calls = tmp_path / "s.sqlite", quantising.window_numbers, []

    def stopping(*args: object) -> dict[str, torch.Tensor]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(quantising, "window_numbers", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantise(TINY, out=out, **QUICK)
    found = quantise(TINY, out=out, **QUICK)
    assert len(calls) == 3  # the first window was kept
    assert found.rows() == quantise(TINY, **QUICK).rows()
    assert len(calls) == 5
    quantise(TINY, out=out, **QUICK)
    assert len(calls) == 5
    quantise(TINY, out=out, resume=False, **QUICK)
    assert len(calls) == 7


def test_a_run_stopped_while_it_checks_its_choice_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said, again = tmp_path / "s.sqlite", list[str](), list[str]()
    whole = quantise(TINY, budget=5.0, **QUICK)

    def stop(label: str) -> None:
        said.append(label)
        if label == "checking on window 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(TINY, budget=5.0, out=out, progress=stop, **QUICK)
    assert len(said) == 4
    found = quantise(TINY, budget=5.0, out=out, progress=again.append, **QUICK)
    assert again == ["checking on window 2 of 2"]
    assert (found.rows(), found.checks[-1].damage) == (whole.rows(), whole.checks[-1].damage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "windows"),
    [({"budget": 6.0}, 2), ({"budget": 5.0, "samples": 5}, 4), ({"budget": 5.0, "seed": 1}, 4)],
)
def test_other_settings_are_other_numbers_in_the_store(tmp_path: Path, change: dict[str, Any], windows: int) -> None:
    """Nothing is taken from a run whose settings decide other numbers; another budget only checks anew."""
    out, said = tmp_path / "s.sqlite", list[str]()
    quantise(TINY, budget=5.0, out=out, **QUICK)
    found = quantise(TINY, out=out, progress=said.append, **QUICK | change)
    assert len(said) == windows
    assert found.rows() == quantise(TINY, **QUICK | change).rows()
    said.clear()
    quantise(TINY, budget=5.0, out=out, progress=said.append, **QUICK)
    assert said == []  # the first run is still there


def test_a_damaged_window_is_named(tmp_path: Path) -> None:
    out = tmp_path / "s.sqlite"
    quantise(TINY, out=out, **QUICK)
    with sqlite3.connect(out) as db:
        db.execute("UPDATE windows SET content = zeroblob(length(content)) WHERE window = 1")
    db.close()
    with pytest.raises(InvalidInput, match=r"window 1 in .* is not what was written"):
        quantise(TINY, out=out, **QUICK)


def test_files_that_are_no_stores_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE a (b)")
    db.close()
    text = tmp_path / "text.txt"
    text.write_text("not a database at all, but long enough to be taken for one" * 30)
    for path, said in ((other, "is not a store of howsmooth quantise"), (text, "cannot be used")):
        with pytest.raises(InvalidInput, match=said), WindowStore.of(path, run_name({})):
            pass


def test_encoders_are_measured_by_their_embedding() -> None:
    found = quantise("random:bert[layers=2,width=32]", budget=5.0, **QUICK)
    assert (found.causal, found.damage_name) == (False, "1 − cosine")
    assert found.checks[-1].perplexity is None
    assert 0 < found.checks[-1].mean < 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 2.0}, "below the smallest format"),
        ({"budget": 30.0}, "above the largest format"),
        ({"formats": "int5"}, "there is no format"),
        ({"formats": "int4[group=3]"}, "do not divide the 8 of a head"),
        ({"text": "too short", "length": 200}, "give more text or ask for less"),
        ({"text": 47 * "x", "budget": 5.0}, "too short to check a choice on what it was not made on"),
        ({"check": 0, "budget": 5.0}, "check"),
    ],
)
def test_bad_requests_are_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as error:
        quantise(TINY, **{**QUICK, **options})
    assert "\n" not in str(error.value)


def chosen(names: str, choice: list[list[list[int]]]) -> Allocation:
    return Allocation(tuple(parse_formats(names)), torch.tensor(choice), 6.0, 0.1)


def test_vllm_gets_one_dtype_and_the_layers_to_skip() -> None:
    made = chosen("fp8_e4m3,bf16", [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [1, 1]]])
    assert EXPORTS["vllm"](made, "org/model") == (
        "vllm serve org/model --kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 2"
    )
    exact = chosen("fp8_e4m3,bf16", [[[1], [1]]])
    assert EXPORTS["vllm"](exact, "m") == "vllm serve m --kv-cache-dtype auto"


def test_modelopt_gets_a_quantiser_for_every_layer_and_part() -> None:
    made = chosen("nvfp4,fp8_e4m3,bf16", [[[2], [1]], [[0], [2]]])
    read = ast.literal_eval(EXPORTS["modelopt"](made, "m"))
    assert read["quant_cfg"] == [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*layers.1.*k_bmm_quantizer",
            "cfg": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
            "enable": True,
        },
        {"quantizer_name": "*layers.0.*v_bmm_quantizer", "cfg": {"num_bits": (4, 3)}, "enable": True},
    ]


def test_model_optimizer_enables_what_the_export_names() -> None:
    """With the engine itself, on a CPU; its nvfp4 needs a GPU."""
    engine = pytest.importorskip("modelopt.torch.quantization", reason="needs nvidia-modelopt")
    made = chosen("fp8_e4m3,int4,bf16", [[[0, 0], [2, 2]], [[1, 1], [0, 0]]])
    opened = open_model(TINY, head=True)
    ids = torch.arange(3, 11)[None]
    settings = ast.literal_eval(EXPORTS["modelopt"](made, "m"))
    rounding = engine.quantize(opened.model, settings, lambda model: model(input_ids=ids))
    enabled = {
        name: module.num_bits
        for name, module in rounding.named_modules()
        if type(module).__name__ == "TensorQuantizer" and module.is_enabled
    }
    place = "model.layers.{}.self_attn.{}_bmm_quantizer".format
    assert enabled == {place(0, "k"): (4, 3), place(1, "k"): 4, place(1, "v"): (4, 3)}


def test_llama_cpp_gets_one_type_for_keys_and_one_for_values() -> None:
    made = chosen("int8,int4[asymmetric]", [[[0], [1]], [[0], [1]]])
    assert EXPORTS["llama.cpp"](made, "m").endswith("--cache-type-k q8_0 --cache-type-v q4_1")


def test_json_gets_everything() -> None:
    made = chosen("int8,int4", [[[0, 1], [1, 1]]])
    assert json.loads(EXPORTS["json"](made, "m"))["layers"] == [
        {"layer": 0, "key": ["int8", "int4"], "value": ["int4", "int4"]}
    ]


@pytest.mark.parametrize(
    ("engine", "formats", "per", "said"),
    [
        ("vllm", "int4,bf16", "layer", "vllm has no int4"),
        ("vllm", "fp8_e4m3,bf16", "part", "vllm takes formats per layer, not per part"),
        ("vllm", "fp8_e4m3,fp8_e5m2", "layer", "one quantised format"),
        ("vllm", "fp8_e4m3,fp8_e4m3[per=token]", "layer", "one quantised format"),
        ("vllm", "fp8_e4m3,bf16[first=4]", "layer", "leave first and rotary out of bf16"),
        ("modelopt", "int8[rotary=before]", "part", "keys after rotary positions"),
        ("llama.cpp", "int8,int4", "layer", "per model, not per layer"),
        ("llama.cpp", "int3", "model", "llama.cpp has no int3"),
        ("modelopt", "int8", "head", "not per head"),
        ("tensorrt", "int8", "part", "choose from vllm, modelopt, llama.cpp, json"),
    ],
)
def test_what_an_engine_cannot_take_is_refused(engine: str, formats: str, per: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_engine(engine, parse_formats(formats), per)
