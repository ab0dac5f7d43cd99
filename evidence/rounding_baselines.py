r"""Other ways to say which caches bear rounding, to be compared with the predicted damage.

Each gives a number for every layer and part (keys, values), the larger the more precision it asks for:

    entropy      minus the mean entropy of the attention weights: sharp heads first
    norm         the mean length of the keys, or of the values
    local error  the relative change of the attention output, ‖δO‖/‖O‖
    change       the same, not relative: ‖δO‖_F
    sigma        σ_max of the Jacobian in the keys or values, times the size of the error: what it could do at worst
    gain         its Frobenius gain, token by token: what an error without direction does, (Σ_j ‖J_j‖_F² σ_j²)^½
    ends         layers near the first and last: 1/(1 + distance)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth.attention.conversion import plain_map
from howsmooth.jacobians import cached_jacobian
from howsmooth.models import CapturedSite
from howsmooth.norms import operator_norm
from howsmooth.rounding.allocation import Allocation, allocate, assigned
from howsmooth.rounding.kv_cache import PARTS, Cache
from howsmooth.rounding.number_formats import Format
from howsmooth.rounding.output_error import output_errors
from howsmooth.rounding.rounded_model import Scores

RIVALS = ("entropy", "norm", "local error", "change", "sigma", "gain", "ends")


@torch.no_grad()
def rivals(sites: Sequence[CapturedSite], form: Format) -> dict[str, Tensor]:
    """Every rival for one format, name → ``(layers, 2)``.

    >>> from howsmooth.models import capture, open_model
    >>> from howsmooth.rounding import parse_format
    >>> opened = open_model("random:llama[layers=2,width=32]", head=True)
    >>> [window] = opened.windows("Down the rabbit hole", length=12)
    >>> numbers = rivals(capture(opened.model, opened.inputs(window)), parse_format("int4"))
    >>> list(numbers) == list(RIVALS), numbers["gain"].shape
    (True, torch.Size([2, 2]))
    """
    rows = [_of_site(site, form) for site in sites]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    depth = torch.arange(len(sites), dtype=torch.float64)
    ends = 1 / (1 + torch.minimum(depth, depth.flip(0)))
    return stacked | {"ends": ends[:, None].expand(-1, 2).clone()}


def by_sensitivity(
    sensitivity: Tensor, damage: Tensor, formats: Sequence[Format], bits: Sequence[float], budget: float
) -> Allocation:
    """The choice of the same knapsack when the damage of a part is its sensitivity² times 4^(−bits).

    Args:
        sensitivity: of every layer and part, ``(layers, 2)``; a rival of the predicted damage.
        damage: predicted, to be stated with the allocation.
    """
    low, high = float(sensitivity.min()), float(sensitivity.max())
    scaled = sensitivity if low > 0 else (sensitivity - low) / (high - low or 1.0) + 0.01
    sizes = torch.tensor([4.0**-form.bits for form in formats], dtype=torch.float64)
    layers, parts, count, heads = damage.shape
    guessed = scaled.double().square()[:, :, None, None] * sizes[:, None]
    allocation = allocate(guessed.expand(layers, parts, count, heads), formats, bits, budget)
    return assigned(damage, formats, bits, allocation.choice)


def joined(windows: Sequence[Scores]) -> Scores:
    """The scores of several windows of one length as samples of one."""
    return Scores(torch.cat([one.products for one in windows]), windows[0].tokens, windows[0].group)


def _of_site(site: CapturedSite, form: Format) -> dict[str, Tensor]:
    cache = Cache.of(site)
    weights = cache.weights(cache.key)
    entropy = torch.special.entr(weights).sum(-1).mean()
    here = output_errors(site, [form])
    change = torch.linalg.vector_norm(here.actual[:, 0], dim=-1)
    gains = [_gains(site, cache, part, form) for part in PARTS]
    return {
        "entropy": -entropy.expand(2),
        "norm": torch.stack([torch.linalg.vector_norm(t, dim=-1).mean() for t in (cache.key, cache.value)]),
        "local error": change / torch.linalg.vector_norm(here.size),
        "change": change,
        "sigma": torch.stack([sigma for sigma, _ in gains]),
        "gain": torch.stack([gain for _, gain in gains]),
    }


def _gains(site: CapturedSite, cache: Cache, part: str, form: Format) -> tuple[Tensor, Tensor]:
    """σ_max and the Frobenius gain, each times the error it meets, of the layer: root sums of squares over heads."""
    held = cache.key if part == "key" else cache.value
    error = cache.shared(cache.rounded(part, form) - held)
    attention = plain_map(site.attention, "rounding")
    operator = cached_jacobian(attention, site.x, "keys" if part == "key" else "values", per_head=True)
    largest = operator_norm(operator, rtol=0.02).value.double() * torch.linalg.matrix_norm(error)
    per_token = operator.influence() * error.square().mean(-1).sqrt()
    return torch.linalg.vector_norm(largest), torch.linalg.vector_norm(per_token)
