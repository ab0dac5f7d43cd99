r"""Worst cases among sequences of real tokens: gradient-guided exchange.

With E the embeddings, replacing token i of a sequence by token w changes ‖J‖ to first order by
:math:`g_i\cdot(E_w - E_{t_i})`, g the gradient in the embedded tokens. One product with E scores every token of the
vocabulary at every position. The most promising exchanges, alone and several together, are then tried, and the best
one is kept if it is an improvement in truth. A sequence that no exchange improves is shaken and goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth.search.ascent import Climb, Peak
from howsmooth.search.initial_vectors import first_vectors
from howsmooth.search.norm_gradient import Roughness
from howsmooth.search.start_inputs import Start
from howsmooth.sets import Tokens

TRIED = 16
"""Exchanges of one token that are tried in a step."""
MEASURED = 3
"""Of those, how many are measured: an estimate from a few products cannot tell close ones apart."""
_ROUNDS = 2
"""Steps of the power method for a sequence that is tried, from the vectors of the one it comes from."""
_PATIENCE = 4
"""Steps without improvement, each trying further exchanges, before a sequence is shaken."""
_BETTER = 1 + 1e-9


class Exchange(Climb):
    """Sequences ``(starts, n)`` of token ids, improved by exchanges."""

    def __init__(self, roughness: Roughness, over: Tokens, starts: list[Start], seed: int):
        self.roughness, self.over = roughness, over
        self.generator = random_stream(seed, "exchanges")
        self.ids = torch.stack([start.x for start in starts])
        values, self.vectors = first_vectors(over.sequence(self.ids), roughness)
        super().__init__(self.ids, values, starts)
        self.values = values.tolist()
        self.stuck = [0] * len(starts)

    def step(self, progress: float) -> None:
        gradient = self._gradient()
        tried = [self._candidates(*pair) for pair in zip(self.ids, gradient, self.stuck, strict=True)]
        counts = [len(candidates) for candidates in tried]
        estimates = self._estimate(torch.cat(tried), self.vectors.repeat_interleave(torch.tensor(counts), 0))
        chosen = [
            ids[values.topk(min(MEASURED, len(values))).indices]
            for ids, values in zip(tried, estimates.split(counts), strict=True)
        ]
        counts = [len(candidates) for candidates in chosen]
        if sum(counts):
            values, vectors = first_vectors(self.over.sequence(torch.cat(chosen)), self.roughness)
            for i, measured in enumerate(zip(chosen, values.split(counts), vectors.split(counts), strict=True)):
                self._decide(i, *measured)
        self.history.append(self.leader.value)

    def milestone(self) -> None:
        kept = self.better_half()
        self.ids, self.vectors = self.ids[kept], self.vectors[kept]
        self.values, self.stuck = [self.values[i] for i in kept], [self.stuck[i] for i in kept]

    def _gradient(self) -> Tensor:
        """Of ‖J‖ in the embedded tokens, ``(starts, n, d)``."""
        with torch.enable_grad():
            embedded = self.over.matrix[self.ids].requires_grad_()
            x = self.over.transformed(embedded)
        slope = self.roughness.slope(x.detach(), self.vectors)
        self.vectors = slope.vectors
        if x is embedded:
            return slope.gradient
        return torch.autograd.grad(x, embedded, slope.gradient)[0]

    def _decide(self, i: int, ids: Tensor, values: Tensor, vectors: Tensor) -> None:
        """Take the best of the sequences tried if it is better; shake the sequence when nothing has been for long."""
        top = int(values.argmax()) if len(values) else 0
        if len(values) and float(values[top]) > self.values[i] * _BETTER:
            self._take(i, ids[top], float(values[top]), vectors[top])
            return
        self.stuck[i] += 1
        if self.stuck[i] > _PATIENCE:
            self._shake(i)

    def _candidates(self, ids: Tensor, gradient: Tensor, skip: int) -> Tensor:
        """Sequences with the best exchange at one position each, and at the 2, 4, 8, … best positions together.

        ``skip`` passes over that many of the best exchanges at every position, which have been tried before.
        """
        scores = gradient @ self.over.matrix.mT  # (n, vocabulary)
        scores -= scores.gather(1, ids[:, None])
        scores.scatter_(1, ids[:, None], -torch.inf)
        rank = min(skip, scores.shape[1] - 1)
        gain, token = (t[:, rank] for t in scores.topk(rank + 1, dim=1))
        order = gain.argsort(descending=True)
        order = order[gain[order] > -torch.inf]
        exchanged = list(order[:TRIED].split(1)) if len(order) else []
        exchanged += [order[: 2**power] for power in range(1, len(order).bit_length())]
        sequences = ids.repeat(len(exchanged), 1)
        for sequence, positions in zip(sequences, exchanged, strict=True):
            sequence[positions] = token[positions]
        return sequences

    def _estimate(self, ids: Tensor, vectors: Tensor) -> Tensor:
        """‖J‖ from below, by a few steps of the power method from the vectors of the sequence they come from."""
        x = self.over.sequence(ids)
        for _ in range(_ROUNDS - 1):
            vectors = self.roughness.slope(x, vectors).vectors
        return self.roughness.slope(x, vectors).value

    def _take(self, i: int, ids: Tensor, value: float, vectors: Tensor) -> None:
        self.ids, self.vectors = self.ids.clone(), self.vectors.clone()
        self.ids[i], self.vectors[i], self.values[i], self.stuck[i] = ids, vectors, value, 0
        if value > self.best[i].value:
            peak = Peak(ids.clone(), value, self.best[i].name)
            self.best = [*self.best[:i], peak, *self.best[i + 1 :]]

    def _shake(self, i: int) -> None:
        """Back to the best sequence of this start, with some of its tokens drawn anew."""
        ids = self.best[i].z.clone()
        n, vocabulary = len(ids), len(self.over.matrix)
        positions = torch.randperm(n, generator=self.generator)[: 1 + n // 8]
        ids[positions] = torch.randint(vocabulary, (len(positions),), generator=self.generator)
        value, vectors = first_vectors(self.over.sequence(ids[None]), self.roughness)
        self._take(i, ids, float(value[0]), vectors[0])
