r"""Both ends: :math:`L \le \mathrm{Lip} \le U` for several numbers of tokens and several sets.

L is the norm of the Jacobian at a witness that the search found, U the smallest upper bound of the catalogue that holds
on the whole set: no input of the set is worse than U, and the witness is one that reaches L.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Positive, Seed, Size, validated
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.engines import Engine, open_engine
from howsmooth.errors import InvalidInput
from howsmooth.search.best_bound import not_passed, tightest_upper
from howsmooth.search.initial_vectors import norm_at
from howsmooth.search.sandwich_result import Sandwich, SandwichCell
from howsmooth.search.worst_case_search import worst_case
from howsmooth.sets import InputSet
from howsmooth.sets.near_sets import Over, as_set

Function = Callable[[Tensor], Tensor]
Progress = Callable[[str, float, int, float], None]


@validated
def sandwich(
    f: Function,
    lengths: Sequence[int],
    *,
    over: Over | Sequence[Over] | Mapping[int, Sequence[Over]] | None = None,
    norm: float = 2,
    head: Size | None = None,
    starts: Size = 8,
    steps: Size = 200,
    seconds: Positive | None = None,
    seed: Seed = 0,
    files: Callable[[int, InputSet], Path] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    executor: Executor | Engine | None = None,
) -> Sandwich:
    """The worst input found and the best theorem known, for every number of tokens on every set.

    A witness is offered as a start to the next search: its tokens repeated when more are asked for, and itself on a
    larger set. An upper bound below a witness would be a mistake in this package and raises `ContradictedBound`.

    Args:
        f: an attention map, or any differentiable function of x, for which there is no upper end.
        lengths: numbers of tokens.
        over: one set or several, as in `howsmooth.worst_case`; of a set about an input (`Around`) the first n tokens. A
            mapping gives the sets of each number of tokens. None for all inputs, for Lipschitz maps.
        norm: 2 or inf.
        head: one head of the map with its slice of the output projection; None for the whole.
        starts, steps, seed: of each search; see `howsmooth.worst_case`.
        seconds: for all searches together.
        files: where the witness of a cell is kept as the search goes.
        source: how the map was made, kept in those files.
        progress: called with a label, the cells done (in parts), all cells, and the best value of the present one.
        executor: for the starts of each search; see `howsmooth.worst_case`.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> for cell in sandwich(head, [4, 8], over=hs.sets.Ball(1.0), starts=2, steps=30):
    ...     print(cell.n, cell.lower <= cell.upper.value, cell.upper.name)
    4 True howsmooth.sqrt_n
    8 True howsmooth.mean_field
    """
    questions = [(n, region) for n in _checked(lengths) for region in _regions(n, over)]
    began, cells = time.monotonic(), list[SandwichCell]()
    try:
        with nullcontext() if executor is None else open_engine(executor) as workers:
            for done, (n, region) in enumerate(questions):
                label = f"n = {n}, {region}"
                attention = as_attention_map(f, n, kind=nn.Module) or f
                alone = attention.head(head) if isinstance(attention, AttentionMap) and head is not None else attention

                def show(step: int, steps: Size, best: float, label: str = label, done: int = done) -> None:
                    if progress is not None:
                        progress(label, done + step / max(steps, 1), len(questions), best)

                show(0, 1, 0.0)
                upper = tightest_upper(f, n, region, norm=norm, head=head)
                left = None if seconds is None else (seconds - (time.monotonic() - began)) / (len(questions) - done)
                file = None if files is None else files(n, region)
                witness = worst_case(
                    f,
                    n,
                    over=region,
                    start=_offered(n, region, cells),
                    norm=norm,
                    head=head,
                    starts=starts,
                    steps=steps,
                    seconds=None if left is None else max(left, 0.01),
                    seed=seed,
                    save=file,
                    source=source,
                    progress=show,
                    executor=workers,
                )
                centre = None if region.x is None else float(norm_at(alone, region.x, norm))
                cells.append(SandwichCell(n, region, witness, not_passed(upper, witness.lower), centre, file))
                if witness.stopped == "interrupted":
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        return Sandwich(tuple(cells), interrupted=True)
    return Sandwich(tuple(cells))


def _checked(lengths: Sequence[int]) -> list[int]:
    counts = sorted(set(lengths))
    if not counts or any(n < 1 or n != int(n) for n in counts):
        raise InvalidInput(f"lengths are whole numbers of tokens, at least one, got {list(lengths)}.")
    return [int(n) for n in counts]


def _regions(n: int, over: object) -> list[InputSet]:
    """The sets for n tokens, smallest first where they have a size."""
    given = over.get(n, ()) if isinstance(over, Mapping) else over
    regions = [as_set(each).first(n) for each in (given if isinstance(given, Sequence) else [given])]
    if not regions:
        raise InvalidInput("there is no set to search: give at least one (over), such as Ball(1.0).")
    return sorted(regions, key=lambda region: region.size or 0.0)


def _offered(n: int, over: InputSet, cells: Sequence[SandwichCell]) -> list[Tensor]:
    """Starts on this set from the last witness of fewer tokens and the last with as many."""
    starts = [cell.witness.x for cell in cells if cell.n == n][-1:]
    for cell in [cell for cell in cells if cell.n < n and cell.over.describe() == over.describe()][-1:]:
        x = cell.witness.x
        if over.x is not None:
            starts.append(torch.cat([x, over.x[cell.n :].to(x)]))
        else:  # every token repeated, or the last one alone: an outlier stays alone
            starts += [x[torch.arange(n) * cell.n // n], torch.cat([x, x[-1:].expand(n - cell.n, -1)])]
    return [over.project_(x.clone()) for x in starts]
