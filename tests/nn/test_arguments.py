"""Constructors refuse what they cannot take, in one sentence, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from howsmooth import nn as layers
from howsmooth.errors import InvalidInput
from howsmooth.nn.invertible.flows import sequence_flow
from howsmooth.nn.invertible.transformer import ActNorm
from howsmooth.nn.layers.weight_norms import SpectralNorm

NUMBERS: tuple[Any, ...] = (math.nan, math.inf, "1", None, [1])
COUNTS: tuple[Any, ...] = (0, -1, 2.5, True, *NUMBERS)
BELOW: tuple[Any, ...] = (0, -1.0, *NUMBERS)
PLAIN = {
    "L2Attention": layers.L2Attention,
    "ContractiveL2Attention": layers.ContractiveL2Attention,
    "DotProductAttention": layers.DotProductAttention,
    "SigmoidAttention": layers.SigmoidAttention,
    "CosineAttention": layers.CosineAttention,
    "NormControlledAttention": layers.NormControlledAttention,
    "LipschitzNormAttention": layers.LipschitzNormAttention,
    "GradientStepAttention": layers.GradientStepAttention,
}
OWN: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "ContractiveL2Attention": (
        layers.ContractiveL2Attention,
        {"embed_dim": 8, "num_heads": 2},
        {
            "coefficient": BELOW,
            "max_tokens": tuple(each for each in COUNTS if each is not None),
            "norm": (1, math.nan, "3", [2]),
            "bound": ("", "kim2021", None, 1),
            "dropout": (0.5, -1),
        },
    ),
    "SigmoidAttention": (
        layers.SigmoidAttention,
        {"embed_dim": 8, "num_heads": 2},
        {"logit_shift": (math.nan, math.inf, "1", [1])},
    ),
    "CosineAttention": (
        layers.CosineAttention,
        {"embed_dim": 8, "num_heads": 2},
        {"temperature": NUMBERS, "value_scale": NUMBERS, "eps": BELOW},
    ),
    "NormControlledAttention": (
        layers.NormControlledAttention,
        {"embed_dim": 8, "num_heads": 2},
        {"cap": BELOW},
    ),
    "GradientStepAttention": (
        layers.GradientStepAttention,
        {"embed_dim": 8, "num_heads": 2},
        {"context_size": COUNTS, "step": (1.5, *BELOW), "dropout": (0.5,)},
    ),
    "ContractiveMLP": (
        layers.ContractiveMLP,
        {"width": 4, "hidden": 8},
        {
            "width": COUNTS,
            "hidden": COUNTS,
            "depth": COUNTS,
            "out_width": (0, -1, 2.5, "4"),
            "coefficient": BELOW,
            "activation": ("gelu", None, ["relu"]),
            "norm": (1, math.nan, "3", [2]),
        },
    ),
    "InvertibleTransformer": (
        layers.InvertibleTransformer,
        {"width": 4},
        {
            "width": COUNTS,
            "heads": (3, *COUNTS),
            "depth": COUNTS,
            "hidden": (0, -1, 2.5, "4"),
            "coefficient": (1.0, 1.5, *BELOW),
            "attention_width": (0, -1, 2.5, "4"),
            "tokens": (0, -1, 2.5, "4"),
            "norm": (1, math.nan, [2]),
        },
    ),
    "InvertibleResidual": (
        layers.InvertibleResidual,
        {"f": layers.ContractiveMLP(2, 4, 0.5)},
        {"coefficient": (1.0, 1.5, -0.1, math.nan, math.inf, "1"), "norm": (1, math.nan, "2")},
    ),
    "ScaledBranch": (layers.ScaledBranch, {"f": layers.ContractiveMLP(2, 4, 0.5), "factor": 1.0}, {"factor": NUMBERS}),
    "ActNorm": (ActNorm, {"width": 4}, {"width": COUNTS, "tokens": (0, -1, 2.5, "4")}),
    "SpectralNorm": (SpectralNorm, {"rows": 2, "columns": 3}, {"rows": COUNTS, "columns": COUNTS, "width": COUNTS}),
    "SpectralCaps": (layers.SpectralCaps, {"module": nn.Linear(2, 2)}, {"cap": BELOW, "exact_every": COUNTS}),
    "SmoothnessMonitor": (
        layers.SmoothnessMonitor,
        {"model": layers.L2Attention(4, 2)},
        {"every": COUNTS, "steps": (1, *COUNTS), "rtol": (1.0, *BELOW), "log": (5,)},
    ),
    "JacobianPenalty": (
        layers.JacobianPenalty,
        {"model": layers.L2Attention(4, 2)},
        {"power": (0, 3, math.nan, "2"), "steps": COUNTS, "layers": (["nowhere"], [])},
    ),
    "sequence_flow": (
        sequence_flow,
        {"transformer": layers.InvertibleTransformer(2), "n": 3, "width": 2},
        {"n": COUNTS, "width": COUNTS},
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_attention_layer_checks_what_all_share(name: str) -> None:
    wrong: list[dict[str, Any]] = [{"embed_dim": value} for value in COUNTS] + [
        {"num_heads": value} for value in COUNTS
    ]
    wrong += [{"num_heads": 3}, {"bias": "yes"}, {"batch_first": None}]
    wrong += [{"dropout": value} for value in (1.0, -0.1, *NUMBERS)]
    for given in wrong:
        with pytest.raises(InvalidInput):
            PLAIN[name](**{"embed_dim": 8, "num_heads": 2} | given)


@pytest.mark.parametrize("name", OWN)
def test_own_arguments_are_checked(name: str) -> None:
    make, good, wrong = OWN[name]
    make(**good)
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidInput):
                make(**good | {argument: value})


def test_whole_numbers_of_numpy_are_taken() -> None:
    size = torch.ones(8).numpy().astype("int64").sum()
    assert layers.L2Attention(size, 2).embed_dim == 8
    assert layers.ContractiveL2Attention(8, 2, coefficient=torch.ones(1).numpy()[0] / 2).coefficient == 0.5


def test_calls_check_their_options() -> None:
    block = layers.InvertibleResidual(layers.ContractiveMLP(2, 4, 0.5)).eval()
    x = torch.zeros(3, 2)
    for options in ({"tolerance": 0.0}, {"tolerance": math.nan}, {"max_iterations": 0}, {"max_iterations": 1.5}):
        with pytest.raises(InvalidInput):
            block.inverse(x, **options)
    for options in ({"samples": True}, {"samples": 2.5}, {"tolerance": "x"}, {"tolerance": -1.0}):
        with pytest.raises(InvalidInput):
            block.log_det(x, "series", **options)
    for confidence in (0.0, 1.0, math.nan, "99"):
        with pytest.raises(InvalidInput):
            block.log_det(x).error_bar(confidence)  # type: ignore[arg-type]
    for n in (0, -1, math.nan, 1.5, "3", True):
        with pytest.raises(InvalidInput):
            layers.L2Attention(4, 2).lipschitz_bound(n)  # type: ignore[arg-type]
