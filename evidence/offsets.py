"""Attention on tokens, keys or values whose offset is far larger than their spread, against 50 digits.

There a Jacobian is a small difference of large numbers. Two promises are checked on every map: the products are off by
no more than the operator's own ``noise`` (and 8 eps·σ), and both ends of `howsmooth.measure` hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mpmath
import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.attention import AttentionMap
from howsmooth.jacobians import attention_jacobian
from howsmooth.testing import by_columns, by_rows

TITLE = "Offsets larger than the spread"
DIGITS = 50
N, D = 6, 3
RATIOS = tuple(10.0**k for k in range(2, 10))
DTYPES = (torch.float32, torch.float64)
Case = tuple[AttentionMap, Tensor]


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def clusters(ratio: float, g: torch.Generator) -> Tensor:
    """Half of the tokens at +c and half at −c on the first axis, with a spread of 0.1."""
    x = 0.1 * draw(g, N, D)
    x[:, 0] += torch.where(torch.arange(N) < N // 2, 0.1 * ratio, -0.1 * ratio)
    return x


def far_clusters(ratio: float, g: torch.Generator) -> Case:
    """Each token attends to one cluster, whose values differ little."""
    a = torch.zeros(D, D, dtype=torch.float64)
    a[0, 1] = 10 ** float(torch.randint(0, 4, (), generator=g))
    return hs.SelfAttention.from_bilinear(a, torch.eye(D, dtype=torch.float64)), clusters(ratio, g)


def value_bias(ratio: float, g: torch.Generator) -> Case:
    weights = [draw(g, D, D) for _ in range(4)]
    return hs.SelfAttention(*weights, value_bias=ratio * draw(g, D), key_bias=ratio * draw(g, D)), draw(g, N, D)


def far_tokens(ratio: float, g: torch.Generator) -> Case:
    """All tokens far from the origin; queries small enough for the weights to stay apart from zero and one."""
    weights = [draw(g, D, D) / ratio, *(draw(g, D, D) for _ in range(3))]
    return hs.SelfAttention(*weights), draw(g, N, D) + ratio


def far_tokens_l2(ratio: float, g: torch.Generator) -> Case:
    return hs.L2SelfAttention(draw(g, D, D), draw(g, D, D), draw(g, D, D)), draw(g, N, D) + ratio


def far_clusters_l2(ratio: float, g: torch.Generator) -> Case:
    return hs.L2SelfAttention(draw(g, D, D), draw(g, D, D), draw(g, D, D)), clusters(ratio, g)


def bias_alone(ratio: float, g: torch.Generator) -> Case:
    """Values that are all the same: the Jacobian is zero."""
    zero = torch.zeros(D, D, dtype=torch.float64)
    return hs.SelfAttention(draw(g, D, D), draw(g, D, D), zero, value_bias=ratio * draw(g, D)), draw(g, N, D)


def orthogonal_output(ratio: float, g: torch.Generator) -> Case:
    """An output projection that sees 1/ratio of the values."""
    u = torch.linalg.qr(draw(g, D, D)).Q
    value, output = u[:, :2] @ draw(g, 2, D), draw(g, D, 1) @ u[:, 2:].mT
    return hs.SelfAttention(draw(g, D, D), draw(g, D, D), value, output + draw(g, D, D) / ratio), draw(g, N, D)


FAMILIES: dict[str, Callable[[float, torch.Generator], Case]] = {
    "two far clusters": far_clusters,
    "key and value bias": value_bias,
    "far tokens": far_tokens,
    "far tokens, L2": far_tokens_l2,
    "two far clusters, L2": far_clusters_l2,
    "values that are one bias": bias_alone,
    "output nearly orthogonal to values": orthogonal_output,
}


def cases(family: str, ratio: float, dtype: torch.dtype, seeds: Iterable[int]) -> Iterator[Case]:
    """Maps of one family; rounded to ``dtype``, which is then what the truth is about."""
    for seed in seeds:
        attention, x = FAMILIES[family](ratio, torch.Generator().manual_seed(seed))
        yield attention.to(dtype), x.to(dtype)


def exact_jacobian(attention: AttentionMap, x: Tensor) -> mpmath.matrix:
    """The Jacobian of one head in 50 digits, entry by entry from the derivative of softmax."""
    with mpmath.workdps(DIGITS):
        tokens = _exact(x).T
        query, key, value = (
            _project(weight[0], bias, tokens)
            for weight, bias in (
                (attention.query_weight, attention.query_bias),
                (attention.key_weight, attention.key_bias),
                (attention.value_weight, attention.value_bias),
            )
        )
        maps = [_exact(w[0]) for w in (attention.query_weight, attention.key_weight, attention.value_weight)]
        output = _exact(attention.output_weight[0]).T
        distances = isinstance(attention, hs.L2SelfAttention)
        scale = mpmath.mpf(1 / attention.temperature if distances else attention.scale)
        n, d = x.shape
        found = mpmath.zeros(n * output.rows, n * d)
        for i in range(n):
            apart = [query[:, i] - key[:, j] for j in range(n)]
            logits = (
                [-scale * _dot(a, a) for a in apart]
                if distances
                else [scale * _dot(query[:, i], key[:, j]) for j in range(n)]
            )
            weights = [mpmath.exp(s - max(logits)) for s in logits]
            weights = [w / sum(weights) for w in weights]
            mean = sum((weights[j] * value[:, j] for j in range(1, n)), weights[0] * value[:, 0])
            for j in range(n):
                to_query = -2 * scale * apart[j].T * maps[0] if distances else scale * key[:, j].T * maps[0]
                to_key = 2 * scale * apart[j].T * maps[1] if distances else scale * query[:, i].T * maps[1]
                moved = output * (weights[j] * (value[:, j] - mean))
                _add(found, i, j, moved * to_key + weights[j] * output * maps[2])
                _add(found, i, i, moved * to_query)
        return found


def _exact(matrix: Tensor) -> mpmath.matrix:
    return mpmath.matrix(matrix.double().tolist())


def _project(weight: Tensor, bias: Tensor | None, tokens: mpmath.matrix) -> mpmath.matrix:
    out = _exact(weight) * tokens
    if bias is not None:
        for j in range(out.cols):
            out[:, j] = out[:, j] + _exact(bias.reshape(-1, 1))
    return out


def _dot(a: mpmath.matrix, b: mpmath.matrix) -> mpmath.mpf:
    return (a.T * b)[0]


def _add(whole: mpmath.matrix, i: int, j: int, block: mpmath.matrix) -> None:
    for r in range(block.rows):
        for c in range(block.cols):
            whole[i * block.rows + r, j * block.cols + c] += block[r, c]


@dataclass
class Tally:
    """What became of the maps of one family."""

    maps: int = 0
    refused: int = 0
    beyond: int = 0
    worst: float = 0.0
    lower: int = 0
    upper: int = 0

    def add(self, attention: AttentionMap, x: Tensor) -> None:
        """Check one map."""
        self.maps += 1
        try:
            operator = attention_jacobian(attention, x)
            found = hs.measure(attention, x)
        except hs.InvalidInput:
            self.refused += 1
            return
        exact = exact_jacobian(attention, x)
        truth = _norm(exact)
        error = max(_norm(_exact(matrix.detach()) - exact) for matrix in (by_columns(operator), by_rows(operator)))
        allowed = float(operator.accuracy.product) + 8 * torch.finfo(operator.dtype).eps * truth
        self.beyond += error > allowed
        self.worst = max(self.worst, error / allowed if error else 0.0)
        self.lower += float(found.lower) > truth
        self.upper += float(found.upper) < truth


def _norm(matrix: mpmath.matrix) -> float:
    """‖·‖₂ of a matrix of many digits: float64 moves it by 10⁻¹⁵ of itself; what 50 digits leave of zero is zero."""
    entries = torch.tensor([[float(v) for v in row] for row in matrix.tolist()], dtype=torch.float64)
    found = float(torch.linalg.matrix_norm(entries, ord=2))
    return found if found > 1e-30 else 0.0


def run(family: str, ratio: float, dtype: torch.dtype, seeds: Iterable[int]) -> Tally:
    """Every map of one family, ratio and dtype."""
    tally = Tally()
    for attention, x in cases(family, ratio, dtype, seeds):
        tally.add(attention, x)
    return tally


def parts(progress: Callable[[str], None], seeds: int = 20) -> list[str]:
    """The text and table of the documentation page."""
    rows, total = [], 0
    for family in FAMILIES:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            progress(f"{family}, {name}")
            tallies = [run(family, ratio, dtype, range(seeds)) for ratio in RATIOS]
            total += sum(t.maps for t in tallies)
            rows.append(
                [
                    family,
                    name,
                    sum(t.maps for t in tallies),
                    sum(t.refused for t in tallies),
                    sum(t.beyond for t in tallies),
                    f"{max(t.worst for t in tallies):.2f}",
                    sum(t.lower for t in tallies),
                    sum(t.upper for t in tallies),
                ]
            )
    return [
        f"{total} maps with offsets of 10² to 10⁹ times the spread, n = {N}, d = {D}, seeds 0 to {seeds - 1}; the "
        f"truth is the Jacobian in {DIGITS} digits. *Beyond* counts maps whose products, built from `matvec` or from "
        "`rmatvec`, differ from it by more than the operator's `noise` and 8 eps·σ; *largest* is the largest error as "
        "a share of that. *Lower* and *upper* count false ends of `hs.measure`. float32 maps are computed in float64 "
        "where float32 does not suffice; logits that float64 cannot resolve are refused.",
        table(["family", "dtype", "maps", "refused", "beyond", "largest", "lower false", "upper false"], rows),
    ]
