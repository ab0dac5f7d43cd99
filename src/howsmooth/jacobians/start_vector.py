"""The random start of measurements. An operator that is tested on this vector can cache the product."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth._util.common import random_stream

_PURPOSE = "golub-kahan start"


def start_stream(seed: int = 0, run: int = 0) -> torch.Generator:
    """Random numbers for the start of a measurement with this seed, and for its further runs."""
    return random_stream(seed, f"{_PURPOSE} {run}" if run else _PURPOSE)


def random_start(maps: int, size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere, one for each map, drawn on the CPU so that a seed means the same on every device.

    >>> bool((random_start(2, 5, torch.zeros(()), start_stream()).norm(dim=-1) - 1).abs().max() < 1e-6)
    True
    """
    v = torch.randn(maps, size, generator=generator, dtype=like.dtype).to(like.device)
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64).to(v)
