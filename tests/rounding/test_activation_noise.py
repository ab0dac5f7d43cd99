"""Predicted noise of low precision against the layers themselves, run by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.rounding.activation_noise import rounding_noise
from tests.cli.command import Command

TINY = "random:llama[layers=3,width=32]"
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


def hidden_states(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """What enters the first layer and leaves each, by a hook on every layer."""
    states: list[torch.Tensor] = []
    layers = model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda m, args, kw: states.append(args[0][0]), with_kwargs=True)]
    hooks += [layer.register_forward_hook(lambda m, args, out: states.append(out[0])) for layer in layers]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return [state[0] if state.dim() == 3 else state for state in states]


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_actual_noise_is_the_difference_of_two_runs_and_is_predicted(dtype: torch.dtype, name: str) -> None:
    opened = open_model(TINY)
    [window] = opened.windows(TEXT, length=16)
    found = rounding_noise(opened, window, name)
    exact = hidden_states(opened.model, window.ids)
    low = hidden_states(copy.deepcopy(opened.model).to(dtype), window.ids)
    for layer in range(3):
        difference = (low[layer + 1].double() - exact[layer + 1].double()).norm()
        assert float(found.actual[layer]) == pytest.approx(float(difference), rel=1e-6)
        assert float(found.size[layer]) == pytest.approx(float(exact[layer + 1].norm()), rel=1e-5)
    assert bool((found.predicted / found.actual - 1).abs().max() < 0.1)
    assert float(found.cosine[0]) > 0.999  # the first layer is given the same; later ones round other numbers
    assert opened.model.dtype == torch.float32


def test_a_layer_with_large_weights_takes_over() -> None:
    opened = open_model(TINY)
    opened.model.layers[1].mlp.down_proj.weight.mul_(300.0)
    [window] = opened.windows(TEXT, length=16)
    found = rounding_noise(opened, window)
    assert found.source.tolist()[1:] == [1, 1]
    assert float(found.share[1]) > 0.5


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1e7, "layer 1 of .* leaves the range of fp16"), (float("nan"), "layers.1.mlp.down_proj.weight holds NaN")],
)
def test_layers_that_overflow_are_named(factor: float, said: str) -> None:
    opened = open_model(TINY)
    opened.model.layers[1].mlp.down_proj.weight.mul_(factor)
    [window] = opened.windows(TEXT, length=8)
    with pytest.raises(InvalidInput, match=said):
        rounding_noise(opened, window, "fp16")


def test_the_command_prints_rows_and_refuses_other_dtypes() -> None:
    rows = Command("noise").json(TINY, "--length", 12)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert all(row["predicted"] > 0 for row in rows)
    shown = Command("noise").run(TINY, "--length", 12)
    assert shown.exit_code == 0
    assert "most from" in shown.stdout
    assert "the precision is bf16, fp16, got 'int8'" in Command("noise").refusal(TINY, "--precision", "int8")
    assert "models of text" in Command("noise").refusal("random:vit[layers=1,width=32]")
    opened = open_model(TINY)
    [window] = opened.windows(TEXT, length=8)
    with pytest.raises(InvalidInput, match="dtype is bf16, fp16"):
        rounding_noise(opened, window, "int8")
