"""Targets against the layers' own definitions, written out by hand, and against dense autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import OpenModel, Targets, Window, open_model, target
from howsmooth.models.attention_reader import random_inputs
from howsmooth.models.module_names import RANDOM_NAMES
from howsmooth.testing import dense_jacobian
from tests.models.test_captured_sites import other_model

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


def opened_at(spec: str, length: int = 6) -> tuple[OpenModel, Window]:
    opened = open_model(spec)
    with torch.no_grad():  # weights large enough that every part matters
        generator = torch.Generator().manual_seed(5)
        for parameter in opened.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    window = random_inputs(opened.model, length)[opened.model.main_input_name]
    return opened, Window(window, [], 0)


def bert_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return layer.attention.output.LayerNorm(h + attention(h))


def gpt2_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + attention(layer.ln_1(h))


def llama_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + attention(layer.input_layernorm(h))


def gemma2_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + layer.post_attention_layernorm(attention(layer.input_layernorm(h)))


def t5_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + attention(layer.layer[0].layer_norm(h))


def vit_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + attention(layer.layernorm_before(h))


def opt_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return h + attention(layer.self_attn_layer_norm(h))


def distilbert_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return layer.sa_layer_norm(h + attention(h))


def wav2vec2_residual(layer: Any, attention: Any, h: Tensor) -> Tensor:
    return layer.layer_norm(h + attention(h))


# Residual block by hand, and what the layer does after it.
BY_HAND: dict[str, tuple[str, Callable[..., Tensor], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "bert": ("encoder.layer.1", bert_residual, lambda m, h, r: m.output(m.intermediate(r), r)),
    "distilbert": ("transformer.layer.1", distilbert_residual, lambda m, h, r: m.output_layer_norm(m.ffn(r) + r)),
    "gemma2": (
        "layers.1",
        gemma2_residual,
        lambda m, h, r: r + m.post_feedforward_layernorm(m.mlp(m.pre_feedforward_layernorm(r))),
    ),
    "gpt2": ("h.1", gpt2_residual, lambda m, h, r: r + m.mlp(m.ln_2(r))),
    "gpt-neox": ("layers.1", llama_residual, lambda m, h, r: r + m.mlp(m.post_attention_layernorm(h))),  # side by side
    "llama": ("layers.1", llama_residual, lambda m, h, r: r + m.mlp(m.post_attention_layernorm(r))),
    "opt": ("decoder.layers.1", opt_residual, lambda m, h, r: r + m.fc2(m.fc1(m.final_layer_norm(r)).relu())),
    "t5": ("block.1", t5_residual, lambda m, h, r: r + m.layer[1].DenseReluDense(m.layer[1].layer_norm(r))),
    "vit": ("layers.1", vit_residual, lambda m, h, r: r + m.mlp(m.layernorm_after(r))),
    "wav2vec2": ("encoder.layers.1", wav2vec2_residual, lambda m, h, r: m.final_layer_norm(r + m.feed_forward(r))),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_residual_and_layer_equal_the_definition_written_out(name: str) -> None:
    path, residual, rest = BY_HAND[name]
    opened, window = opened_at(f"random:{name}[width=32]")
    targets, module = Targets(opened, window), opened.model.get_submodule(path)
    attention, _ = targets.get("attention", 1)
    r, h = targets.get("residual", 1)
    layer, also = targets.get("layer", 1)
    assert torch.equal(h, also)
    moved = h + 0.1 * torch.randn(h.shape, generator=torch.Generator().manual_seed(2))
    for point in (h, moved):
        expected = residual(module, attention, point)
        torch.testing.assert_close(r(point), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(point), rest(module, point, expected), rtol=1e-4, atol=1e-4)


def count_hooks(opened: OpenModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in opened.model.modules())


@pytest.mark.parametrize("name", RANDOM_NAMES)
def test_every_target_reproduces_the_model_and_leaves_no_hook(name: str) -> None:
    opened, window = opened_at(f"random:{name}[width=32]")
    with torch.no_grad():
        own = opened.model(**opened.inputs(window), output_hidden_states=True)
    states, hooks = own.hidden_states, count_hooks(opened)  # transformers keeps hooks of its own for hidden states
    targets = Targets(opened, window)
    first, x = targets.get("prefix", 0)
    torch.testing.assert_close(x, states[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first(x), states[1][0], rtol=1e-5, atol=1e-5)
    whole, x = targets.get("model")
    torch.testing.assert_close(whole(x), own.last_hidden_state[0], rtol=1e-5, atol=1e-5)
    mlp, y = targets.get("mlp", 1)
    assert mlp(y).shape == y.shape
    targets.get("residual", 0)[0](x)
    assert count_hooks(opened) == hooks


def test_what_mlps_see_is_kept_only_where_it_is_asked_for() -> None:
    opened, window = opened_at("random:llama[width=32]")
    kept = {}
    for mlps in (True, False):
        targets = Targets(opened, window, mlps=mlps)
        f, x = targets.get("model")
        kept[mlps] = len(targets._outputs)
        torch.testing.assert_close(f(x), Targets(opened, window).get("model")[0](x))
    assert kept[False] == targets.layers + 1
    assert kept[True] > kept[False]
    assert target(opened, "mlp", 0, window)[1].shape == x.shape


@pytest.mark.parametrize("what", ["residual", "mlp", "layer", "prefix", "model"])
@pytest.mark.slow
def test_measured_value_equals_dense_autograd(what: str) -> None:
    opened, window = opened_at("random:llama[width=16,heads=2]", length=4)
    f, x = target(opened, what, 1, window)
    jacobian = dense_jacobian(f, x)
    expected = float(torch.linalg.matrix_norm(jacobian.double(), 2))
    assert float(hs.measure(f, x, rtol=1e-5)) == pytest.approx(expected, rel=1e-4)


def test_the_model_ends_before_the_head_that_it_was_opened_with() -> None:
    """OPT's head does not call the body by its own name."""
    plain = open_model("random:opt[layers=1,width=16]")
    window = opened_at("random:opt[layers=1,width=16]")[1]
    with_head = open_model("random:opt[layers=1,width=16]", head=True)
    (f, x), (g, y) = (Targets(model, window).get("model") for model in (plain, with_head))
    assert torch.equal(x, y)
    assert torch.equal(f(x), g(y))


