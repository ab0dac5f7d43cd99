"""Captured sites against what the models compute themselves, listened to by hooks of the tests' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import howsmooth as hs
from howsmooth.attention import ComposedAttention
from howsmooth.bounds.catalogue import upper_bounds
from howsmooth.bounds.question_setting import setting
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import attention_reader, capture, site
from howsmooth.testing import dense_jacobian
from tests.models.tiny import TINY, D

CAUSAL = ["gemma", "gpt2", "gpt_neox", "granite", "llama", "opt", "phi", "phi3", "smollm3"]
SLIDING = ["gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "starcoder2"]


@pytest.mark.parametrize("kind", TINY)
def test_map_reproduces_the_models_own_output_in_float32(kind: str) -> None:
    tiny = TINY[kind]
    model = tiny.build().float()
    inputs = {name: t.float() if t.is_floating_point() else t for name, t in tiny.inputs(12).items()}
    model.set_attn_implementation("eager")
    sites = capture(model, inputs)
    assert [(s.layer, s.name) for s in sites] == [(layer, tiny.block.format(layer)) for layer in tiny.layers]
    for s in sites:
        x, y, _, _ = tiny.listen(model, s.layer, inputs)
        assert torch.equal(s.x, x[0])
        assert float((s.attention(s.x) - y[0]).norm() / y.norm()) < 1e-5
        assert s.error < 1e-5


@pytest.mark.parametrize("kind", TINY)
def test_measured_value_equals_dense_autograd_of_the_models_own_block(kind: str) -> None:
    tiny = TINY[kind]
    model = tiny.build()
    model.set_attn_implementation("eager")
    inputs = tiny.inputs(6)
    s = capture(model, inputs, layers=[1])[0]
    jacobian = torch.autograd.functional.jacobian(tiny.function(model, 1, inputs), s.x)
    expected = float(torch.linalg.matrix_norm(jacobian.reshape(s.x.numel(), s.x.numel()), 2))
    assert float(hs.measure(s.attention, s.x, rtol=1e-6)) == pytest.approx(expected, rel=1e-4)


def test_the_model_is_not_run_beyond_the_last_layer_asked_for_and_is_left_as_it_was() -> None:
    model, inputs = TINY["llama"].build(), TINY["llama"].inputs(6)
    expected, implementation = capture(model, inputs)[0], model.config._attn_implementation
    entered: list[int] = []
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, number=number: entered.append(number))
    [first] = capture(model, inputs, layers=[0])
    assert entered == [], "the first layer ends with its MLP, which nobody asked for"
    assert torch.equal(first.x, expected.x)
    assert torch.equal(first.attention(first.x), expected.attention(expected.x))
    assert model.config._attn_implementation == implementation
    assert [site.layer for site in capture(model, inputs, layers=[1, 0])] == [1, 0]
    assert entered == [0]
    capture(model, inputs)
    assert entered == [0, 0, 1]


@pytest.mark.parametrize("kind", CAUSAL + SLIDING)
def test_future_and_faraway_tokens_do_not_leak(kind: str) -> None:
    model, ids = TINY[kind].build(), TINY[kind].inputs(12)["input_ids"]
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 90 + 3
    windows: list[int] = []
    for before, after in zip(*(capture(model, {"input_ids": i}) for i in (ids, changed)), strict=True):
        torch.testing.assert_close(after.x[:7], before.x[:7], rtol=0, atol=1e-12)
        assert (after.x[7] != before.x[7]).any()
        window = next((t.window for t in before.attention.terms if isinstance(t, hs.SlidingWindow)), 12)
        moved = before.x.clone()
        moved[2] += 1
        difference = (before.attention(moved) - before.attention(before.x)).abs().amax(-1)
        assert (difference > 1e-9).tolist() == [2 <= i < 2 + window for i in range(12)]
        windows.append(window)
    assert (5 in windows) == (kind in SLIDING)


# Padding on the left moves absolute positions, which changes what the model reads.
PADDED = [(kind, "right") for kind in ("bert", "distilbert", "gemma2", "gpt_neox", "llama", "mistral", "mpnet", "t5")]
PADDED += [(kind, "left") for kind in ("gemma2", "gpt_neox", "llama", "mistral", "t5")]


@pytest.mark.parametrize(("kind", "side"), PADDED)
def test_padding_changes_nothing(kind: str, side: str) -> None:
    # In float32: transformers casts its float64 masks to float32 inside softmax, where hidden rows become NaN.
    model, ids = TINY[kind].build().float(), TINY[kind].inputs(8)["input_ids"]
    padding, real = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)
    order = (padding, real) if side == "left" else (real, padding)
    content = (padding, ids) if side == "left" else (ids, padding)
    padded = {"input_ids": torch.cat(content, 1), "attention_mask": torch.cat(order, 1)}
    for plain, other in zip(capture(model, {"input_ids": ids}), capture(model, padded), strict=True):
        torch.testing.assert_close(other.x, plain.x, rtol=1e-5, atol=1e-5)
        values = [float(hs.measure(s.attention, s.x, rtol=1e-5)) for s in (plain, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-4)


def test_masks_that_do_not_say_which_tokens_are_real_are_refused() -> None:
    model, inputs = TINY["bert"].build(), TINY["bert"].inputs(4)
    with pytest.raises(InvalidInput, match="leaves no token to read"):
        capture(model, {**inputs, "attention_mask": torch.zeros(1, 4, dtype=torch.long)})
    sound, samples = TINY["wav2vec2"].build(), TINY["wav2vec2"].inputs(6)
    mask = torch.ones(samples["input_values"].shape, dtype=torch.long)
    mask[:, 40:] = 0
    with pytest.raises(InvalidInput, match="attention_mask has 70 places"):
        capture(sound, {**samples, "attention_mask": mask})


@pytest.mark.parametrize("kind", ["bert", "gemma2", "mpnet", "t5", "wav2vec2"])
def test_model_is_left_as_it_was(kind: str) -> None:
    model = TINY[kind].build().float().train()

    def state() -> tuple[Any, ...]:
        modules = list(model.modules())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        return hooks, [m.training for m in modules], model.config._attn_implementation, model.config.to_dict()

    before, weights, names = state(), copy.deepcopy(model.state_dict()), sorted(ALL_ATTENTION_FUNCTIONS)
    inputs = {name: t.float() if t.is_floating_point() else t for name, t in TINY[kind].inputs(12).items()}
    capture(model, inputs)
    assert state() == before
    assert sorted(ALL_ATTENTION_FUNCTIONS) == names
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


SPOILED: dict[str, tuple[str, Any]] = {
    "queries": ("bert", lambda a: setattr(a.query_stages[-1], "factor", a.scale * 1.001)),
    "keys": ("gpt2", lambda a: setattr(a, "key_weight", a.key_weight.flip(0))),
    "values": ("llama", lambda a: setattr(a, "value_weight", -a.value_weight)),
    "weights": ("gpt2", lambda a: setattr(a, "logit_biases", nn.ModuleList())),
    "output": ("mpnet", lambda a: setattr(a, "output_weight", a.output_weight * 1.001)),
}


@pytest.mark.parametrize("part", SPOILED)
def test_map_with_one_wrong_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, spoil = SPOILED[part]

    def read(*args: Any) -> Any:
        attention = attention_reader.read_attention(*args)
        spoil(attention)
        return attention

    monkeypatch.setattr("howsmooth.models.captured_sites.read_attention", read)
    with pytest.raises(UnsupportedModel, match=r"of layer 0 \(.*differ from the model's own by a relative"):
        capture(TINY[kind].build(), TINY[kind].inputs(8))


def test_the_interface_shows_what_the_output_alone_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys scaled inversely give the same output; only the socket can tell them from the model's own."""

    def read(*args: Any) -> Any:
        attention = attention_reader.read_attention(*args)
        attention.query_weight, attention.query_bias = attention.query_weight * 2, attention.query_bias * 2
        attention.key_weight, attention.key_bias = attention.key_weight / 2, attention.key_bias / 2
        return attention

    monkeypatch.setattr("howsmooth.models.captured_sites.read_attention", read)
    with pytest.raises(UnsupportedModel, match="the queries of layer 0"):
        capture(TINY["bert"].build(), TINY["bert"].inputs(8))


