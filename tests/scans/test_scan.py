"""A scan measures what the model computes, and its numbers depend on nothing but the cell."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import BertModel

from howsmooth.errors import InvalidInput
from howsmooth.models.model_inputs import read_input
from howsmooth.scans import Scan, StoreError, scan
from howsmooth.scans.plan import ScanProgress
from howsmooth.testing import dense_jacobian

FIELDS = [
    *("model", "model_sha256", "precision", "what", "layer", "head", "length", "window", "window_start", "text"),
    *("text_sha256", "value", "lower", "upper", "relative", "confidence", "converged", "proved", "bounds", "radius"),
    *("value_path", "score_path", "value_share", "sink", "sink_token", "entropy", "seed", "rtol", "dtype", "seconds"),
    *("howsmooth", "lower_holds", "upper_holds"),
]


def timeless(found: Scan) -> list[dict[str, Any]]:
    """The rows without the time they took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found.rows]


def spectral(f: Any, x: Tensor) -> float:
    """σ_max of the Jacobian that autograd writes out."""
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))


class Oracle:
    """The model in float64, its attention written out by hand."""

    def __init__(self, folder: Path, tokens: list[str]):
        words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.model = (
            BertModel.from_pretrained(folder, attn_implementation="eager").double().eval().requires_grad_(False)
        )
        with torch.no_grad():
            ids = torch.tensor([[words[token] for token in tokens]])
            self.hidden = [h[0] for h in self.model(ids, output_hidden_states=True).hidden_states]

    def weights(self, layer: int, x: Tensor) -> Tensor:
        block = self.model.encoder.layer[layer].attention.self
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(0, 1) for part in (block.query, block.key))
        return torch.softmax(q @ k.mT / math.sqrt(8), -1)

    def head(self, layer: int, head: int) -> Any:
        attention = self.model.encoder.layer[layer].attention
        own = slice(8 * head, 8 * head + 8)

        def f(x: Tensor) -> Tensor:
            return (
                self.weights(layer, x)[head] @ attention.self.value(x)[:, own] @ attention.output.dense.weight[:, own].T
            )

        return f

    def block(self, layer: int) -> Any:
        return lambda x: sum(self.head(layer, head)(x) for head in range(4))


@pytest.fixture(scope="module")
def found(folder: Path, text: Path) -> Scan:
    return scan(str(folder), text, lengths="6,12", windows=3, what="head,attention", bounds="all")


def test_every_cell_is_there_once_with_every_field(found: Scan) -> None:
    cells = {(r["what"], r["layer"], r["head"], r["length"], r["window"]) for r in found.rows}
    assert len(cells) == len(found) == 2 * 3 * 2 * (4 + 1)
    assert all(list(row) == FIELDS for row in found.rows)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 2])
def test_values_equal_dense_jacobians_of_the_model_written_by_hand(found: Scan, folder: Path, window: int) -> None:
    rows = [row for row in found.rows if (row["length"], row["window"]) == (6, window)]
    oracle = Oracle(folder, found.tokens[rows[0]["model"], 6, window])
    assert len(rows) == 10
    for row in rows:
        layer, x = row["layer"], oracle.hidden[row["layer"]]
        f = oracle.block(layer) if row["head"] is None else oracle.head(layer, row["head"])
        sigma = spectral(f, x)
        assert row["value"] == pytest.approx(sigma, rel=1e-3)
        assert row["lower"] <= sigma * (1 + 1e-5)
        assert row["upper"] >= sigma * (1 - 1e-5)
        assert row["relative"] == pytest.approx(sigma * float(x.norm() / f(x).norm()), rel=2e-3)
        assert row["radius"] == pytest.approx(float(x.norm(dim=-1).max()), rel=1e-5)
        if row["head"] is not None:
            weights = oracle.weights(layer, x)[row["head"]]
            assert row["sink"] == pytest.approx(float(weights.sum(0).max()), rel=1e-4)
            assert row["entropy"] == pytest.approx(float(-(weights * weights.log()).sum(-1).mean()), rel=1e-4)
            gain = oracle.model.encoder.layer[layer].attention
            own = slice(8 * row["head"], 8 * row["head"] + 8)
            value = gain.output.dense.weight[:, own] @ gain.self.value.weight[own]
            path = torch.linalg.matrix_norm(weights, 2) * torch.linalg.matrix_norm(value, 2)
            assert row["value_path"] == pytest.approx(float(path), rel=2e-3)


