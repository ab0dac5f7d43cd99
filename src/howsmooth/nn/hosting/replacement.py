"""Replacement of the attention of transformers models and of `torch.nn.TransformerEncoder` by layers of `howsmooth.nn`.

transformers has an interface for attention functions (`AttentionInterface`), but it passes projected queries, keys and
values, and projects the result itself. Layers with a Lipschitz bound need the weights: L2 attention multiplies
value and output matrices, contractive layers divide by a norm of all of them. So whole blocks are replaced.

A new layer starts from the weights of the old attention that have a counterpart:

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

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import nn

from howsmooth._util.validation import check_one_of, validated
from howsmooth.attention import Rotary, SelfAttention
from howsmooth.attention.conversion import plain_map
from howsmooth.attention.stages import UnitNorm
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.attention_reader import read_attention
from howsmooth.models.checkpoint_files import read_checkpoint, weight_files
from howsmooth.models.module_names import attention_sites
from howsmooth.nn.hosting.adapter import AttentionAdapter
from howsmooth.nn.layers.attention_layer import AttentionLayer
from howsmooth.nn.layers.dot_product_layers import DotProductAttention, LipschitzNormAttention, NormControlledAttention
from howsmooth.nn.layers.gradient_step_layer import GradientStepAttention
from howsmooth.nn.layers.l2_layers import ContractiveL2Attention, L2Attention, UntiedL2Attention
from howsmooth.nn.layers.registry import LAYER_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    check_one_of(tie, get_args(Tie), "tie")
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


_Model = TypeVar("_Model", bound=nn.Module)

REPLACEABLE = (
    *("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta", "vit"),
    *("gpt2", "llama", "mistral", "opt", "qwen2"),
)
"""Types of transformers models whose attention can be replaced; each is tested."""
_NOTE = "howsmooth_attention"


@validated
def replace_attention(
    model: _Model,
    kind: str,
    layers: Iterable[int] | None = None,
    *,
    tie: Tie = "query",
    drop_positions: bool = False,
    **options: Any,
) -> _Model:
    """Replace the self-attention of a model, in place, by layers of `howsmooth.nn`; the model is returned.

    The new layers start from the old weights as far as possible: see the table of this module. Masks, padding,
    gradients and generation work as before. The configuration of a transformers model records the replacement: save it
    with ``save_pretrained`` and load it with `load_replaced`.

    Args:
        model: a transformers model of a type in `REPLACEABLE`, a `torch.nn.TransformerEncoder`, or any module that
            holds `torch.nn.TransformerEncoderLayer`.
        kind: a name of `howsmooth.nn.layers.registry.KINDS`: "l2", "contractive-l2", "sigmoid", "cosine",
            "lipschitz-norm", "gradient-step", "norm-controlled", "dot-product" or "l2-untied".
        layers: numbers of the layers to replace, from 0; all when None.
        tie: initial tied weights of L2 attention: those of "query", of "key", or their "mean".
        drop_positions: drop rotary positions where the kind cannot use them. A causal model can still count tokens; an
            encoder then ignores their order.
        options: options of the layer, such as ``coefficient`` of "contractive-l2". In causal models the layer must not
            depend on the number of tokens, which grows in generation, so that ``max_tokens`` of "contractive-l2" and
            ``logit_shift`` of "sigmoid" are by default those of the longest text that the model takes.

    Raises:
        UnsupportedModel: the model has no replaceable attention, or one with features that the layers lack.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99))
    >>> _ = replace_attention(model, "l2")
    >>> for name, layer in replaced_layers(model):
    ...     print(name, bool(layer.lipschitz_bound(n=10, mask="causal").isfinite()))
    transformer.h.0.attn.layer True
    transformer.h.1.attn.layer True
    """
    check_one_of(kind, LAYER_KINDS, "the kind of attention")
    if hasattr(model, "config") and hasattr(model.config, "model_type"):
        if getattr(model.config, _NOTE, None) is not None:
            raise InvalidInput("attention of this model has been replaced already: load the model anew.")
        _replace_in_transformers(model, kind, layers, tie, drop_positions, _written(options))
    else:
        _replace_in_torch(model, kind, layers, tie, options)
    return model


@validated
def replaced_layers(model: nn.Module) -> Iterator[tuple[str, AttentionLayer]]:
    """Iterate over the layers of howsmooth in a model, with their dotted paths."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AttentionLayer))


