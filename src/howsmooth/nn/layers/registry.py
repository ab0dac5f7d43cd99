"""Kinds of attention layers by name: one table for replacement, training and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from howsmooth.nn.layers.attention_layer import AttentionLayer
from howsmooth.nn.layers.dot_product_layers import (
    CosineAttention,
    DotProductAttention,
    LipschitzNormAttention,
    NormControlledAttention,
    SigmoidAttention,
)
from howsmooth.nn.layers.gradient_step_layer import GradientStepAttention
from howsmooth.nn.layers.l2_layers import ContractiveL2Attention, L2Attention, UntiedL2Attention


@dataclass(frozen=True)
class LayerKind:
    """A kind of attention layer and its abilities.

    Attributes:
        layer: class of the layer. options: its fixed arguments.
        lipschitz: whether the layer has a Lipschitz constant on all inputs.
        causal: whether it can hide later tokens.
        dropout: whether it takes dropout on its weights.
        by_length: the option whose default depends on the number of tokens; causal models must fix it.
    """

    layer: type[AttentionLayer]
    options: Mapping[str, Any] = field(default_factory=dict)
    lipschitz: bool = True
    causal: bool = True
    dropout: bool = True
    by_length: str | None = None


def _contractive(**options: Any) -> LayerKind:
    return LayerKind(ContractiveL2Attention, options, dropout=False, by_length="max_tokens")


LAYER_KINDS: dict[str, LayerKind] = {
    "dot-product": LayerKind(DotProductAttention, lipschitz=False),
    "sigmoid": LayerKind(SigmoidAttention, lipschitz=False, by_length="logit_shift"),
    "cosine": LayerKind(CosineAttention),
    "norm-controlled": LayerKind(NormControlledAttention, lipschitz=False),
    "lipschitz-norm": LayerKind(LipschitzNormAttention, causal=False),
    "l2": LayerKind(L2Attention),
    "l2-untied": LayerKind(UntiedL2Attention, lipschitz=False),
    "contractive-l2": _contractive(),
    "contractive-2": _contractive(norm="2"),
    "contractive-inf": _contractive(norm="inf", bound="kim2021"),
    "gradient-step": LayerKind(GradientStepAttention, dropout=False),
}
"""Every kind of layer by its name; "contractive-2" and "contractive-inf" are "contractive-l2" with a fixed norm."""
