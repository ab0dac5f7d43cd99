"""The table of attention layouts: the names of projections, norms and biases in each model type and in weight files.

A model type is listed only when a test reads a small instance of it. Matching names alone would not suffice: some
models (BigBird) attend fully on short inputs and sparsely on long ones, which no check on a short input can notice.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from howsmooth.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Layout = Literal["separate", "gated", "contiguous", "per_head", "latent"]


@dataclass(frozen=True)
class Convention:
    """The names of the parts of an attention block, as paths inside the block or in its state dict.

    Attributes:
        inputs: the projections: query, key and value, or the one fused projection.
        output: the output projection.
        layout: of a fused projection's features: "contiguous" (all queries, all keys, all values) or "per_head" (query,
            key and value of the first head, then of the second, …). "gated": the query projection gives the queries and
            the output gate of the first head, then of the second, …; "latent": multi-head latent attention.
        norms: normalisations of queries and keys, where the block has them.
        after: modules behind the output projection that belong to the block and not to the map.
        more: further modules that are read, where a block has them.
        interleaved: rotary positions turn neighbouring coordinates.
        in_files: whether the projections determine the map, so that a block is also read from a weight file.
        suffixes: weight and bias of an input projection in a state dict.
        transposed: stored weights are (in, out), so that heads are columns (GPT-2's Conv1D).
    """

    inputs: tuple[str, ...]
    output: str
    layout: Layout = "separate"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    after: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    interleaved: bool = False
    in_files: bool = False
    suffixes: tuple[str, str] = (".weight", ".bias")
    transposed: bool = False

    def fits(self, module: nn.Module) -> bool:
        """Whether the module holds all projections."""
        return all(submodule(module, path) is not None for path in (*self.inputs, self.output))

    @property
    def required(self) -> tuple[str, ...]:
        """The tensors of a state dict by which the block is recognised."""
        return tuple(name + self.suffixes[0] for name in self.inputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """The tensors of a state dict that may be missing: biases, and the output projection."""
        return (*(name + self.suffixes[1] for name in self.inputs), self.output + ".weight", self.output + ".bias")


_Q_K_V_PROJ = ("q_proj", "k_proj", "v_proj")
_O_PROJ = Convention(_Q_K_V_PROJ, "o_proj", in_files=True)
_OUT_PROJ = Convention(_Q_K_V_PROJ, "out_proj", in_files=True)
_LATENT = Convention(
    ("kv_a_proj_with_mqa", "kv_b_proj"),
    "o_proj",
    "latent",
    more=("kv_a_layernorm", "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"),
    interleaved=True,
)
_BERT = Convention(("self.query", "self.key", "self.value"), "output.dense", after=("output.LayerNorm",), in_files=True)

CONVENTIONS: dict[str, Convention] = {
    **dict.fromkeys(["bert", "camembert", "electra", "roberta", "xlm-roberta"], _BERT),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3"], _O_PROJ),
    **dict.fromkeys(["smollm3", "starcoder2", "deit", "dinov2", "vit"], _O_PROJ),
    **dict.fromkeys(["exaone4", "gpt_oss", "olmo2", "olmo3", "qwen3_moe"], _O_PROJ),
    "cohere": Convention(_Q_K_V_PROJ, "o_proj", interleaved=True),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], _LATENT),
    "llama4_text": Convention(_Q_K_V_PROJ, "o_proj", norms=("qk_norm", "qk_norm"), interleaved=True),
    "qwen3_next": Convention(_Q_K_V_PROJ, "o_proj", "gated"),
    "distilbert": Convention(("q_lin", "k_lin", "v_lin"), "out_lin", in_files=True),
    "gpt2": Convention(("c_attn",), "c_proj", "contiguous", in_files=True, transposed=True),
    "gpt_neox": Convention(("query_key_value",), "dense", "per_head"),
    **dict.fromkeys(["mpnet", "t5"], Convention(("q", "k", "v"), "o")),
    **dict.fromkeys(["opt", "wav2vec2", "whisper"], _OUT_PROJ),
    "phi": Convention(_Q_K_V_PROJ, "dense", norms=("q_layernorm", "k_layernorm")),
    "phi3": Convention(("qkv_proj",), "o_proj", "contiguous"),
}
"""Model type (as in a model's configuration) → names."""

FILE_CONVENTIONS = (
    *dict.fromkeys(convention for convention in CONVENTIONS.values() if convention.in_files),
    Convention(("in_proj",), "out_proj", "contiguous", suffixes=("_weight", "_bias")),  # torch.nn.MultiheadAttention
    Convention(("attention.query", "attention.key", "attention.value"), "output.dense"),  # ViT before transformers 5
    Convention(("query", "key", "value"), "output"),
)
"""The conventions by which a block in a weight file is recognised."""

MODEL_TYPES = tuple(sorted(CONVENTIONS))
"""The model types that can be read."""


RANDOM_NAMES = (
    *("bert", "distilbert", "electra", "gemma", "gemma2", "gemma3", "gpt-neox", "gpt2", "llama", "mistral", "mpnet"),
    *("opt", "phi", "qwen2", "qwen3", "roberta", "t5", "vit", "wav2vec2", "whisper"),
)
"""The architectures that come with random weights."""


@dataclass(frozen=True)
class AttentionSite:
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


def find_blocks(names: Collection[str]) -> dict[str, Convention]:
    """The prefixes at which an attention block begins among the names of a state dict, with its convention.

    >>> list(find_blocks(["h.3.attn.c_attn.weight", "h.3.mlp.c_proj.weight"]))
    ['h.3.attn.']
    """
    blocks: dict[str, Convention] = {}
    taken: set[str] = set()
    for convention in sorted(FILE_CONVENTIONS, key=lambda c: -len(c.required[0])):  # self.query before query
        first = convention.required[0]
        for name in names:
            prefix = name.removesuffix(first)
            whole = name.endswith(first) and (not prefix or prefix.endswith("."))
            if not whole or name in taken or not all(prefix + other in names for other in convention.required):
                continue
            same_inputs = [c for c in FILE_CONVENTIONS if c.required == convention.required]
            blocks[prefix] = next((c for c in same_inputs if f"{prefix}{c.output}.weight" in names), convention)
            taken.update(prefix + other for other in convention.required)
    return blocks


def attention_sites(model: PreTrainedModel) -> list[AttentionSite]:
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
    return [AttentionSite(_number(path), block, names, path) for path, block in blocks.items()]


def attention_site(model: PreTrainedModel, layer: int) -> AttentionSite:
    """The self-attention block of one layer, counted from 0."""
    sites = {site.layer: site for site in attention_sites(model)}
    skipped = layers_without_softmax(model)
    if layer in skipped:
        raise UnsupportedModel(f"{skipped[layer]}: choose another layer.")
    if layer not in sites:
        raise no_such_layer(model, layer, len(sites) + len(skipped))
    return sites[layer]


def layer_modules(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's list of layers, including layers without softmax; None when it has no such list."""
    path = attention_sites(model)[0].path
    prefix = re.match(r"(.*?)\.?\b\d+\b", path)
    layers = None if prefix is None else submodule(model, prefix[1])
    from torch import nn

    return layers if isinstance(layers, nn.ModuleList) else None


def layers_without_softmax(model: PreTrainedModel) -> dict[int, str]:
    """The layers of a hybrid stack without softmax attention (linear attention, state spaces), each with a reason.

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
            kind = mixer or (kinds[number] if kinds else type(layer).__name__)
            skipped[number] = f"layer {number} has no softmax attention ({kind})"
    return skipped


def _mixes(name: str) -> bool:
    return any(word in name for word in ("attn", "attention", "mixer", "mamba", "ssm", "conv"))


def _number(path: str) -> int:
    """The layer of a module: the first number of its path."""
    found = re.search(r"\b\d+\b", path)
    return int(found[0]) if found else 0


def no_such_layer(model: nn.Module, layer: int | None, count: int) -> InvalidInput:
    """The error for a layer that a model does not have."""
    return InvalidInput(
        f"layer {layer} does not exist: this {type(model).__name__} has {count} layers, 0 to {count - 1}."
    )
