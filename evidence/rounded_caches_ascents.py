"""The proved bounds under attack: errors that climb on change ÷ bound inside the cell that rounding leaves them.

An integer format of b bits with one scale for each token moves every number by at most half of max|x|/(2^(b−1) − 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence.rounded_caches_windows import Step
from evidence.tables import table
from howsmooth.models import CapturedSite
from howsmooth.rounding import parse_formats
from howsmooth.rounding.kv_cache import Cache
from howsmooth.rounding.output_error import _mean, _Reach

ATTACKED = "int8,int4,int3,int2"
STARTS = (1.0, 0.3)
Ratio = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Attack:
    """How near errors came to the bound: 1 is on it, above 1 is a violation."""

    format: str
    layer: int
    keys: float
    values: float


def attack(site: CapturedSite, steps: int = 30) -> list[Attack]:
    """Ascents on the keys (query by query) and values (head by head) of one layer, for every format of `ATTACKED`."""
    cache = Cache.of(site)
    weights, value = cache.weights(cache.key), cache.shared(cache.value) @ cache.output
    output = weights @ value
    reach = _Reach.of(cache, weights, value, output)

    def of_keys(moved: Tensor) -> Tensor:
        change = cache.weights(cache.key + moved) @ value - output
        bound = torch.minimum(*reach.of_keys(cache, cache.shared(moved)))
        return (_length(change) / bound)[:, 1:]  # the first token may see itself alone, and then nothing changes

    def of_values(moved: Tensor) -> Tensor:
        seen = cache.shared(moved) @ cache.output
        each, whole = (_mean(bound) for bound in reach.of_values(seen))
        return _mean(_length(weights @ seen)) / torch.minimum(each, whole)

    found = []
    for form in parse_formats(ATTACKED):
        cells = [t.abs().amax(-1, keepdim=True) / (2 ** (form.bits - 1) - 1) / 2 for t in (cache.key, cache.value)]
        near = [_climbed(ratio, cell, like, steps) for ratio, cell, like in _parts(cells, cache, of_keys, of_values)]
        found.append(Attack(form.name, site.layer, *near))
    return found


def _parts(cells: list[Tensor], cache: Cache, *ratios: Ratio) -> list[tuple[Ratio, Tensor, Tensor]]:
    return list(zip(ratios, cells, (cache.key, cache.value), strict=True))


def _length(change: Tensor) -> Tensor:
    """|change|, with a slope where it is zero."""
    return (change.square().sum(-1) + 1e-40).sqrt()


def _climbed(ratio: Ratio, cell: Tensor, like: Tensor, steps: int) -> float:
    """The largest ratio met by signed steps inside the cell, from every start."""
    generator, best = torch.Generator().manual_seed(0), 0.0
    for start in STARTS:
        place = start * (2 * torch.rand(like.shape, generator=generator, dtype=like.dtype) - 1)
        for step in range(steps):
            place.requires_grad_()
            now = ratio(place * cell)
            best = max(best, float(now.detach().max()))
            goal = now.sum() if step % 2 else torch.logsumexp(20 * now.flatten(), 0)
            (uphill,) = torch.autograd.grad(goal, place)
            some = torch.rand(like.shape, generator=generator) < 0.5
            place = (place.detach() + 0.2 * uphill.nan_to_num().sign() * some).clamp(-1, 1)
    return best


def attack_table(sites: Sequence[CapturedSite], tell: Step) -> str:
    """All formats: the nearest that any layer came to its bound."""
    found = []
    for site in sites:
        tell(f"ascents in layer {site.layer}")
        found += attack(site)
    rows = []
    for form in parse_formats(ATTACKED):
        here = [one for one in found if one.format == form.name]
        nearest = (max(getattr(one, part) for one in here) for part in ("keys", "values"))
        rows.append([form.name, *(f"{math.floor(1e5 * ratio) / 1e5:.5f}" for ratio in nearest)])  # 1 only when it is
    return table(["errors within a cell of", "nearest to the bound, keys", "values"], rows)
