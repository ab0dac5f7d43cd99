"""The SOURCE argument of a command and its options become an attention map and tokens, and the sets of ``--over``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from typer import Argument

from howsmooth._util.common import digest
from howsmooth._util.validation import check_device, check_memory, check_one_of, shown
from howsmooth.attention import (
    ALiBi,
    AttentionMap,
    Causal,
    CosineAttention,
    L2SelfAttention,
    LogitBias,
    Rotary,
    SelfAttention,
    SigmoidAttention,
    SlidingWindow,
)
from howsmooth.cli.options import (
    Device,
    Dtype,
    Seed,
    Text,
    details_option,
    length_option,
    one_length,
    what_option,
    where_option,
)
from howsmooth.errors import InvalidInput
from howsmooth.models import capture, open_model
from howsmooth.models.model_inputs import read_input
from howsmooth.models.open_source import DTYPES, names_model
from howsmooth.models.probed_norms import norm_before, norm_beside, stored_gain
from howsmooth.models.random_models import random_name
from howsmooth.models.weight_files import SUFFIXES, load_tokens, read_attention_weights, read_tensors
from howsmooth.scans.plan import Selection, parse_what
from howsmooth.sets import SetText
from howsmooth.sets.ellipsoid import Ellipsoid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS: dict[str, Any] = {"l2": L2SelfAttention, "cosine": CosineAttention, "sigmoid": SigmoidAttention}
"""Other kinds of attention that weights can be taken for."""
_OF_DOT_PRODUCTS = ("rope", "rope_base", "alibi", "softcap", "qk_norm", "scale", "kv_heads")
_OF_MODELS = ("source", "layer", "text", "input", "input_name", "seed", "length", "dtype")
"""Options that a model takes; all others are for weights without one."""
OVER = "{}: point, around:0.01, around:1% (of the mean token norm), together:0.01, ball:2, sphere:2, norm, norm:NAME."
"""Help of an option ``--over``."""
OF_THE_INPUT = ("text", "input", "input_name", "length")
"""Options that do not name a map."""
_NORM_NAMES = re.compile(r"(norm|\bln)\w*\.weight$", re.IGNORECASE)


@dataclass(frozen=True)
class MapOptions:
    """An attention map and its tokens, as the first options of every command that takes a SOURCE name them.

    Values of the configuration are None where no option gives them.
    """

    source: Annotated[
        str,
        Argument(
            help="A weights file (.safetensors, .pt, .pth), random weights, or a model: a name (minilm, smollm2), "
            "random:KIND, a folder, a .gguf file, or an id on the hub (org/name)."
        ),
    ] = "random"
    prefix: Annotated[str | None, what_option("A layer of the file, for example h.0.attn.")] = None
    layer: Annotated[int | None, what_option("A layer of the model, counted from 0 (0).", min=0)] = None
    text: Text = None
    input: Annotated[Path | None, where_option("File with the tokens, (n, d) or (batch, n, d).")] = None
    input_name: Annotated[str | None, where_option("A tensor of the --input file.")] = None
    seed: Seed = 0
    width: Annotated[int | None, what_option("Width d of a random map (64).", min=1)] = None
    heads: Annotated[int | None, what_option("Number of heads (4 when random).", min=1)] = None
    causal: Annotated[bool | None, what_option("Tokens see only the past.")] = None
    length: Annotated[
        str | None,
        length_option("Number of random or text tokens (128); for bounds and worst-case several: 8,16,…,64."),
    ] = None
    like: Annotated[str | None, details_option("Random weights of the sizes of bert-base, gpt2 or llama.")] = None
    attention: Annotated[
        str | None,
        details_option("Kind of attention of weights without a model: dot, l2, cosine, sigmoid (dot)."),
    ] = None
    kv_heads: Annotated[int | None, details_option("Number of key-value heads, when fewer.", min=1)] = None
    window: Annotated[int | None, details_option("Tokens see only this many neighbours.", min=1)] = None
    rope: Annotated[bool | None, details_option("Rotary positions.")] = None
    rope_base: Annotated[float | None, details_option("Base of the rotary angles (10000).")] = None
    alibi: Annotated[bool | None, details_option("Linear position biases.")] = None
    softcap: Annotated[float | None, details_option("Logits become c·tanh(s/c).")] = None
    qk_norm: Annotated[str | None, details_option("Normalise queries and keys: rms or l2.")] = None
    scale: Annotated[float | None, details_option("Factor on the logits (1/√head width).")] = None
    dtype: Dtype = None
    device: Device = None

    @property
    def names_model(self) -> bool:
        """Whether SOURCE is a model, which has tokens of its own."""
        return names_model(self.source)

    @property
    def rotary(self) -> bool:
        """Whether queries and keys turn with their position; a base alone implies it."""
        return self.rope_base is not None if self.rope is None else self.rope

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype; None for that of the weights."""
        name = check_one_of(self.dtype or "auto", DTYPES, "--dtype")
        return None if name == "auto" else getattr(torch, name)

    @property
    def tokens(self) -> int | None:
        """The number of tokens."""
        return None if self.length is None else one_length(self.length)

    def open(self) -> MapAtTokens:
        """The map and its tokens: from --input, else those that a model's layer sees, else random ones of unit RMS."""
        if self.input is None and self.input_name is not None:
            raise InvalidInput("--input-name chooses a tensor of --input: give that file too.")
        if self.device is not None:
            return replace(self, device=None).open().on(self.device)
        if self.names_model:
            return _from_model(self)
        if self.layer is not None or self.text is not None:
            raise InvalidInput(f"--layer and --text are for models, but {self.source!r} is none: leave them out.")
        return _from_weights(self)

    def attention_arguments(self, heads: int, head_width: int) -> dict[str, Any]:
        """The arguments of `SelfAttention` beside the weights."""
        for name in ("rope_base", "softcap", "scale"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise InvalidInput(f"--{name.replace('_', '-')} is a finite number, got {getattr(self, name)}.")
        if self.rope_base is not None and not self.rope_base > 0:
            raise InvalidInput(f"the base of the rotary angles must be positive, got {self.rope_base}.")
        mask: LogitBias | None = Causal() if self.causal else None
        if self.window is not None:
            mask = SlidingWindow(self.window, causal=bool(self.causal))
        return {
            "mask": mask,
            "rotary": Rotary.standard(head_width, self.rope_base or 10_000.0) if self.rotary else None,
            "logit_biases": [ALiBi.standard(heads)] if self.alibi else [],
            "softcap": self.softcap,
            "qk_norm": self.qk_norm,
            "scale": self.scale,
        }


_DEFAULTS: dict[str, Any] = {"width": 64, "heads": 4, "length": "128", "dtype": "float32"}
PRESETS: dict[str, dict[str, Any]] = {
    "bert-base": {"width": 768, "heads": 12},
    "gpt2": {"width": 768, "heads": 12, "causal": True},
    "llama": {"width": 2048, "heads": 32, "kv_heads": 8, "causal": True, "rope_base": 500_000.0},  # Llama 3.2 1B
}
"""Sizes of known models, for random weights."""


@dataclass(frozen=True)
class MapAtTokens:
    """An attention map and the tokens it is measured at, with where they come from.

    Attributes:
        options: the options that name them.
        tensors: all weights of the file or model by name; none for a random map.
        model: the model whose layer this is, when there is one.
        notes: further facts about the model.
        seen: the tokens of the layer for a window of another length, when a model reads a text.
    """

    attention: AttentionMap
    x: Tensor
    options: MapOptions
    source: str
    tokens: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    model: PreTrainedModel | None = None
    notes: tuple[str, ...] = ()
    seen: Callable[[int], Tensor] | None = None

    @property
    def seeds(self) -> dict[str, int]:
        """Three seeds from one: the solver's start must have nothing to do with the weights and the tokens.

        The weights of a model and its tokens are not drawn here, and the start is that of `howsmooth scan`.
        """
        seed, step = self.options.seed, 0 if self.model is not None else 1
        return {"weights": seed, "tokens": seed + step, "solver": seed + 2 * step}

    @property
    def one_input(self) -> Tensor:
        """The tokens, without the axis of a batch of one."""
        return self.x[0] if self.x.dim() == 3 and len(self.x) == 1 else self.x

    def on(self, device: str) -> MapAtTokens:
        """The same map and tokens on another device."""
        check_device(device)
        seen = self.seen
        moved = None if seen is None else (lambda n: seen(n).to(device))
        return replace(self, attention=self.attention.to(device), x=self.x.to(device), seen=moved)

    def first(self, n: int) -> Tensor:
        """The tokens of an input of length n: what the layer sees of a text so long, or the first that are stored."""
        x = self.one_input
        return x[..., :n, :] if self.seen is None or n == x.shape[-2] else self.seen(n)

    def in_words(self) -> str:
        """The map in one line."""
        facts = self.describe()
        shared = "" if facts["kv_heads"] == facts["heads"] else f" ({facts['kv_heads']} key-value)"
        return (
            f"{facts['source']}: d = {facts['d']}, {facts['heads']} heads{shared}, mask {facts['mask']}, positions "
            f"{facts['positions']}, {facts['dtype']}, seed {facts['seed']}"
        )

    def describe(self) -> dict[str, Any]:
        """The facts of the measurement, for the header and for JSON."""
        return {
            "source": self.source,
            "input": self.tokens,
            "n": self.x.shape[-2],
            "d": self.x.shape[-1],
            "batch": self.x.shape[0] if self.x.dim() == 3 else None,
            "heads": self.attention.heads,
            "kv_heads": self.attention.kv_heads,
            "mask": mask_name(self.attention),
            "positions": positions_name(self.attention),
            "dtype": str(torch.promote_types(self.x.dtype, self.attention.dtype)).removeprefix("torch."),
            "seed": self.options.seed,
            "seeds": self.seeds,
            "notes": list(self.notes),
        }


def random_options(options: MapOptions) -> MapOptions | None:
    """The complete configuration of random weights that the options name; None for another SOURCE.

    >>> random_options(MapOptions(heads=2)).width, random_options(MapOptions("minilm"))
    (64, None)
    >>> random_options(MapOptions(like="gpt2", heads=2)).causal
    True
    """
    if options.source != "random":
        return None
    if options.like not in (None, *PRESETS):
        raise InvalidInput(
            f"--like is {', '.join(PRESETS)}, got {shown(options.like)}; random models of `howsmooth models`, such as "
            "random:bert, are SOURCES of their own."
        )
    given = {name: value for name, value in vars(options).items() if value is not None}
    return MapOptions(**_DEFAULTS | PRESETS.get(options.like or "", {}) | given)


def kinds_of_map(what: str) -> list[str]:
    """The block, its heads, or both, as --what of `howsmooth scan` names them.

    >>> kinds_of_map("head,attention")
    ['block', 'heads']
    """
    names = {Selection("attention"): "block", Selection("head"): "heads"}
    chosen = parse_what(what)
    if not all(selection in names for selection in chosen):
        raise InvalidInput(f"--what is attention, head or attention,head here, got {shown(what)}.")
    return [name for selection, name in names.items() if selection in chosen]


def in_kind(attention: SelfAttention, options: MapOptions) -> AttentionMap:
    """The same weights in another kind of attention: L2 has its queries as keys too (they are tied).

    >>> in_kind(SelfAttention.random(8, heads=2, mask="causal"), MapOptions(attention="l2", causal=True)).kind
    'l2'
    """
    kind = options.attention
    if kind in (None, "dot"):
        return attention
    if kind not in KINDS:
        raise InvalidInput(f"--attention is dot, {', '.join(KINDS)}, got {shown(kind)}.")
    unfit = [name for name in _OF_DOT_PRODUCTS if getattr(options, name) not in (None, False)]
    if unfit or attention.kv_heads != attention.heads:
        name = unfit[0].replace("_", "-") if unfit else "kv-heads"
        raise InvalidInput(f"--{name} is for dot-product attention: leave it out with --attention {kind}.")
    names = ("query_bias", "key_bias", "value_bias", "output_bias")
    biases = {name: bias.flatten() for name in names if (bias := getattr(attention, name)) is not None}
    if biases and kind == "l2":
        raise InvalidInput("these weights have biases, which L2 attention has not: choose another --attention.")
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    query, key, value = (weight.flatten(0, 1) for weight in weights)
    output, mask = attention.output_weight.flatten(0, 1).T, next(iter(attention.terms), None)
    if kind == "l2":
        return L2SelfAttention(query, value, output, heads=attention.heads, mask=mask)
    other: AttentionMap = KINDS[kind](query, key, value, output, heads=attention.heads, mask=mask, **biases)
    return other


def unit_rms_tokens(length: int, width: int, seed: int) -> Tensor:
    """Directions drawn uniformly, every token of root mean square one: |x_i| = √width. In float64.

    >>> unit_rms_tokens(3, 4, seed=0).square().mean(-1)
    tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    check_memory(8 * length * width, f"an input of {length} tokens of width {width}", "lower --length")
    x = torch.randn(length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def mask_name(attention: AttentionMap) -> str:
    """The mask in a word or two.

    >>> mask_name(SelfAttention.random(4, mask="causal"))
    'causal'
    """
    names = []
    for term in attention.terms:
        if isinstance(term, Causal):
            names.append("causal")
        elif isinstance(term, SlidingWindow):
            names.append(f"window {term.window}" + (", causal" if term.causal else ", both sides"))
        elif not isinstance(term, ALiBi):
            names.append(type(term).__name__)
    return "; ".join(names) or "none"


def positions_name(attention: AttentionMap) -> str:
    """The positions that the map reads, in a word or two."""
    names = ["rotary"] if any(isinstance(stage, Rotary) for stage in attention.query_stages) else []
    names += ["ALiBi"] if any(isinstance(term, ALiBi) for term in attention.terms) else []
    return ", ".join(names) or "none"


def map_entry(options: MapOptions, attention: AttentionMap) -> dict[str, Any]:
    """The entry of a witness file about its map: the options that name it, and the hash of its weights."""
    if options.names_model:
        options = replace(options, layer=options.layer or 0)
    named = {name: value for name, value in vars(options).items() if value is not None and name not in OF_THE_INPUT}
    return named | {"sha256": map_sha256(attention)}


def map_sha256(attention: AttentionMap) -> str:
    """A hash of all weights with names, dtypes and shapes, and of the mask and positions.

    >>> import howsmooth as hs
    >>> plain, causal = hs.SelfAttention.random(4), hs.SelfAttention.random(4, mask="causal")
    >>> map_sha256(plain) == map_sha256(hs.SelfAttention.random(4)), map_sha256(plain) == map_sha256(causal)
    (True, False)
    """
    facts = (str(attention), attention.kind, attention.softcap, mask_name(attention), positions_name(attention))
    return digest(attention.state_dict(), repr(facts).encode())


def _from_weights(options: MapOptions) -> MapAtTokens:
    """Random weights, or those of a file, which holds no tokens."""
    tensors: Mapping[str, Tensor] = {}
    drawn = random_options(options)
    if drawn is not None:
        if options.prefix is not None:
            raise InvalidInput("--prefix chooses a layer of a weights file: leave it out for a random configuration.")
        width, heads = drawn.width or 0, drawn.heads or 1
        check_memory(32 * width**2, f"random attention of width {width}", "lower --width")
        arguments = drawn.attention_arguments(heads, width // heads)
        arguments |= {"kv_heads": drawn.kv_heads, "dtype": drawn.torch_dtype}
        attention = in_kind(SelfAttention.random(width, heads, seed=options.seed, **arguments), drawn)
    else:
        attention = _from_file(options)
        tensors, _ = read_tensors(Path(options.source))
    if options.input is not None:
        if options.length is not None and drawn is None:
            raise InvalidInput("--length is for random tokens: leave it out when --input gives the tokens.")
        x, origin = _stored_tokens(options, options.torch_dtype if drawn is None else None)
    else:
        length = (drawn or options).tokens or 128
        x = unit_rms_tokens(length, attention.in_features, options.seed + 1).to(attention.dtype)
        origin = f"random tokens of unit RMS, seed {options.seed + 1}"
    return MapAtTokens(attention, x, options, options.source, origin, tensors)


def _from_file(options: MapOptions) -> AttentionMap:
    path = Path(options.source)
    if path.suffix not in SUFFIXES and not os.path.isfile(path):
        raise InvalidInput(
            f"{shown(options.source)} is neither a weights file (.safetensors, .pt, .pth) nor random nor a model "
            "(minilm, random:bert, or a folder with config.json)."
        )
    for name in ("width", "like"):
        if getattr(options, name) is not None:
            raise InvalidInput(f"--{name} is for random weights: those of a file have their own sizes.")
    sizes: dict[str, Any] = {"kv_heads": options.kv_heads, "dtype": options.torch_dtype, "rotary": options.rotary}
    weights = read_attention_weights(path, options.prefix, options.heads, **sizes)
    settings = options.attention_arguments(weights["heads"], len(weights["query"]) // weights["heads"])
    return in_kind(SelfAttention(**weights, **settings), options)


def _from_model(options: MapOptions) -> MapAtTokens:
    """A layer of a model, at the tokens it sees when the model reads a text."""
    misplaced = [name for name, value in vars(options).items() if value is not None and name not in _OF_MODELS]
    if misplaced:
        name = random_name(options.source)
        hint = f" (a block of its sizes is random --like {name})" if name in PRESETS else ""
        raise InvalidInput(
            f"--{misplaced[0].replace('_', '-')} is for weights without a model: {options.source} has its own{hint}."
        )
    if options.input is not None and (options.text is not None or options.length is not None):
        raise InvalidInput("--text and --length choose what the model reads: leave them out when --input is given.")
    opened, layer, dtype = open_model(options.source), options.layer or 0, options.torch_dtype
    _, content, _ = read_input(options.text, opened.modality)

    def at(length: int) -> tuple[Any, Tensor]:
        (window,) = opened.windows(content, length, 1, options.seed)
        (site,) = capture(opened.model, opened.inputs(window), [layer])
        return (site.attention, site.x) if dtype is None else (site.attention.in_dtype(dtype), site.x.to(dtype))

    attention, x = at(options.tokens or opened.usual_length(content))
    origin = f"what layer {layer} sees of {options.text or 'Alice in Wonderland'}"
    if options.input is not None:
        x, origin = _stored_tokens(options, dtype)
    name, model = f"{options.source}, layer {layer}", opened.model
    seen = None if options.input is not None else (lambda length: at(length)[1])
    return MapAtTokens(attention, x, options, name, origin, model.state_dict(), model, opened.notes, seen)


def _stored_tokens(options: MapOptions, dtype: torch.dtype | None) -> tuple[Tensor, str]:
    assert options.input is not None
    x = load_tokens(options.input, options.input_name)
    x = x.to(dtype) if dtype is not None and x.is_floating_point() else x
    return x, str(options.input) + ("" if options.input_name is None else f" ({options.input_name})")


def norm_image(site: MapAtTokens, over: SetText) -> Ellipsoid | None:
    """The image of the normalisation that ``norm``, ``norm:NAME`` or ``rms:NAME`` means; None for another set."""
    if over.form not in ("norm", "rms"):
        return None
    if over.name is None:
        return layer_tokens(site)
    name = over.name.removesuffix(".")
    if f"{name}.weight" not in site.tensors:
        known = sorted(key.removesuffix(".weight") for key in site.tensors if _NORM_NAMES.search(key))
        choices = f": choose from {', '.join(known[:8])}" if known else ""
        raise InvalidInput(f"{site.source} holds no normalisation {name!r}{choices}.")
    return _named_norm(site, name, over.form == "rms")


def layer_tokens(site: MapAtTokens) -> Ellipsoid:
    """The set of all tokens that the attention can receive: the image of the normalisation before it.

    >>> layer_tokens(MapOptions("random:gpt2[layers=1,width=16]", length="4").open()).radius
    4.0
    """
    if site.model is not None:
        norm, x = norm_before(site.model, site.options.layer or 0)
        return Ellipsoid.after(norm, x.shape[-1])
    name = norm_beside(site.tensors, site.options.prefix)
    if name is None:
        raise InvalidInput(f"{site.source} holds no normalisation before this attention: give --over ball:2.")
    # Normalisations without a shift are RMSNorms, and the image of a LayerNorm lies in that of an RMSNorm.
    return _named_norm(site, name, rms=f"{name}.bias" not in site.tensors)


def _named_norm(site: MapAtTokens, name: str, rms: bool) -> Ellipsoid:
    """The image of the normalisation of that name in a file or model."""
    weight, shift = site.tensors[f"{name}.weight"], site.tensors.get(f"{name}.bias")
    if site.model is not None:
        return Ellipsoid.after(site.model.get_submodule(name), len(weight))
    gain, known = stored_gain(weight, name, site.source)
    tokens = (Ellipsoid.rms_norm if rms else Ellipsoid.layer_norm)(gain, shift)
    return tokens if known else replace(tokens, origin=f"{tokens.origin} with gain w or 1 + w")
