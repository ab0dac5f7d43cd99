"""Replaced attention: the same model where nothing changes, no leak, generation, saving, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.named_models import NAMED
from howsmooth.nn.hosting.adapter import AttentionAdapter, TransformersMask
from howsmooth.nn.hosting.replacement import (
    REPLACEABLE,
    load_replaced,
    replace_attention,
    replaced_layers,
    replacement_of,
)
from howsmooth.nn.layers.registry import LAYER_KINDS
from tests.models.tiny import TINY

TEXT = tuple(kind for kind in REPLACEABLE if kind != "vit")
CAUSAL_KINDS = tuple(kind for kind in LAYER_KINDS if kind != "lipschitz-norm")
BLIND = (
    "contractive-l2",
    "contractive-2",
    "contractive-inf",
    "gradient-step",
    "l2",
    "l2-untied",
)  # to rotary positions
GENERATORS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
MORE = {"mistral": "MistralForCausalLM", "opt": "OPTForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def generator(name: str, **more: Any) -> Any:
    """A language model in float64 whose parameters are all drawn."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{TINY[name].kind}Config")(**{**TINY[name].options, **more})
    model = getattr(transformers, (GENERATORS | MORE)[name])(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def replaced(name: str, kind: str, **options: Any) -> Any:
    return replace_attention(generator(name), kind, drop_positions=name == "llama" and kind in BLIND, **options)


def words(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


# --- the same model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TEXT)
def test_dot_product_attention_computes_what_the_model_did(name: str, implementation: str) -> None:
    """Padded on the left and on the right; weights, biases, scale, heads, positions and masks all have to be right.

    Eager attention in float32: Llama's own gives NaN for padding on the left in float64, whose least number is −∞ in
    the float32 of its softmax.
    """
    model, ids = TINY[name].build(), words(3, 9)
    model = model.float() if implementation == "eager" else model
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    if name not in ("roberta", "camembert", "xlm-roberta"):  # their positions count padding by its id
        mask[2, :3] = 0
    with torch.no_grad():
        before = [model(input_ids=ids)[0], model(input_ids=ids, attention_mask=mask)[0][mask.bool()]]
        assert replace_attention(model, "dot-product") is model
        after = [model(input_ids=ids)[0], model(input_ids=ids, attention_mask=mask)[0][mask.bool()]]
    assert sum(isinstance(module, AttentionAdapter) for module in model.modules()) == 2
    for old, new in zip(before, after, strict=True):
        error = 1e-5 if implementation == "eager" else 1e-6 if "RMSNorm" in repr(model) else 1e-12
        torch.testing.assert_close(new, old, rtol=error, atol=error)


def test_images_are_seen_as_before() -> None:
    model, inputs = TINY["vit"].build(), TINY["vit"].inputs()
    x, hidden = torch.randn(1, 5, 32, dtype=torch.float64), torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    hidden[..., 3] = -math.inf
    before = model(**inputs)[0], model.layers[0].attention(x, hidden)[0][:, [0, 1, 2, 4]]
    replace_attention(model, "dot-product")
    after = model(**inputs)[0], model.layers[0].attention(x, hidden)[0][:, [0, 1, 2, 4]]  # a mask without its name
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def test_scale_of_the_logits_is_kept() -> None:
    model = generator("gpt2", scale_attn_by_inverse_layer_idx=True)
    ids = words(1, 7)
    before = model(ids).logits
    torch.testing.assert_close(replace_attention(model, "dot-product")(ids).logits, before, rtol=1e-10, atol=1e-9)


def test_some_layers_can_be_replaced_and_others_left() -> None:
    model, ids = generator("gpt2"), words(2, 7)
    before = model(ids).logits
    replace_attention(model, "dot-product", layers=[1])
    assert [name for name, _ in replaced_layers(model)] == ["transformer.h.1.attn.layer"]
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-10, atol=1e-9)


def test_packed_texts_do_not_see_each_other() -> None:
    """transformers keeps texts apart that are told by their positions, without a cache; so does the replaced model."""
    model = generator("llama")
    ids, places = words(1, 8), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    before = model(ids, position_ids=places, use_cache=False).logits
    together = replace_attention(model, "dot-product")(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(together, before, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(together[:, 4:], model(ids[:, 4:]).logits, rtol=1e-6, atol=1e-6)
    with pytest.raises(InvalidInput, match="must not jump"):  # with a cache transformers does not mask them
        model(ids, position_ids=places, use_cache=True)


def test_encoder_of_torch_computes_what_it_did() -> None:
    for batch_first in (True, False):
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=batch_first).double()
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
        runs: list[list[Tensor]] = []
        for _ in range(2):
            with torch.no_grad():
                full = encoder(x)
                masked = encoder(x, mask=causal, is_causal=True)
                padded = encoder(x if batch_first else x.mT.mT.transpose(0, 1), src_key_padding_mask=padding)
                padded = (padded if batch_first else padded.transpose(0, 1))[~padding]
            if batch_first:
                runs.append([full, masked, padded])
            else:
                runs.append([full, padded])
            if len(runs) == 1:
                replace_attention(encoder, "dot-product").eval()
        for old, new in zip(*runs, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-10)


# --- every kind


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_every_kind_runs_forward_and_backward_in_an_encoder(kind: str) -> None:
    model = replace_attention(TINY["bert"].build(), kind).train()
    ids, mask = words(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    model(input_ids=ids, attention_mask=mask)[0][mask.bool()].square().mean().backward()
    for name, layer in replaced_layers(model):
        for own, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"{name}.{own}"
            assert parameter.grad.isfinite().all()
    assert any(parameter.grad.any() for _, layer in replaced_layers(model) for parameter in layer.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_every_kind_runs_in_an_encoder_of_torch(kind: str, batch_first: bool) -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    encoder = replace_attention(nn.TransformerEncoder(block, 2, enable_nested_tensor=batch_first), kind)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = x if batch_first else x.transpose(0, 1)
    encoder(x, src_key_padding_mask=padding).square().mean().backward()
    assert all(p.grad.isfinite().all() for _, layer in replaced_layers(encoder) for p in layer.parameters())
    assert encoder.eval()(x, src_key_padding_mask=padding).isfinite().all()


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    model = replace_attention(TINY["bert"].build(), kind)
    ids = words(1, 5)
    alone = model(input_ids=ids)[0]
    padded = torch.cat([ids, words(1, 4, seed=9)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    torch.testing.assert_close(model(input_ids=padded, attention_mask=mask)[0][:, :5], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_no_token_sees_the_future_or_its_length(kind: str, name: str) -> None:
    model, ids = replaced(name, kind), words(1, 9)
    other = ids.clone()
    other[:, 5:] = words(1, 4, seed=8)
    assert not torch.equal(ids, other)
    with torch.no_grad():
        out = model(ids).logits
        torch.testing.assert_close(model(other).logits[:, :5], out[:, :5], rtol=0, atol=1e-10)
        torch.testing.assert_close(model(ids[:, :5]).logits, out[:, :5], rtol=0, atol=1e-10)
        assert float((model(other).logits[:, 5:] - out[:, 5:]).abs().max()) > 1e-3
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[:, 4].sum(), embedded)
    assert not gradient[:, 5:].any()
    assert gradient[:, 4].any()


@pytest.mark.parametrize("kind", ["contractive-l2", "sigmoid"])
def test_outputs_that_depend_on_the_number_of_tokens_are_what_the_defaults_prevent(kind: str) -> None:
    """Negative control: the same layer without the default changes the past when the text grows."""
    model, ids = replaced("gpt2", kind), words(1, 9)
    for _, layer in replaced_layers(model):
        setattr(layer, "max_tokens" if kind == "contractive-l2" else "logit_shift", None)
    with torch.no_grad():
        assert float((model(ids[:, :5]).logits - model(ids).logits[:, :5]).abs().max()) > 1e-6


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_generation_with_a_cache_equals_the_forward_pass(kind: str, name: str) -> None:
    model, ids = replaced(name, kind), words(2, 4)
    with torch.no_grad():
        whole = model(torch.cat([ids, words(2, 3, seed=8)], dim=1), use_cache=False).logits
        first = model(ids, use_cache=True)
        rest = model(words(2, 3, seed=8)[:, :2], past_key_values=first.past_key_values, use_cache=True)
        last = model(words(2, 3, seed=8)[:, 2:], past_key_values=rest.past_key_values, use_cache=True)
        steps = torch.cat([first.logits, rest.logits, last.logits], dim=1)
    torch.testing.assert_close(steps, whole, rtol=1e-6, atol=1e-6 if name == "llama" else 1e-9)
    for options in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
        assert torch.equal(
            model.generate(ids, use_cache=True, **settings), model.generate(ids, use_cache=False, **settings)
        )


@pytest.mark.parametrize("name", [*GENERATORS, *MORE])
def test_generation_is_that_of_the_old_model_when_attention_is(name: str) -> None:
    """Two texts of different length, padded on the left, with the cache of transformers on both sides."""
    model, ids = generator(name), words(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    before = model.generate(ids, **settings)
    assert torch.equal(replace_attention(model, "dot-product").generate(ids, **settings), before)


@pytest.mark.parametrize("name", MORE)
def test_windows_are_kept_when_the_cache_forgets(name: str) -> None:
    """Mistral and Qwen2 see five tokens here and keep no more in their cache."""
    model = replace_attention(generator(name), "l2", drop_positions=True)
    settings = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones(2, 5)}
    ids = words(2, 5)
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_contractive_layers_divide_by_the_same_from_the_first_token_on(implementation: str) -> None:
    model, ids = replaced("gpt2", "contractive-l2", coefficient=50.0), words(1, 6)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        whole = model(ids).logits
        for n in range(1, 6):
            torch.testing.assert_close(model(ids[:, :n]).logits, whole[:, :n], rtol=1e-9, atol=1e-9)
    with pytest.raises(UnsupportedModel, match="sliding window"):
        replace_attention(generator("mistral"), "contractive-l2", drop_positions=True)


def test_caches_of_fixed_length_are_refused() -> None:
    with pytest.raises(InvalidInput, match="cache_implementation"):
        replaced("gpt2", "l2").generate(
            words(1, 4), attention_mask=torch.ones(1, 4), max_new_tokens=3, cache_implementation="static"
        )


# --- first weights


def test_tied_weights_start_from_queries_keys_or_their_mean() -> None:
    old = hs.SelfAttention.from_transformers(generator("gpt2").transformer, 0)
    sources = {"query": old.query_weight, "key": old.key_weight, "mean": (old.query_weight + old.key_weight) / 2}
    for tie, source in sources.items():
        layer = dict(replaced_layers(replaced("gpt2", "l2", tie=tie)))["transformer.h.0.attn.layer"]
        torch.testing.assert_close(layer.qk_proj.weight.detach() * 2**0.5, source.flatten(0, 1))
        torch.testing.assert_close(layer.v_proj.weight.detach(), old.value_weight.flatten(0, 1))
    with pytest.raises(InvalidInput, match="tie must be 'query' or 'key'"):
        replaced("gpt2", "l2", tie="value")


@pytest.mark.parametrize("kind", ["l2", "lipschitz-norm"])
def test_bias_of_the_values_becomes_one_of_the_output(kind: str) -> None:
    """Rows of P sum to one: P(v + b)W = PvW + bW, which needs no P to be checked."""
    model = TINY["bert"].build()
    old = hs.SelfAttention.from_transformers(model, 0)
    replace_attention(model, kind)
    _, layer = next(replaced_layers(model))
    expected = old.output_bias + old.value_bias.flatten() @ old.output_weight.flatten(0, 1)
    torch.testing.assert_close(layer.out_proj.bias.detach(), expected)


def test_shared_keys_and_values_are_repeated() -> None:
    old = hs.SelfAttention.from_transformers(generator("llama").model, 0)
    assert old.kv_heads == 2
    _, layer = next(replaced_layers(replaced("llama", "cosine")))
    _, key, value = layer.in_proj.weight.detach().unflatten(0, (3, 4, -1))
    torch.testing.assert_close(key, old.key_weight[[0, 0, 1, 1]])
    torch.testing.assert_close(value, old.value_weight[[0, 0, 1, 1]])


def test_dropout_stays_where_it_was() -> None:
    model = replace_attention(generator("gpt2", attn_pdrop=0.25, resid_pdrop=0.5), "l2")
    host = model.transformer.h[0].attn
    assert (host.layer.dropout, host.dropout.p, host.training) == (0.25, 0.5, False)
    assert (
        replace_attention(generator("gpt2", attn_pdrop=0.25), "contractive-l2").transformer.h[0].attn.layer.dropout == 0
    )


def test_layers_of_a_replaced_model_keep_below_their_bound() -> None:
    model, ids = replaced("gpt2", "l2"), words(1, 12)
    heard: dict[str, Tensor] = {}
    for name, layer in replaced_layers(model):
        layer.register_forward_pre_hook(lambda module, args, name=name: heard.update({name: args[0][0]}))
    model(ids)
    for name, layer in replaced_layers(model):
        found = hs.measure(layer.map("causal"), heard[name].detach())
        exact = torch.autograd.functional.jacobian(lambda x, layer=layer: layer(x, is_causal=True)[0], heard[name])
        torch.testing.assert_close(
            found.value, torch.linalg.matrix_norm(exact.reshape(12 * 32, 12 * 32), 2), rtol=2e-3, atol=0
        )
        assert found.upper <= layer.lipschitz_bound(12, mask="causal")


def test_half_precision_keeps_the_frequencies_of_positions() -> None:
    model = replace_attention(generator("llama").float(), "dot-product")
    exact = model.model.layers[0].self_attn.layer.query_stages[0].frequencies.clone()
    model.to(torch.bfloat16)
    found = model.model.layers[0].self_attn.layer.query_stages[0].frequencies
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # whose bfloat16 kernels need instructions that some processors only claim
    try:
        assert model(words(1, 5)).logits.isfinite().all()
    finally:
        torch._C._set_mkldnn_enabled(enabled)


# --- saving and loading


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_saved_models_come_back(kind: str, name: str, shard: str, tmp_path: Path) -> None:
    model, ids = replaced(name, kind), words(1, 6)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard == "1GB" else len(list(tmp_path.glob("model-*"))))
    state = torch.get_rng_state()
    again = load_replaced(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "twice")
    with torch.no_grad():
        assert torch.equal(load_replaced(tmp_path / "twice")(ids).logits, model(ids).logits)


def test_partly_replaced_models_come_back(tmp_path: Path) -> None:
    model, ids = generator("gpt2"), words(1, 6)
    replace_attention(model, "contractive-l2", layers=[1], coefficient=0.5, max_tokens=64).save_pretrained(tmp_path)
    again = load_replaced(tmp_path)
    _, layer = next(replaced_layers(again))
    assert (layer.coefficient, layer.max_tokens) == (0.5, 64)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["l2", "contractive-l2", "dot-product"])
def test_a_model_built_from_the_configuration_takes_the_saved_weights(name: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{TINY[name].kind}Config")(**TINY[name].options)
    model = getattr(transformers, f"{TINY[name].kind}Model")(config).eval()
    options = {"coefficient": 0.5, "norm": math.inf} if kind == "contractive-l2" else {}
    replace_attention(model, kind, layers=[1], drop_positions=name == "llama" and kind in BLIND, **options)
    model.save_pretrained(tmp_path)
    saved = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    replacement = replacement_of(saved)
    assert replacement is not None
    assert (replacement.kind, replacement.layers) == (kind, (1,))
    fresh = type(model)(saved).eval()
    ids = words(1, 6)
    with torch.no_grad():
        assert not torch.equal(fresh(ids).last_hidden_state, model(ids).last_hidden_state)
        replacement.apply(fresh)
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
        assert torch.equal(fresh(ids).last_hidden_state, model(ids).last_hidden_state)
    assert replacement_of(fresh.config) == replacement
    with pytest.raises(InvalidInput, match="already"):
        replacement.apply(fresh)


def test_configurations_that_tell_nothing_or_nonsense() -> None:
    config = replaced("gpt2", "l2").config
    note = config.howsmooth_attention
    assert json.loads(json.dumps(note, allow_nan=False)) == note
    assert replacement_of(transformers.GPT2Config()) is None
    wrong: list[Any] = ["l2", [], {}, note | {"layers": "all"}, note | {"layers": [True]}, note | {"layers": [-1]}]
    wrong += [note | {"layers": []}, note | {"kind": 5}, note | {"kind": "magic"}, note | {"drop_positions": "no"}]
    wrong += [note | {"options": None}, note | {"options": {"coefficient": [1]}}, note | {"options": {"a": math.nan}}]
    for each in wrong:
        config.howsmooth_attention = each
        with pytest.raises(InvalidInput):
            replacement_of(config)
    config.howsmooth_attention = note | {"layers": [7]}
    with pytest.raises(InvalidInput, match="cannot be replaced"):
        replacement_of(config).apply(generator("gpt2"))  # type: ignore[union-attr]
    config.howsmooth_attention = note | {"options": {"colour": "red"}}
    with pytest.raises(InvalidInput, match="does not take these options"):
        replacement_of(config).apply(generator("gpt2"))  # type: ignore[union-attr]


def test_options_that_no_configuration_can_hold_are_refused() -> None:
    model = generator("gpt2")
    for value in (torch.ones(()), [0.5], math.nan, math.inf):
        with pytest.raises(InvalidInput, match="the option coefficient"):
            replace_attention(model, "contractive-l2", coefficient=value)
    assert not list(replaced_layers(model))


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        load_replaced(tmp_path / "nowhere")
    generator("gpt2").save_pretrained(tmp_path / "plain")
    with pytest.raises(InvalidInput, match="no replaced attention"):
        load_replaced(tmp_path / "plain")
    replaced("gpt2", "l2").save_pretrained(tmp_path / "good")
    weights = tmp_path / "good" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(InvalidInput, match="damaged"):
        load_replaced(tmp_path / "good")
    weights.unlink()
    with pytest.raises(InvalidInput, match="missing"):
        load_replaced(tmp_path / "good")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    replaced("gpt2", "l2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "transformer.h.0.attn.layer.qk_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=f"lacks weights, such as {name}"):
        load_replaced(tmp_path)
    save_file(weights | {name: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match="do not fit"):
        load_replaced(tmp_path)


@pytest.mark.slow
def test_configurations_cannot_name_other_classes(tmp_path: Path) -> None:
    replaced("gpt2", "l2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for architecture in ("Trainer", "Nothing"):
        path.write_text(json.dumps(config | {"architectures": [architecture]}))
        with pytest.raises(UnsupportedModel, match=architecture):
            load_replaced(tmp_path)
    note = config["howsmooth_attention"]
    path.write_text(json.dumps(config | {"howsmooth_attention": note | {"kind": "magic"}}))
    with pytest.raises(InvalidInput, match="magic"):
        load_replaced(tmp_path)


# --- what is refused


def test_masks_that_hide_self_are_refused() -> None:
    model, ids = replaced("gpt2", "l2"), words(1, 5)
    sees = torch.ones(5, 5, dtype=torch.bool).tril()
    model(ids, attention_mask=sees[None, None])
    blind = sees.clone()
    blind[2, 2] = False  # token 2 does not see itself, but later ones see it
    with pytest.raises(InvalidInput, match="hides a token from itself"):
        model(ids, attention_mask=blind[None, None])
    biased = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~sees, -math.inf)
    biased[4, 0] = -0.5
    with pytest.raises(InvalidInput, match="adds other numbers"):
        model(ids, attention_mask=biased[None, None])
    assert replaced("gpt2", "dot-product")(ids, attention_mask=biased[None, None]).logits.isfinite().all()


def test_refusals_leave_the_model_as_it_was() -> None:
    model, ids = generator("llama"), words(1, 5)
    before = model(ids).logits
    for kind, options, match in (
        ("l2", {}, "RoPE"),
        ("contractive-l2", {}, "RoPE"),
        ("gradient-step", {}, "RoPE"),
        ("lipschitz-norm", {}, "see the future"),
        ("magic", {}, "the kind of attention is dot-product"),
        ("l2", {"drop_positions": True, "colour": 1}, "does not take these options"),
        ("dot-product", {"layers": [2]}, "0 to 1"),
        ("dot-product", {"layers": []}, "cannot be replaced"),
    ):
        with pytest.raises(InvalidInput, match=match):
            replace_attention(model, kind, **options)
    assert torch.equal(model(ids).logits, before)
    assert not hasattr(model.config, "howsmooth_attention")
    replace_attention(model, "dot-product")
    with pytest.raises(InvalidInput, match="already"):
        replace_attention(model, "dot-product")


def test_models_that_cannot_be_replaced_are_refused() -> None:
    for name in ("gemma2", "mpnet", "t5"):
        with pytest.raises(UnsupportedModel, match="cannot be replaced"):
            replace_attention(TINY[name].build(), "l2")
    with pytest.raises(UnsupportedModel, match="no self-attention"):
        replace_attention(nn.Linear(2, 2), "l2")
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    replace_attention(encoder, "l2")
    with pytest.raises(UnsupportedModel, match="no self-attention"):
        replace_attention(encoder, "l2")
    wide = transformers.LlamaModel(transformers.LlamaConfig(**{**TINY["llama"].options, "head_dim": 16}))
    with pytest.raises(UnsupportedModel, match="do not fill"):
        replace_attention(wide, "cosine")


def test_positions_that_jump_are_refused() -> None:
    model, ids = replaced("llama", "dot-product"), words(1, 4)
    with pytest.raises(InvalidInput, match="must not jump"):
        model(ids, position_ids=torch.tensor([[0, 1, 5, 6]]))


def test_masks_of_transformers_are_read() -> None:
    least = torch.finfo(torch.float32).min
    causal = torch.zeros(1, 1, 3, 3).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), least)
    assert TransformersMask.of(causal, (2, 3), 3, causal=False) == TransformersMask(None, True, None)
    assert TransformersMask.of(None, (1, 3), 1, causal=True) == TransformersMask(None, True, None)
    assert TransformersMask.of(torch.ones(1, 1, 1, 3, dtype=torch.bool), (1, 3), 1, True) == TransformersMask(
        None, True, None
    )
    left = causal.clone()
    left[..., 0] = least
    found = TransformersMask.of(left, (1, 3), 3, causal=False)
    assert (found.mask, found.causal, found.padding.tolist()) == (None, True, [[True, False, False]])
    window = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
    found = TransformersMask.of(window[None, None], (1, 3), 3, causal=True)
    assert torch.equal(found.mask[0, 0], ~window)
    with pytest.raises(InvalidInput, match="set_attn_implementation"):
        TransformersMask.of(torch.ones(3), (1, 3), 3, True)
    with pytest.raises(InvalidInput, match="attend to"):
        TransformersMask.of(torch.ones(1, 1, 2, 3), (1, 3), 3, True)


# --- models of real size


@pytest.mark.slow
def test_minilm_runs_with_replaced_attention(tmp_path: Path) -> None:
    if not NAMED["minilm"].available():
        pytest.skip("MiniLM is not installed")
    folder = NAMED["minilm"].locate()
    for kind in ("l2", "contractive-l2"):
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        replace_attention(model, kind).train()
        ids = torch.randint(1000, 20000, (2, 16), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        model(input_ids=ids, attention_mask=mask).last_hidden_state.square().mean().backward()
        assert all(p.grad.isfinite().all() for _, layer in replaced_layers(model) for p in layer.parameters())
        model.eval().save_pretrained(tmp_path / kind)
        again = load_replaced(tmp_path / kind)
        with torch.no_grad():
            outs = [each(input_ids=ids, attention_mask=mask).last_hidden_state for each in (model, again)]
        assert torch.equal(*outs)


@pytest.mark.slow
def test_a_model_of_the_size_of_gpt2_runs(tmp_path: Path) -> None:
    """124 million parameters: forward, backward, generate, save, load, no leak."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=None, pad_token_id=0))
    assert sum(parameter.numel() for parameter in model.parameters()) > 124e6
    replace_attention(model, "l2").train()
    ids = torch.randint(3, 50000, (1, 12), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    text = model.generate(ids, **settings)
    assert torch.equal(text, model.generate(ids, use_cache=False, **settings))
    model.save_pretrained(tmp_path)
    again = load_replaced(tmp_path)
    other = ids.clone()
    other[:, 6:] = 5
    with torch.no_grad():
        out = model(ids).logits
        assert torch.equal(again(ids).logits, out)
        torch.testing.assert_close(model(other).logits[:, :6], out[:, :6], rtol=0, atol=1e-5)
