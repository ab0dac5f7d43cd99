"""From a Hugging Face model to an attention map: weights, heads, positions, mask and scale of one layer.

A map is compared with the model's own attention before it is returned: the model runs once on random tokens. A copy of
the attention block is called again in double precision with the recorded arguments (positions, mask), on its own tokens
and on larger ones, whose logits are large enough that a wrong scale, soft-cap or mask cannot hide behind nearly uniform
weights.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import relative_error
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import validated
from howsmooth.attention import (
    Causal,
    Chunked,
    ComposedAttention,
    LogitBias,
    RelativeBias,
    Rotary,
    SelfAttention,
    SlidingWindow,
    UnitNorm,
)
from howsmooth.attention.composite_map import Feature, Features
from howsmooth.attention.stages import HeadNorm, PlaceScale
from howsmooth.errors import UnsupportedModel
from howsmooth.models.forward_pass import Call, record_calls, reference_mode, temporary_hooks
from howsmooth.models.model_inputs import random_inputs
from howsmooth.models.module_names import AttentionSite, attention_site, submodule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_ADAPTER = re.compile(r"\.(base_layer|lora_\w+\.\w+)(?=\.)")
"""Parts of parameter names that PEFT inserts."""
_SINKS, _RELATIVE_BIAS = "sinks", "relative_attention_bias"
"""Names of the logits of learned sinks and of a table of relative position biases, where a block has them."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
Rotations = dict[int, tuple[Tensor, Tensor]]
"""Identity of a rounded tensor → that tensor (a reference keeps its identity unique) and the same unrounded."""
TOLERANCE = 1e-4
"""Largest relative difference (Frobenius norm, without the output bias) between the map and the model's own output."""
_TOKENS = 24
_LONGEST = 512
_LARGE_LOGIT = 4.0


@validated
@alone
def from_transformers(model: PreTrainedModel, layer: int) -> SelfAttention | ComposedAttention:
    """The self-attention of one layer of a Hugging Face model, with output projection, nothing around it.

    Blocks with learned sinks, output gates, latent projections or norms over all heads give a `ComposedAttention`. The
    map is compared with the model's own attention before it is returned (`check_against_model`). It holds
    copies of the weights, in the model's dtype; the model is unchanged afterwards.

    Args:
        model: a model of one of the types in `howsmooth.models.MODEL_TYPES`, with or without a task head.
        layer: counted from 0.

    Raises:
        UnsupportedModel: the model is of another type, or its attention has a feature that the map lacks.
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


def read_attention(
    model: PreTrainedModel, site: AttentionSite, positions: Tensor | None = None
) -> SelfAttention | ComposedAttention:
    """The map that weights and settings describe, not yet compared with the model.

    Args:
        positions: positions of the tokens, ``(n,)``, when they are not 0, 1, 2, …; only rotary positions need it.
    """
    _refuse_unread_parameters(site)
    output, output_bias = _read_linear(site, site.names.output)
    kind = _layer_type(model.config, site.layer)
    rotary = read_rotary(model, site.owner, kind, positions, site.names.interleaved)
    mask = _mask(model.config, site.owner, kind)
    if site.names.layout == "latent":
        return _read_latent(site, rotary, mask)
    owner = site.owner
    width = next(int(getattr(owner, name)) for name in _HEAD_WIDTHS if hasattr(owner, name))
    heads = output.shape[1] // width
    (query, key, value, gate), (*biases, gate_bias) = _projections(site, heads, width)
    kv_heads = len(key) // width
    norms = _query_key_norms(site, heads, kv_heads, width)
    features = None
    if (
        norms is not None and heads > 1 and getattr(norms[0], "length", width**0.5) != width**0.5
    ):  # of all heads at once
        features, (query, key, value) = _normed_together((query, key, value), biases, norms)
        biases, norms = [None, None, biases[2]], None
    if norms is not None and rotary is not None and site.names.norms[0] == site.names.norms[1]:
        norms, rotary = _norm_of_turned(norms, rotary)
    attention = SelfAttention(
        query,
        key,
        value,
        output,
        heads=heads,
        kv_heads=kv_heads,
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output_bias=output_bias,
        mask=mask,
        logit_biases=_relative_bias(model),
        rotary=rotary,
        qk_norm=norms,
        softcap=getattr(owner, "attn_logit_softcapping", None),
        scale=getattr(owner, "scaling", width**-0.5),
    )
    if getattr(owner, "attn_temperature_tuning", False) and rotary is None:
        strength, step = (float(getattr(owner, name)) for name in ("attn_scale", "floor_scale"))
        attention.query_stages.insert(0, PlaceScale(strength, step, positions))
    sinks: Any = getattr(owner, _SINKS, None)
    if features is None and gate is None and sinks is None:
        return attention
    sinks = None if sinks is None else sinks.detach().clone()
    return ComposedAttention(attention, features=features, sinks=sinks, gate=gate, gate_bias=gate_bias)


def _read_linear(site: AttentionSite, path: str) -> tuple[Tensor, Tensor | None]:
    """Copies of a projection's weight ``(out, in)`` and bias."""
    from transformers.pytorch_utils import Conv1D

    module, added = _without_adapter(site.submodule(path), path, site.layer)
    if not isinstance(module, nn.Linear | Conv1D) or not module.weight.is_floating_point():
        raise UnsupportedModel(
            f"the projection {path!r} of layer {site.layer} is a {type(module).__name__} without plain floating-point "
            "weights: load the model without quantisation and merge its adapters first."
        )
    weight = module.weight.detach()
    if weight.is_meta:
        raise UnsupportedModel(
            f"the weights of layer {site.layer} are not in memory (they are on the meta device): load the model "
            "without offloading."
        )
    weight = weight if added is None else weight + added.to(weight.dtype)
    weight = weight.T if isinstance(module, Conv1D) else weight
    return weight.clone(), None if module.bias is None else module.bias.detach().clone()


