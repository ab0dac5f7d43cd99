"""The least smooth input of a set, by search."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from torch import Tensor

from howsmooth._util.display import search_bar
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import Count, Positive, Seed, Size, validated
from howsmooth.engines import Engine
from howsmooth.search.distributed_starts import best_of_all
from howsmooth.search.multi_start import Search
from howsmooth.search.search_question import Progress, Question, SearchOptions
from howsmooth.search.start_inputs import starts_for
from howsmooth.search.witness import Witness
from howsmooth.sets.near_sets import Over


@validated
@full_precision
def worst_case(
    f: Callable[[Tensor], Any],
    n: Count | None = None,
    *,
    over: Over | None = None,
    start: Tensor | Sequence[Tensor] | None = None,
    norm: float | str = 2,
    head: int | None = None,
    starts: Size = 8,
    constructions: bool = True,
    steps: Size = 200,
    seconds: Positive | None = None,
    seed: Seed = 0,
    save: str | os.PathLike[str] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    executor: Executor | Engine | None = None,
) -> Witness:
    r"""Look for the X in a set at which ‖J(X)‖ is largest; on a convex set the supremum is the Lipschitz constant.

    The search climbs from many starts at once by the gradient of ‖J(X)‖ through fixed singular vectors
    (`howsmooth.search.norm_gradient`), with the theorems' own inputs among the starts. What it finds is a lower bound
    with a witness: no search can say that there is nothing worse. For the other end see `howsmooth.bounds.table`.

    Args:
        f: an attention map, a layer of `howsmooth.nn` or `torch.nn.MultiheadAttention`, or any function or module of x
            ``(n, d)`` that can be differentiated twice.
        n: number of tokens; may be left out when the set or a start says it.
        over: the set (`howsmooth.sets`): `Ball`, `Sphere`, `Normalised`, `Around`, `Box` or `Tokens`; a normalisation
            layer means its image. None is all of R^{n × d}, for Lipschitz maps.
        start: inputs of your own to set out from, ``(n, d)`` each (token ids, ``(n,)``, for `Tokens`); one that
            lies outside the set is brought into it, which the witness notes.
        norm: 2 or inf.
        head: one head of the map, with its own slice of the output projection.
        starts: number of random starts.
        constructions: False searches without the theorems' inputs.
        steps: most steps to make.
        seconds: most seconds to climb; the first and last measurements come on top.
        seed: of the random starts; the same seed gives the same witness, unless ``seconds`` cuts it short.
        save: a file that always holds the best witness so far, whole.
        source: how the map was made, kept in that file, so that it can be made again.
        progress: called after every step with the step, ``steps`` and the best value so far; with an executor, after
            every start with the starts that are done, all of them, and the best value. A notebook shows a bar without
            it.
        executor: any `concurrent.futures.Executor`, or a `howsmooth.engines.Engine` of one: every start then climbs by
            itself, to its own end, and none is left behind half way. It is the same witness for any number of workers.

    Returns:
        A `Witness`. Ctrl-C ends the search and returns the best so far.

    >>> import torch, howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    >>> witness = worst_case(head, 8, over=hs.sets.Ball(8**0.5), starts=2, steps=20)
    >>> round(witness.value, 1), witness.start
    (16.1, 'two poles')
    """
    began = time.perf_counter()
    options = SearchOptions(
        given=() if start is None else (start,) if isinstance(start, Tensor) else tuple(start),
        norm=norm,
        head=head,
        starts=starts,
        constructions=constructions,
        steps=steps,
        seconds=seconds,
        seed=seed,
        save=None if save is None else Path(save),
        source=dict(source or {}),
        progress=progress or search_bar(),
    )
    question = Question.of(f, n, over, options)
    starts_, notes = starts_for(question)
    if executor is None:
        return Search(question, began, starts_, notes).run()
    return best_of_all(question, began, starts_, notes, executor)
