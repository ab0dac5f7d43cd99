"""From a Hugging Face model to an attention map: weights, heads, positions, mask and scale of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth.attention import Causal, LogitBias, RelativeBias, Rotary, SelfAttention, SlidingWindow, UnitNorm
from howsmooth.checks import door
from howsmooth.errors import UnsupportedModel
from howsmooth.models.alone import alone
from howsmooth.models.conventions import Site, attention_site, submodule
from howsmooth.models.self_check import check_against_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@door
@alone
def from_transformers(model: PreTrainedModel, layer: int) -> SelfAttention:
    """The self-attention of one layer of a Hugging Face model, with output projection, nothing around it.

    The map is compared with the model's own attention before it is returned (see `howsmooth.models.self_check`). It has
    copies of the weights, in the model's dtype; the model is left as it was.

    Args:
        model: a model of one of the types in `howsmooth.models.MODEL_TYPES`, with or without a task head.
        layer: counted from 0.

    Raises:
        UnsupportedModel: the model is of another type, or its attention does something the map would not do.
        InvalidInput: there is no such layer.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99))
    >>> from_transformers(model, layer=0)(torch.zeros(5, 32)).shape
    torch.Size([5, 32])
    """
    site = attention_site(model, layer)
    attention = read_attention(model, site)
    check_against_model(model, site, attention)
    return attention


def read_attention(model: PreTrainedModel, site: Site, positions: Tensor | None = None) -> SelfAttention:
    """The map as the weights and settings describe it, not yet compared with the model.

    Args:
        positions: where the tokens stand, ``(n,)``, when not at 0, 1, 2, …; only rotary positions need it.
    """
    _refuse_unread_parameters(site)
    owner = site.owner
    width = next(int(getattr(owner, name)) for name in _HEAD_WIDTHS if hasattr(owner, name))
    output, output_bias = _linear(site, site.names.output)
    heads = output.shape[1] // width
    (query, key, value), biases = _projections(site, heads, width)
    kind = _layer_type(model.config, site.layer)
    return SelfAttention(
        query,
        key,
        value,
        output,
        heads=heads,
        kv_heads=len(key) // width,
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output_bias=output_bias,
        mask=_mask(model.config, owner, kind),
        logit_biases=_relative_bias(model),
        rotary=read_rotary(model, owner, kind, positions),
        qk_norm=_query_key_norms(site, width),
        softcap=getattr(owner, "attn_logit_softcapping", None),
        scale=getattr(owner, "scaling", width**-0.5),
    )


def _linear(site: Site, path: str) -> tuple[Tensor, Tensor | None]:
    """Copies of a projection's weight ``(out, in)`` and bias."""
    from transformers.pytorch_utils import Conv1D

    module = site.submodule(path)
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UnsupportedModel(
            f"the projection {path!r} of layer {site.layer} is a {type(module).__name__} without plain floating-point "
            "weights: load the model without quantisation and merge its adapters first."
        )
    if weight.is_meta:
        raise UnsupportedModel(
            f"the weights of layer {site.layer} are not in memory (they are on the meta device): load the model "
            "without offloading."
        )
    weight = weight.detach().T if isinstance(module, Conv1D) else weight.detach()
    return weight.clone(), None if module.bias is None else module.bias.detach().clone()


