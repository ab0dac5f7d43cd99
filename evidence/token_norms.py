"""The norm from largest token to largest token against a search of the whole sphere of directions.

For outputs of width one to three, N_i = max over unit u of Σ_j |J_ijᵀu| is bracketed by a grid of directions: the sum
grows by at most Σ_j ‖J_ij‖₂ times the distance to the nearest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table

TITLE = "Is the norm of the largest token right?"
SEEDS = 12
SHAPES = ((1, 1), (1, 3), (2, 2), (3, 2), (4, 3), (6, 3))
_STEPS = {2: 20_000, 3: 400}
Function = Callable[[Tensor], Tensor]


def directions(width: int) -> tuple[Tensor, float]:
    """Unit vectors, and how far any other is from the nearest of them or its opposite."""
    if width == 1:
        return torch.ones(1, 1, dtype=torch.float64), 0.0
    count = _STEPS[width]
    angles = (torch.arange(count, dtype=torch.float64) + 0.5) * math.pi / count
    if width == 2:
        return torch.stack([angles.cos(), angles.sin()], 1), math.pi / count / 2
    polar, around = torch.meshgrid(angles, torch.cat([angles, angles + math.pi]), indexing="ij")
    points = torch.stack([polar.sin() * around.cos(), polar.sin() * around.sin(), polar.cos()], -1)
    return points.reshape(-1, 3), math.pi / count / math.sqrt(2)


def bracket(blocks: Tensor) -> tuple[float, float]:
    """Both ends for blocks ``(output tokens, width, tokens, width)``."""
    points, distance = directions(blocks.shape[1])
    reached = [float(torch.einsum("um,mnd->und", points, row).norm(dim=-1).sum(-1).max()) for row in blocks]
    slopes = [float(torch.linalg.matrix_norm(row.movedim(1, 0), 2).sum()) for row in blocks]
    return max(reached), max(low + slope * distance for low, slope in zip(reached, slopes, strict=True))


def functions(n: int, d: int, seed: int) -> Iterator[tuple[str, Function]]:
    """Maps of n tokens of width d: attention, linear ones, one with a single entry, and a tiny one."""
    generator = torch.Generator().manual_seed(seed)
    attention = hs.SelfAttention.random(d, seed=seed, mask="causal" if seed % 2 else None, dtype=torch.float64)
    whole, single = torch.randn(n * d, n * d, generator=generator).double(), torch.zeros(n * d, n * d).double()
    single[0, -1] = 3.0
    yield "attention", lambda x: attention.in_dtype(x.dtype)(x)
    for name, matrix in (("linear", whole), ("one entry", single), ("tiny", 1e-18 * whole)):
        yield name, lambda x, matrix=matrix: (matrix.to(x.dtype) @ x.flatten()).reshape(x.shape)  # type: ignore[misc]


def trial(f: Function, x: Tensor, exact_limit: int) -> tuple[bool, float]:
    """Whether the ends have the norm between them and the value is attained, and how far the ends are apart."""
    n, d = x.shape
    matrix = torch.autograd.functional.jacobian(f, x.double()).reshape(n, d, n, d)
    low, high = bracket(matrix)
    found = hs.measure(f, x, norm="token", exact_limit=exact_limit)
    lower, value, upper = (float(end) for end in (found.lower, found.value, found.upper))
    slack = 1e-12 if x.dtype == torch.float64 else 1e-5
    return lower <= high * (1 + 1e-12) and upper >= low * (1 - 1e-12) and value <= high * (1 + slack), upper / lower - 1


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    rows = []
    for dtype in (torch.float32, torch.float64):
        for name, limit in (("token blocks", 4096), ("token ascent", 0)):
            progress(f"{name}, {dtype}")
            found = [
                trial(f, 2 * torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype), limit)
                for n, d in SHAPES
                for seed in range(SEEDS)
                for _, f in functions(n, d, seed)
            ]
            apart = sorted(gap for _, gap in found)
            wrong = sum(not right for right, _ in found)
            kind = str(dtype).removeprefix("torch.")
            rows.append([name, kind, len(found), wrong, f"{apart[len(apart) // 2]:.1e}", f"{apart[-1]:.1e}"])
    return [
        "Maps of one to six tokens of width one to three (attention, linear maps, a single entry, tiny ones) have "
        "their norm bracketed by a grid over all directions of an output token. The ends must have the norm between "
        "them, and the value may not exceed it.",
        table(["method", "dtype", "maps", "wrong", "ends apart (median)", "ends apart (most)"], rows),
    ]