@dataclass(frozen=True)
class Replacement:
    """The record of `replace_attention` in the configuration of a transformers model (``howsmooth_attention``).

    Attributes:
        kind: kind of the new layers. layers: numbers of the replaced layers, from 0.
        drop_positions: whether rotary positions were dropped.
        options: options of the layers, numbers and names only.
    """

    kind: str
    layers: tuple[int, ...]
    drop_positions: bool
    options: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the record for config.json."""
        return asdict(self) | {"layers": list(self.layers)}

    def apply(self, model: nn.Module) -> None:
        """Replace the attention of a model built from the configuration: its weights then have the saved names.

        The saved weights must then overwrite the initial ones.
        """
        if any(True for _ in replaced_layers(model)):
            raise InvalidInput("attention of this model has been replaced already: build the model anew.")
        _replace_in_transformers(model, self.kind, self.layers, None, self.drop_positions, dict(self.options))


def replacement_of(config: Any) -> Replacement | None:
    """Read the record of a replacement from a transformers configuration; None when there is none.

    >>> from transformers import GPT2Config, GPT2Model
    >>> replacement_of(GPT2Config()) is None
    True
    >>> model = replace_attention(GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2)), "l2", layers=[1])
    >>> replacement_of(model.config)
    Replacement(kind='l2', layers=(1,), drop_positions=False, options={})
    """
    note = getattr(config, _NOTE, None)
    if note is None:
        return None
    wanted = {"kind": str, "layers": list, "drop_positions": bool, "options": dict}
    if not isinstance(note, dict) or any(not isinstance(note.get(name), kind) for name, kind in wanted.items()):
        raise InvalidInput(
            f"the entry {_NOTE} of the configuration was not written by replace_attention: save the model again."
        )
    layers = note["layers"]
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise InvalidInput(f"the configuration lists replaced layers {layers!r}, which are no numbers.")
    kind = check_one_of(note["kind"], LAYER_KINDS, "the kind of attention")
    return Replacement(kind, tuple(layers), note["drop_positions"], _written(note["options"]))


def _written(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options to values for config.json: numbers, names, True, False and None."""
    plain_options = {name: "inf" if name == "norm" and value == math.inf else value for name, value in options.items()}
    for name, value in plain_options.items():
        plain = value is None or isinstance(value, str | bool | int | float)
        if not plain or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidInput(f"the option {name} must be a finite number or a name, got {value!r}.")
    return plain_options


