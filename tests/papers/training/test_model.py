"""The model keeps to its masks, its blocks to their promises, and its bounds hold on what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
import howsmooth.nn as layers
from howsmooth.attention import Causal, SlidingWindow
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.l2_layers import UntiedL2Attention
from howsmooth.papers.training import CharacterModel, TrainingSettings
from howsmooth.papers.training.model import ContractiveBlock, LayerNormBlock, WithinDocuments
from howsmooth.papers.training.training_settings import ATTENTIONS
from howsmooth.testing import dense_jacobian


def small(attention: str, **others: object) -> CharacterModel:
    torch.manual_seed(0)
    settings = TrainingSettings(attention=attention, width=12, heads=2, length=10, batch_tokens=20, **others)  # type: ignore[arg-type]
    return CharacterModel(settings, symbols=7).double().eval()


def symbols(batch: int = 2, n: int = 10) -> Tensor:
    return torch.randint(7, (batch, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_character_sees_the_future(attention: str) -> None:
    model, first = small(attention), symbols()
    second = first.clone()
    second[:, 6:] = (second[:, 6:] + 1) % 7
    one, two = model(first), model(second)
    torch.testing.assert_close(one[:, :6], two[:, :6], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(one[:, 6:], two[:, 6:])


# Sigmoid attention adds −log n to its logits, and so depends on the length of the piece by design.
@pytest.mark.parametrize("attention", [kind for kind in ATTENTIONS if kind != "sigmoid"])
def test_documents_in_one_piece_are_computed_as_if_alone(attention: str) -> None:
    model, together = small(attention), symbols(1)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    seen = (documents[:, :, None] == documents[:, None]).tril()
    places = torch.tensor([[*range(4), *range(6)]])
    found = model(together, places, seen)
    torch.testing.assert_close(found[:, :4], model(together[:, :4]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[:, 4:], model(together[:, 4:]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_contractive_branches_contract_even_for_large_weights(norm: str) -> None:
    model = small(f"contractive-{norm}", depth=1)
    block = model.blocks[0]
    assert isinstance(block, ContractiveBlock)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(5.0)
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    order = 2 if norm == "2" else float("inf")
    x = torch.randn(10, 12, dtype=torch.float64)
    dense = dense_jacobian(lambda y: block.attention(y, attn_mask=mask)[0], x)
    assert float(torch.linalg.matrix_norm(dense, order)) <= block.attention_bound(10, Causal()) <= 0.9 * (1 + 1e-6)
    dense = dense_jacobian(lambda y: block.mlp(y[None])[0], x)
    assert float(torch.linalg.matrix_norm(dense, 2)) <= float(block.mlp.lipschitz_bound(10)) <= 0.9 * (1 + 1e-6)


@pytest.mark.parametrize("attention", ["dot-product", "l2", "sigmoid", "cosine"])
def test_the_bound_of_a_block_holds_on_the_stream(attention: str) -> None:
    model = small(attention, depth=2)
    bound = model.attention_bound(10)
    assert bound is not None
    for block, x in zip(model.blocks, model.stream(symbols()), strict=False):
        assert isinstance(block, LayerNormBlock)
        measured = hs.measure(block.attention.map("causal", n=10), block.norms[0](x).detach())
        assert float(measured.lower.max()) <= bound


# A gradient step looks at points that it has learned, not at other tokens.
@pytest.mark.parametrize("attention", [kind for kind in ATTENTIONS if kind != "gradient-step"])
def test_a_window_hides_what_is_further_back(attention: str) -> None:
    model, first = small(attention, depth=1, window=3), symbols()
    second = first.clone()
    second[:, 4] = (second[:, 4] + 1) % 7
    moved = (model(first) - model(second)).abs().amax(-1) > 1e-9
    assert moved.tolist() == 2 * [4 * [False] + 3 * [True] + 3 * [False]]


@pytest.mark.parametrize("attention", ["l2", "contractive-2", "dot-product"])
def test_a_window_within_documents_is_both(attention: str) -> None:
    model, together = small(attention, depth=1, window=2), symbols(1)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    seen = (documents[:, :, None] == documents[:, None]).tril()
    places = torch.tensor([[*range(4), *range(6)]])
    found = model(together, places, seen)
    torch.testing.assert_close(found[:, 4:], model(together[:, 4:]), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found, model(together, places))


def test_the_bound_of_a_narrow_window_is_smaller_and_holds() -> None:
    wide, narrow = small("l2"), small("l2", window=2)
    bound = narrow.attention_bound(10)
    assert bound is not None
    assert bound < 0.5 * (wide.attention_bound(10) or 0.0)
    for block, x in zip(narrow.blocks, narrow.stream(symbols()), strict=False):
        assert isinstance(block, LayerNormBlock)
        measured = hs.measure(block.attention.map(SlidingWindow(2), n=10), block.norms[0](x).detach())
        assert float(measured.lower.max()) <= bound


def test_in_usual_blocks_a_coefficient_may_be_above_one() -> None:
    assert small("contractive-2", blocks="pre-norm", coefficient=5.0).attention_bound(10) == pytest.approx(5, rel=1e-6)


def test_blocks_are_the_formulas_written_out() -> None:
    x, mask = torch.randn(2, 10, 12, dtype=torch.float64), Causal()
    for blocks in ("pre-norm", "post-norm"):
        block = small("l2", blocks=blocks).blocks[0]
        assert isinstance(block, LayerNormBlock)
        (first, second), attend = block.norms, lambda y, block=block: block.attention(y, is_causal=True)[0]
        if blocks == "pre-norm":
            middle = x + attend(first(x))
            expected = middle + block.mlp(second(middle))
        else:
            middle = first(x + attend(x))
            expected = second(middle + block.mlp(middle))
        torch.testing.assert_close(block(x, mask), expected, rtol=1e-12, atol=1e-12)


def test_attention_before_any_norm_has_a_bound_only_where_it_is_lipschitz() -> None:
    assert small("dot-product", blocks="post-norm").attention_bound(10) is None
    assert small("l2", blocks="post-norm").attention_bound(10) is not None


def test_the_bound_is_the_same_in_training_and_evaluation() -> None:
    model = small("contractive-2")
    expected = model.attention_bound(10)
    model.train()
    model(symbols())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = model.attention_bound(10)
    assert model.training
    assert expected == pytest.approx(0.9, rel=1e-6)
    assert found == pytest.approx(0.9, rel=1e-6)


def test_untied_l2_attention_equals_its_map_and_refuses_a_bound() -> None:
    torch.manual_seed(3)
    layer = UntiedL2Attention(8, 2).double()
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x, is_causal=True)[0], layer.map("causal")(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(DoesNotApply, match="not Lipschitz"):
        layer.lipschitz_bound(6)
    assert small("l2-untied").attention_bound(10) is None


def test_untied_l2_attention_grows_without_bound() -> None:
    layer = UntiedL2Attention(1, 1).double()
    with torch.no_grad():
        for linear, weight in ((layer.qk_proj, 1.0), (layer.k_proj, 0.5), (layer.v_proj, 1.0), (layer.out_proj, 1.0)):
            linear.weight.fill_(weight)
    norms = []
    for b in (1.0, 10.0, 100.0):
        x = torch.tensor([[100 * b], [2 * (100 * b + b)], [2 * (100 * b - b)]], dtype=torch.float64)
        dense = dense_jacobian(lambda y: layer(y)[0], x)
        norms.append(float(torch.linalg.matrix_norm(dense, float("inf"))))
    assert norms[1] / norms[0] > 50
    assert norms[2] / norms[1] > 50


def test_tied_keys_are_the_untied_layer_with_equal_weights() -> None:
    torch.manual_seed(0)
    untied, tied = UntiedL2Attention(8, 2).double(), layers.L2Attention(8, 2).double()
    untied.load_state_dict(tied.state_dict() | {"k_proj.weight": tied.qk_proj.weight})
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(untied(x)[0], tied(x)[0], rtol=1e-12, atol=1e-12)


def test_lipschitz_norm_is_left_out_because_it_takes_no_causal_mask() -> None:
    with pytest.raises(InvalidInput, match="depends on all tokens"):
        layers.LipschitzNormAttention(8, 2)(torch.randn(1, 6, 8), is_causal=True)
    with pytest.raises(InvalidInput, match="attention is"):
        TrainingSettings(attention="lipschitz-norm")  # type: ignore[arg-type]


def test_the_mask_of_documents_is_made_of_the_tokens_that_are_seen() -> None:
    seen = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [0, 1]]]).bool()
    layer = layers.DotProductAttention(4, 2).double()
    _, weights = layer(torch.randn(2, 2, 4, dtype=torch.float64), attn_mask=WithinDocuments(seen), need_weights=True)
    assert weights is not None
    assert torch.equal(weights > 0, seen)


def test_what_is_promised_to_contract_must() -> None:
    with pytest.raises(InvalidInput, match="no known constant below one"):
        TrainingSettings(attention="l2", blocks="contractive")
    with pytest.raises(InvalidInput, match="0 < coefficient < 1"):
        TrainingSettings(attention="contractive-2", coefficient=1.0)
    with pytest.raises(InvalidInput, match="dropout"):
        CharacterModel(TrainingSettings(attention="contractive-2", dropout=0.1), 5)
    with pytest.raises(InvalidInput, match="made for 10 tokens"):
        small("l2-untied")(symbols(n=11))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"attention": "magic"}, "attention is dot-product"),
        ({"heads": 3}, "does not split"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"length": 48}, "whole pieces"),
        ({"rate": float("nan")}, "learning rate"),
        ({"warmup": -1}, "warmup"),
        ({"schedule": "linear"}, "schedule is cosine, fixed"),
        ({"dropout": 1.0}, "dropout"),
        ({"window": 0}, "window must be at least 1"),
        ({"attention": "contractive-2", "blocks": "pre-norm", "coefficient": float("inf")}, "positive and finite"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        TrainingSettings(**wrong)  # type: ignore[arg-type]
