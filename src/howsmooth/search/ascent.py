r"""Climbs of ‖J(X)‖ from many starts side by side: gradient ascent, and exchange of tokens.

**Ascent.** Each token takes a step of Adam with one second moment for the whole token, which turns with the
coordinates, of a length that falls along a cosine:

.. math:: z_i \leftarrow \Pi\Big(z_i + \eta_t\,\frac{\hat m_i}{\hat s_i^{1/2}}\Big), \qquad
          m_i \leftarrow \beta_1m_i + (1-\beta_1)g_i, \quad s_i \leftarrow \beta_2s_i + (1-\beta_2)|g_i|^2,

with Π the way back into the set; on a sphere g and m are first cut to the tangent plane. The singular vectors follow by
one step of the power method per step. At a few milestones they are found anew, since a power method that follows one
singular vector does not see another overtake it, and the worse half of the starts is left behind.

**Exchange**, among sequences of real tokens. With E the embeddings, replacing token i of a sequence by token w changes
‖J‖ to first order by :math:`g_i\cdot(E_w - E_{t_i})`, g the gradient in the embedded tokens. One product with E scores
every token of the vocabulary at every position. The most promising exchanges, alone and several together, are then
tried, and the best one is taken if it is an improvement in truth. A sequence that no exchange improves is perturbed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import measure_map
from howsmooth.search.norm_gradient import AttentionRoughness, Roughness, unit
from howsmooth.search.search_question import Start
from howsmooth.sets import InputSet, Tokens

_ALL_ROWS = 2**20
"""Entries up to which every row of a Jacobian is summed; beyond it rows are chosen by random probes."""
_SOME_ROWS, _PROBES, _BOYD_ROUNDS = 32, 24, 3
_POWER_ROUNDS, _ROW_TRIES = 10, 4
ROUGH = 1e-2
"""Accuracy that is enough to set out with: the climb itself continues to improve the vectors."""


def norm_at(f: Callable[[Tensor], Any], x: Tensor, norm: float) -> Measurement:
    """‖J(x)‖ at one input in float64: the value of a witness and of `howsmooth.measure`."""
    return measure_map(f, x.double(), norm=norm)


def first_vectors(x: Tensor, roughness: Roughness) -> tuple[Tensor, Tensor]:
    """A lower bound on ‖J‖ at every x, ``(starts, n, d)``, and vectors that attain it, for the roughness to follow.

    For attention maps by Golub–Kahan–Lanczos, in the ∞-norm from the rows that are largest on random probes. For
    functions by the power method from random vectors, in the ∞-norm by Boyd's iteration from several.
    """
    if not isinstance(roughness, AttentionRoughness):
        shape, streams = (len(x), *roughness.out_shape(x[0])), _ROW_TRIES if roughness.norm == math.inf else 1
        drawn = [random_stream(i, "vectors to begin with") for i in range(streams)]
        random = [unit(torch.randn(shape, generator=stream, dtype=x.dtype)) for stream in drawn]
        tries = [_power_method(x, roughness, vectors, _POWER_ROUNDS) for vectors in random]
        values, vectors = map(torch.stack, zip(*tries, strict=True))
        best = values.argmax(0)
        return values.amax(0), vectors[best, torch.arange(len(x))]
    if roughness.norm == math.inf:
        if x[0].numel() * roughness.out_shape(x[0]).numel() <= _ALL_ROWS:
            sums, signs = zip(*(_largest_row(jacobian(roughness.map, one)) for one in x), strict=True)
            return torch.stack(sums), torch.stack(signs)
        return _best_row(jacobian(roughness.map, x))
    measured = measure_map(roughness.map, x, rtol=ROUGH)
    assert measured.right is not None
    return measured.value, measured.right


def _power_method(x: Tensor, roughness: Roughness, vectors: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """A lower bound on ‖J‖ at every x from vectors improved by steps of the power method, and these vectors."""
    for _ in range(rounds):
        vectors = roughness.slope(x, vectors).vectors
    return roughness.slope(x, vectors).value, vectors


def _largest_row(op: JacobianOperator) -> tuple[Tensor, Tensor]:
    """‖J‖_∞ of one map, and the signs of the row that attains it."""
    rows = op.rows(torch.arange(op.out_size))
    sums = rows.abs().flatten(1).sum(1)
    return sums.amax(), rows[int(sums.argmax())].sign()


def _best_row(op: JacobianOperator) -> tuple[Tensor, Tensor]:
    """The largest sum of |J| over a row that was looked at, and the signs of that row.

    Those that are largest on probes, and then by Boyd's iteration that of the largest entry of J·(signs of the best).
    """
    generator = random_stream(0, "rows to begin with")
    seen = torch.zeros(op.batch_size, op.out_size, dtype=op.dtype)
    for _ in range(_PROBES):
        probe = torch.randn((*op.batch_shape, *op.in_shape), generator=generator, dtype=op.dtype).sign()
        seen += op.matvec(probe).square().flatten(1)
    best, signs = seen.new_zeros(op.batch_size), seen.new_zeros(*op.batch_shape, *op.in_shape)
    probed = list(seen.topk(min(_SOME_ROWS, op.out_size), dim=1).indices.unbind(1))
    for i in range(len(probed) + _BOYD_ROUNDS):
        index = probed[i] if i < len(probed) else op.matvec(signs).flatten(1).abs().argmax(1)
        unit_rows = torch.zeros_like(seen).scatter_(1, index[:, None], 1.0)
        row = op.rmatvec(unit_rows.reshape(*op.batch_shape, *op.out_shape))
        sums = row.abs().flatten(1).sum(1)
        better = sums > best
        best, signs = torch.where(better, sums, best), torch.where(better[:, None, None], row.sign(), signs)
    return best, signs


RATE, LAST_RATE = 0.2, 0.01
"""First and last length of a token's step, in units of `InputSet.stride`."""
MILESTONES = (0.25, 0.5, 0.75)
FEWEST = 2
"""Starts that are never left behind, so that one that falls back does not end the search."""
FALLEN, SHORTER = 0.9, 0.3
"""A start that is below this share of its own best at a milestone continues from there with steps shorter by this."""
SETTLED = 1e-7
"""Relative gain below which steps brought nothing."""
_FIRST, _SECOND = 0.9, 0.99
_JITTER = 1e-3
_TINY = 1e-140
"""Gradients of log ‖J‖ below this are nothing: their squares underflow."""


