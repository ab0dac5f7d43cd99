"""Models in memory are scanned as they are, and stay as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, pipeline

import howsmooth as hs
from evidence.scan_faults import make_model
from howsmooth.models import open_model
from howsmooth.models.in_memory import model_in_memory

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
    assert model_in_memory(wrapped).sha256 == model_in_memory(model).sha256


@pytest.mark.slow
def test_an_adapter_is_merged() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    wanted = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    adapted = peft.get_peft_model(gpt2(), wanted)
    scan = hs.scan(adapted, WORDS, lengths=8)
    assert values(scan) != values(hs.scan(gpt2(), WORDS, lengths=8))
    assert values(scan) == values(hs.scan(adapted.merge_and_unload(), WORDS, lengths=8))


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_that_are_switched_off_are_left_out(merged: bool) -> None:
    adapted = _adapted(gpt2())
    if merged:
        adapted.merge_adapter()
    adapted.base_model.disable_adapter_layers()
    expected = values(hs.scan(gpt2(), WORDS, lengths=8))
    assert values(hs.scan(adapted, WORDS, lengths=8)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_adapters_are_merged_in_single_precision_whatever_the_weights_are_in() -> None:
    rounded = _adapted(gpt2().to(torch.bfloat16))
    exact = _adapted(gpt2().to(torch.bfloat16)).to(torch.float32)
    held = model_in_memory(rounded)
    assert held.sha256 == model_in_memory(exact.merge_and_unload()).sha256
    assert held.precision.startswith("bfloat16")


@pytest.mark.slow
def test_layers_that_adapters_replace_are_refused_where_they_are_switched_off() -> None:
    adapted = _adapted(gpt2(), modules_to_save=["ln_f"])
    adapted.base_model.disable_adapter_layers()
    with pytest.raises(hs.InvalidInput, match="unload them first"):
        model_in_memory(adapted)


def _adapted(model: GPT2LMHeadModel, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    wanted = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **options)
    return peft.get_peft_model(model, wanted)


def test_parts_that_are_compiled_are_the_parts() -> None:
    expected = model_in_memory(gpt2()).sha256
    region, one, forward = gpt2(), gpt2(), gpt2()
    region.transformer.h[1] = torch.compile(region.transformer.h[1], backend="eager")
    one.transformer.h[0].attn.c_attn = torch.compile(one.transformer.h[0].attn.c_attn, backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")
    assert [model_in_memory(each).sha256 for each in (region, one, forward)] == [expected] * 3
    scanned = hs.scan(forward, WORDS, lengths=8)
    assert values(scanned) == values(hs.scan(gpt2(), WORDS, lengths=8))


def test_a_forward_from_outside_is_refused() -> None:
    model = gpt2()
    model.transformer.h[0].mlp.forward = lambda x: 2 * x
    with pytest.raises(hs.UnsupportedModel, match="a GPT2MLP of the model has a forward that was put in from outside"):
        model_in_memory(model)


def test_hooks_that_are_left_out_are_said() -> None:
    model = gpt2()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)  # hooks of transformers, which change nothing
    assert not any("hooks" in note for note in model_in_memory(model).notes)
    model.transformer.h[0].attn.register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))
    assert "forward hooks of the model are left out (1), with all they change in it" in model_in_memory(model).notes


def test_what_cannot_be_scanned_is_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="a network of your own is scanned on tensors"):
        hs.scan(torch.nn.Linear(3, 3), WORDS)
    with pytest.raises(hs.InvalidInput, match="brings its own"):
        hs.scan("random:bert[layers=1,width=16]", WORDS, tokenizer=object())
    with pytest.raises(hs.InvalidInput, match="device"):
        hs.scan("random:bert[layers=1,width=16]", WORDS, device="nonsense")
    with torch.device("meta"):
        empty = gpt2()
    with pytest.raises(hs.InvalidInput, match=r"on the meta device: load them before measuring.*LayeredModel"):
        hs.scan(empty, WORDS)


@pytest.mark.slow
def test_another_module_is_refused_before_anything_of_transformers_is_loaded() -> None:
    code = (
        "import os, sys, torch, howsmooth as hs\n"
        "before = dict(os.environ)\n"
        "try:\n    hs.scan(torch.nn.Linear(8, 8), 'some words', lengths=4)\n"
        "except hs.InvalidInput:\n    pass\n"
        "heavy = {'torch._inductor', 'transformers.modeling_utils', 'transformers.pipelines'} & set(sys.modules)\n"
        "print(heavy or '', {name for name in os.environ if os.environ[name] != before.get(name)} or '')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], done.stdout
