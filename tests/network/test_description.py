"""A network in words: the printed tree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.network.description import parameters, phrases
from howsmooth.network.nodes import MixTokens, Rearrange, Tokenwise, Unread
from howsmooth.network.reader import read_function
from tests.network.handwritten import CASES


def lines(network: object) -> list[str]:
    return str(network).splitlines()


def test_an_encoder_layer_reads_as_its_formula() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True).eval()
    found = lines(hs.read_network(layer, torch.randn(4, 8)))
    assert found[0] == "TransformerEncoderLayer: 4 × 8 → 4 × 8, 600 parameters"
    assert found[0].startswith(f"TransformerEncoderLayer: 4 × 8 → 4 × 8, {sum(p.numel() for p in layer.parameters())} ")
    assert [line.partition("  (")[0] for line in found[1:-1]] == [
        "  x +",
        "    LayerNorm of 8",
        "    attention 8 → 8, 2 heads",
        "  x +",
        "    LayerNorm of 8, linear 8 → 16, relu, linear 16 → 8",
    ]
    assert "(norm1)" in found[2]
    assert "(self_attn)" in found[3]
    assert found[-1].startswith("agrees with its own output and derivative to ")


def text_of(name: str) -> str:
    case = next(case for case in CASES if case.name == name)
    module, others = case.make().double(), [other.double() for other in case.others]
    with torch.no_grad():
        return str(read_function(lambda x: module(x, *others), case.x().double(), root=module, name=name))


def test_attention_is_described_by_what_it_has() -> None:
    assert "attention 32 → 32, 4 heads, 2 of keys and values, rotary, Causal" in text_of("llama_rotary")
    assert "RMSNorm of 32" in text_of("llama_rotary")
    assert "gate by silu" in text_of("llama_rotary")
    assert "4 heads, 2 of keys and values, SlidingWindow" in text_of("sliding_window")
    assert "3 heads, Causal, soft-cap 5" in text_of("soft_capped")
    assert "DenseBias" in text_of("relative_buckets")


def test_patches_positions_and_pooling_have_words() -> None:
    found = text_of("vit_mean")
    assert "1 × 3 × 8 × 12" in found
    assert "numbers rearranged" in found
    assert "mean of 7 tokens" in found


def test_operations_that_are_not_known_are_named_with_their_place() -> None:
    found = text_of("max_pooling")
    assert "amax, by automatic differentiation" in found
    assert "left to automatic differentiation: amax" in found


def test_every_node_without_children_has_a_phrase() -> None:
    moved = torch.arange(6).reshape(2, 3)
    expected = {
        "mean of 4 tokens": MixTokens(torch.full((1, 4), 0.25)),
        "mixture of 4 tokens into 3": MixTokens(torch.randn(3, 4)),
        "positions added to 2 tokens": Rearrange(moved, None, torch.ones(2, 3)),
        "numbers rearranged into 2 tokens of 3": Rearrange(moved.flip(0)),
        "numbers rearranged and scaled into 2 tokens of 3, a constant added": Rearrange(
            moved, torch.ones(2, 3), torch.ones(2, 3)
        ),
        "sort, by automatic differentiation": Unread("sort", lambda x: x.sort().values, "layer"),
    }
    for phrase, node in expected.items():
        assert phrases(node) == [phrase]


def test_parameters_are_those_that_a_node_holds() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2, bias=False)).eval()
    network = hs.read_network(module, torch.randn(3, 4))
    assert sum(parameters(node) for node in network.root.walk()) == sum(p.numel() for p in module.parameters())
    assert isinstance(network.root, Tokenwise)
    assert [place for place in network.root.places if place] == ["0", "1", "2", "3"]


def test_a_deep_network_is_printed_at_the_depth_of_its_sums() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(x + torch.tanh(x @ x.new_ones(4, 4)))

    found = lines(hs.read_network(Nested(), torch.randn(3, 4)))
    assert found[1:-1] == ["  x +", "    x +", "      linear 4 → 4, tanh", "    relu"]