@dataclass(frozen=True)
class Peak:
    """The best point of one start: its coordinates, a true lower bound on ‖J‖ there, and the start's name."""

    z: Tensor
    value: float
    name: str


class Climb(ABC):
    """The starts of one search, and the best each has met; `step` by `step`, so that its owner may stop at any time.

    The best points are replaced, never written into: after an interrupt at any moment they are whole.
    """

    def __init__(self, roughness: Roughness, over: InputSet, points: Tensor, starts: list[Start]):
        self.roughness = roughness
        values, self.vectors = first_vectors(over.at(points), roughness)
        evaluated = zip(points, values.tolist(), starts, strict=True)
        self.best = [Peak(z.clone(), value, start.name) for z, value, start in evaluated]
        self.retired: list[Peak] = []
        self.history: list[float] = []

    @abstractmethod
    def step(self, progress: float) -> None:
        """One step of every start; ``progress`` in [0, 1] is how much of the budget is used up."""

    @abstractmethod
    def milestone(self) -> None:
        """Go on with the better half of the starts."""

    @property
    def everyone(self) -> list[Peak]:
        """The best point of every start."""
        return [*self.best, *self.retired]

    @property
    def leader(self) -> Peak:
        """The best point so far."""
        return max(self.everyone, key=lambda peak: peak.value)

    def settled(self, steps: int) -> bool:
        """Whether the last steps brought next to nothing."""
        return len(self.history) > steps and self.history[-1] <= self.history[-1 - steps] * (1 + SETTLED)

    def better_half(self) -> list[int]:
        """Leave the worse half of the starts behind; the places of the others among all."""
        order = sorted(range(len(self.best)), key=lambda i: -self.best[i].value)
        half = max(FEWEST, (len(order) + 1) // 2)
        self.retired += [self.best[i] for i in order[half:]]
        remaining = sorted(order[:half])
        self.best = [self.best[i] for i in remaining]
        return remaining


class Ascent(Climb):
    """Gradient ascent in the coordinates of a set."""

    def __init__(self, roughness: Roughness, over: InputSet, starts: list[Start], seed: int):
        self.over, self.z = over, over.restrict_(over.coordinates(torch.stack([start.x for start in starts])))
        super().__init__(roughness, over, self.z, starts)
        self.stride = over.stride(self.z)
        self.fallen = [False] * len(starts)
        self._shake([i for i, start in enumerate(starts) if start.exact], seed)
        self._rest()

    def _rest(self) -> None:
        self.first, self.second, self.count = torch.zeros_like(self.z), torch.zeros_like(self.z[..., :1]), 0

    def step(self, progress: float) -> None:
        slope = self.roughness.slope(self.over.at(self.z), self.vectors)
        values = slope.value.tolist()
        self.best = [
            Peak(z.clone(), value, peak.name) if value > peak.value else peak
            for z, value, peak in zip(self.z, values, self.best, strict=True)
        ]
        self.history.append(self.leader.value)
        self.fallen = [value < FALLEN * peak.value for value, peak in zip(values, self.best, strict=True)]
        rate = LAST_RATE + (RATE - LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self.vectors = slope.vectors
        self._move(slope.gradient / slope.value.clamp(min=_TINY)[:, None, None], rate)

    def milestone(self) -> None:
        """Go on with the better half, from their best points, with vectors found anew."""
        remaining = self.better_half()
        self.stride = torch.stack([self.stride[i] * (SHORTER if self.fallen[i] else 1.0) for i in remaining])
        self.z = torch.stack([peak.z for peak in self.best])
        values, self.vectors = first_vectors(self.over.at(self.z), self.roughness)
        pairs = zip(self.best, values.tolist(), strict=True)
        self.best = [Peak(peak.z, max(peak.value, value), peak.name) for peak, value in pairs]
        self._rest()

    def _move(self, gradient: Tensor, rate: float) -> None:
        over = self.over
        g = over.tangent(self.z, over.pull(gradient).nan_to_num(0.0, 0.0, 0.0))
        self.count += 1
        self.first = _FIRST * over.tangent(self.z, self.first) + (1 - _FIRST) * g
        self.second = _SECOND * self.second + (1 - _SECOND) * g.square().sum(-1, keepdim=True)
        mean, square = self.first / (1 - _FIRST**self.count), self.second / (1 - _SECOND**self.count)
        self.z = over.restrict_(self.z + rate * self.stride * mean / square.sqrt().clamp(min=_TINY))

    def _shake(self, exact: list[int], seed: int) -> None:
        """Move constructions a little, since equal tokens have equal gradients and would stay equal."""
        noise = torch.randn(self.z.shape, generator=random_stream(seed, "shaken constructions"), dtype=self.z.dtype)
        noise = noise / noise.norm(dim=-1, keepdim=True)
        self.z = self.z.clone()
        self.z[exact] += _JITTER * self.stride[exact] * noise[exact]
        self.z = self.over.restrict_(self.z)


TRIED = 16
"""Exchanges of one token that are tried in a step."""
MEASURED = 3
"""Of those, how many are measured: an estimate from a few products cannot tell close ones apart."""
_ROUNDS = 1
"""Steps of the power method for a sequence that is tried, from the vectors of the one it comes from."""
_PATIENCE = 4
"""Steps without improvement, each trying further exchanges, before a sequence is shaken."""
_BETTER = 1 + 1e-9


class Exchange(Climb):
    """Sequences ``(starts, n)`` of token ids, improved by exchanges."""

    def __init__(self, roughness: Roughness, over: Tokens, starts: list[Start], seed: int):
        self.over, self.ids = over, torch.stack([start.x for start in starts])
        super().__init__(roughness, over, self.ids, starts)
        self.generator = random_stream(seed, "exchanges")
        self.values = [peak.value for peak in self.best]
        self.stuck = [0] * len(starts)

    def step(self, progress: float) -> None:
        gradient = self._gradient()
        tried = [self._candidates(*pair) for pair in zip(self.ids, gradient, self.stuck, strict=True)]
        counts = [len(candidates) for candidates in tried]
        vectors = self.vectors.repeat_interleave(torch.tensor(counts), 0)
        estimates, _ = _power_method(self.over.sequence(torch.cat(tried)), self.roughness, vectors, _ROUNDS)
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
        remaining = self.better_half()
        self.ids, self.vectors = self.ids[remaining], self.vectors[remaining]
        self.values, self.stuck = [self.values[i] for i in remaining], [self.stuck[i] for i in remaining]

    def _gradient(self) -> Tensor:
        """Of ‖J‖ in the embedded tokens, ``(starts, n, d)``."""
        with torch.enable_grad():
            embedded = self.over.matrix[self.ids].requires_grad_()
            x = self.over.transformed(embedded)
        slope = self.roughness.slope(x.detach(), self.vectors)
        self.vectors = slope.vectors
        return torch.autograd.grad(x, embedded, slope.gradient)[0]

    def _decide(self, i: int, ids: Tensor, values: Tensor, vectors: Tensor) -> None:
        """Take the best of the sequences tried if it is better; shake the sequence when nothing has been for long."""
        top = int(values.argmax()) if len(values) else 0
        if len(values) and float(values[top]) > self.values[i] * _BETTER:
            self._take(i, ids[top], float(values[top]), vectors[top])
        elif self.stuck[i] < _PATIENCE:
            self.stuck[i] += 1
        else:
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
