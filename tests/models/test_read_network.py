"""Models of every kind as networks of nodes: value, Jacobian and product bound against the models themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds.model_stack import measured_variances, stack
from howsmooth.errors import DoesNotApply, HowsmoothError, UnsupportedModel
from howsmooth.models import MODEL_TYPES
from howsmooth.network.nodes import Attend
from howsmooth.network.reader import Network
from howsmooth.testing import dense_jacobian
from tests.bounds.steepness import attack
from tests.models.tiny import TINY

REFUSED = {
    **dict.fromkeys(
        ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_moe", "qwen3_next"], r"nonzero in layers\.\d\.mlp\.experts"
    ),
    "llama4_text": r"experts|router|topk|int64",
}
"""Mixtures of experts: which tokens an expert sees depends on the data, and with it the shapes of what it computes."""
UNBOUNDED = {"cohere", "exaone4", "olmo2", "olmo3"}
"""Attention reads tokens that nothing has normalised, or (Cohere) whose queries and keys have a norm for each head."""
READ = sorted(set(TINY) - set(REFUSED))
QUICK = ("bert", "gpt2", "llama")


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def opened(name: str, n: int = 4) -> tuple[Any, Tensor]:
    """A model in float64, and its input: numbers of tokens, pixels, or sound."""
    model: Any = TINY[name].build().requires_grad_(False)
    return model, TINY[name].inputs(n)[model.main_input_name]


def definition(name: str, model: Any, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The model as a function of its word embeddings ``(n, d)``, or of its input in one row, without the package."""
    model.set_attn_implementation("eager")
    if model.main_input_name == "input_ids":
        start = model.get_input_embeddings()(x)[0]
        return lambda tokens: hidden(model(inputs_embeds=tokens[None])), start
    key = model.main_input_name
    flat = x.reshape(x.shape[1], -1) if x.dim() == 3 else x.reshape(1, -1)
    return lambda pixels: hidden(model(**{key: pixels.reshape(x.shape)})), flat


def hidden(output: Any) -> Tensor:
    return output.last_hidden_state[0]


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def test_every_listed_architecture_is_read_or_refused_by_name() -> None:
    assert {*READ, *REFUSED} == set(MODEL_TYPES)
    assert len(READ) >= 25


@pytest.mark.parametrize("name", cases(READ))
def test_a_model_is_read_wholly_and_rightly(name: str) -> None:
    """In float64; models that compute a part in float32 agree to that."""
    model, given = opened(name)
    network = hs.read_network(model, given)
    assert not network.unread
    own, start = definition(name, model, given)
    torch.testing.assert_close(network.x, start, rtol=0, atol=0)
    tolerance = 1e-5 if network.difference > 1e-9 else 1e-9
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for x in (start, torch.randn(start.shape, generator=generator, dtype=torch.float64), 20 * start + 0.3):
            expected = own(x)
            assert float((network(x) - expected).norm()) <= tolerance * float(expected.norm())
    exact, J = dense_jacobian(own, start), network.jacobian_at(start, 2**26)
    v, u = (torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in (J.in_shape, J.out_shape))
    pushed = torch.stack([J.matvec(one) for one in v]).flatten(1)
    pulled = torch.stack([J.rmatvec(one) for one in u]).flatten(1)
    torch.testing.assert_close(pushed, v.flatten(1) @ exact.mT, rtol=1e-5, atol=1e-5 * norm(exact))
    torch.testing.assert_close(pulled, u.flatten(1) @ exact, rtol=1e-5, atol=1e-5 * norm(exact))
    m = hs.measure(network, start)
    assert float(m.value) == pytest.approx(norm(exact), rel=1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_mixtures_of_experts_are_refused_by_name(name: str) -> None:
    with pytest.raises(HowsmoothError, match=REFUSED[name]) as caught:
        hs.read_network(*opened(name))
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("name", cases([name for name in READ if name not in UNBOUNDED]))
def test_the_product_bound_holds_for_every_architecture(name: str) -> None:
    """Above the norm at the model's own input and at random ones; with variance floors at that input."""
    model, given = opened(name)
    network = hs.read_network(model, given)
    own, start = definition(name, model, given)
    bound = stack(network)
    generator = torch.Generator().manual_seed(4)
    others = [size * torch.randn(start.shape, generator=generator, dtype=torch.float64) for size in (0.3, 3.0)]
    for x in (start, *others):
        assert math.log10(norm(dense_jacobian(own, x))) <= bound.log10
    floors = measured_variances(model, given)
    assert set(floors) == {leaf for leaf in floors if leaf}
    floored = stack(network, variance=floors)
    assert math.log10(norm(dense_jacobian(own, start))) <= floored.log10 <= bound.log10
    kinds = {leaf.kind for leaf in bound.leaves}
    assert kinds >= {"attention", "normalisation", "MLP"}
    layers = sum(isinstance(node, Attend) for node in network.root.walk())
    assert sum(leaf.kind == "attention" for leaf in bound.leaves) == layers >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_product_bound_is_not_passed_by_ascent(name: str) -> None:
    model, given = opened(name, n=2)
    own, start = definition(name, model, given)
    bound = stack(model, x=given)
    starts = torch.stack([start, 0.01 * start, start.mean(-1, keepdim=True) + 1e-3 * start])

    def function(x: Tensor) -> Tensor:
        return own(x)[0, :6]  # a part of the output has no larger norm

    assert math.log10(attack(function, starts, steps=4)) <= bound.log10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_attention_on_tokens_of_any_size_has_no_product_bound(name: str) -> None:
    model, given = opened(name)
    with pytest.raises(DoesNotApply, match=r"layers\.0: self_attn reads tokens without a normalisation"):
        stack(model, x=given)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_nodes_of_an_encoder_compute_its_output(norm_first: bool, causal: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, activation="gelu", dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8, dtype=torch.float64), enable_nested_tensor=False)
    encoder.eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
    x = torch.randn(5, 8, dtype=torch.float64)
    network = hs.read_network(lambda tokens: encoder(tokens, mask), x)
    other = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(network(other), encoder(other, mask), rtol=1e-10, atol=1e-10)
    named = hs.read_network(encoder, x)
    norms = [place for node in named.root.walk() for place in getattr(node, "places", ()) if "norm" in place]
    assert norms == [*(f"layers.{layer}.norm{number}" for layer in (0, 1) for number in (1, 2)), "norm"]
    assert [node.place for node in named.root.walk() if isinstance(node, Attend)] == [
        *(f"layers.{layer}.self_attn" for layer in (0, 1)),
    ]