def _without_adapter(module: Any, path: str, layer: int) -> tuple[nn.Module, Tensor | None]:
    """The projection under the LoRA adapters of PEFT, and the sum of the active adapters."""
    if not hasattr(module, "get_base_layer"):
        return module, None
    active: list[str] = getattr(module, "active_adapters", [])
    lora, dora = (getattr(module, kind, {}) for kind in ("lora_A", "use_dora"))
    if any(name not in lora or dora.get(name) for name in active):
        raise UnsupportedModel(
            f"the projection {path!r} of layer {layer} has an adapter that is not plain LoRA: merge it into the model."
        )
    base: nn.Module = module.get_base_layer()
    if getattr(module, "merged", False) or getattr(module, "disable_adapters", False) or not active:
        return base, None
    with torch.no_grad():
        return base, torch.stack([module.get_delta_weight(name).detach() for name in active]).sum(0)


def _projections(site: AttentionSite, heads: int, width: int) -> tuple[list[Any], list[Any]]:
    """Weights and biases of query, key, value and output gate, rows ordered head by head; None without them."""
    layout = site.names.layout

    def split(first: Tensor | None, *others: Tensor | None) -> list[Tensor | None]:
        if first is None:
            return [None, *(others or (None, None)), None]
        if layout == "separate":
            return [first, *others, None]
        if layout == "gated":
            query, gate = first.unflatten(0, (heads, 2, width)).unbind(1)
            return [query.flatten(0, 1), *others, gate.flatten(0, 1)]
        if layout == "per_head":
            return [*(third.flatten(0, 1) for third in first.unflatten(0, (heads, 3, width)).unbind(1)), None]
        shared = (len(first) - heads * width) // 2
        return [*first.split([heads * width, shared, shared]), None]

    weights, biases = zip(*(_read_linear(site, path) for path in site.names.inputs), strict=True)
    return split(*weights), split(*biases)


def _refuse_unread_parameters(site: AttentionSite) -> None:
    """Refuse a block with unread parameters: a feature whose weights are still zero would pass the self-check."""
    names = site.names
    read = (*names.inputs, names.output, *names.norms, *names.after, _RELATIVE_BIAS, *names.more)
    parameters = [name for name, _ in site.block.named_parameters() if name != _SINKS]
    unread = [name for name in parameters if _ADAPTER.sub("", name).rpartition(".")[0] not in read]
    if unread:
        raise UnsupportedModel(
            f"the attention of layer {site.layer} has parameters that hs.SelfAttention does not model "
            f"({', '.join(unread)}): measure it as a function instead."
        )


