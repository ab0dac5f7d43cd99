"""Attention of architectures without an entry in the table, found by tracing tensors through the attention interface.

All linear layers of the model are recorded. When the interface is called with q, k and v, the linear layers since the
last call are searched for those that made them, from one and the same input x; the next linear layer that receives the
output of the call is the output projection. Names play no part. A factor and the model's own rotary positions may lie
between a linear layer and q or k; everything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth._util.common import relative_error
from howsmooth.attention import (
    Causal,
    ComposedAttention,
    CrossAttention,
    DenseBias,
    LogitBias,
    Rotary,
    SelfAttention,
)
from howsmooth.errors import UnsupportedModel
from howsmooth.models.attention_reader import read_rotary, rotary_kinds
from howsmooth.models.forward_pass import (
    AttentionCall,
    Inputs,
    RealTokens,
    attention_calls,
    run_model,
    temporary_hooks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAME = 1e-5


class FoundAttention(NamedTuple):
    """An attention found in one run: its path and map, the tokens of queries and keys, the output and the call."""

    name: str
    attention: SelfAttention | ComposedAttention | CrossAttention
    x: Tensor
    keys: Tensor
    output: Tensor
    call: Any = None  # AttentionCall, where the interface was called


@dataclass(frozen=True)
class _Linear:
    """Weight ``(out, d)`` and bias with which x became y."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    y: Tensor


def find_attention(
    model: PreTrainedModel, inputs: Inputs, kind: type[SelfAttention | CrossAttention]
) -> list[FoundAttention]:
    """The attentions of a kind in one run, in the order of computing; `UnsupportedModel` where there is none."""
    linears: list[_Linear] = []
    waiting: list[AttentionCall] = []
    names = {module: name for name, module in model.named_modules()}
    attentions: list[FoundAttention] = []

    def on_linear(module: Any, args: Any, y: Any) -> None:
        if not (args and isinstance(args[0], Tensor) and isinstance(y, Tensor)):
            return  # a router that is built on a linear layer, and returns more than its product
        weight = module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        one = _Linear(weight if isinstance(module, nn.Linear) else weight.T, bias, args[0], y)
        if waiting and one.x.shape == waiting[0].output.shape and torch.equal(one.x, waiting[0].output):
            call = waiting.pop()
            name = names[call.module]
            real = RealTokens.read_by(call.module, model, inputs)
            x, keys, attention = _rebuild(model, name, call, linears, one, real)
            attentions.append(FoundAttention(name, attention, x, keys, y, call))
            linears.clear()
        else:
            linears.append(one)

    def on_call(call: AttentionCall) -> None:
        refuse_unprojected()
        waiting.append(call)

    def refuse_unprojected() -> None:
        if waiting:
            raise UnsupportedModel(
                f"what {names[waiting[0].module]} computes does not go straight into a linear output projection, which "
                "hs.SelfAttention does not model: measure the module as a function, models.site(model, path, …)."
            )

    from transformers.pytorch_utils import Conv1D

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    with temporary_hooks(layer.register_forward_hook(on_linear) for layer in layers), attention_calls(model, on_call):
        run_model(model, inputs)
        refuse_unprojected()
    found = [one for one in attentions if isinstance(one.attention, kind)]
    if not found:
        name = "self-attention" if kind is SelfAttention else "cross-attention"
        raise UnsupportedModel(
            f"no {name} was found in {type(model).__name__} (model type {model.config.model_type!r}): it has none, or "
            "computes it without transformers' attention interface; measure a module of it as a function, "
            "models.site(model, path, …)."
        )
    return found


