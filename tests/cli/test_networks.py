"""Networks as SOURCE: what the commands print is what the library says."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import howsmooth as hs
from tests.cli.command import Command

MODULE = """
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.classes = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.classes(x.mean(-2))


def make():
    torch.manual_seed(0)
    return Classifier().eval()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of Python and an input, from which commands are given."""
    name = f"own_net_{abs(hash(tmp_path)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    np.save(tmp_path / "x.npy", np.random.RandomState(0).randn(5, 8).astype("float32"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / name


def network(here: Path) -> torch.nn.Module:
    from importlib import import_module

    return import_module(here.name).make()


def test_measure_prints_the_parts(here: Path) -> None:
    found = Command("measure").json(f"{here.name}:make", "--input", "x.npy", "--what", "model,layer:1,attention:0")
    x = torch.from_numpy(np.load("x.npy"))
    for part in ("model", "layer:1", "attention:0"):
        assert found[part]["value"] == float(hs.measure(network(here), x, what=part).value)


def test_bounds_prints_the_product_bound(here: Path) -> None:
    found = Command("bounds").json(f"{here.name}:make", "--input", "x.npy", "--over", "ball:8")
    x = torch.from_numpy(np.load("x.npy"))
    assert found["log10"] == hs.bounds.stack(network(here), x=x, over=hs.sets.Ball(8.0)).log10


def test_certify_prints_radius_and_attack(here: Path) -> None:
    found = Command("certify").json(f"{here.name}:make", "--input", "x.npy", "--tokens", "2")
    x = torch.from_numpy(np.load("x.npy"))
    assert found["radius"] == hs.certify(network(here), x, found["label"], tokens=[2]).radius
    assert found["radius_holds"] == "proved"
    assert 0 < found["radius"] < found["attacked"]
    done = Command("certify").run(f"{here.name}:make", "--input", "x.npy", "--tokens", "2")
    assert "token 2 moves, the others stay" in done.stdout
    assert "certified ÷ attacked" in done.stdout


def test_scan_stores_the_rows(here: Path) -> None:
    asked = [f"{here.name}:make", "--input", "x.npy", "--what", "attention,model", "--out", "s.sqlite"]
    done = Command("scan").run(*asked)
    assert done.exit_code == 0
    x = torch.from_numpy(np.load("x.npy"))
    expected = hs.scan(network(here), x, what="attention,model").rows
    rows = Command("scan").json(*asked)
    assert [row["value"] for row in rows] == [row["value"] for row in expected]


@pytest.mark.slow
def test_an_exported_program_is_a_source(here: Path) -> None:
    net, x = network(here), torch.from_numpy(np.load("x.npy"))
    torch.export.save(torch.export.export(net, (x,)), "net.pt2")
    found = Command("certify").json("net.pt2", "--input", "x.npy")
    assert found["radius"] == pytest.approx(hs.certify(net, x, found["label"]).radius, rel=1e-9)


@pytest.mark.slow
def test_parts_of_a_model_of_transformers() -> None:
    found = Command("measure").json("random:gpt2[layers=2,width=16]", "--what", "model,layer:1", "--length", "8")
    assert set(found) == {"setting", "model", "layer:1", "converged"}
    whole = Command("bounds").json("random:gpt2[layers=2,width=16]", "--whole", "--length", "8")
    assert whole["log10"] > np.log10(found["model"]["value"])


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("measure", ["nowhere.onnx"], "nowhere.onnx"),
        ("measure", ["nowhere.pt2"], "nowhere.pt2"),
        ("measure", ["no_such_module:net"], "cannot be imported"),
        ("measure", ["{here}:none"], "has no none"),
        ("measure", ["{here}:make"], "give one"),
        ("measure", ["{here}:make", "--input", "x.npy", "--heads", "2"], "--heads is for attention maps"),
        ("measure", ["{here}:make", "--input", "x.npy", "--explain"], "leave them out for a network"),
        ("measure", ["{here}:make", "--input", "x.npy", "--what", "mlp:0"], "not mlp"),
        ("bounds", ["{here}:make", "--input", "x.npy"], "give their set"),
        ("bounds", ["{here}:make", "--input", "x.npy", "--latex"], "one product bound"),
        ("certify", ["{here}:make", "--input", "x.npy", "--label", "7"], "label is one of 3 classes"),
        ("certify", ["{here}:make", "--input", "x.npy", "--tokens", "9"], "tokens"),
        ("certify", ["{here}:make", "--input", "x.npy", "--over", "around:0.1"], "leave"),
        ("scan", ["{here}:make"], "scanned on tensors"),
    ],
)
def test_what_cannot_be_is_one_sentence(here: Path, command: str, arguments: list[str], words: str) -> None:
    message = Command(command).refusal(*(one.format(here=here.name) for one in arguments))
    assert words in message