def _layer_type(config: Any, layer: int) -> str | None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    if types[layer] not in ("full_attention", "sliding_attention", "chunked_attention"):
        raise UnsupportedModel(
            f"layer {layer} has attention of type {types[layer]!r}: full, sliding and chunked attention can be read."
        )
    return str(types[layer])


def _mask(config: Any, owner: nn.Module, kind: str | None) -> LogitBias | None:
    if kind == "chunked_attention":
        return Chunked(config.attention_chunk_size)
    causal = bool(getattr(owner, "is_causal", False))
    window = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    if window is not None:
        return SlidingWindow(window, causal=causal)
    return Causal() if causal else None


def rotary_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules with the rotary frequencies of a model."""
    return [module for path, module in model.named_modules() if path.split(".")[-1] == "rotary_emb"]


def rotary_kinds(model: PreTrainedModel) -> list[str | None]:
    """The layer types with frequencies of their own (ModernBERT, OLMo 3); [None] where all layers share them."""
    types = [getattr(module, "rope_type", None) for module in rotary_modules(model)[:1]]
    return list(types[0]) if types and isinstance(types[0], dict) else [None]


def read_rotary(
    model: PreTrainedModel,
    owner: nn.Module,
    kind: str | None,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Rotary | None:
    """Rotary positions with the model's own frequencies, in the single precision in which the model turns."""
    rotary = next(iter(rotary_modules(model)), None)
    everywhere = getattr(owner, "sliding_window", None) is None or getattr(owner, "is_sliding", True)
    if rotary is None or not getattr(owner, "use_rope", True) or not everywhere:  # EXAONE 4 turns in windows only
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
    interleaved = interleaved and getattr(model.config, "rope_interleave", True)
    return Rotary(frequencies.detach().float().clone(), interleaved, amplitude, positions)


def _query_key_norms(site: AttentionSite, heads: int, kv_heads: int, width: int) -> tuple[Any, Any] | None:
    query, key = (submodule(site.block, path) for path in site.names.norms)
    if query is None or key is None:
        return None
    for_key = _read_norm(key, kv_heads, width, site.layer)
    if isinstance(for_key, HeadNorm):  # stages see keys once for each query head
        group = heads // kv_heads
        gain, shift = (
            t if t is None or t.dim() == 1 else t.repeat_interleave(group, dim=0) for t in (for_key.gain, for_key.shift)
        )
        for_key = HeadNorm(for_key.eps, gain, shift)
    return _read_norm(query, heads, width, site.layer), for_key


