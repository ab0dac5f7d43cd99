"""Models in memory are scanned as they are, and stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, pipeline

import howsmooth as hs
from evidence.scan_faults import make_model
from howsmooth.models import held_model, open_model

WORDS = "to be or not to be, that is the question " * 20


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=300, n_positions=64))


def values(scan: hs.Scan) -> list[float]:
    return [row["value"] for row in scan.rows]


def test_a_gpt2_in_memory_is_scanned_in_one_line() -> None:
    scan = hs.scan(gpt2(), WORDS, lengths=12)
    assert len(scan) == 4
    assert all(row["lower"] <= row["value"] <= row["upper"] for row in scan.rows)
    assert any("bytes" in note for note in scan.notes)


def test_nothing_of_the_callers_model_changes() -> None:
    model = gpt2().to(torch.bfloat16).train()
    model.transformer.h[0].register_forward_hook(lambda *_: None)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    hs.scan(model, WORDS, lengths=8)
    assert model.training
    assert len(model.transformer.h[0]._forward_hooks) == 1
    for name, weight in model.named_parameters():
        assert weight.requires_grad
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])


def test_bfloat16_weights_are_measured_as_stored_and_said() -> None:
    model = gpt2()
    rounded, exact = gpt2().to(torch.bfloat16), model
    with torch.no_grad():
        for weight in exact.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    scan = hs.scan(rounded, WORDS, lengths=8)
    assert {row["precision"] for row in scan.rows} == {"bfloat16 weights, computed in float32"}
    assert values(scan) == pytest.approx(values(hs.scan(exact, WORDS, lengths=8)), rel=1e-6)


def test_a_folder_a_path_a_model_and_a_pipeline_give_one_answer(tmp_path: Path) -> None:
    make_model(tmp_path)
    asked = {"lengths": 8, "explain": False, "bounds": "none"}
    opened = open_model(str(tmp_path))
    pipe = pipeline("feature-extraction", model=opened.model, tokenizer=opened.processor)
    expected = values(hs.scan(str(tmp_path), WORDS, **asked))
    assert values(hs.scan(tmp_path, WORDS, **asked)) == expected
    assert values(hs.scan(opened.model, WORDS, tokenizer=opened.processor, **asked)) == expected
    assert values(hs.scan(pipe, WORDS, **asked)) == expected


@pytest.mark.slow
def test_a_compiled_model_is_the_model() -> None:
    model = gpt2()
    wrapped = torch.compile(model, backend="eager")
    assert held_model(wrapped).sha256 == held_model(model).sha256


@pytest.mark.slow
def test_an_adapter_is_merged() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    wanted = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    adapted = peft.get_peft_model(gpt2(), wanted)
    scan = hs.scan(adapted, WORDS, lengths=8)
    assert values(scan) != values(hs.scan(gpt2(), WORDS, lengths=8))
    assert values(scan) == values(hs.scan(adapted.merge_and_unload(), WORDS, lengths=8))


def test_what_cannot_be_scanned_is_refused() -> None:
    with pytest.raises(hs.UnsupportedModel, match="a model of transformers"):
        hs.scan(torch.nn.Linear(3, 3), WORDS)
    with pytest.raises(hs.InvalidInput, match="brings its own"):
        hs.scan("random:bert[layers=1,width=16]", WORDS, tokenizer=object())
    with pytest.raises(hs.InvalidInput, match="device"):
        hs.scan("random:bert[layers=1,width=16]", WORDS, device="nonsense")
    with torch.device("meta"):
        empty = gpt2()
    with pytest.raises(hs.InvalidInput, match=r"on the meta device: load them before measuring.*LayeredModel"):
        hs.scan(empty, WORDS)
