"""The values of a cell: the measured norm with its ends, upper bounds, and the paths that explain it.

The memory of a window is checked by its size before the model reads it, and refused in one sentence when it runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import out_of_memory
from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import Composite
from howsmooth.bounds import CATALOGUE, get, setting
from howsmooth.bounds.catalogue import upper_bounds
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets
from howsmooth.models.checkpoint_files import free_bytes
from howsmooth.models.network_parts import NetworkTargets
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import explain, measure_heads, measure_map
from howsmooth.scans.plan import CellBatch, ScanCell, ScanSettings

CellValues = dict[str, Any]
Reasons = dict[str, Tensor]
PROVED = "howsmooth.three_path"
"""The bound that every attention map has at an input."""
_REASONS = ("value_path", "score_path", "value_share", "sink", "sink_token", "entropy")
PROVED_AROUND = "howsmooth.composed"
"""The same bound for attention with other operations around it."""
COSTLY = ("howsmooth.local",)
"""Bounds that take many times as long as the measurement; only with ``bounds="all"``."""


def head_values(attention: AttentionMap | Composite, x: Tensor, settings: ScanSettings) -> list[CellValues]:
    """The numbers of every head, measured together.

    >>> import howsmooth as hs
    >>> x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    >>> rows = head_values(hs.SelfAttention.random(8, heads=2), x, ScanSettings())
    >>> [row["lower"] <= row["value"] <= row["upper"] <= 1.1 * row["proved"] for row in rows]
    [True, True]
    """
    begun = time.perf_counter()
    total, reasons = _measured(attention, x, settings, per_head=True)
    bounds = _bounds(attention, x, settings, per_head=True)
    seconds = (time.perf_counter() - begun) / attention.heads
    return [_values(total, (head,), x, seconds, reasons, bounds[head]) for head in range(attention.heads)]


def map_values(f: Callable[[Tensor], Tensor], x: Tensor, settings: ScanSettings) -> CellValues:
    """The numbers of one map: an attention block with its bounds and paths, or any function with its value alone."""
    begun = time.perf_counter()
    if isinstance(f, AttentionMap | Composite):
        total, reasons = _measured(f, x, settings, per_head=False)
        (bounds,) = _bounds(f, x, settings, per_head=False)
    else:
        total, reasons, bounds = measure_map(f, x, **_solver(settings)), {}, {}
    return _values(total, (), x, time.perf_counter() - begun, reasons, bounds)


def measure_batch(
    targets: Targets | NetworkTargets, batch: CellBatch, settings: ScanSettings
) -> list[tuple[ScanCell, CellValues]]:
    """The cells of a batch with their numbers.

    All heads of a layer are measured even if some are asked for: their random starts are drawn together, and a number
    must not depend on what else is asked for.
    """
    if batch.what == "head":
        assert batch.layer is not None
        site = targets.site(batch.layer)
        of_heads = head_values(site.attention, site.x, settings)
        return [(cell, of_heads[cell.head]) for cell in batch.cells() if cell.head is not None]
    numbers = map_values(*targets.get(batch.what, batch.layer), settings)
    return [(cell, numbers) for cell in batch.cells()]


def _solver(settings: ScanSettings) -> dict[str, Any]:
    return {"rtol": settings.rtol, "seed": settings.seed, "confidence": settings.confidence}


def _measured(
    attention: AttentionMap | Composite, x: Tensor, settings: ScanSettings, per_head: bool
) -> tuple[Measurement, Reasons]:
    """The measurement and, if asked for, what explains it; of a block, its strongest sink and mean entropy."""
    if not settings.explain:
        return (measure_heads if per_head else measure_map)(attention, x, **_solver(settings)), {}
    story = explain(attention, x, per_head=per_head, influence=False, **_solver(settings))
    sink, sink_token, entropy = story.sink, story.sink_token, story.entropy
    if not per_head:
        strongest = sink.argmax()
        sink, sink_token, entropy = sink[strongest], sink_token[strongest], entropy.mean()
    paths = story.value_path.value, story.score_path.value
    return story.total, dict(zip(_REASONS, (*paths, story.value_share, sink, sink_token, entropy), strict=True))


def _bounds(
    attention: AttentionMap | Composite, x: Tensor, settings: ScanSettings, per_head: bool
) -> list[dict[str, float]]:
    """Upper bounds on the 2-norm by name, for every head or for the block."""
    where = setting(attention, over=x)
    wanted = [] if settings.bounds == "none" else [get(PROVED), get(PROVED_AROUND)]
    if settings.bounds in ("cheap", "all"):
        wanted = [b for b in CATALOGUE.values() if settings.bounds == "all" or b.name not in COSTLY]
    bounds = upper_bounds(where, per_head=per_head, among=wanted)
    values = {name: bound.reshape(-1).tolist() for name, bound in bounds.items()}
    count = attention.heads if per_head else 1
    return [{name: of_map[number] for name, of_map in values.items()} for number in range(count)]


def _values(
    total: Measurement, index: tuple[int, ...], x: Tensor, seconds: float, reasons: Reasons, bounds: dict[str, float]
) -> CellValues:
    """The columns of a store for the map at one index of a measurement."""
    others = {name: _finite(value) for name, value in bounds.items() if name not in (PROVED, PROVED_AROUND)}
    return {
        "value": float(total.value[index]),
        "lower": float(total.lower[index]),
        "upper": _finite(float(total.upper[index])),
        "relative": None if total.relative is None else _finite(float(total.relative[index])),
        "confidence": total.confidence,
        "converged": bool(total.converged[index]),
        "proved": _finite(bounds.get(PROVED, bounds.get(PROVED_AROUND, math.inf))),
        "bounds": others,
        "radius": float(torch.linalg.vector_norm(x.double(), dim=-1).max()),
        **{name: reasons[name][index].item() if reasons else None for name in _REASONS},
        "dtype": str(total.dtype).removeprefix("torch."),
        "seconds": seconds,
        "input_energy": None if total.right is None else _energies(total.right[index]),
    }


def _finite(value: float) -> float | None:
    """None for a bound that says nothing."""
    return value if math.isfinite(value) else None


def _energies(vector: Tensor) -> list[float]:
    """|v_j|² of every token in six digits."""
    return [float(f"{share:.6g}") for share in vector.double().square().sum(-1).tolist()]


_FLOAT = 4


@dataclass(frozen=True)
class ModelSizes:
    """The width, heads and layers of a model."""

    width: int
    heads: int
    layers: int

    @classmethod
    def of(cls, model: OpenModel) -> ModelSizes:
        """From its configuration; 1 where it has no such entry."""
        config: Any = getattr(model.model, "config", None)
        names = ("hidden_size", "num_attention_heads", "num_hidden_layers")
        sizes = [getattr(config, name, None) for name in names]
        return cls(*(size if isinstance(size, int) else 1 for size in sizes))


def least_bytes(length: int, sizes: ModelSizes) -> int:
    """A lower bound on the bytes that reading n tokens takes.

    A layer holds its h·n² logits while it makes weights of them, and every layer's n·d tokens are kept.

    >>> least_bytes(1000, ModelSizes(width=100, heads=10, layers=2))
    80800000
    """
    return _FLOAT * (2 * sizes.heads * length**2 + sizes.layers * length * sizes.width)


def check_fits(model: OpenModel, length: int, free: int | None = None) -> None:
    """Refuse a window that cannot fit.

    Args:
        model, length: what reads how many tokens.
        free: bytes; by default what the machine has.
    """
    sizes = ModelSizes.of(model)
    needed, there = least_bytes(length, sizes), free_bytes() if free is None else free
    if needed > there:
        raise InvalidInput(
            f"n = {length} does not fit in memory: the logits of one layer with {sizes.heads} heads take at least "
            f"{needed / 1e9:.3g} GB, and {there / 1e9:.3g} GB are free. Ask for shorter lengths."
        )


@contextmanager
def fitting(length: int) -> Iterator[None]:
    """Replace errors of exhausted memory by one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            raise InvalidInput(
                f"n = {length} does not fit in memory: ask for shorter lengths, or for less at once with --what and "
                "--layers. What a store has kept stays there."
            ) from error
        raise
