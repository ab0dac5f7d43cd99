"""Predicted damage against the direct one, on tiny random models in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evidence.rounding_baselines import joined
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import open_model
from howsmooth.rounding import parse_format, parse_formats
from howsmooth.rounding.kv_cache import PARTS, read_back
from howsmooth.rounding.rounded_model import RoundedModel, sampled_scores

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


def reader(spec: str = "random:llama[layers=2,width=32,heads=4,kv_heads=2]", length: int = 16) -> RoundedModel:
    opened = open_model(spec, head=True)
    opened.model.double()
    for parameter in opened.model.parameters():  # random weights say next to nothing: make them say more
        parameter.mul_(3.0) if parameter.dim() == 2 else None
    [window] = opened.windows(TEXT, length=length)
    return RoundedModel.of(opened.model, opened.inputs(window))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["random:llama[layers=2,width=32,heads=4,kv_heads=2]", "random:bert[layers=2,width=32]"]
)
def test_predicted_damage_is_the_direct_one_up_to_its_standard_error(spec: str) -> None:
    model, form = reader(spec), parse_format("int6")
    exact = model.outcome()
    scores = sampled_scores(model, [form], samples=400)
    value, error = scores.damage(scores.products.sum(-1))
    for layer in range(2):
        for place, part in enumerate(PARTS):
            direct = model.damage(exact, model.outcome({(layer, part): form}))
            assert abs(float(value[layer, place, 0]) - direct) < 4 * float(error[layer, place, 0]) + 0.05 * direct
            assert float(error[layer, place, 0]) < 0.2 * direct


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
def test_damage_of_parts_together_is_that_of_the_summed_scores(layer: int) -> None:
    """Keys and values of one layer: in a later one what is rounded has moved already, and rounds another way."""
    model, form = reader(), parse_format("int6")
    scores = sampled_scores(model, [form], samples=400)
    together, error = scores.damage(scores.products[:, layer].sum((1, 3)))
    direct = model.damage(model.outcome(), model.outcome({(layer, part): form for part in PARTS}))
    assert abs(float(together[0]) - direct) < 4 * float(error[0]) + 0.05 * direct


def test_products_are_the_derivative_of_the_sampled_log_likelihood() -> None:
    """One sample: its score times a small change of one head is the difference of log-likelihoods."""
    model, form = reader(), parse_format("int8")
    products = sampled_scores(model, [form], samples=3, seed=5).products
    exact = model.outcome()
    from howsmooth._util.common import random_stream

    drawn = torch.multinomial(exact.exp(), 3, replacement=True, generator=random_stream(5, "scores"))
    for layer in range(2):
        for place, part in enumerate(PARTS):
            moved = model.outcome({(layer, part): form}) - exact
            expected = torch.stack([moved.gather(1, words[:, None]).sum() for words in drawn.T])
            assert torch.allclose(products[:, layer, place, 0].sum(-1), expected, rtol=0.05, atol=1e-6)


def test_grouped_heads_sum_before_they_are_squared() -> None:
    scores = sampled_scores(reader(), parse_formats("int8,int4"), samples=4)
    assert scores.by_head.shape == (2, 2, 2, 4)
    pairs = scores.products.unflatten(-1, (2, 2)).sum(-1).square().mean(0) / (2 * 16)
    assert torch.allclose(scores.by_cache, pairs)
    assert torch.allclose(scores.by_layer, scores.products.sum(-1).square().mean(0) / 32)


def test_windows_join_as_samples() -> None:
    model = reader()
    one, other = (sampled_scores(model, parse_formats("int4"), samples=3, seed=seed) for seed in (0, 1))
    both = joined([one, other])
    assert both.products.shape[0] == 6
    assert torch.allclose(both.by_layer, (one.by_layer + other.by_layer) / 2)


def test_running_with_formats_is_running_with_what_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigned formats reach the model's own attention: the same outcome as patching its key projection's output."""
    model = reader()
    form = parse_format("int3")

    def values_of_layer_one(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        held = output.unflatten(-1, (2, 8)).transpose(1, 2)
        return read_back(held, "value", form).transpose(1, 2).flatten(2)

    handle = model.model.model.layers[1].self_attn.v_proj.register_forward_hook(values_of_layer_one)
    with torch.no_grad():
        patched = model.read(model.model(**model.inputs))
    handle.remove()
    assert torch.allclose(model.outcome({(1, "value"): form}), patched, atol=1e-12)
    assert not torch.allclose(patched, model.outcome(), atol=1e-4)


def test_exact_caches_do_no_damage_and_the_model_is_left_as_it_was() -> None:
    model = reader()
    before = model.model.config._attn_implementation
    exact = model.outcome()
    assert model.damage(exact, model.outcome({(0, "key"): None})) == 0
    assert model.model.config._attn_implementation == before
    assert all(parameter.grad is None for parameter in model.model.parameters())
    ids = model.inputs["input_ids"][0]
    mine = -torch.stack([exact[t, ids[t + 1]] for t in range(len(ids) - 1)]).mean()
    assert model.loss(exact) == pytest.approx(float(mine))


def test_wrong_models_and_texts_are_refused_in_one_sentence() -> None:
    opened = open_model("random:llama[layers=1,width=32]")
    [window] = opened.windows(TEXT, length=4)
    with pytest.raises(InvalidInput, match="has no language-model head: open it with head=True"):
        RoundedModel.of(opened.model, opened.inputs(window))
    with pytest.raises(InvalidInput, match="too short"):
        reader(length=1)
    image = open_model("random:vit[layers=1,width=32]")
    with pytest.raises(UnsupportedModel, match="rounding is measured on models of text"):
        RoundedModel.of(image.model, {"pixel_values": torch.zeros(1, 3, 32, 32)})


def test_attention_past_the_socket_is_refused_rather_than_left_exact() -> None:
    opened = open_model("random:mpnet[layers=2,width=32]", head=True)
    [window] = opened.windows(TEXT, length=8)
    model = RoundedModel.of(opened.model, opened.inputs(window))
    for way in (model.outcome, lambda: sampled_scores(model, parse_formats("int4"), samples=2)):
        with pytest.raises(UnsupportedModel, match="2 of its 2 layers past transformers' attention interface"):
            way()


def test_nan_in_the_cache_is_named_with_its_layer() -> None:
    model = reader()
    model.model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(InvalidInput, match="the values of layer 1 hold NaN"):
        model.outcome({(1, "value"): parse_format("int8")})
