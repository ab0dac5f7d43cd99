"""Parts of networks at an input: attention, layers and the whole, measured as any other map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.network_parts import NetworkTargets, part_of
from howsmooth.testing import dense_jacobian

X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers).double().eval()


def norm_of(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))


def test_the_whole_equals_dense_autograd() -> None:
    net = encoder()
    m = hs.measure(net, X, what="model", rtol=1e-6)
    assert float(m) == pytest.approx(norm_of(lambda x: net(x[None])[0], X[0]), rel=1e-6)


def test_a_layer_equals_dense_autograd_of_the_layer_where_it_stands() -> None:
    net = encoder()
    inner = net.layers[0](X)[0].detach()
    m = hs.measure(net, X, what="layer:1", rtol=1e-6)
    assert float(m) == pytest.approx(norm_of(lambda x: net.layers[1](x[None])[0], inner), rel=1e-6)


def test_an_attention_block_is_the_map_of_its_module_at_its_tokens() -> None:
    net = encoder()
    attention, tokens = part_of(net, X, "attention:1")
    assert isinstance(attention, hs.SelfAttention)
    inner = net.layers[0](X).detach()
    torch.testing.assert_close(tokens[None], inner, rtol=1e-12, atol=1e-12)
    expected = net.layers[1].self_attn(inner, inner, inner, need_weights=False)[0]
    torch.testing.assert_close(attention(tokens)[None], expected, rtol=1e-12, atol=1e-12)


def test_a_network_of_token_numbers_is_measured_in_the_vectors_of_its_embedding() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).double().eval()
    ids = torch.tensor([[1, 4, 2]])
    m = hs.measure(net, ids, what="model", rtol=1e-6)
    vectors = net[0](ids)[0].detach()
    assert float(m) == pytest.approx(norm_of(lambda x: net[1](x[None])[0], vectors), rel=1e-6)


@pytest.mark.parametrize(("what", "kind"), [("model", "model"), ("layer:1", "layer"), ("attention:0", "attention")])
def test_parts_of_a_model_of_transformers_are_those_of_a_scan(what: str, kind: str) -> None:
    model = "random:gpt2[layers=2,width=16]"
    ids = torch.tensor([3, 1, 4, 1, 5])
    number = what.partition(":")[2]
    targets = hs.models.Targets(hs.models.open_model(model), hs.models.Window(ids[None], [], 0))
    expected = hs.measure(*targets.get(kind, int(number) if number else None))
    assert float(hs.measure(model, ids, what=what)) == float(expected)


def test_a_classifier_of_transformers_is_measured_from_word_vectors_to_logits() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes)).eval()
    ids = torch.tensor([3, 7, 9])
    vectors = model.get_input_embeddings()(ids).detach()
    expected = norm_of(lambda x: model(inputs_embeds=x[None]).logits, vectors)
    assert float(hs.measure(model, ids, what="logits")) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("layer", "a part with its number"),
        ("model:1", "a part with its number"),
        ("head:0", "a part with its number"),
        ("attention:2", "attention 2 does not exist"),
        ("mlp:0", "attention, layer, model can be measured, not mlp"),
    ],
)
def test_a_part_that_is_not_there_is_one_sentence(what: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        part_of(encoder(), X, what)


def test_layers_that_are_no_list_are_refused() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.block(x)

    with pytest.raises(UnsupportedModel, match="are not a list of modules"):
        part_of(Alone().double().eval(), X, "layer:0")


def test_attention_inside_branches_sees_its_own_tokens() -> None:
    targets = NetworkTargets(encoder(), X)
    assert [site.name for site in targets.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(targets.sites[0].x, X[0])


def test_a_text_needs_a_model_that_reads_one() -> None:
    with pytest.raises(InvalidInput, match="is measured at a tensor"):
        hs.measure(encoder(), "a text", what="model")
    with pytest.raises(InvalidInput, match="a text is for a model"):
        hs.measure(encoder(), "a text")