def _projections(site: Site, heads: int, width: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of query, key and value, rows ordered head by head."""
    if site.names.layout == "separate":
        pairs = [_linear(site, path) for path in site.names.inputs]
        return [weight for weight, _ in pairs], [bias for _, bias in pairs]
    fused, bias = _linear(site, site.names.inputs[0])

    def split(rows: Tensor) -> list[Tensor]:
        if site.names.layout == "per_head":
            return [third.flatten(0, 1) for third in rows.unflatten(0, (heads, 3, width)).unbind(1)]
        shared = (len(rows) - heads * width) // 2
        return list(rows.split([heads * width, shared, shared]))

    return split(fused), [None] * 3 if bias is None else list(split(bias))


def _refuse_unread_parameters(site: Site) -> None:
    """No parameter of the block may stay unread: a feature whose weights are still zero would pass the check unseen."""
    read = (*site.names.inputs, site.names.output, *site.names.norms, *site.names.after, site.names.bias)
    unread = [name for name, _ in site.block.named_parameters() if name.rpartition(".")[0] not in read]
    if unread:
        raise UnsupportedModel(
            f"the attention of layer {site.layer} has parameters that hs.SelfAttention does not model "
            f"({', '.join(unread)}): measure it as a function instead."
        )


def _layer_type(config: Any, layer: int) -> str | None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    if types[layer] not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(
            f"layer {layer} has attention of type {types[layer]!r}, but full and sliding attention can be read."
        )
    return str(types[layer])


def _mask(config: Any, owner: nn.Module, kind: str | None) -> LogitBias | None:
    causal = bool(getattr(owner, "is_causal", False))
    window = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    if window is not None:
        return SlidingWindow(window, causal=causal)
    return Causal() if causal else None


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The module that knows the model's rotary frequencies, where it has one."""
    return next((module for path, module in model.named_modules() if path.split(".")[-1] == "rotary_emb"), None)


def rotary_kinds(model: PreTrainedModel) -> list[str | None]:
    """The types of layers that have frequencies of their own (ModernBERT, OLMo 3); [None] where all share them."""
    types = getattr(rotary_module(model), "rope_type", None)
    return list(types) if isinstance(types, dict) else [None]


def read_rotary(
    model: PreTrainedModel, owner: nn.Module, kind: str | None, positions: Tensor | None = None
) -> Rotary | None:
    """Rotary positions with the model's own frequencies, in the single precision in which the model turns."""
    rotary = rotary_module(model)
    if rotary is None or not getattr(owner, "use_rope", True):
        return None
    prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
    rope: Any = getattr(rotary, "rope_type", "default")
    rope = rope.get(kind, "default") if isinstance(rope, dict) else rope
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"this model's rotary frequencies change with the length of the input (rope type {rope!r}), which one map "
            "cannot do: build an hs.SelfAttention with the frequencies of your length."
        )
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    if frequencies is None:
        return None
    amplitude = getattr(rotary, f"{prefix}attention_scaling")
    return Rotary(frequencies.detach().float().clone(), amplitude=amplitude, positions=positions)


def _query_key_norms(site: Site, width: int) -> tuple[UnitNorm, UnitNorm] | None:
    query, key = (submodule(site.block, path) for path in site.names.norms)
    if query is None or key is None:
        return None
    return _rms_norm(query, width, site.layer), _rms_norm(key, width, site.layer)


def _rms_norm(norm: Any, width: int, layer: int) -> UnitNorm:
    """RMSNorm over a head. Some families multiply by the weight, some by 1 + weight: a probe of ones tells which."""
    weight, eps = norm.weight.detach(), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is not None and weight.shape == (width,):
        with torch.no_grad():
            probe = norm(torch.ones_like(weight)[None])[0] * (1 + eps) ** 0.5
        for gain in (weight.clone(), 1 + weight):
            if torch.allclose(probe.float(), gain.float(), rtol=1e-2, atol=1e-2):
                return UnitNorm.rms(width, eps, gain)
    raise UnsupportedModel(
        f"layer {layer} normalises queries and keys by {type(norm).__name__} in a way that is not RMSNorm over each "
        "head: measure it as a function instead."
    )


def _relative_bias(model: PreTrainedModel) -> list[RelativeBias]:
    """The bias by bucketed distance of MPNet and T5, written out by offset; the outermost buckets have no end."""
    module: Any
    for module in model.modules():
        if not isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding):
            continue
        weight = module.relative_attention_bias.weight.detach()
        if hasattr(module, "_relative_position_bucket"):  # T5
            reach = module.relative_attention_max_distance
            settings: tuple[Any, ...] = (not module.is_decoder, module.relative_attention_num_buckets, reach)
            bucket = module._relative_position_bucket
        else:  # MPNet
            reach, settings, bucket = 128, (), module.relative_position_bucket
        offsets = torch.arange(-reach, reach + 1, device=weight.device)
        return [RelativeBias(weight[bucket(offsets, *settings)].T.clone())]
    return []