def test_later_tokens_do_not_leak_through_a_causal_model() -> None:
    opened, window = opened_at("random:gpt2[width=32]", length=9)
    f, x = target(opened, "model", None, window)
    moved = x.clone()
    moved[5, ::2] += 1  # a shift of all coordinates would be invisible to LayerNorm
    changed = (f(moved) - f(x)).abs().amax(-1) > 1e-6
    assert changed.tolist() == [i >= 5 for i in range(9)]


@pytest.mark.parametrize("spec", ["random:gpt2[width=32]", "random:llama[width=32]", "random:vit[width=32]"])
def test_logits_need_a_head(spec: str) -> None:
    opened = open_model(spec, head=True)
    ids = random_inputs(opened.model, 6)[opened.model.main_input_name]
    window = Window(ids, [], 0)
    if opened.modality == "image":  # its head reads one token, which is no function of all of them in a chain
        with pytest.raises(UnsupportedModel, match="the logits of this ViTForImageClassification is more than"):
            target(opened, "logits", None, window)
    else:
        f, x = target(opened, "logits", None, window)
        torch.testing.assert_close(f(x), opened.model(ids).logits[0], rtol=1e-5, atol=1e-5)
    hidden, x = target(opened, "model", None, window)
    torch.testing.assert_close(hidden(x), opened.model.base_model(ids).last_hidden_state[0], rtol=1e-5, atol=1e-5)
    plain, window = opened_at(spec)
    with pytest.raises(InvalidInput, match="no head that gives logits: open it with head=True"):
        target(plain, "logits", None, window)


def test_wav2vec2_gives_the_logits_of_its_ctc_head() -> None:
    opened = open_model("random:wav2vec2[width=32]", head=True)
    assert type(opened.model).__name__ == "Wav2Vec2ForCTC"
    sound = random_inputs(opened.model, 10)["input_values"]
    f, x = target(opened, "logits", None, Window(sound, [], 0))
    assert x.shape == (10, 32)
    torch.testing.assert_close(f(x), opened.model(sound).logits[0], rtol=1e-5, atol=1e-5)


def test_targets_of_an_unlisted_architecture() -> None:
    model = other_model("bart").requires_grad_(False)
    model.set_attn_implementation("eager")
    opened = OpenModel("bart", model, None, "text", "", "float32", 99, "")
    window = Window(torch.tensor([[5, 6, 7, 8]]), [], 0)
    f, x = target(opened, "model", None, window)
    torch.testing.assert_close(f(x), model(window.ids).last_hidden_state[0], rtol=1e-5, atol=1e-5)


def test_layers_that_share_their_modules_are_refused() -> None:
    opened = OpenModel("albert", other_model("albert"), None, "text", "", "float32", 99, "")
    with pytest.raises(UnsupportedModel, match="share their modules"):
        target(opened, "layer", 0, Window(torch.tensor([[5, 6, 7, 8]]), [], 0))


@pytest.mark.parametrize(
    ("what", "layer", "message"),
    [
        ("heads", 0, "one of attention, residual, mlp, layer, prefix, model, logits, got 'heads'"),
        ("layer", 2, "layer 2 does not exist: this GPT2Model has 2 layers, 0 to 1"),
        ("mlp", None, "layer None does not exist"),
    ],
)
def test_unknown_targets_are_refused(what: str, layer: int | None, message: str) -> None:
    opened = open_model("random:gpt2[width=32]")
    with pytest.raises(InvalidInput, match=message):
        target(opened, what, layer, opened.windows(TEXT, 8)[0])
    with pytest.raises(InvalidInput, match=r"cut one with open_model\.windows"):
        target(opened, "layer", 0)