@validated
def load_replaced(folder: str | Path) -> PreTrainedModel:
    """Load a model that `replace_attention` changed and ``save_pretrained`` wrote.

    The configuration names the model's class and the replacement; weights are read from safetensors files only, and
    each must fit. transformers' own ``from_pretrained`` ignores the replacement: it would warn of missing weights and
    draw them at random.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = replace_attention(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99)), "cosine")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     again = load_replaced(folder)
    >>> torch.equal(again.h[0].attn.layer.in_proj.weight, model.h[0].attn.layer.in_proj.weight)
    True
    """
    import transformers

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder} holds no config.json: give the folder that save_pretrained wrote.")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    replacement, names = replacement_of(config), getattr(config, "architectures", None) or ["?"]
    if replacement is None:
        raise InvalidInput(f"the model in {folder} has no replaced attention: load it with from_pretrained.")
    architecture = getattr(transformers, str(names[0]), None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        raise UnsupportedModel(f"the model in {folder} is a {names[0]}, which transformers does not have.")
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
        model = architecture(config)
        replacement.apply(model)
    _load_weights(model, folder)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        # transformers reads it from this attribute only; its own from_pretrained assigns it in the same way.
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def _replace_in_transformers(
    model: Any, kind: str, layers: Iterable[int] | None, tie: Tie | None, drop_positions: bool, options: dict[str, Any]
) -> None:
    """Replace and record; without ``tie`` the new layers have their own initial weights."""
    if model.config.model_type not in REPLACEABLE:
        raise UnsupportedModel(
            f"attention of a {type(model).__name__} (model type {model.config.model_type!r}) cannot be replaced, but "
            f"that of {', '.join(REPLACEABLE)} can."
        )
    chosen, adapters = _chosen(attention_sites(model), layers), []
    for site in chosen:  # all are made before the first is inserted: a refusal leaves the model unchanged
        old = plain_map(read_attention(model, site), "replacing attention")
        assert isinstance(old, SelfAttention)
        check_plain(old, f"layer {site.layer} of this {type(model).__name__}")
        divides = issubclass(LAYER_KINDS[kind].layer, ContractiveL2Attention)
        if divides and old.terms.most_seen(math.inf) < math.inf:
            raise UnsupportedModel(
                "contractive attention divides by a bound that depends on the mask, which a sliding window changes as "
                "a text grows, so that the past would change with it: choose l2."
            )
        causal = bool(getattr(site.owner, "is_causal", False))
        options = _for_any_length(kind, model.config, options) if causal else options
        if causal and not LAYER_KINDS[kind].causal:
            raise InvalidInput(
                "the divisor of LipschitzNorm depends on all tokens, so a causal model would see the future: choose l2."
            )
        rotary = None if drop_positions else next((s for s in old.query_stages if isinstance(s, Rotary)), None)
        layer = _make(kind, old, rotary, _dropout(site.owner), options, tie)
        number, after = getattr(site.owner, "layer_idx", site.layer), getattr(site.owner, "resid_dropout", None)
        names = list(inspect.signature(site.owner.forward).parameters)[1:]
        adapters.append(AttentionAdapter(layer, causal, number, getattr(after, "p", 0.0), names))
        adapters[-1].train(site.block.training)
    for site, new in zip(chosen, adapters, strict=True):
        if site.owner is site.block:
            model.set_submodule(site.path, new)
        else:  # BERT: the output projection lies outside, before a LayerNorm that remains
            model.set_submodule(f"{site.path}.{site.names.inputs[0].rpartition('.')[0]}", new)
            model.set_submodule(f"{site.path}.{site.names.output}", nn.Identity())
    note = Replacement(kind, tuple(site.layer for site in chosen), drop_positions, options)
    setattr(model.config, _NOTE, note.as_json())


def _replace_in_torch(
    model: nn.Module, kind: str, layers: Iterable[int] | None, tie: Tie, options: dict[str, Any]
) -> None:
    layers_of_torch = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    blocks = [block for block in layers_of_torch if isinstance(block.self_attn, nn.MultiheadAttention)]
    if not blocks:
        raise UnsupportedModel(
            f"this {type(model).__name__} holds no self-attention that can be replaced: give a transformers model, or "
            "a module with nn.TransformerEncoderLayer whose attention is still torch's own."
        )
    chosen, new = _chosen(blocks, layers), []
    for block in chosen:
        old, given = SelfAttention.from_torch(block.self_attn), {"batch_first": block.self_attn.batch_first}
        layer = _make(kind, old, None, block.self_attn.dropout, given | options, tie)
        new.append(layer.train(block.training))
    for block, layer in zip(chosen, new, strict=True):
        block.set_submodule("self_attn", layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # torch offers no other way to switch off its fused dot-product path, which would ignore the new layers.
            module.enable_nested_tensor = module.use_nested_tensor = False


def _make(
    kind: str, old: SelfAttention, rotary: Rotary | None, dropout: float, options: dict[str, Any], tie: Tie | None
) -> AttentionLayer:
    layer = build(kind, old, rotary, dropout, **options).to(device=old.query_weight.device, dtype=old.dtype)
    if tie is not None:
        start_from(layer, old, tie)
    return layer


def _for_any_length(kind: str, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Fix the options of a causal model, whose outputs must not change when the text grows."""
    longest = getattr(config, "max_position_embeddings", None)
    wanted = LAYER_KINDS[kind].by_length
    if wanted is None or options.get(wanted) is not None:
        return options
    if longest is None:
        raise InvalidInput(f"this model states no maximum length of a text: give {wanted} to {kind} attention.")
    return options | {wanted: longest if wanted == "max_tokens" else -math.log(longest)}


def _chosen(blocks: list[Any], layers: Iterable[int] | None) -> list[Any]:
    if layers is None:
        return blocks
    wanted = sorted(set(layers))
    if not wanted or not 0 <= wanted[0] <= wanted[-1] < len(blocks):
        raise InvalidInput(f"layers {wanted} cannot be replaced: choose among 0 to {len(blocks) - 1}.")
    return [blocks[number] for number in wanted]


def _dropout(owner: nn.Module) -> float:
    """Return the dropout rate of the old attention weights."""
    values = (getattr(owner, name, None) for name in ("attn_dropout", "attention_dropout", "dropout"))
    found = next((value for value in values if isinstance(value, nn.Dropout | float)), 0.0)
    return found.p if isinstance(found, nn.Dropout) else found


def _load_weights(model: PreTrainedModel, folder: Path) -> None:
    try:
        weights = read_checkpoint(weight_files(folder)).tensors
    except InvalidInput as error:
        raise InvalidInput(f"the weights in {folder} are missing or damaged ({error}): save the model again.") from None
    state = model.state_dict()
    wrong = [name for name, weight in weights.items() if name not in state or state[name].shape != weight.shape]
    if wrong:
        raise InvalidInput(f"{folder} holds weights that do not fit its configuration, such as {wrong[0]}.")
    # Tied weights are saved once: a weight that shares memory with a saved one is saved.
    saved = {state[name].data_ptr() for name in weights}
    missing = [name for name, weight in state.items() if weight.numel() and weight.data_ptr() not in saved]
    if missing:
        raise InvalidInput(f"{folder} lacks weights, such as {missing[0]}: save the model again.")
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    model.to(dtype=dtype)  # type: ignore[call-arg]
    model.load_state_dict(weights, strict=False)
