"""Maps read from Hugging Face models against what the models compute themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import MODEL_TYPES
from howsmooth.models.attention_reader import check_against_model, from_transformers, read_attention
from howsmooth.models.module_names import attention_site
from tests.models.tiny import HEADS, TINY, D


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.slow
def test_every_listed_model_type_is_tested() -> None:
    assert sorted(TINY) == list(MODEL_TYPES)
    assert all(tiny.build().config.model_type == kind for kind, tiny in TINY.items())


@pytest.mark.parametrize(("kind", "layer"), [(kind, layer) for kind, tiny in TINY.items() for layer in tiny.layers])
def test_map_reproduces_the_output_inside_the_model(kind: str, layer: int) -> None:
    tiny = TINY[kind]
    model = tiny.build()
    attention = from_transformers(model, layer)
    x, y, _, _ = tiny.listen(model, layer, tiny.inputs())
    assert attention.dtype == torch.float64
    assert attention.heads == HEADS
    assert relative_error(attention(x), y) < tiny.tolerance


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("bert", {"is_decoder": True}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("phi", {"qk_layernorm": True}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
        ("qwen3_next", {"layer_types": ["full_attention", "full_attention"]}),
        ("llama4_text", {"use_qk_norm": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                },
                "max_position_embeddings": 256,
            },
        ),
    ],
    ids=[
        "inverse-layer",
        "no-scale",
        "causal-bert",
        "bidirectional",
        "multi-query",
        *("phi-norm", "whole-query", "half-turns", "gate", "no-norm"),
        "linear-rope",
        "yarn",
    ],
)
def test_settings_reproduce_the_output_inside_the_model(kind: str, options: dict[str, Any]) -> None:
    tiny = TINY[kind]
    model = tiny.build(**options)
    for layer in (0, 1):
        x, y, _, _ = tiny.listen(model, layer, tiny.inputs())
        assert relative_error(from_transformers(model, layer)(x), y) < tiny.tolerance


@pytest.mark.parametrize("kind", ["mpnet", "t5"])
def test_relative_bias_reproduces_far_distances(kind: str) -> None:
    tiny = TINY[kind]
    model = tiny.build()
    x, y, _, _ = tiny.listen(model, 1, tiny.inputs(300))
    assert relative_error(from_transformers(model, 1)(x), y) < 1e-10


@pytest.mark.parametrize("kind", ["bert", "gemma2", "gpt2", "gpt_neox", "mistral", "mpnet", "qwen3"])
def test_measured_value_equals_dense_svd_of_the_models_own_attention(kind: str) -> None:
    tiny, inputs = TINY[kind], TINY[kind].inputs(8)
    model = tiny.build()
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(tiny.function(model, 0, inputs), x)
    expected = torch.linalg.svdvals(jacobian.reshape(8 * D, 8 * D))[0]
    value = hs.measure(from_transformers(model, 0), x, rtol=1e-8).value
    assert float((value - expected).abs() / expected) < max(1e-8, tiny.tolerance)


@pytest.mark.parametrize(("kind", "window"), [("gpt2", None), ("llama", None), ("opt", None), ("mistral", 5)])
def test_later_and_faraway_tokens_do_not_leak(kind: str, window: int | None) -> None:
    attention = from_transformers(TINY[kind].build(), 0)
    x = torch.randn(12, D, dtype=torch.float64)
    for j in (0, 4, 11):
        moved = x.clone()
        moved[j] += 1
        changed = (attention(moved) - attention(x)).abs().amax(-1) > 1e-9
        assert changed.tolist() == [j <= i and (window is None or i - j < window) for i in range(12)]


def test_sliding_and_full_layers_are_told_apart() -> None:
    masks = [next(iter(from_transformers(TINY["qwen2"].build(), layer).terms)) for layer in (0, 1)]
    assert isinstance(masks[0], hs.SlidingWindow)
    assert masks[0].window == 5
    assert isinstance(masks[1], hs.Causal)


def test_task_head_changes_nothing() -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=D, n_layer=2, n_head=4, vocab_size=97)).double()
    x = torch.randn(5, D, dtype=torch.float64)
    assert torch.equal(from_transformers(model, 1)(x), from_transformers(model.transformer, 1)(x))


@pytest.mark.parametrize("kind", ["bert", "gemma2", "llama", "qwen3"])
def test_half_precision_weights_give_the_map_of_those_weights(kind: str) -> None:
    # float16, not bfloat16: products of the latter end in an illegal instruction on some virtual machines.
    tiny = TINY[kind]
    model = tiny.build().to(torch.float16)
    exact = copy.deepcopy(model).double()
    x, y, _, _ = tiny.listen(exact, 0, tiny.inputs())
    attention = from_transformers(model, 0)
    assert attention.dtype == torch.float16
    assert relative_error(attention.in_dtype(torch.float64)(x), y) < 1e-5


@pytest.mark.parametrize("kind", ["bert", "gemma2", "gpt2", "llama", "vit"])
def test_model_is_left_as_it_was(kind: str) -> None:
    model = TINY[kind].build().float().train()
    next(model.children()).eval()

    def state() -> tuple[Any, ...]:
        modules = list(model.modules())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        return hooks, [m.training for m in modules], model.config._attn_implementation, model.config.to_dict()

    before, weights, random = state(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attention = from_transformers(model, 1)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)
    for buffer in attention.buffers():
        assert not buffer.requires_grad
        buffer.zero_()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


BREAKAGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "scale": ("bert", lambda a: setattr(a.query_stages[-1], "factor", a.scale * 1.01)),
    "heads": ("gpt2", lambda a: setattr(a, "query_weight", a.query_weight.flip(0))),
    "mask": ("gpt2", lambda a: setattr(a, "logit_biases", nn.ModuleList())),
    "window": ("mistral", lambda a: setattr(a.logit_biases[0], "window", 6)),
    "soft-cap": ("gemma2", lambda a: setattr(a, "softcap", None)),
    "rotation": ("llama", lambda a: setattr(a.query_stages[0], "interleaved", True)),
    "query norm": ("qwen3", lambda a: setattr(a.query_stages[0], "gain", a.query_stages[0].gain + 1)),
    "relative bias": ("mpnet", lambda a: setattr(a, "logit_biases", nn.ModuleList())),
    "output bias": ("bert", lambda a: setattr(a, "output_bias", a.output_bias + 1e-2)),
}


@pytest.mark.parametrize("feature", BREAKAGES)
def test_check_refuses_a_map_with_one_wrong_feature(feature: str) -> None:
    kind, spoil = BREAKAGES[feature]
    # The model's own initialisation, whose small weights hide most features unless the check is loud.
    model = TINY[kind].build(randomise=False)
    if feature == "relative bias":
        nn.init.normal_(model.encoder.relative_attention_bias.weight)
    site = attention_site(model, 0)
    attention = read_attention(model, site)
    check_against_model(model, site, attention)
    spoil(attention)
    with pytest.raises(UnsupportedModel, match=r"layer 0 as read from .* differs from what the model computes"):
        check_against_model(model, site, attention)


def test_weights_that_are_not_numbers_are_called_so() -> None:
    model = TINY["bert"].build()
    site = attention_site(model, 0)
    attention = read_attention(model, site)
    attention.value_weight[0, 0, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match=r"value weight of layer 0 .* holds NaN or infinite values"):
        check_against_model(model, site, attention)


@pytest.mark.parametrize("layer", [-1, 2])
def test_layer_out_of_range_names_the_number_of_layers(layer: int) -> None:
    with pytest.raises(InvalidInput, match=f"layer {layer} does not exist: this BertModel has 2 layers, 0 to 1"):
        from_transformers(TINY["bert"].build(), layer)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaModel(
        transformers.MambaConfig(hidden_size=D, num_hidden_layers=2, vocab_size=97, state_size=4)
    ),
    "big_bird": lambda: transformers.BigBirdModel(
        transformers.BigBirdConfig(
            hidden_size=D, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=97
        )
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_model_types_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"model type '{kind}'.* is not among the models"):
        from_transformers(UNKNOWN[kind](), 0)


def test_other_modules_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"Linear \(model type None\) is not among the models"):
        from_transformers(nn.Linear(2, 2), 0)  # type: ignore[arg-type]


def test_decoder_beside_an_encoder_is_refused() -> None:
    model = transformers.T5Model(transformers.T5Config(**TINY["t5"].options))
    with pytest.raises(UnsupportedModel, match=r"3 stacks of attention .* pass the part of the model"):
        from_transformers(model, 0)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"2 stacks of attention \(h\.\*\.attn, h\.\*\.crossattention\)"):
        from_transformers(TINY["gpt2"].build(add_cross_attention=True), 0)


def test_unread_parameters_are_refused() -> None:
    model = TINY["phi"].build()
    model.layers[0].self_attn.slopes = nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(UnsupportedModel, match=r"parameters that .* does not model \(slopes\)"):
        from_transformers(model, 0)


def test_layers_without_softmax_are_refused_with_their_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer 0 has no softmax attention \(Qwen3NextGatedDeltaNet\)"):
        from_transformers(TINY["qwen3_next"].build(), 0)


def test_frequencies_that_depend_on_the_length_are_refused() -> None:
    model = TINY["llama"].build(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModel, match="rotary frequencies change with the length"):
        from_transformers(model, 0)


def test_other_kinds_of_layer_are_refused() -> None:
    model = TINY["qwen2"].build()
    model.config.layer_types = ["sliding_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="layer 1 has attention of type 'linear_attention'"):
        from_transformers(model, 1)


class PlainGain(nn.Module):
    """A "norm" that does not normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16, dtype=torch.float64)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_norms_other_than_rms_and_layer_norm_are_refused() -> None:
    model = TINY["qwen3"].build()
    model.layers[0].self_attn.q_norm = PlainGain()
    with pytest.raises(UnsupportedModel, match="normalises queries and keys by PlainGain"):
        from_transformers(model, 0)


def test_replaced_projections_are_refused() -> None:
    model = TINY["llama"].build()
    model.layers[0].self_attn.q_proj = nn.Sequential(nn.Linear(D, D))
    with pytest.raises(UnsupportedModel, match=r"does not model \(q_proj\.0\.weight"):
        from_transformers(model, 0)


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not in memory"):
        from_transformers(TINY["llama"].build().to("meta"), 0)


def test_constructor_of_self_attention_reads_the_same_map() -> None:
    model, x = TINY["vit"].build(), torch.randn(5, D, dtype=torch.float64)
    assert torch.equal(hs.SelfAttention.from_transformers(model, 1)(x), from_transformers(model, 1)(x))