def _rebuild(
    model: PreTrainedModel, name: str, call: AttentionCall, linears: list[_Linear], last: _Linear, real: RealTokens
) -> tuple[Tensor, Tensor, SelfAttention | CrossAttention]:
    """The map behind one call of the interface and the tokens of its queries and keys, which may be two sequences."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    value = _source(call.value, linears, None)
    for rotary in _rotations(model, call.module, real):
        query, key = (_source(made, linears, rotary) for made in (call.query, call.key))
        if query is not None and key is not None and value is not None:
            break
    else:
        raise UnsupportedModel(
            f"the queries, keys or values of {name} are not plain linear functions of its tokens (something more than "
            "rotary positions comes between), which hs.SelfAttention does not model: measure the module as a function, "
            "models.site(model, path, …)."
        )
    weights = query.weight, key.weight, value.weight, last.weight.clone()
    shared: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "scale": 1.0}
    shared |= {"query_bias": query.bias, "key_bias": key.bias, "value_bias": value.bias}
    shared["output_bias"] = None if last.bias is None else last.bias.clone()
    if not (query.x.shape == key.x.shape and torch.equal(query.x, key.x) and torch.equal(key.x, value.x)):
        if key.x.shape != value.x.shape or not torch.equal(key.x, value.x):
            raise UnsupportedModel(f"keys and values of {name} come from different tokens, which is not modelled.")
        return query.x, key.x, CrossAttention(*weights, bias=_bias(call.bias, heads), **shared)
    if rotary is not None and real.keep is not None:
        rotary = Rotary(rotary.frequencies, rotary.interleaved, rotary.amplitude, real.positions)
    mask = _mask(call.bias, real.keep)
    return query.x, key.x, SelfAttention(*weights, mask=mask, rotary=rotary, softcap=call.softcap, **shared)


def _rotations(model: PreTrainedModel, module: nn.Module, real: RealTokens) -> Iterator[Rotary | None]:
    """Possible rotations of queries and keys: none, or by the model's own frequencies, of halves or neighbours."""
    yield None
    # With padding, all tokens are searched through first, at their own places 0, 1, 2, ….
    for kind in rotary_kinds(model):
        rotary = read_rotary(model, module, kind, None if real.keep is not None else real.positions)
        if rotary is not None:
            yield rotary
            yield Rotary(rotary.frequencies, True, rotary.amplitude, rotary.positions)


def _source(made: Tensor, linears: list[_Linear], rotary: Rotary | None) -> _Linear | None:
    """The linear layer, or the part of one, that made these queries, keys or values; the factor on them included."""
    _, heads, _, width = made.shape
    for one in reversed(linears):
        if one.y.shape[:-1] != (1, made.shape[2]):
            continue
        for rows in _splits(one.y.shape[-1], heads, width):
            plain = one.y[..., rows].unflatten(-1, (heads, width)).transpose(1, 2)
            turned = plain if rotary is None else rotary(plain)
            size = float(turned.square().sum())
            factor = float((made * turned).sum()) / size if size > 0 else 1.0
            if relative_error(factor * turned, made) <= _SAME:
                bias = None if one.bias is None else one.bias[rows] * factor
                return _Linear(one.weight[rows] * factor, bias, one.x, made)
    return None


def _splits(features: int, heads: int, width: int) -> Iterator[Tensor]:
    """Index sets that may hold one of query, key and value: all features, or blocks of them, or blocks per head."""
    size = heads * width
    everything = torch.arange(features)
    if features == size:
        yield everything
        return
    for start in range(0, features - size + 1, width):
        yield everything[start : start + size]
    if features == 3 * size:
        yield from (third.flatten() for third in everything.unflatten(0, (heads, 3, width)).unbind(1))


def _bias(bias: Tensor | None, heads: int) -> Tensor | None:
    """The term added to the logits of cross-attention, ``(heads, n, m)``; None for zeros."""
    bias = _with_infinities(bias)
    return None if bias is None else bias.expand(heads, -1, -1).clone()


def _mask(bias: Tensor | None, keep: Tensor | None) -> LogitBias | None:
    """None or the causal mask where the bias is one of them, otherwise the bias written out for this length."""
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], bias.shape[-1], -1)
        bias = bias if keep is None else bias[..., keep, :][..., keep]
    bias = _with_infinities(bias)
    mask = None if bias is None else DenseBias(bias.clone())
    return Causal() if mask is not None and mask.is_causal else mask


def _with_infinities(bias: Tensor | None) -> Tensor | None:
    """A bias ``(1, heads or 1, n, m)`` without its batch, with −∞ for the lowest numbers; None for zeros."""
    if bias is None:
        return None
    bias = torch.where(bias < torch.finfo(bias.dtype).min / 2, float("-inf"), bias)[0]
    return None if bool((bias == 0).all()) else bias