def _read_norm(norm: Any, heads: int, width: int, layer: int, only_rms: bool = False) -> Any:
    """RMSNorm (`UnitNorm`) or LayerNorm (`HeadNorm`) of each head, or RMSNorm of all heads at once.

    Some families multiply by the weight, some by 1 + weight: a probe tells which.
    """
    weight, bias = (None if t is None else t.detach().clone() for t in map(norm._parameters.get, ("weight", "bias")))
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is not None and heads > 1 and weight.shape == (heads * width,):
        heads, width, only_rms = 1, heads * width, True
    gains = [None] if weight is None else [weight, 1 + weight]
    candidates: list[UnitNorm | HeadNorm] = []
    if eps is not None and (weight is None or weight.shape in ((width,), (heads, width))):
        if bias is None and (weight is None or weight.dim() == 1):
            candidates += [UnitNorm.rms(width, eps, gain) for gain in gains]
        candidates += [HeadNorm(eps, gain, bias) for gain in gains if not only_rms]
    dtype, device = (torch.float32, None) if weight is None else (weight.dtype, weight.device)
    probe = torch.randn(1, heads, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with torch.no_grad():
        for stage in candidates:
            ours = stage(probe.float()[0][:, None])[:, 0]
            if torch.allclose(ours, norm(probe)[0].float(), rtol=2e-2, atol=2e-2):
                return stage
    raise UnsupportedModel(
        f"layer {layer} normalises queries and keys by {type(norm).__name__} in a way that is neither RMSNorm nor "
        "LayerNorm of each head, nor RMSNorm of all heads: measure it as a function instead."
    )


def _normed_together(
    weights: tuple[Tensor, Tensor, Tensor], biases: list[Tensor | None], norms: tuple[UnitNorm, UnitNorm]
) -> tuple[Features, tuple[Tensor, Tensor, Tensor]]:
    """Queries and keys that are normalised over all heads (OLMo 2): features from which heads are cut."""
    query, key, value = weights
    features = Features(Feature(query, biases[0], [norms[0]]), Feature(key, biases[1], [norms[1]]), Feature(None))
    sizes = (len(query), len(key), query.shape[1])
    eye = torch.eye(sum(sizes), dtype=query.dtype, device=query.device)
    picked_query, picked_key, tokens = eye.split(sizes)
    return features, (picked_query.clone(), picked_key.clone(), value @ tokens)


def _norm_of_turned(norms: tuple[UnitNorm, UnitNorm], rotary: Rotary) -> tuple[tuple[UnitNorm, UnitNorm], Rotary]:
    """Norms behind a rotation (Llama 4) written before it: without a gain they commute, and lengths follow ε."""
    if any(not isinstance(norm, UnitNorm) or norm.gain is not None for norm in norms):
        raise UnsupportedModel("a normalisation with a gain behind rotary positions cannot be read.")
    query, key = (UnitNorm(norm.eps / rotary.amplitude**2, norm.length) for norm in norms)
    return (query, key), Rotary(rotary.frequencies, rotary.interleaved, positions=rotary.positions)


def _relative_bias(model: PreTrainedModel) -> list[RelativeBias]:
    """The bias by bucketed distance of MPNet and T5, written out by offset; the outermost buckets have no end."""
    module: Any
    for module in model.modules():
        if not isinstance(getattr(module, _RELATIVE_BIAS, None), nn.Embedding):
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


def _read_latent(site: AttentionSite, rotary: Rotary | None, mask: LogitBias | None) -> ComposedAttention:
    """Multi-head latent attention (DeepSeek-AI 2024).

    A token x gives a query latent c^q = norm(W^{qa}x), a key–value latent c = norm(W^{a}x) and one key of positions
    r = W^{r}x for all heads. Head h has queries W^{qb}_h c^q, keys (W^{kb}_h c, r) and values W^{vb}_h c; rotary
    positions turn only r and the last coordinates of the queries. These coordinates come first here, which leaves the
    dot products unchanged.
    """
    owner: Any = site.owner
    heads, rank, turned, plain = (
        int(getattr(owner, name)) for name in ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    if getattr(owner, "q_proj", None) is not None:
        query, query_bias = _read_linear(site, "q_proj")
        first = Feature(None)
    else:
        latent, bias = _read_linear(site, "q_a_proj")
        first = Feature(latent, bias, [_read_norm(owner.q_a_layernorm, 1, len(latent), site.layer, only_rms=True)])
        query, query_bias = _read_linear(site, "q_b_proj")
    both, bias = _read_linear(site, "kv_a_proj_with_mqa")
    biases = (None, None) if bias is None else bias.split([rank, turned])
    down, places = both.split([rank, turned])
    features = Features(
        first,
        Feature(down, biases[0], [_read_norm(owner.kv_a_layernorm, 1, rank, site.layer, only_rms=True)]),
        Feature(places, biases[1]),
    )
    up, _ = _read_linear(site, "kv_b_proj")
    up = up.unflatten(0, (heads, -1))
    sizes = (query.shape[1], rank, turned)

    def at(index: int, rows: Tensor) -> Tensor:
        """Rows ``(heads, ·, ·)`` that read one of the three parts of the features."""
        return nn.functional.pad(rows, (sum(sizes[:index]), sum(sizes[index + 1 :])))

    def turned_first(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, plain:], rows[:, :plain]], dim=1)

    eye = torch.eye(turned, dtype=up.dtype, device=up.device).expand(heads, -1, -1)
    key = torch.cat([at(2, eye), at(1, up[:, :plain])], dim=1)
    output, output_bias = _read_linear(site, site.names.output)
    attention = SelfAttention(
        at(0, turned_first(query.unflatten(0, (heads, -1)))).flatten(0, 1),
        key.flatten(0, 1),
        at(1, up[:, plain:]).flatten(0, 1),
        output,
        heads=heads,
        query_bias=None if query_bias is None else turned_first(query_bias.reshape(heads, -1, 1)).flatten(),
        output_bias=output_bias,
        mask=mask,
        rotary=rotary,
        scale=float(owner.scaling),
    )
    return ComposedAttention(attention, features=features)


