"""Networks of one's own are scanned as models are: blocks of attention, layers, the whole, in a store that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import HowsmoothError

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers).eval()


def test_rows_are_the_measurements_of_the_parts() -> None:
    net = encoder()
    rows = hs.scan(net, X, what="attention,layer,model", windows=2).rows
    assert len(rows) == 2 * (2 + 2 + 1)
    for row in rows:
        what = row["what"] if row["layer"] is None else f"{row['what']}:{row['layer']}"
        assert row["value"] == float(hs.measure(net, X[row["window"]][None], what=what))
        assert row["lower"] <= row["value"] <= row["upper"]


def test_heads_are_those_of_the_attention_map() -> None:
    net = encoder(1)
    rows = hs.scan(net, X[:1], what="head").rows
    attention = hs.SelfAttention.from_torch(net.layers[0].self_attn)
    expected = hs.measure_heads(attention, X[0]).value.tolist()
    assert [row["value"] for row in rows] == pytest.approx(expected, rel=1e-5)


def test_a_store_goes_on_where_it_was(tmp_path: Path) -> None:
    net, out = encoder(), tmp_path / "own.sqlite"
    first = hs.scan(net, X[:1], what="attention", out=out)
    both = hs.scan(net, X[:1], what="attention,model", out=out)
    assert [row["seconds"] for row in both.rows if row["what"] == "attention"] == [r["seconds"] for r in first.rows]


def test_other_weights_are_another_model_in_a_store(tmp_path: Path) -> None:
    out = tmp_path / "own.sqlite"
    hs.scan(encoder(), X[:1], what="model", out=out)
    other = encoder()
    with torch.no_grad():
        other.layers[0].linear1.weight.mul_(2)
    hs.scan(other, X[:1], what="model", out=out)
    with hs.scans.Store.reading(out) as store:
        assert len(store.identities()) == 2


def test_threads_measure_the_same() -> None:
    from concurrent.futures import ThreadPoolExecutor

    net = encoder()
    with ThreadPoolExecutor(2) as pool:
        found = hs.scan(net, X, what="attention", windows=2, executor=pool)
    here = hs.scan(net, X, what="attention", windows=2)
    assert [r["value"] for r in found.rows] == pytest.approx([r["value"] for r in here.rows], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": 7}, "the inputs have 5 tokens, not 7"),
        ({"windows": 3}, "3 windows were requested, but there are 2 inputs"),
        ({"reference": "random"}, "models of transformers"),
        ({"device": "cpu"}, "measured where it is"),
        ({"dtype": "bfloat16"}, "float32 or float64"),
        ({"tokenizer": object()}, "no tokenizer"),
        ({"what": "mlp"}, "can be measured, not mlp"),
        ({"what": "head", "layers": [4]}, "layer 4 does not exist"),
    ],
)
def test_what_a_network_does_not_have_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HowsmoothError, match=words):
        hs.scan(encoder(), X, **options)


def test_inputs_are_tensors() -> None:
    with pytest.raises(HowsmoothError, match="scanned on tensors"):
        hs.scan(encoder(), "a text")
    with pytest.raises(HowsmoothError, match="NaN"):
        hs.scan(encoder(), X * torch.nan)
    with pytest.raises(HowsmoothError, match="half precision"):
        hs.scan(encoder().half(), X)


def test_a_network_without_attention_says_so() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.inner(x))

    with pytest.raises(HowsmoothError, match="no layer of this model has softmax attention"):
        hs.scan(Mixer().eval(), X)
    assert len(hs.scan(Mixer().eval(), X[:1], what="model").rows) == 1
