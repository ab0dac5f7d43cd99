"""Formats of a cached key or value: how many bits, which codes, what shares a scale.

A format is written ``int4``, ``int4[per=channel]``, ``int3[asymmetric,group=32]``, ``fp8_e4m3[per=token]``,
``int4[first=4,rotary=before]``: a name of `NUMBER_FORMATS`, and what differs from its entry in brackets.

Keys and values are ``(…, heads, n, width)``, as attention holds them. What shares a scale (``per``):

    token     the numbers of one head at one token, or groups of ``group`` of them
    channel   one coordinate of a head over all tokens, or over runs of ``group`` tokens (the last may be shorter)
    tensor    all heads and tokens of a layer
    none      nothing: the numbers are cast as they are

Integers of b bits, symmetric: s = max|x|/(2^(b−1) − 1), x ≈ s·round(x/s). Asymmetric: x ≈ m + s·round((x − m)/s) with
m = min x and s = (max x − min x)/(2^b − 1). Everything is computed in float32, rounds to nearest with ties to even, and
saturates at the largest code; where torch has the dtype (float8_e4m3fn, float8_e5m2, bfloat16, float16) its own cast is
taken. Scales and offsets are float16 numbers, and are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from howsmooth._util.validation import did_you_mean, shown, validated
from howsmooth.errors import InvalidInput

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of e2m1 (OCP Microscaling Formats v1.0, table 4), by code; the sign is a bit of its own."""
_FP4_MIDDLES = (FP4[1:] + FP4[:-1]) / 2
Kind = Literal["integer", "cast", "scaled", "mxfp4", "nvfp4"]
Scope = Literal["token", "channel", "tensor", "none"]
SCOPES = get_args(Scope)
_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the nearest number of a floating dtype, saturated (torch's cast to e4m3 gives NaN beyond 448)."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def to_fp4(x: Tensor) -> Tensor:
    """x as the nearest number of e2m1.

    >>> to_fp4(torch.tensor([0.25, 0.75, 2.5, -5.0, 9.0]))
    tensor([ 0.,  1.,  2., -4.,  6.])
    """
    middles = _FP4_MIDDLES.to(x.device)
    size = x.abs().contiguous()
    below = torch.bucketize(size, middles, right=False)  # a tie goes to the lower code …
    tie = size == middles[below.clamp(max=len(middles) - 1)]
    code = torch.where(tie & (below % 2 == 1), below + 1, below)  # … unless that one is odd
    return torch.copysign(FP4.to(x.device)[code.clamp(max=len(FP4) - 1)], x)


def stored_scale(size: Tensor) -> Tensor:
    """A scale (or offset) as the float16 that is stored beside the codes."""
    return to_dtype(size, torch.float16)


def power_of_two_scale(largest: Tensor) -> Tensor:
    """The scale 2^(⌊log₂ max|x|⌋ − 2) of mxfp4, an e8m0 number: 2 is the largest exponent of e2m1 (OCP MX, 6.3)."""
    _, exponent = torch.frexp(largest)  # largest = m·2^e, ½ ≤ m < 1
    scale = torch.ldexp(torch.ones_like(largest), (exponent - 3).clamp(-127, 127))
    return torch.where(largest > 0, scale, 0.0)


def two_level_scale(largest: Tensor, whole: Tensor) -> Tensor:
    """The scale of a block of nvfp4: an e4m3 number times the float32 scale max|X|/(448·6) of the whole tensor."""
    outer = whole / (torch.finfo(torch.float8_e4m3fn).max * FP4[-1])
    inner = to_dtype(torch.where(outer > 0, largest / FP4[-1] / outer, 0.0), torch.float8_e4m3fn)
    return inner * outer


def scaled(x: Tensor, scale: Tensor, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """s·nearest(x/s), and 0 where the scale is 0."""
    return torch.where(scale > 0, nearest(x / scale) * scale, 0.0)


@dataclass(frozen=True)
class Format:
    """The storage of a cached number.

    Attributes:
        base: the name of the entry in `NUMBER_FORMATS`.
        bits: of a code, without scales.
        per: what shares a scale.
        group: how many numbers of it do; None for all.
        symmetric: integers around zero; otherwise from the least to the largest number.
        first: how many tokens at the beginning are kept as they are.
        rotary: whether keys are rounded before or after they are turned to their positions. Keys without rotary
            positions, and values, know no difference.
    """

    base: str
    bits: int
    kind: Kind
    per: Scope
    group: int | None = None
    symmetric: bool = True
    first: int = 0
    rotary: Literal["after", "before"] = "after"

    @property
    def name(self) -> str:
        """As it is written; `parse_format` reads it back.

        >>> parse_format("int4[ per = channel, group=32 ]").name
        'int4[per=channel,group=32]'
        """
        entry = NUMBER_FORMATS[self.base]
        options = [] if self.symmetric else ["asymmetric"]
        for option in ("per", "group", "first", "rotary"):
            value = getattr(self, option)
            if value != getattr(entry, option):
                options.append(f"{option}={value}")
        return f"{self.base}[{','.join(options)}]" if options else self.base

    def bits_per_number(self, width: int, tokens: int, heads: int = 1) -> float:
        """Bits per cached number in a window, scales and exact tokens (16 bits each number) included.

        >>> NUMBER_FORMATS["int4"].bits_per_number(width=64, tokens=128)
        4.25
        >>> [NUMBER_FORMATS[name].bits_per_number(width=64, tokens=128) for name in ("nvfp4", "mxfp4")]
        [4.50390625, 4.25]
        """
        self.check(width)
        rounded = max(tokens - self.first, 0)
        scopes = {
            "token": rounded * (width // (self.group or width)),
            "channel": width * -(-rounded // (self.group or max(rounded, 1))),
            "tensor": 1 / heads,
            "none": 0,
        }[self.per]
        each = {"integer": 16 if self.symmetric else 32, "scaled": 32, "cast": 0, "mxfp4": 8, "nvfp4": 8}[self.kind]
        whole = 32 / heads if self.kind == "nvfp4" else 0
        stored = self.bits * rounded * width + each * scopes + whole + 16 * min(self.first, tokens) * width
        return stored / (tokens * width)

    def check(self, width: int) -> None:
        """Refuse heads that groups along a token do not divide."""
        if self.per == "token" and self.group is not None and width % self.group:
            raise InvalidInput(
                f"groups of {self.group} numbers ({self.name}) do not divide the {width} of a head: choose a group, or "
                f"another format, that divides {width}."
            )

    def rounded(self, x: Tensor, what: str = "these numbers") -> Tensor:
        """The numbers of a cache ``(…, heads, n, width)`` after rounding to this format, in the dtype of x.

        >>> NUMBER_FORMATS["int2"].rounded(torch.tensor([[[1.0, 0.4, -0.6, 0.0]]]))
        tensor([[[ 1.,  0., -1.,  0.]]])
        """
        self.check(x.shape[-1])
        if not bool(x.isfinite().all()):  # it would spread over its scale
            raise InvalidInput(f"{what} hold NaN or infinity, which no format can round: check the model's weights.")
        exact, rest = x[..., : self.first, :], x[..., self.first :, :].float()
        if not rest.numel():
            return x.clone()
        return torch.cat([exact, self._rounded(rest).to(x.dtype)], dim=-2)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.per in ("none", "tensor"):
            return self._in_scope(x, x, (-3, -2, -1) if x.dim() > 2 else (-2, -1))
        if self.per == "token":
            parts = x.unflatten(-1, (-1, self.group or x.shape[-1]))
            return self._in_scope(parts, x, (-1,)).flatten(-2)
        parts = x.split(self.group or x.shape[-2], dim=-2)
        return torch.cat([self._in_scope(part, x, (-2,)) for part in parts], dim=-2)

    def _in_scope(self, x: Tensor, whole: Tensor, dims: tuple[int, ...]) -> Tensor:
        """x rounded with one scale for every run along ``dims``; ``whole`` is the tensor it is part of."""
        largest = x.abs().amax(dims, keepdim=True)
        match self.kind:
            case "cast":
                return to_dtype(x, _DTYPES[self.base])
            case "scaled":
                dtype = _DTYPES[self.base]
                return scaled(x, largest / torch.finfo(dtype).max, partial(to_dtype, dtype=dtype))
            case "mxfp4":
                return scaled(x, power_of_two_scale(largest), to_fp4)
            case "nvfp4":
                return scaled(x, two_level_scale(largest, whole.abs().amax()), to_fp4)
        if self.symmetric:
            code = 2 ** (self.bits - 1) - 1
            return scaled(x, stored_scale(largest / code), lambda z: z.round().clamp(-code, code))
        lowest, code = x.amin(dims, keepdim=True), 2**self.bits - 1
        scale, offset = stored_scale((x.amax(dims, keepdim=True) - lowest) / code), stored_scale(lowest)
        return offset + scaled(x - offset, scale, lambda z: z.round().clamp(0, code))


_integer = partial(Format, kind="integer", per="token")
_cast = partial(Format, kind="cast", per="none")
NUMBER_FORMATS: dict[str, Format] = {
    entry.base: entry
    for entry in (
        *(_integer(f"int{bits}", bits) for bits in (8, 6, 4, 3, 2)),
        _cast("fp8_e4m3", 8),
        _cast("fp8_e5m2", 8),
        Format("nvfp4", 4, "nvfp4", "token", 16),
        Format("mxfp4", 4, "mxfp4", "token", 32),
        _cast("bf16", 16),
        _cast("fp16", 16),
    )
}
"""The formats by name. fp8 is cast without a scale, as engines do by default; ``[per=…]`` scales it."""


def parse_format(text: str) -> Format:
    """A format from its name and what differs in brackets.

    >>> parse_format("int4[asymmetric,per=channel,group=32,first=4]").bits_per_number(width=64, tokens=68)
    5.647058823529412
    >>> parse_format("int5")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: there is no format 'int5': choose from int8, int6, int4, ..., bf16, fp16, ...
    """
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[(.*)\])?\s*", text) if isinstance(text, str) else None
    if match is None or match[1] not in NUMBER_FORMATS:
        hint = did_you_mean(match[1], list(NUMBER_FORMATS)) if match else None
        raise InvalidInput(
            f"there is no format {shown(text)}: choose from {', '.join(NUMBER_FORMATS)}, with brackets if you like, as "
            f"in int4[asymmetric,per=channel,group=32,first=4,rotary=before]{hint or '.'}"
        )
    form = NUMBER_FORMATS[match[1]]
    for option in filter(None, (piece.strip() for piece in (match[2] or "").split(","))):
        form = _with_option(form, option, text)
    return form


@validated
def parse_formats(text: str) -> list[Format]:
    """Formats between commas, each once.

    >>> [one.name for one in parse_formats("int8, int4[per=channel,group=32],int8")]
    ['int8', 'int4[per=channel,group=32]']
    """
    return list(dict.fromkeys(parse_format(name) for name in re.split(r",(?![^\[]*\])", text)))


def _with_option(entry: Format, option: str, whole: str) -> Format:
    name, _, value = (piece.strip() for piece in option.partition("="))
    if option in ("symmetric", "asymmetric"):
        if entry.kind != "integer":
            raise InvalidInput(f"{shown(whole)}: only integers are symmetric or asymmetric.")
        return replace(entry, symmetric=option == "symmetric")
    if name == "per" and value in SCOPES:
        return _with_scope(entry, value, whole)
    if name in ("group", "first") and re.fullmatch("[0-9]{1,9}", value) and int(value) >= (name == "group"):
        if name == "group" and (entry.per not in ("token", "channel") or entry.kind in ("mxfp4", "nvfp4")):
            raise InvalidInput(f"{shown(whole)}: only numbers with a scale per token or channel come in other groups.")
        return replace(entry, group=int(value)) if name == "group" else replace(entry, first=int(value))
    if name == "rotary" and value in ("after", "before"):
        return replace(entry, rotary=value)  # type: ignore[arg-type]
    raise InvalidInput(
        f"{shown(whole)}: brackets take asymmetric, per={'|'.join(SCOPES)}, group=NUMBER, first=NUMBER and "
        f"rotary=before|after, not {shown(option)}."
    )


def _with_scope(entry: Format, per: str, whole: str) -> Format:
    if entry.kind in ("mxfp4", "nvfp4") and per != entry.per:
        raise InvalidInput(f"{shown(whole)}: {entry.base} has blocks of {entry.group} along a token by definition.")
    if entry.kind == "integer" and per == "none":
        raise InvalidInput(f"{shown(whole)}: integers need a scale, so per is token, channel or tensor.")
    if entry.base in ("bf16", "fp16") and per != "none":
        raise InvalidInput(f"{shown(whole)}: {entry.base} has no scale.")
    kind: Kind = "scaled" if entry.base in ("fp8_e4m3", "fp8_e5m2") and per != "none" else entry.kind
    return replace(entry, per=per, kind=kind if per != "none" else "cast")  # type: ignore[arg-type]