def check_against_model(
    model: PreTrainedModel, site: AttentionSite, attention: SelfAttention | ComposedAttention
) -> None:
    """Raise `UnsupportedModel` when the map differs from the model's own attention by more than `TOLERANCE`."""
    for name, weight in attention.named_buffers():
        if weight.is_floating_point() and "logit_biases" not in name and not bool(torch.isfinite(weight).all()):
            raise UnsupportedModel(
                f"the {name.replace('_', ' ')} of layer {site.layer} of {type(model).__name__} holds NaN or infinite "
                "values: the file is damaged, or training diverged."
            )
    with _unrounded_rotations(model) as unrounded_by_id:
        call = record_calls(model, [site], random_inputs(model, _length(model, attention)))[site.layer]
    exact = copy.deepcopy(attention).to("cpu", torch.float64)
    with reference_mode(model):
        block = copy.deepcopy(site.block).to("cpu", torch.float64)
        seen = _double(call.hidden, unrounded_by_id)
        for tokens in (seen, _large_tokens(exact, seen)):
            output = _own_output(AttentionSite(site.layer, block, site.names), call, tokens, unrounded_by_id)
            error = relative_error(exact(tokens), output, exact.output_bias)
            if not error <= TOLERANCE:
                raise UnsupportedModel(
                    f"the attention of layer {site.layer} as read from {type(model).__name__} differs from what the "
                    f"model computes by a relative {error:.1e}: a feature of it is not modelled, so measure it as "
                    "a function instead."
                )


def _length(model: PreTrainedModel, attention: SelfAttention | ComposedAttention) -> int:
    """Enough tokens to see past a sliding window, unless it is very long."""
    past = attention.terms.most_seen(math.inf) + 8
    wanted = max(_TOKENS, int(past)) if past <= _LONGEST else _TOKENS
    # RoBERTa counts positions from 2.
    return max(2, min(wanted, getattr(model.config, "max_position_embeddings", wanted + 2) - 2))


def _large_tokens(attention: SelfAttention | ComposedAttention, like: Tensor) -> Tensor:
    """Random tokens, scaled so that logits have a root mean square of about four."""
    tokens = torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)
    query, key, _ = attention.staged(tokens)
    size = float((query @ key.mT).square().mean().sqrt())
    return tokens * (_LARGE_LOGIT / size) ** 0.5 if size > 0 else tokens


def _own_output(site: AttentionSite, call: Call, tokens: Tensor, unrounded_by_id: Rotations) -> Tensor:
    """The output of the block's output projection when the block is called on ``tokens``."""
    outputs: list[Tensor] = []
    projection = site.submodule(site.names.output)
    with temporary_hooks([projection.register_forward_hook(lambda module, args, output: outputs.append(output))]):
        site.block(tokens, *_double(call.args, unrounded_by_id), **_double(call.kwargs, unrounded_by_id))
    return outputs[-1]


def _double(value: Any, unrounded_by_id: Rotations) -> Any:
    """Every floating tensor inside ``value`` in double precision on the CPU."""
    if isinstance(value, Tensor):
        value = unrounded_by_id.get(id(value), (value, value))[1].cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_double(item, unrounded_by_id) for item in value)
    if isinstance(value, dict):
        return {name: _double(item, unrounded_by_id) for name, item in value.items()}
    return value


@contextmanager
def _unrounded_rotations(model: PreTrainedModel) -> Iterator[Rotations]:
    """Collect the cosines and sines of rotary positions before the model rounds them to its own precision.

    Half precision has about three digits, too few for the tolerance.
    """
    unrounded_by_id: Rotations = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        exact = module.forward(args[0].double(), *args[1:], **kwargs)
        if isinstance(output, Tensor):  # complex numbers, which no model rounds
            return
        unrounded_by_id.update({id(pair[0]): pair for pair in zip(output, exact, strict=True)})

    with temporary_hooks(module.register_forward_hook(record, with_kwargs=True) for module in rotary_modules(model)):
        yield unrounded_by_id
