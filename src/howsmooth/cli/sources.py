"""What a command measures: the SOURCE argument and its options become an attention map and tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from howsmooth.attention import ALiBi, AttentionMap, Causal, LogitBias, Rotary, SelfAttention, SlidingWindow
from howsmooth.errors import InvalidInput
from howsmooth.weights import SUFFIXES, load_tokens, read_attention_weights

_GRAMMAR = re.compile(r"random(?::(?P<preset>[\w.-]+))?(?:\[(?P<pairs>.*)\])?")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Settings:
    """A configuration of attention; None where nothing was said."""

    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    length: int | None = None
    causal: bool | None = None
    window: int | None = None
    rope: bool | None = None
    rope_base: float | None = None
    alibi: bool | None = None
    softcap: float | None = None
    qk_norm: str | None = None
    scale: float | None = None
    dtype: str | None = None

    def over(self, base: Settings) -> Settings:
        """These settings where they say something, those of ``base`` elsewhere."""
        return replace(base, **{name: value for name, value in vars(self).items() if value is not None})

    @property
    def rotary(self) -> bool:
        """Whether queries and keys turn with their position; a base alone says so too."""
        return self.rope_base is not None if self.rope is None else self.rope

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype asked for."""
        if self.dtype is None:
            return None
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        return DTYPES[self.dtype]

    def options(self, heads: int, head_width: int) -> dict[str, Any]:
        """The arguments of `SelfAttention` beside the weights."""
        if heads < 1:
            raise InvalidInput(f"an attention has at least one head, got {heads}.")
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


DEFAULTS = Settings(width=64, heads=4, length=128, dtype="float32")
PRESETS = {
    "bert-base": Settings(width=768, heads=12),
    "gpt2": Settings(width=768, heads=12, causal=True),
    "llama": Settings(width=2048, heads=32, kv_heads=8, causal=True, rope_base=500_000.0),  # Llama 3.2 1B
}


@dataclass(frozen=True)
class Site:
    """An attention map and the tokens it is measured at, with where they come from."""

    attention: AttentionMap
    x: Tensor
    source: str
    tokens: str
    seed: int

    @property
    def seeds(self) -> dict[str, int]:
        """Three seeds from one: the solver's start must have nothing to do with the weights and the tokens."""
        return {"weights": self.seed, "tokens": self.seed + 1, "solver": self.seed + 2}

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
            "seed": self.seed,
            "seeds": self.seeds,
        }


def open_site(
    source: str,
    settings: Settings,
    seed: int,
    prefix: str | None = None,
    tokens_file: Path | None = None,
    tokens_name: str | None = None,
) -> Site:
    """The map and tokens that SOURCE and its options stand for.

    Args:
        source: a weights file, ``random``, ``random:PRESET`` or ``random[name=value,…]``.
        settings: what the flags say; they win over the preset and the brackets.
        tokens_file: where to read the tokens; random ones of unit root mean square when None.
    """
    attention: AttentionMap
    if (parsed := _GRAMMAR.fullmatch(source)) is not None:
        if prefix is not None:
            raise InvalidInput("--prefix chooses a layer of a weights file: leave it out for a random configuration.")
        settings = settings.over(_pairs(parsed["pairs"])).over(_preset(parsed["preset"])).over(DEFAULTS)
        attention = random_attention(settings, seed)
    else:
        attention = _from_file(source, settings, prefix)
    if tokens_file is not None:
        if settings.length is not None and parsed is None:
            raise InvalidInput("--length is for random tokens: leave it out when --input gives the tokens.")
        x, origin = load_tokens(tokens_file, tokens_name), str(tokens_file)
        wanted = settings.torch_dtype if parsed is None else None
        x = x.to(wanted) if wanted is not None and x.is_floating_point() else x
        origin += "" if tokens_name is None else f" ({tokens_name})"
    else:
        if tokens_name is not None:
            raise InvalidInput("--input-name chooses a tensor of --input: give that file too.")
        length = settings.length or DEFAULTS.length or 0
        x = random_tokens(length, attention.in_features, seed + 1).to(attention.dtype)
        origin = f"random tokens of unit RMS, seed {seed + 1}"
    return Site(attention, x, source, origin, seed)


def random_attention(settings: Settings, seed: int) -> SelfAttention:
    """Random weights of a complete configuration."""
    width, heads, dtype = settings.width, settings.heads, settings.torch_dtype
    assert width is not None
    assert heads is not None
    assert dtype is not None
    options = settings.options(heads, width // max(heads, 1))
    return SelfAttention.random(width, heads, kv_heads=settings.kv_heads, seed=seed, dtype=dtype, **options)


def random_tokens(length: int, width: int, seed: int) -> Tensor:
    """Directions drawn uniformly, every token of root mean square one: |x_i| = √width. In float64.

    >>> random_tokens(3, 4, seed=0).square().mean(-1)
    tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    if length < 1:
        raise InvalidInput(f"an input holds at least one token, got a length of {length}.")
    x = torch.randn(length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def mask_name(attention: AttentionMap) -> str:
    """The mask in a word or two.

    >>> mask_name(SelfAttention.random(4, mask="causal"))
    'causal'
    """
    names = []
    for term in attention.logit_terms():
        if isinstance(term, Causal):
            names.append("causal")
        elif isinstance(term, SlidingWindow):
            names.append(f"window {term.window}" + (", causal" if term.causal else ", both sides"))
        elif not isinstance(term, ALiBi):
            names.append(type(term).__name__)
    return "; ".join(names) or "none"


def positions_name(attention: AttentionMap) -> str:
    """What tells the map where a token stands."""
    names = ["rotary"] if any(isinstance(stage, Rotary) for stage in attention.query_stages) else []
    names += ["ALiBi"] if any(isinstance(term, ALiBi) for term in attention.logit_terms()) else []
    return ", ".join(names) or "none"


def _from_file(source: str, settings: Settings, prefix: str | None) -> SelfAttention:
    path = Path(source)
    if path.suffix not in SUFFIXES and not path.is_file():
        raise InvalidInput(
            f"{source!r} is neither a weights file (.safetensors, .pt, .pth) nor a random configuration (random, "
            f"{', '.join(f'random:{name}' for name in PRESETS)}, random[width=64,heads=4,…])."
        )
    if settings.width is not None:
        raise InvalidInput("--width is for random weights: those of a file have their own.")
    found = read_attention_weights(
        path,
        prefix,
        settings.heads,
        kv_heads=settings.kv_heads,
        dtype=settings.torch_dtype,
        rotary=settings.rotary,
    )
    return found.attention(**settings.options(found.heads, found.head_width))


def _preset(name: str | None) -> Settings:
    if name is not None and name not in PRESETS:
        raise InvalidInput(f"there is no random configuration {name!r}: choose {', '.join(PRESETS)}.")
    return Settings() if name is None else PRESETS[name]


def _pairs(text: str | None) -> Settings:
    """``width=64,causal=true`` as settings."""
    kinds = {name: get_args(kind)[0] for name, kind in get_type_hints(Settings).items()}
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if name not in kinds:
            raise InvalidInput(f"{name!r} is not a setting: choose from {', '.join(f.name for f in fields(Settings))}.")
        try:
            found[name] = _TRUTH[value.lower()] if kinds[name] is bool else kinds[name](value)
        except (KeyError, ValueError):
            raise InvalidInput(f"{pair!r} does not give {name} a value of type {kinds[name].__name__}.") from None
    return Settings(**found)
