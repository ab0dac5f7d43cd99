"""Positions of tokens in attention.

`Rotary` turns queries and keys (a token stage); `ALiBi` and `RelativeBias` add to the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth._util.validation import check_count, check_number, check_positive, check_weights, validated
from howsmooth.attention.masks import HIDDEN, LogitBias, Maps, Sight
from howsmooth.attention.memory_layout import interleave_channels, join_channels
from howsmooth.attention.stages import TokenDerivative, TokenStage
from howsmooth.errors import InvalidInput


class Rotary(TokenStage):
    """Rotary position embedding (Su et al. 2021): the pair (x_a, x_b) at position t turns by the angle t·ω.

    Args:
        frequencies: the angles per position ω, one per pair; see `Rotary.standard`.
        interleaved: pairs are (0,1), (2,3), … (GPT-J) instead of (0, m), (1, m+1), … (Llama, GPT-NeoX).
        amplitude: factor on cosine and sine (YaRN and relatives).
        positions: the position of each token; 0, 1, 2, … when None.

    Coordinates beyond the pairs pass unchanged (partial rotary).
    """

    linear = True

    @validated
    def __init__(
        self, frequencies: Tensor, interleaved: bool = False, amplitude: float = 1.0, positions: Tensor | None = None
    ):
        super().__init__()
        check_number(amplitude, "amplitude")
        if frequencies.dim() != 1 or not bool(torch.isfinite(frequencies).all()):
            raise InvalidInput(
                f"rotary positions need a vector of finite frequencies, got some of shape {tuple(frequencies.shape)}."
            )
        self.frequencies: Tensor
        self.positions: Tensor | None
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("positions", positions, persistent=False)
        self.interleaved, self.amplitude = interleaved, amplitude

    @classmethod
    @validated
    def standard(cls, dim: int, base: float = 10_000.0, interleaved: bool = False) -> Rotary:
        """ω_m = base^{−2m/dim}, in double precision."""
        base = check_positive(base, "the base of rotary positions")
        if dim < 2 or dim % 2:
            raise InvalidInput(f"rotary positions turn pairs of coordinates: the width must be even, got {dim}.")
        return cls(base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), interleaved)

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        n, width = x.shape[-2:]
        pairs = len(self.frequencies)
        if 2 * pairs > width:
            raise InvalidInput(f"rotary positions need {2 * pairs} coordinates per head, but heads are {width} wide.")
        places = torch.arange(n, device=x.device) if self.positions is None else self.positions
        if len(places) != n:
            raise InvalidInput(f"rotary positions are given for {len(places)} tokens, but the input has {n}.")
        wide = torch.promote_types(self.frequencies.dtype, torch.float32)  # bfloat16 cannot count beyond 256
        angle = places.to(wide)[:, None] * self.frequencies.to(wide)
        turn = _Turn((angle.cos() * self.amplitude).to(x), (angle.sin() * self.amplitude).to(x), self.interleaved)
        return turn.jvp(x), turn


@dataclass(frozen=True)
class _Turn(TokenDerivative):
    """The rotation itself: linear, the same for every head and batch item."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def jvp(self, dx: Tensor) -> Tensor:
        return self._turn(dx, self.sin)

    def vjp(self, gy: Tensor) -> Tensor:
        return self._turn(gy, -self.sin)

    def size(self) -> Tensor:
        return torch.hypot(self.cos, self.sin).amax(-1, keepdim=True).clamp_min(1.0)

    def _turn(self, x: Tensor, sin: Tensor) -> Tensor:
        pairs = sin.shape[-1]
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.split(pairs, dim=-1)
        both = a * self.cos - b * sin, b * self.cos + a * sin
        return join_channels([interleave_channels(*both) if self.interleaved else join_channels(both), rest])


class ALiBi(LogitBias):
    """Linear biases (Press et al. 2022): the logit of (i, j) in head h gains −slope_h·|i − j|."""

    sight: Sight = "full"
    keeps_self = True

    @validated
    def __init__(self, slopes: Tensor):
        super().__init__()
        if slopes.dim() != 1 or not bool(torch.isfinite(slopes).all()):
            raise InvalidInput(f"ALiBi needs one finite slope per head, got a tensor of shape {tuple(slopes.shape)}.")
        self.slopes: Tensor
        self.register_buffer("slopes", slopes, persistent=False)

    @classmethod
    @validated
    def standard(cls, heads: int) -> ALiBi:
        """The slopes of the paper: 2^{−8/m}, 2^{−16/m}, … for m = heads a power of two, interpolated otherwise."""
        check_weights(check_count(heads, "heads"), "ALiBi")
        closest = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
        slopes += [2 ** (-4 * (2 * h + 1) / closest) for h in range(heads - closest)]
        return cls(torch.tensor(slopes, dtype=torch.float64))

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        distance = (maps.positions(rows)[:, None] - maps.positions(cols)).abs()
        return -self.slopes[maps.heads, None, None].to(maps.like) * distance

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.slopes) != heads:
            raise InvalidInput(f"ALiBi has {len(self.slopes)} slopes, but the attention has {heads} heads.")


class RelativeBias(LogitBias):
    """Additive bias by relative position: the logit of (i, j) in head h gains ``table[h, clip(j − i) + reach]``.

    Args:
        table: ``(heads or 1, 2·reach + 1)``; offsets beyond ± reach use the outermost entries. Bucketed schemes
            (T5, MPNet) are of this form once their buckets are written out by offset.
    """

    @validated
    def __init__(self, table: Tensor):
        super().__init__()
        if table.dim() != 2 or table.shape[1] % 2 == 0:
            raise InvalidInput(f"a relative bias table has shape (heads, 2·reach + 1), got {tuple(table.shape)}.")
        if bool((table.isnan() | (table == float("inf"))).any()):
            raise InvalidInput("a relative bias table may hold finite logits and −inf, but this one holds NaN or +inf.")
        self.table: Tensor
        self.register_buffer("table", table, persistent=False)
        self.keeps_self = bool((table[:, table.shape[1] // 2] != HIDDEN).all())
        self.sight = "full" if bool((table != HIDDEN).all()) else "any"

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        reach = self.table.shape[1] // 2
        offset = maps.positions(cols) - maps.positions(rows)[:, None]
        table = self.table if len(self.table) == 1 else self.table[maps.heads]
        return table.to(maps.like)[:, offset.clamp(-reach, reach) + reach]

    def check(self, n: int, heads: int, batch: int) -> None:
        if len(self.table) not in (1, heads):
            raise InvalidInput(f"the relative bias has {len(self.table)} rows, but the attention has {heads} heads.")
