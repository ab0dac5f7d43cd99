"""What rounded keys and values do to outputs, beside the bounds on it: of `howsmooth.rounding.output_error`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import howsmooth as hs
from evidence.juries import Example, Modules, agreement
from howsmooth.attention.masks import HIDDEN
from howsmooth.rounding import parse_formats
from howsmooth.rounding.kv_cache import Cache

DRAWS = 12


@dataclass(frozen=True)
class Window:
    """A map at tokens, whose cached keys or values are off by some size.

    Attributes:
        aligned: errors of keys are along the values of the tokens, where they move outputs most.
    """

    attention: hs.SelfAttention
    x: Tensor
    size: float
    aligned: bool = False

    @cached_property
    def cache(self) -> Cache:
        return Cache.at(self.attention, self.x)

    @cached_property
    def weights(self) -> Tensor:
        return self.cache.weights(self.cache.key)

    @cached_property
    def values(self) -> Tensor:
        return self.cache.shared(self.cache.value) @ self.cache.output

    @cached_property
    def errors(self) -> list[Tensor]:
        """Of keys or values, ``(kv heads, n, k)``."""
        shape, generator = self.cache.key.shape, torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(DRAWS)]
        if self.aligned:
            along = self.values[:: self.cache.group, :, :1] - self.values[:: self.cache.group, :, :1].mean(
                1, keepdim=True
            )
            drawn[:2] = [along.expand(shape), -along.expand(shape)]
        return [self.size * one for one in drawn]

    def example(self, label: str) -> Example:
        """Both forms for keys, both for values, and what they are made of."""
        seen = (self.cache.bias != HIDDEN).expand_as(self.weights)
        output = self.weights @ self.values

        def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
            reach = modules["rounding.output_error"]._Reach.of(self.cache, self.weights, self.values, output)
            yield "spread", reach.spread
            yield "diameter", reach.diameter
            yield "norm of the weights", reach.norm
            keys = [reach.of_keys(self.cache, self.cache.shared(moved)) for moved in self.errors]
            yield "tanh form", torch.stack([tanh for tanh, _ in keys])
            yield "path form", torch.stack([path for _, path in keys])
            moved = [reach.of_values(self.cache.shared(error) @ self.cache.output) for error in self.errors]
            yield "values, each query", torch.stack([each for each, _ in moved])
            yield "values, whole window", torch.stack([_mean(whole) for _, whole in moved])

        changes = torch.stack(
            [self._change(self.cache.weights(self.cache.key + e) - self.weights) for e in self.errors]
        )
        held = torch.stack([
            (self.weights @ self.cache.shared(error) @ self.cache.output).norm(dim=-1) for error in self.errors
        ])  # fmt: skip
        about = self.values[:, None] - output[:, :, None]
        apart = torch.cdist(self.values, self.values)[:, None] * (seen[..., None] & seen[..., None, :])
        return Example(label, proved, {
            "spread": torch.linalg.matrix_norm(self.weights.sqrt()[..., None] * about, 2),
            "diameter": apart.amax((-2, -1)), "norm of the weights": torch.linalg.matrix_norm(self.weights, 2),
            "tanh form": changes, "path form": changes, "values, each query": held,
            "values, whole window": _mean(held),
        })  # fmt: skip

    def _change(self, weights: Tensor) -> Tensor:
        return (weights @ self.values).norm(dim=-1)


def _mean(per_query: Tensor) -> Tensor:
    return per_query.square().mean(-1).sqrt()


def _two(half: float, share: float = 0.5) -> Window:
    """Two tokens on a line that all look at with these shares; errors of keys along the values."""
    one = torch.ones(1, 1, dtype=torch.float64)
    mask = torch.tensor([1 - share, share], dtype=torch.float64).log().expand(2, 2)
    attention = hs.SelfAttention(0 * one, 0 * one, one, one, query_bias=torch.ones(1).double(), mask=mask, scale=1.0)
    return Window(attention, torch.tensor([[-1.0], [1.0]], dtype=torch.float64), half, aligned=True)


def _drawn(mask: str | None, size: float, softcap: float | None = None) -> Window:
    rotary = hs.Rotary.standard(4, base=100.0)
    attention = hs.SelfAttention.random(
        8, heads=2, kv_heads=1, seed=1, dtype=torch.float64, mask=mask, rotary=rotary, softcap=softcap
    )
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Window(attention, x, size)


def _lone() -> Window:
    """All queries look at the first token alone: the weights have the norm √n."""
    one = torch.ones(1, 1, dtype=torch.float64)
    mask = torch.full((3, 3), -torch.inf, dtype=torch.float64)
    mask[:, 0] = 0
    return Window(hs.SelfAttention(one, one, one, one, mask=mask), torch.ones(3, 1, dtype=torch.float64), 0.1)


def _answers() -> Example:
    """The answers of a block, by its own forward pass."""
    window, formats = _drawn("causal", 0.0), parse_formats("int8,int4,int2")
    attention, x, cache = window.attention, window.x, window.cache
    query, key, value = attention.staged(x[None])

    def output(key: Tensor, value: Tensor) -> Tensor:
        return (attention._weights(query, key) @ value @ attention.output_weight)[0]

    exact, actual, first = output(key, value), [], []
    for part in ("key", "value"):
        for form in formats:
            held = cache.key if part == "key" else cache.value
            moved = cache.shared(cache.rounded(part, form) - held)[None]

            def along(t: Tensor, part: str = part, moved: Tensor = moved) -> Tensor:
                return output(key + t * moved, value) if part == "key" else output(key, value + t * moved)

            one = torch.ones((), dtype=torch.float64)
            actual.append(_mean((along(one) - exact).norm(dim=-1)))
            first.append(_mean(torch.func.jvp(along, (0 * one,), (one,))[1].norm(dim=-1)))
    changes, predicted = (torch.stack(some).unflatten(0, (2, len(formats))) for some in (actual, first))

    def proved(modules: Modules) -> Iterator[tuple[str, Tensor]]:
        found = modules["rounding.output_error"].output_errors_at(attention, x, formats)
        yield "change", agreement(found.actual, changes)
        yield "first order", agreement(found.predicted, predicted)
        yield "size", agreement(found.size, _mean(exact.norm(dim=-1)))
        for name in ("tanh", "path", "proved"):
            yield f"{name} of the block", getattr(found, name)

    ones = torch.ones_like(changes)
    return Example("a block", proved, {
        "change": ones, "first order": ones, "size": ones[0, 0], "tanh of the block": changes,
        "path of the block": changes, "proved of the block": changes,
    })  # fmt: skip


WINDOWS = {
    **{
        f"two tokens, {share:g} by {half:g}": _two(half, share)
        for share, half in ((0.5, 1e-3), (0.5, 1.0), (0.1, 1.0), (0.9, 1.0), (0.01, 2.0), (0.01, 0.1))
    },
    **{
        f"{mask or 'no'} mask by {size:g}": _drawn(mask, size)
        for mask in ("causal", None)
        for size in (0.01, 1.0, 10.0)
    },
    "soft-cap": _drawn("causal", 1.0, softcap=2.0),
    "one token for all": _lone(),
}


def examples() -> list[Example]:
    """Windows and a block."""
    return [*(window.example(label) for label, window in WINDOWS.items()), _answers()]
