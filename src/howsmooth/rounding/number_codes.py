"""The numbers of a format: the nearest code of a scaled number, and the storage of scales.

Everything is computed in float32, rounds to nearest with ties to even, and saturates at the largest code. Where torch
has the dtype (float8_e4m3fn, float8_e5m2, bfloat16, float16) its own cast is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.errors import InvalidInput

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of e2m1 (OCP Microscaling Formats v1.0, table 4), by code; the sign is a bit of its own."""
_FP4_MIDDLES = (FP4[1:] + FP4[:-1]) / 2
LARGEST_SCALE = float(torch.finfo(torch.float16).max)


def to_integers(x: Tensor, scale: Tensor, most: int) -> Tensor:
    """s·clip(round(x/s), −most, most), and 0 where the scale is 0."""
    return torch.where(scale > 0, (x / scale).round_().clamp_(-most, most) * scale, 0.0)


def to_offset_integers(x: Tensor, scale: Tensor, offset: Tensor, most: int) -> Tensor:
    """m + s·clip(round((x − m)/s), 0, most), and m where the scale is 0."""
    return torch.where(scale > 0, ((x - offset) / scale).round_().clamp_(0, most) * scale + offset, offset)


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the nearest number of a floating dtype, saturated (torch's cast to e4m3 gives NaN beyond 448)."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


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
    """A scale (or offset) as the float16 that stands beside the codes."""
    return size.clamp(-LARGEST_SCALE, LARGEST_SCALE).half().float()


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


def check_finite_cache(x: Tensor, what: str) -> None:
    """Refuse a cache that holds NaN or infinity: rounding would spread it over its scale."""
    if not bool(torch.isfinite(x).all()):
        raise InvalidInput(f"{what} hold NaN or infinity, which no format can round: check the model's weights.")
