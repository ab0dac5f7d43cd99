"""Cross-attention of models against dense autograd of the models' own blocks, in each of its two sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import CrossAttention
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import capture, capture_cross
from howsmooth.testing import dense_jacobian
from tests.models.tiny import _T5, _WHISPER, TINY, WORDS, D

_BART = {"d_model": D, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": WORDS, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {**_T5, "decoder_start_token_id": 0}),
    "bart": ("Bart", {**_BART, "decoder_start_token_id": 1, "forced_eos_token_id": None}),
    "whisper": ("Whisper", _WHISPER),
}
PATHS = {"t5": "EncDecAttention", "bart": "encoder_attn", "whisper": "encoder_attn"}


def build(kind: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    name, options = MODELS[kind]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    ids = {"decoder_input_ids": torch.randint(3, WORDS, (1, 5))}
    if kind == "whisper":
        return model, {"input_features": torch.randn(1, 80, 24, dtype=torch.float64), **ids}
    return model, {"input_ids": torch.randint(3, WORDS, (1, 7)), **ids}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_both_sides_equal_dense_autograd_of_the_models_own_block(kind: str) -> None:
    model, inputs = build(kind)
    model.set_attn_implementation("eager")
    block = capture_cross(model, inputs)[-1]
    assert PATHS[kind] in block.name
    assert block.error < 1e-5
    own = model.get_submodule(block.name)

    def attend(decoder: Tensor, encoder: Tensor) -> Tensor:
        return own(decoder[None], key_value_states=encoder[None])[0][0]

    torch.testing.assert_close(block.attention(block.decoder, block.encoder), attend(block.decoder, block.encoder))
    sides = {
        "decoder": (block.attention.in_decoder(block.encoder), block.decoder, lambda x: attend(x, block.encoder)),
        "encoder": (block.attention.in_encoder(block.decoder), block.encoder, lambda y: attend(block.decoder, y)),
    }
    for side, x, theirs in sides.values():
        expected = float(torch.linalg.matrix_norm(dense_jacobian(theirs, x), 2))
        assert float(hs.measure(side, x, rtol=1e-6)) == pytest.approx(expected, rel=1e-4)
        assert hs.measure_heads(side, x).value.shape == (4,)


def test_sides_of_grouped_heads_with_a_bias_equal_dense_autograd() -> None:
    def draw(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, dtype=torch.float64)

    hidden = torch.where(torch.rand(4, 6, 9) < 0.3, float("-inf"), 0.0).double()
    hidden[..., 0] = 0
    biases = {"query_bias": draw(12), "key_bias": draw(6), "value_bias": draw(4), "output_bias": draw(8)}
    weights = draw(12, 5), draw(6, 7), draw(4, 7), draw(8, 8)
    cross = CrossAttention(*weights, heads=4, kv_heads=2, bias=draw(6, 9) + hidden, **biases)
    x, y = draw(6, 5), draw(9, 7)
    for side, tokens in ((cross.in_decoder(y), x), (cross.in_encoder(x), y)):
        expected = dense_jacobian(side, tokens)
        torch.testing.assert_close(hs.jacobian(side, tokens).dense(), expected, rtol=0, atol=1e-12)
        story = hs.explain(side, tokens)
        blocks = expected.reshape(6, -1, *tokens.shape).transpose(1, 2)
        assert story.influence is not None
        torch.testing.assert_close(story.influence, torch.linalg.matrix_norm(blocks, 2), rtol=0, atol=1e-10)
        torch.testing.assert_close(story.sink, side.weights(tokens).sum(-2).amax(-1))
        torch.testing.assert_close(story.entropy, torch.special.entr(side.weights(tokens)).sum(-1).mean(-1))
    assert float(hs.explain(cross.in_decoder(y), x).value_path) == 0  # values stay where only queries move


def test_what_has_no_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no cross-attention was found in BertModel"):
        capture_cross(TINY["bert"].build(), TINY["bert"].inputs(5))
    model, inputs = build("t5")
    padded = {**inputs, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]])}
    with pytest.raises(InvalidInput, match="captured without padding"):
        capture_cross(model, padded)
    with pytest.raises(InvalidInput, match=r"captured without padding \(decoder_attention_mask\)"):
        capture_cross(model, {**inputs, "decoder_attention_mask": torch.tensor([[0, 1, 1, 1, 1]])})
    with pytest.raises(InvalidInput, match=r"the other sequence has shape \(3, 4\), but must be \(tokens, 7\)"):
        CrossAttention(torch.eye(4), torch.ones(4, 7), torch.ones(4, 7)).in_decoder(torch.zeros(3, 4))


@pytest.mark.parametrize("side", ["left", "right"])
def test_encoder_and_decoder_are_cut_to_their_own_real_tokens(side: str) -> None:
    model, _ = build("bart")
    model = model.float()
    texts = {"input_ids": torch.randint(3, WORDS, (1, 6)), "decoder_input_ids": torch.randint(3, WORDS, (1, 6))}
    mask = torch.tensor([[0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0]])
    for name in ("attention_mask", "decoder_attention_mask"):
        padded_part = "decoder" if name.startswith("decoder") else "encoder"
        for s in capture(model, {**texts, name: mask}):
            assert len(s.x) == (4 if s.name.startswith(padded_part) else 6)
            kept = mask[0].bool() if s.name.startswith(padded_part) else torch.ones(6, dtype=torch.bool)
            own = _own_norm(model, s.name, {**texts, name: mask}, kept)
            assert float(hs.measure(s.attention, s.x)) == pytest.approx(own, rel=1e-4)


def _own_norm(model: Any, path: str, inputs: dict[str, Tensor], kept: Tensor) -> float:
    """‖J‖ of the model's own block in its real tokens, by autograd."""
    heard: dict[str, Any] = {}
    block = model.get_submodule(path)
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: heard.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(**inputs, use_cache=False)
    hook.remove()
    kwargs = {key: value for key, value in heard["kwargs"].items() if key != "past_key_values"}
    everything = (heard["args"] or (kwargs.pop("hidden_states"),))[0]

    def function(real: Tensor) -> Tensor:
        tokens = everything[0].index_put((kept.nonzero().flatten(),), real)
        return block(tokens[None], *heard["args"][1:], **kwargs)[0][0][kept]

    return float(torch.linalg.matrix_norm(dense_jacobian(function, everything[0][kept]), 2))