@pytest.mark.parametrize("what", ["layer", "prefix", "model", "mlp", "residual"])
@pytest.mark.slow
def test_other_parts_equal_dense_jacobians_of_the_model(folder: Path, text: Path, what: str) -> None:
    (row,) = (found := scan(str(folder), text, lengths=6, layers=1, what=what)).rows
    oracle = Oracle(folder, found.tokens[row["model"], 6, 0])
    layers = oracle.model.encoder.layer
    last, x = layers[1], oracle.hidden[0 if what in ("prefix", "model") else 1]
    f = {
        "layer": lambda y: last(y[None])[0],
        "prefix": lambda y: last(layers[0](y[None]))[0],
        "model": lambda y: oracle.model.encoder(y[None]).last_hidden_state[0],
        "mlp": lambda y: last.output.dense(last.intermediate(y)),
        "residual": lambda y: last.attention(y[None])[0][0],
    }[what]
    x = last.attention(x[None])[0][0] if what == "mlp" else x
    assert row["value"] == pytest.approx(spectral(f, x), rel=1e-3)
    assert (row["layer"], row["head"], row["proved"], row["bounds"]) == (None if what == "model" else 1, None, None, {})


def test_energies_are_the_worst_direction_of_the_dense_jacobian(found: Scan, folder: Path) -> None:
    name = found.rows[0]["model"]
    oracle = Oracle(folder, found.tokens[name, 6, 1])
    dense = dense_jacobian(oracle.head(1, 2), oracle.hidden[1])
    expected = torch.linalg.svd(dense)[2][0].reshape(6, 32).square().sum(-1)
    energy = torch.tensor(found.energies[name, 1, 2, 6, 1], dtype=torch.float64)
    assert float(energy.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float((energy - expected).abs().max()) < 0.02


def test_every_bound_is_above_the_certified_lower_end(found: Scan) -> None:
    for row in found.rows:
        assert row["proved"] >= row["lower"]
        assert len(row["bounds"]) >= 3
        assert all(value is None or value >= row["lower"] for value in row["bounds"].values())
        assert row["lower"] <= row["value"] <= row["upper"]
        assert row["converged"]


def test_windows_are_what_stands_in_the_text(found: Scan, text: Path) -> None:
    words = text.read_text().split()
    for row in found.rows:
        tokens = found.tokens[row["model"], row["text_sha256"], row["length"], row["window"]]
        assert tokens[0] == "[CLS]"
        assert tokens[-1] == "[SEP]"
        body = row["length"] - 2
        assert tokens[1:-1] == words[row["window_start"] : row["window_start"] + body]
    assert len({row["window_start"] for row in found.rows if row["length"] == 6}) == 3


def test_a_number_does_not_depend_on_what_else_is_asked_for(found: Scan, folder: Path, text: Path) -> None:
    some = scan(str(folder), text, lengths=12, windows=3, what="head[layers=1,heads=2]", bounds="all")
    assert len(some) == 3
    assert all(row in timeless(found) for row in timeless(some))


@pytest.mark.slow
def test_a_store_takes_new_cells_and_measures_none_twice(folder: Path, text: Path, tmp_path: Path) -> None:
    begun: list[str] = []

    def more(**asked: Any) -> Scan:
        return scan(str(folder), text, out=tmp_path / "s.sqlite", progress=lambda now: begun.append(now.label), **asked)

    more(lengths=6, what="head[heads=0]")
    first = list(begun)
    more(lengths="6,12", what="head[heads=0],attention")
    assert not set(first[:-1]) & set(begun[len(first) :]) - {"n = 6, window 0: reading"}
    begun.clear()
    again = more(lengths="6,12", what="head[heads=0],attention")
    assert begun == ["done"]
    assert timeless(again) == timeless(scan(str(folder), text, lengths="6,12", what="head[heads=0],attention"))
    assert Scan.open(tmp_path / "s.sqlite").rows == again.rows


def test_measuring_anew_replaces_other_settings(folder: Path, text: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lengths": 6, "layers": 0, "out": tmp_path / "s.sqlite"}
    scan(str(folder), text, **asked)
    with pytest.raises(StoreError, match=r"rtol 0.001, not 0.1.*--no-resume"):
        scan(str(folder), text, rtol=0.1, **asked)
    found = scan(str(folder), text, rtol=0.1, resume=False, **asked)
    assert (
        {row["rtol"] for row in Scan.open(tmp_path / "s.sqlite").rows} == {0.1} == {row["rtol"] for row in found.rows}
    )


def test_two_texts_in_one_store_keep_their_own_tokens(folder: Path, text: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lengths": 6, "layers": 0, "out": tmp_path / "s.sqlite"}
    first = scan(str(folder), text, **asked)
    second = scan(str(folder), "w1 w2 w3 w4", **asked)
    both = Scan.open(tmp_path / "s.sqlite")
    assert len(both) == len(first) + len(second)
    row = second.rows[0]
    assert row["text"] == "given text"
    assert both.tokens[row["model"], row["text_sha256"], 6, 0] == ["[CLS]", "w1", "w2", "w3", "w4", "[SEP]"]
    assert (row["model"], 6, 0) not in both.tokens


def test_without_explanation_and_bounds_the_values_stay_the_same(found: Scan, folder: Path, text: Path) -> None:
    plain = scan(str(folder), text, lengths=12, windows=3, explain=False, bounds="none")
    proved = scan(str(folder), text, lengths=12, windows=3, explain=False, bounds="proved")
    values = {
        (r["layer"], r["head"], r["window"]): r["value"]
        for r in found.rows
        if r["length"] == 12 and r["what"] == "head"
    }
    assert {(r["layer"], r["head"], r["window"]): r["value"] for r in plain.rows} == values
    assert all(row["value_path"] is None and row["bounds"] == {} for row in (*plain.rows, *proved.rows))
    assert all(row["proved"] is None for row in plain.rows)
    assert all(row["proved"] > row["value"] for row in proved.rows)


@pytest.mark.skipif(sys.platform != "linux", reason="only here a file name may be any bytes")
def test_texts_and_stores_may_have_any_name_and_models_are_refused_by_it(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    model, words, out = (tmp_path / os.fsdecode(b"caf\xe9" + end) for end in (b"", b".txt", b".sqlite"))
    shutil.copytree(folder, model)
    shutil.copy(text, words)
    for _ in range(2):  # and taken up again
        found = scan(str(folder), words, lengths=8, what="head[layers=0,heads=0]", out=out)
        assert len(found) == 1
    assert found.rows[0]["text"] == "caf\ufffd.txt"
    with pytest.raises(InvalidInput, match="caf\ufffd is not UTF-8, so weights in it cannot be opened: rename it"):
        scan(str(model), words, lengths=8)


def test_progress_counts_every_cell_and_ends_at_the_whole(folder: Path, text: Path) -> None:
    seen: list[ScanProgress] = []
    scan(str(folder), text, lengths="6,12", progress=seen.append)
    assert [now.cells for now in seen] == sorted(now.cells for now in seen)
    assert (seen[0].cells, seen[-1].cells, seen[-1].total) == (0, 16, 16)
    assert [now.work for now in seen] == sorted(now.work for now in seen)
    assert seen[-1].work == 1.0


def test_exports_hold_the_same_numbers(found: Scan, tmp_path: Path) -> None:
    found.to_csv(tmp_path / "rows.csv")
    found.to_parquet(tmp_path / "rows.parquet")
    found.to_json(tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == found.rows
    frame = found.to_pandas()
    assert list(frame) == FIELDS
    assert frame["value"].tolist() == [row["value"] for row in found.rows]
    assert json.loads(frame["bounds"][0]) == found.rows[0]["bounds"]
    for other in (pd.read_parquet(tmp_path / "rows.parquet"), pd.read_csv(tmp_path / "rows.csv")):
        assert list(other) == FIELDS
        assert other["value"].tolist() == frame["value"].tolist()
        assert other["head"].fillna(-1).tolist() == frame["head"].fillna(-1).tolist()
        assert other["bounds"].tolist() == frame["bounds"].tolist()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x89PNG\r\n\x1a\n\x00\x00", b"text\x00with a zero"])
def test_binary_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="is not a text in UTF-8"):
        read_input(path)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is empty"):
        read_input(" \n")


def test_a_text_shorter_than_a_window_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="tokens"):
        scan(str(folder), "w1 w2 w3", lengths=12)


def test_a_length_above_the_limit_of_the_model_is_refused(folder: Path, text: Path) -> None:
    with pytest.raises(InvalidInput, match="64"):
        scan(str(folder), text, lengths="8,65")