def test_a_model_is_read_at_numbers_at_vectors_and_at_random_input_alike() -> None:
    model, ids = opened("bert")
    by_ids, vectors = hs.read_network(model, ids[0]), model.get_input_embeddings()(ids)
    at_vectors, anywhere = hs.read_network(model, vectors), hs.read_network(model, n=4)
    torch.testing.assert_close(by_ids.x, vectors[0])
    torch.testing.assert_close(by_ids(vectors[0]), at_vectors(vectors[0]), rtol=0, atol=0)
    torch.testing.assert_close(anywhere(vectors[0]), at_vectors(vectors[0]))


def test_modules_of_numbers_move_the_vectors_of_their_embedding() -> None:
    torch.manual_seed(0)
    words = nn.Embedding(9, 6)
    module = nn.Sequential(words, nn.LayerNorm(6), nn.Linear(6, 2)).eval()
    ids = torch.tensor([3, 1, 4])
    network = hs.read_network(module, ids)
    torch.testing.assert_close(network.x, words(ids))
    torch.testing.assert_close(network(words(ids)), module(ids))


def test_group_norms_are_norms_of_groups() -> None:
    for groups in (1, 2, 8):
        module = nn.GroupNorm(groups, 8, dtype=torch.float64)
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
        network = hs.read_network(module, torch.randn(1, 8, 5, dtype=torch.float64))
        assert not network.unread
        x = torch.randn(1, 8, 5, dtype=torch.float64)
        torch.testing.assert_close(network(x[0]), module(x)[0])


def test_an_encoder_and_decoder_is_read_as_its_encoder() -> None:
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 50}
    config = BartConfig(
        **sizes, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    model = BartModel(config).double().eval()
    ids = torch.tensor([[5, 6, 7]])
    network = hs.read_network(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(network(network.x), model.get_encoder()(ids).last_hidden_state[0])


def test_half_precision_is_refused_with_what_to_do() -> None:
    model, ids = opened("gpt2")
    with pytest.raises(UnsupportedModel, match=r"model\.float\(\)"):
        hs.read_network(model.half(), ids)


def test_what_has_been_read_is_not_read_again() -> None:
    network = hs.read_network("random:gpt2[layers=1,width=16]", n=3)
    assert isinstance(network, Network)
    assert hs.read_network(network) is network
