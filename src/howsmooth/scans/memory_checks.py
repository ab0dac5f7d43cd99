"""Memory of a window: checked by its size before it is read, and refused in one sentence when it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from howsmooth._util.common import out_of_memory
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel
from howsmooth.models.checkpoint_files import free_bytes

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
        config: Any = model.model.config
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
