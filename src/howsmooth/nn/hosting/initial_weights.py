"""Initial weights of a layer from a trained attention: every weight with a counterpart is copied.

================  ====================================================================================================
dot-product       everything: the layer computes the same function as the old attention
sigmoid, cosine,  all four matrices and biases; the function differs by its weights P. Norm-controlled layers then clip
norm-controlled   singular values at their cap
lipschitz-norm    all four matrices; the biases of values move into the output, the others are dropped
l2,               W_h = W^Q_h/√2 (or keys, or the mean), so that 2 z_i·z_j/s is the old size of q_i·q_j/√k; W^V, W^O and
contractive-l2    the bias. The factor A_h is new, so that the function changes
l2-untied         the same, with W^K_h/√2 for the keys
gradient-step     nothing: it has other weights
================  ====================================================================================================
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from howsmooth.attention import Rotary, SelfAttention
from howsmooth.attention.stages import UnitNorm
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.nn.layers.attention_layer import AttentionLayer
from howsmooth.nn.layers.contractive_layer import ContractiveL2Attention
from howsmooth.nn.layers.dot_product_layers import DotProductAttention, NormControlledAttention
from howsmooth.nn.layers.gradient_step_layer import GradientStepAttention
from howsmooth.nn.layers.l2_layer import L2Attention, UntiedL2Attention
from howsmooth.nn.layers.lipschitz_norm_layer import LipschitzNormAttention
from howsmooth.nn.layers.registry import LAYER_KINDS

Tie = Literal["query", "key", "mean"]


def build(kind: str, old: SelfAttention, rotary: Rotary | None, dropout: float, **options: Any) -> AttentionLayer:
    """Make a layer of a kind with the shape of ``old`` and its own initial weights.

    Args:
        rotary: rotary positions, for layers with queries and keys.
        dropout: dropout of the old attention, for layers that take it.
        options: options of the layer's class.

    >>> build("l2", SelfAttention.random(8, heads=2), None, 0.0)
    L2Attention(
      8, heads=2
      (qk_proj): Linear(in_features=8, out_features=8, bias=False)
      (v_proj): Linear(in_features=8, out_features=8, bias=False)
      (out_proj): Linear(in_features=8, out_features=8, bias=False)
    )
    """
    chosen = LAYER_KINDS[kind]
    fixed = sorted(chosen.options.keys() & options.keys())
    if fixed:
        raise InvalidInput(f"{kind} attention says its {fixed[0]} by its name: leave the option out.")
    heads, width, d = old.query_weight.shape
    if heads * width != d or old.out_features != d or old.value_weight.shape[1] != width:
        raise UnsupportedModel(
            f"{heads} heads of width {width} do not fill the {d} features of a token, which the layers of howsmooth.nn "
            "need: this model's attention cannot be replaced."
        )
    if rotary is not None and not issubclass(chosen.layer, DotProductAttention):
        raise InvalidInput(
            f"this model encodes positions by rotating queries and keys (RoPE), which {chosen.layer.__name__} cannot "
            "do (its bound holds for tokens that are all projected alike): choose dot-product, sigmoid, cosine or "
            "norm-controlled, or drop the positions with drop_positions=True."
        )
    biases = (old.query_bias, old.key_bias, old.value_bias, old.output_bias)
    settings = {"bias": any(bias is not None for bias in biases)} | ({"dropout": dropout} if chosen.dropout else {})
    try:
        layer = chosen.layer(d, heads, **{**settings, **chosen.options, **options})
    except TypeError as error:
        raise InvalidInput(f"attention of kind {kind!r} does not take these options: {error}.") from None
    if isinstance(layer, DotProductAttention):
        layer.set_rotary(rotary)
    return layer


def check_plain(old: SelfAttention, where: str) -> None:
    """Refuse attention with features that every layer of `howsmooth.nn` lacks."""
    features = {
        "a soft-cap on its logits": old.softcap is not None,
        "normalised queries and keys": any(isinstance(stage, UnitNorm) for stage in old.query_stages),
        "a bias by relative position": not old.terms.hides_only,
    }
    present = [name for name, there in features.items() if there]
    if present:
        raise UnsupportedModel(f"{where} has {' and '.join(present)}, which no layer of howsmooth.nn can take over.")


@torch.no_grad()
def start_from(layer: AttentionLayer, old: SelfAttention, tie: Tie = "query") -> None:
    """Copy the weights of an old attention as far as possible; shared keys and values are repeated."""
    if tie not in get_args(Tie):
        raise InvalidInput(f"queries and keys are tied from 'query', 'key' or 'mean', got {tie!r}.")
    if isinstance(layer, GradientStepAttention):
        return
    group = old.heads // old.kv_heads
    key, value = (weight.repeat_interleave(group, dim=0) for weight in (old.key_weight, old.value_weight))
    share = _share(old)
    query, key = share * old.query_weight, share * key
    if isinstance(layer, L2Attention):
        query, key = query / 2**0.5, key / 2**0.5
        if isinstance(layer, UntiedL2Attention):
            layer.k_proj.weight.copy_(key.flatten(0, 1))
        else:
            query = {"query": query, "key": key, "mean": (query + key) / 2}[tie]
        layer.qk_proj.weight.copy_(query.flatten(0, 1))
        layer.v_proj.weight.copy_(value.flatten(0, 1))
    else:
        assert isinstance(layer, DotProductAttention | LipschitzNormAttention)
        layer.in_proj.weight.copy_(torch.cat([query, key, value]).flatten(0, 1))
    layer.out_proj.weight.copy_(old.output_weight.flatten(0, 1).T)
    _start_biases(layer, old, group)
    if isinstance(layer, ContractiveL2Attention):
        layer.follow_weights()
    if isinstance(layer, NormControlledAttention):
        layer.cap_()


def _share(old: SelfAttention) -> float:
    """Return the factor of queries and of keys: layers scale logits by 1/√k, a model may use another scale."""
    return float(old.scale * old.query_weight.shape[1] ** 0.5) ** 0.5


def _start_biases(layer: Any, old: SelfAttention, group: int) -> None:
    if layer.out_proj.bias is None:
        return
    zero = torch.zeros_like(layer.out_proj.bias)
    out = zero if old.output_bias is None else old.output_bias.clone()
    value = None if old.value_bias is None else old.value_bias.repeat_interleave(group, dim=0)
    if getattr(getattr(layer, "in_proj", None), "bias", None) is None:
        if value is not None:  # rows of P sum to one, so a bias of the values is one of the output
            out = out + (value[:, None] @ old.output_weight).sum((0, 1))
    else:
        query = zero if old.query_bias is None else _share(old) * old.query_bias.flatten()
        key = zero if old.key_bias is None else _share(old) * old.key_bias.repeat_interleave(group, dim=0).flatten()
        layer.in_proj.bias.copy_(torch.cat([query, key, zero if value is None else value.flatten()]))
    layer.out_proj.bias.copy_(out)
