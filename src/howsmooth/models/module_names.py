"""Where each kind of model keeps its attention: a table of names, and the search for them.

A kind is listed only when a test reads a small instance of it. Matching names alone would not do: some models (BigBird)
attend fully on short inputs and sparsely on long ones, which no check on a short input can notice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from howsmooth.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Layout = Literal["separate", "gated", "contiguous", "per_head", "latent"]


@dataclass(frozen=True)
class Convention:
    """How an attention block names its parts, as paths inside the block.

    Attributes:
        inputs: the projections: query, key and value, or the one fused projection.
        output: the output projection.
        layout: of a fused projection's features: "contiguous" (all queries, all keys, all values) or "per_head" (query,
            key and value of the first head, then of the second, …). "gated": the query projection gives the queries and
            the output gate of the first head, then of the second, …; "latent": multi-head latent attention, see
            `howsmooth.models.latent_attention`.
        norms: normalisations of queries and keys, where the block has them.
        after: what follows the output projection inside the block and is not part of the map.
        bias: a table of relative position biases, where a block has one.
        sinks: logits of learned sinks, where a block has them.
        more: what else is read, where a block has it.
        interleaved: rotary positions turn neighbouring coordinates.
    """

    inputs: tuple[str, ...]
    output: str
    layout: Layout = "separate"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    after: tuple[str, ...] = ()
    bias: str = "relative_attention_bias"
    sinks: str = "sinks"
    more: tuple[str, ...] = ()
    interleaved: bool = False

    def fits(self, module: nn.Module) -> bool:
        """Whether the module holds all projections."""
        return all(submodule(module, path) is not None for path in (*self.inputs, self.output))


_Q_K_V_PROJ = ("q_proj", "k_proj", "v_proj")
_O_PROJ = Convention(_Q_K_V_PROJ, "o_proj")
_LATENT = Convention(
    ("kv_a_proj_with_mqa", "kv_b_proj"),
    "o_proj",
    "latent",
    more=("kv_a_layernorm", "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"),
    interleaved=True,
)
_BERT = Convention(("self.query", "self.key", "self.value"), "output.dense", after=("output.LayerNorm",))

CONVENTIONS: dict[str, Convention] = {
    **dict.fromkeys(["bert", "camembert", "electra", "roberta", "xlm-roberta"], _BERT),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3"], _O_PROJ),
    **dict.fromkeys(["smollm3", "starcoder2", "deit", "dinov2", "vit"], _O_PROJ),
    **dict.fromkeys(["exaone4", "gpt_oss", "olmo2", "olmo3", "qwen3_moe"], _O_PROJ),
    "cohere": Convention(_Q_K_V_PROJ, "o_proj", interleaved=True),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], _LATENT),
    "llama4_text": Convention(_Q_K_V_PROJ, "o_proj", norms=("qk_norm", "qk_norm"), interleaved=True),
    "qwen3_next": Convention(_Q_K_V_PROJ, "o_proj", "gated"),
    "distilbert": Convention(("q_lin", "k_lin", "v_lin"), "out_lin"),
    "gpt2": Convention(("c_attn",), "c_proj", "contiguous"),
    "gpt_neox": Convention(("query_key_value",), "dense", "per_head"),
    **dict.fromkeys(["mpnet", "t5"], Convention(("q", "k", "v"), "o")),
    **dict.fromkeys(["opt", "wav2vec2", "whisper"], Convention(_Q_K_V_PROJ, "out_proj")),
    "phi": Convention(_Q_K_V_PROJ, "dense", norms=("q_layernorm", "k_layernorm")),
    "phi3": Convention(("qkv_proj",), "o_proj", "contiguous"),
}
"""Model type (as in a model's configuration) → names."""

MODEL_TYPES = tuple(sorted(CONVENTIONS))
"""The model types that can be read."""


RANDOM_NAMES = (
    *("bert", "distilbert", "electra", "gemma", "gemma2", "gemma3", "gpt-neox", "gpt2", "llama", "mistral", "mpnet"),
    *("opt", "phi", "qwen2", "qwen3", "roberta", "t5", "vit", "wav2vec2", "whisper"),
)
"""The architectures that come with random weights."""


@dataclass(frozen=True)
class Site:
    """One attention block of a model, and its dotted path there."""

    layer: int
    block: nn.Module
    names: Convention
    path: str = ""

    @property
    def owner(self) -> nn.Module:
        """The module that holds the projections and their settings (head width, scale, causal or not)."""
        return self.submodule(self.names.inputs[0].rpartition(".")[0])

    def submodule(self, path: str) -> nn.Module:
        """A submodule of the block."""
        return self.block.get_submodule(path)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at ``path``, or None when there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def attention_sites(model: PreTrainedModel) -> list[Site]:
    """The self-attention blocks of a model, one per layer, in order."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in CONVENTIONS:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {kind!r}) is not among the models whose attention can be read "
            f"({', '.join(MODEL_TYPES)}): build an hs.SelfAttention from its weights, or measure its attention as a "
            "function."
        )
    names = CONVENTIONS[kind]
    blocks = {path: module for path, module in model.named_modules() if names.fits(module)}
    stacks = sorted({re.sub(r"\b\d+\b", "*", path) for path in blocks})
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"this {type(model).__name__} holds {len(stacks)} stacks of attention ({', '.join(stacks) or 'none'}), but "
            "one stack of self-attention can be read: pass the part of the model that has it."
        )
    return [Site(_number(path), block, names, path) for path, block in blocks.items()]


def attention_site(model: PreTrainedModel, layer: int) -> Site:
    """The self-attention block of one layer, counted from 0."""
    sites = {site.layer: site for site in attention_sites(model)}
    skipped = layers_without_softmax(model)
    if layer in skipped:
        raise UnsupportedModel(f"{skipped[layer]}: choose another layer.")
    if layer not in sites:
        raise no_such_layer(model, layer, len(sites) + len(skipped))
    return sites[layer]


def layer_modules(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's list of layers, those without softmax included; None when it has no such list."""
    path = attention_sites(model)[0].path
    prefix = re.match(r"(.*?)\.?\b\d+\b", path)
    layers = None if prefix is None else submodule(model, prefix[1])
    from torch import nn

    return layers if isinstance(layers, nn.ModuleList) else None


def layers_without_softmax(model: PreTrainedModel) -> dict[int, str]:
    """The layers of a hybrid stack that mix tokens in another way (linear attention, state spaces), each with a reason.

    >>> from transformers import GPT2Config, GPT2Model
    >>> layers_without_softmax(GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)))
    {}
    """
    read = {site.layer for site in attention_sites(model)}
    kinds = getattr(model.config, "layer_types", None)
    skipped = {}
    for number, layer in enumerate(layer_modules(model) or ()):
        if number not in read:
            mixer = next((type(child).__name__ for name, child in layer.named_children() if _mixes(name)), "")
            said = mixer or (kinds[number] if kinds else type(layer).__name__)
            skipped[number] = f"layer {number} has no softmax attention ({said})"
    return skipped


def _mixes(name: str) -> bool:
    return any(word in name for word in ("attn", "attention", "mixer", "mamba", "ssm", "conv"))


def _number(path: str) -> int:
    """The layer in which a module lies: the first number of its path."""
    found = re.search(r"\b\d+\b", path)
    return int(found[0]) if found else 0


def no_such_layer(model: nn.Module, layer: int | None, count: int) -> InvalidInput:
    """The error for a layer that a model does not have."""
    said = f"this {type(model).__name__} has {count} layers, 0 to {count - 1}"
    return InvalidInput(f"layer {layer} does not exist: {said}.")
