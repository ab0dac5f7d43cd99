"""The set after a layer's own normalisation is read off the model, whatever its class does with its weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from howsmooth.cli.source_options import MapOptions, layer_tokens
from howsmooth.errors import InvalidInput
from howsmooth.models import attention_inputs
from howsmooth.models.probed_norms import norm_before
from howsmooth.sets import Normalised
from howsmooth.sets.ellipsoid import Ellipsoid

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 50}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 50}
MODELS = {
    "llama": (transformers.LlamaModel, transformers.LlamaConfig(**SIZES)),
    "gemma": (transformers.GemmaModel, transformers.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8)),
    "bert": (transformers.BertModel, transformers.BertConfig(**SIZES)),
    "gpt_neox": (transformers.GPTNeoXModel, transformers.GPTNeoXConfig(**SIZES)),
    "t5": (transformers.T5EncoderModel, transformers.T5Config(**T5)),
}


def tokens_before(model: transformers.PreTrainedModel, layer: int) -> Ellipsoid:
    norm, x = norm_before(model, layer)
    return Ellipsoid.after(norm, x.shape[-1])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layer", [0, 1])
def test_the_set_is_as_large_as_what_the_normalisation_gives_out(kind: str, layer: int) -> None:
    cls, config = MODELS[kind]
    model = cls(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            parameter.data.uniform_(0.2, 0.6)
    tokens = tokens_before(model, layer)
    assert tokens.origin == {"bert": "LayerNorm", "gpt_neox": "LayerNorm"}.get(kind, "RMSNorm")
    x = attention_inputs(model, None, torch.randint(50, (16,)), layers=[layer])[layer][0].double()
    assert Normalised(tokens).excess(x) < 1e-4
    # Real tokens lie on the surface, so that a set 5 % smaller does not hold them: the gain is the model's own.
    smaller = Ellipsoid(tokens.centre, tokens.axes, 0.95 * tokens.reach, tokens.radius)
    assert Normalised(smaller).excess(x) > 1e-3


def test_attention_that_sees_unnormalised_tokens_is_refused() -> None:
    config = transformers.OPTConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        ffn_dim=64,
        vocab_size=50,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
    )
    with pytest.raises(InvalidInput, match="give --over ball:2"):
        tokens_before(transformers.OPTModel(config).eval(), 0)


@pytest.mark.parametrize(("bias", "make"), [(True, Ellipsoid.layer_norm), (False, Ellipsoid.rms_norm)])
def test_a_file_says_its_normalisation_beside_the_attention(bias: bool, make: object, tmp_path: Path) -> None:
    drawn = {f"h.{i}.attn.{name}_proj.weight": torch.randn(8, 8) for name in "qkvo" for i in (0, 1)}
    drawn |= {f"h.{i}.ln_1.weight": torch.rand(8) + 1 + i for i in (0, 1)}
    drawn |= {f"h.{i}.ln_1.bias": torch.rand(8) for i in (0, 1) if bias}
    save_file(drawn, tmp_path / "w.safetensors")
    options = MapOptions(str(tmp_path / "w.safetensors"), prefix="h.1.attn", heads=2, length="1")
    found = layer_tokens(options.open())
    expected = make(drawn["h.1.ln_1.weight"], drawn.get("h.1.ln_1.bias"))  # type: ignore[operator]
    assert torch.equal(found.axes, expected.axes)
    assert torch.equal(found.centre, expected.centre)


@pytest.mark.parametrize(("kind", "extra"), [("gemma", 1.0), ("llama", 0.0), (None, None)])
def test_gains_of_a_file_are_those_of_its_model_or_cover_both(
    kind: str | None, extra: float | None, tmp_path: Path
) -> None:
    names = {f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(8, 8) for name in "qkvo"}
    gain = torch.randn(8)
    save_file(names | {"model.layers.0.input_layernorm.weight": gain}, tmp_path / "w.safetensors")
    if kind is not None:
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    found = layer_tokens(MapOptions(str(tmp_path / "w.safetensors"), heads=2, length="1").open())
    wide = torch.maximum(gain.double().abs(), (1 + gain.double()).abs())
    assert torch.equal(found.axes.diagonal(), wide if extra is None else extra + gain.double())
    assert ("w or 1 + w" in found.origin) == (extra is None)


def test_random_weights_have_no_normalisation() -> None:
    site = MapOptions("random", width=8, length="1").open()
    with pytest.raises(InvalidInput, match="holds no normalisation"):
        layer_tokens(site)
