"""A model whose layers are read one at a time is the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import LayeredModel, capture

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
INPUTS = {"input_ids": torch.tensor([[5, 7, 11, 13, 17, 19, 23]])}


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES | more, num_key_value_heads=2, initializer_range=0.3)


def saved(model: Any, folder: Path) -> Path:
    """In several files, as large models are."""
    model.eval().save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(params=["llama", "llama with a head", "bert"])
def model(request: pytest.FixtureRequest) -> Any:
    kinds = {
        "llama": lambda: LlamaModel(llama()),
        "llama with a head": lambda: LlamaForCausalLM(llama()),
        "bert": lambda: BertModel(BertConfig(**SIZES, initializer_range=0.3)),
    }
    return kinds[request.param]()


def test_tokens_and_maps_of_every_layer_are_those_of_the_model(model: Any, tmp_path: Path) -> None:
    layers = LayeredModel(saved(model, tmp_path), scratch=tmp_path)
    layers.read(INPUTS)
    expected = capture(model, INPUTS)
    assert len(layers) == len(expected) == 3
    for layer in (2, 0, 1):  # in any order
        site = layers.site(layer)
        assert site.layer == layer
        assert torch.equal(site.x, expected[layer].x)
        ours, theirs = (hs.measure_heads(one.attention, one.x, seed=0) for one in (site, expected[layer]))
        assert torch.equal(ours.value, theirs.value)
        from_weights = layers.attention(layer)
        assert torch.equal(from_weights.query_weight, expected[layer].attention.query_weight)
        assert torch.equal(from_weights.value_weight, expected[layer].attention.value_weight)


def test_no_layer_stays_in_memory(tmp_path: Path) -> None:
    layers = LayeredModel(saved(LlamaModel(llama()), tmp_path), scratch=tmp_path)
    layers.read(INPUTS)
    layers.site(1)
    layers.attention(2)
    inside = [p for name, p in layers.model.named_parameters() if name.startswith("layers.")]
    assert len(inside) == 3 * 9
    assert all(parameter.is_meta for parameter in inside)


def test_weights_in_half_precision_are_computed_in_single(tmp_path: Path) -> None:
    layers = LayeredModel(saved(LlamaModel(llama()).to(torch.bfloat16), tmp_path), scratch=tmp_path)
    layers.read(INPUTS)
    whole = LlamaModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = capture(whole, INPUTS)
    assert torch.equal(layers.site(2).x, expected[2].x)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no config\.json"):
        LayeredModel(tmp_path, scratch=tmp_path)
    layers = LayeredModel(saved(LlamaModel(llama()), tmp_path), scratch=tmp_path)
    with pytest.raises(InvalidInput, match="has read nothing yet"):
        layers.site(0)
    with pytest.raises(InvalidInput, match="layer 3 does not exist: this LlamaModel has 3 layers"):
        layers.attention(3)
    llama(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"has no weight layers\.3\."):
        LayeredModel(tmp_path, scratch=tmp_path)


@pytest.mark.slow
def test_a_checkpoint_is_bounded_and_measured_layer_by_layer(tmp_path: Path) -> None:
    """A small sample of the evidence page: a checkpoint of bfloat16 files in a process of its own."""
    from evidence.large_models import CAP, Shape, capped, make_checkpoint

    shape = Shape(width=32, inner=48, layers=3, heads=4, words=80)
    assert make_checkpoint(tmp_path, shape) > 2 * (80 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48))
    answer = capped(tmp_path, CAP)
    assert (answer["bounded"], answer["layer"], len(answer["values"])) == (12, 1, 4)
    assert answer["converged"]