def test_half_precision_several_texts_and_missing_layers_are_refused() -> None:
    tiny = TINY["bert"]
    with pytest.raises(UnsupportedModel, match=r"computes in float16.*model\.float\(\)"):
        capture(tiny.build().half(), tiny.inputs(4))
    with pytest.raises(InvalidInput, match="input_ids holds 2 items, but one"):
        capture(tiny.build(), {"input_ids": torch.ones(2, 4, dtype=torch.long)})
    with pytest.raises(InvalidInput, match="layer 2 does not exist: this BertModel has 2 layers"):
        capture(tiny.build(), tiny.inputs(4), layers=[0, 2])
    with pytest.raises(UnsupportedModel, match=r"Linear is not a transformers model.*models\.site"):
        capture(nn.Linear(2, 2), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.tensor([[5, 97]])}, "no token with the id 97: the ids of this BertModel go from 0 to 96"),
        ({"input_ids": torch.tensor([[5, -1]])}, "no token with the id -1"),
        ({"input_ids": torch.tensor([[5.0, 6.0]])}, "token ids are whole numbers, got float32"),
        ({"input_ids": torch.tensor(5)}, r"holds at least one item, got a tensor of shape \(\)"),
        ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "holds at least one item"),
        ({"input_ids": [[5, 6]]}, "input_ids of a model is a tensor .* got list"),
        ({"input_ids": torch.ones(1, 600, dtype=torch.long)}, "does not take these inputs .* no longer than the model"),
        ({"no_such_input": torch.ones(1, 3)}, "does not take these inputs"),
        (torch.tensor([[5, 6]]), "inputs must be a dictionary"),
        (None, "inputs must be a dictionary"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused_in_one_line(inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        capture(TINY["bert"].build(), inputs)
    assert "\n" not in str(caught.value)


OTHERS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bart": {},
    "biogpt": {},
    "cohere": {"num_key_value_heads": 2},
    "ernie": {},
    "gpt_bigcode": {},
    "mixtral": {"num_key_value_heads": 2, "sliding_window": 5},
    # Frequencies of their own for layers that see everything and for those that see a window.
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "olmo": {"num_key_value_heads": 2},
    # Its router is a linear layer that returns a tuple.
    "phimoe": {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def other_model(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    special = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, **special, **options)
    model = transformers.AutoModel.from_config(config).eval()
    model = model.get_encoder() if config.is_encoder_decoder else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_unlisted_architectures_are_read_through_the_attention_interface(kind: str) -> None:
    """The map against the model's own attention module, differentiated densely by autograd."""
    model = other_model(kind, **OTHERS[kind])
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 97, (1, 7), generator=torch.Generator().manual_seed(1))
    sites = capture(model, {"input_ids": ids})
    assert [s.layer for s in sites] == [0, 1]
    for found in sites[:1] if kind in ("albert", "ernie") else sites:  # `_owner` changes what their second layer sees
        own, x = site(model.requires_grad_(False), _owner(model, found.name), input_ids=ids)
        torch.testing.assert_close(x, found.x, rtol=0, atol=0)
        assert float((found.attention(x) - own(x)).norm() / own(x).norm()) < 1e-5
        jacobian = dense_jacobian(own, x)
        expected = float(torch.linalg.matrix_norm(jacobian.double(), 2))
        assert float(hs.measure(found.attention, x, rtol=1e-5)) == pytest.approx(expected, rel=1e-4)


def _owner(model: Any, name: str) -> str:
    """The module whose output is that of the output projection; ALBERT and ERNIE add a normalisation after it."""
    module = model.get_submodule(name)
    if type(module).__name__ == "AlbertAttention":
        module.LayerNorm = _OnlyTheUpdate(module)
    if name.endswith(".self"):
        outer = model.get_submodule(name.removesuffix(".self"))
        outer.output.LayerNorm = _OnlyTheUpdate(outer)
        return name.removesuffix(".self")
    return name


class _OnlyTheUpdate(nn.Module):
    """In place of a LayerNorm that receives x + f(x): gives f(x)."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.x = Tensor()
        block.register_forward_pre_hook(lambda module, args: setattr(self, "x", args[0]))

    def forward(self, total: Tensor) -> Tensor:
        return total - self.x


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mamba", {"state_size": 4}, "no self-attention was found in MambaModel"),
        ("big_bird", {}, "no self-attention was found in BigBirdModel"),
        ("olmoe", {"num_experts": 2, "num_experts_per_tok": 1}, "are not plain linear functions of its tokens"),
    ],
)
def test_attention_that_a_map_does_not_model_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        capture(other_model(kind, **options), {"input_ids": torch.tensor([[5, 6, 7, 8]])})


@pytest.mark.slow
def test_plain_modules_are_measured_by_their_path() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(D, 4, 48, batch_first=True, dropout=0.0).double().eval()
    tokens = torch.randn(1, 5, D, dtype=torch.float64)
    f, x = site(encoder, "self_attn", tokens)
    own = encoder.self_attn
    jacobian = torch.autograd.functional.jacobian(lambda y: own(y[None], y[None], y[None])[0][0], tokens[0])
    expected = float(torch.linalg.matrix_norm(jacobian.reshape(5 * D, 5 * D), 2))
    assert torch.equal(x, tokens[0])
    assert float(hs.measure(f, x, rtol=1e-6)) == pytest.approx(expected, rel=1e-5)
    assert not encoder.self_attn._forward_pre_hooks


def test_paths_that_lead_nowhere_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(InvalidInput, match=r"no module at 'head': give a dotted path that begins with one of 0, 1"):
        site(model, "head", torch.zeros(1, 2))
    branch = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    branch.forward = branch["used"].forward  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match="'idle' was not called"):
        site(branch, "idle", torch.zeros(1, 2))
    with pytest.raises(InvalidInput, match="receives no floating-point tensor"):
        site(nn.Sequential(nn.Embedding(3, 2)), "0", torch.tensor([1]))


NEWEST = ["deepseek_v3", "gpt_oss", "llama4_text", "olmo2", "qwen3_next"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEWEST)
def test_bounds_of_the_newest_maps_hold_or_refuse(kind: str) -> None:
    tiny = TINY[kind]
    for s in capture(tiny.build(), tiny.inputs(8)):
        where = setting(s.attention, over=s.x)
        heads, block = upper_bounds(where, per_head=True), upper_bounds(where)
        measured, whole = hs.measure_heads(s.attention, s.x, rtol=1e-4), hs.measure(s.attention, s.x, rtol=1e-4)
        assert all(bool((bound >= measured.lower).all()) for bound in heads.values())
        assert all(float(bound) >= float(whole.lower) for bound in block.values())
        composed = "howsmooth.composed" in block
        assert composed == isinstance(s.attention, ComposedAttention)


@pytest.mark.slow
def test_a_scan_of_a_hybrid_stack_skips_layers_without_softmax() -> None:
    model = TINY["qwen3_next"].build(vocab_size=300).float()
    scan = hs.scan(model, "down the rabbit hole " * 3, lengths=8, what="head,layer")
    rows = {(row["what"], row["layer"]) for row in scan.rows}
    assert rows == {("head", 1), ("layer", 0), ("layer", 1)}
    assert any("layer 0 has no softmax attention (Qwen3NextGatedDeltaNet): skipped" in note for note in scan.notes)
    with pytest.raises(UnsupportedModel, match="layer 0 has no softmax attention"):
        hs.scan(model, "down the rabbit hole " * 3, lengths=8, layers=[0])
