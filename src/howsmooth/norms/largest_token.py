r"""The norm of a Jacobian from largest token to largest token: tokens measured by :math:`\max_i |x_i|_2`.

Noise that every token bears by itself (rounded activations, a synonym for each word, jitter in each frame) is measured
in this norm, and a bound in it does not grow with the number of tokens merely because there are more of them. With the
blocks J_ij of J, which say how output token i moves with input token j,

.. math:: \|J\|_{\mathrm{token}} = \max_i N_i, \qquad
          N_i = \sup_{|y_j|_2 \le 1}\Bigl|\sum_j J_{ij}y_j\Bigr|_2 = \max_{|u|_2 = 1} \sum_j |J_{ij}^\top u|_2 ,

the second form because the best :math:`y_j` for a direction u is :math:`J_{ij}^\top u` at unit length.

**From below**: going from u to these :math:`y_j` and from them to :math:`u = \sum_j J_{ij}y_j` at unit length never
makes the sum smaller, and every value on the way is attained.

**From above**: for any weights :math:`w_j > 0`, by Cauchy–Schwarz over j,

.. math:: \sum_j |J_{ij}^\top u| \le \Bigl(\sum_j w_j\Bigr)^{1/2}\Bigl(\sum_j |J_{ij}^\top u|^2/w_j\Bigr)^{1/2}
          \le \Bigl(\sum_j w_j\Bigr)^{1/2} \lambda_{\max}\Bigl(\sum_j w_j^{-1} J_{ij}J_{ij}^\top\Bigr)^{1/2} .

:math:`w_j = 1` gives :math:`\sqrt n\,\|J_i\|_2` and :math:`w_j = \|J_{ij}\|_2` something below
:math:`\sum_j\|J_{ij}\|_2`. At a resting point u of the ascent, :math:`w_j = |J_{ij}^\top u|` makes u an eigenvector of
the matrix, of eigenvalue :math:`S = \sum_j w_j`: where that is the largest one, both ends are S and the norm is known.
Elsewhere the weights move on by steps of Frank and Wolfe: the least upper bound over all w is
:math:`\max_Q \sum_j (\operatorname{tr} J_{ij}^\top Q J_{ij})^{1/2}`
over :math:`Q \succeq 0` of trace 1, which is concave, and whose rank-one Q are the directions u.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from howsmooth._util.common import random_stream
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms.counted_products import (
    CHUNK_BYTES,
    FlatProducts,
    not_finite,
    power_of_two,
    product_error,
    rounding_allowance,
    widened,
)
from howsmooth.norms.lanczos import below_spectral_norm
from howsmooth.norms.measurement import Measurement, measurement_between

_ROUNDS, _FIRST_STEPS, _STEPS = 12, 4, 50
"""How often a row of blocks is looked at, and how far it is climbed: all rows a little, then the few that may be
largest."""
_STILL = 1e-8
"""Relative gain below which an ascent rests."""
_STARTS, _ROUGHLY = 4, 1e-3
"""How many tokens an ascent by products begins at, and the relative gain below which it rests."""
_FAINT = 1e-9
"""Share of the largest weight below which none is taken: inverses stay finite, and any weights give a bound."""


@validated
def token_norm(
    op: JacobianOperator, rtol: float = 1e-3, confidence: float = 0.99, seed: int = 0, exact_limit: int = 4096
) -> Measurement:
    r"""The norm of J with tokens measured by the largest of their lengths; the last axis is that of a token.

    When all rows cost at most ``exact_limit`` products, both ends come from the blocks, as the module says, and no
    chance is involved. Beyond that ``value`` is the best of an ascent by products, hence a lower bound, and the upper
    end is :math:`\sqrt{n}\,\|J\|_2` with `golub_kahan` at this ``confidence``: no vector of n tokens of unit length is
    longer than :math:`\sqrt n`, and no token longer than its vector. Of a single token it is the 2-norm.

    >>> import howsmooth as hs
    >>> mean = lambda x: x.mean(0, keepdim=True).expand_as(x)  # every token moves by at most what the largest moves
    >>> op = hs.jacobian(mean, torch.zeros(5, 3, dtype=torch.float64))
    >>> round(float(token_norm(op)), 9), round(float(token_norm(op).upper), 9)
    (1.0, 1.0)
    """
    started = time.perf_counter()
    FlatProducts(op)  # refuses what has no norm
    if not op.in_shape or not op.out_shape:
        raise InvalidInput(f"{op!r} has no tokens, whose last axis this norm needs: choose norm=2.")
    cost = math.ceil(op.line_costs()[0])
    with torch.no_grad():
        if cost > exact_limit:
            ascent = partial(_ascent, seed=seed)
            tokens = _tokens(op.in_shape)
            return below_spectral_norm(op, ascent, tokens, rtol, confidence, seed, "token", "token ascent")
        value, above = _from_blocks(op, rtol / 10)
    allowance, error = rounding_allowance(op.dtype, op.out_size, op.accuracy.point), _error(op)
    ends = widened(value, allowance, error)[0], widened(above, allowance, error)[1]
    seconds = time.perf_counter() - started
    return measurement_between(
        op, value, ends, rtol, norm="token", products=cost, method="token blocks", seconds=seconds
    )


def _tokens(shape: torch.Size) -> int:
    """How many tokens a map takes or gives: all axes but the last."""
    return math.prod(shape[:-1])


def _error(op: JacobianOperator) -> Tensor:
    """The error of the norm by cancellation: with ε in every row of a token, ‖E_i‖ ≤ √width·ε, and |y| ≤ √n."""
    info = torch.finfo(op.dtype)
    one = product_error(op) + 4 * info.tiny * info.eps * math.sqrt(op.in_size)
    return math.sqrt(op.out_shape[-1] * _tokens(op.in_shape)) * one


def _from_blocks(op: JacobianOperator, close: float) -> tuple[Tensor, Tensor]:
    """The best lower and the worst upper end of the tokens of every map, ``(maps,)``, ``close`` apart where it can."""
    best, worst = (torch.zeros(op.batch_size, dtype=torch.float64) for _ in range(2))
    for blocks in _row_blocks(op):  # (maps, tokens, width out, n, width in)
        maps, tokens = blocks.shape[:2]
        scale = power_of_two(blocks.abs().amax((1, 2, 3, 4)))
        owner = torch.arange(maps).repeat_interleave(tokens)
        scaled = (blocks / scale[:, None, None, None, None]).flatten(0, 1)
        lower, upper = block_ends(scaled, owner, best / scale, close)
        best = torch.maximum(best, scale * lower.reshape(maps, tokens).amax(1))
        worst = torch.maximum(worst, scale * upper.reshape(maps, tokens).amax(1))
    return best, torch.maximum(best, worst)


def _row_blocks(op: JacobianOperator) -> Iterator[Tensor]:
    """The blocks of some output tokens at a time, ``(maps, tokens, width out, n, width in)``, in float64."""
    out, width = _tokens(op.out_shape), op.out_shape[-1]
    chunk = max(1, CHUNK_BYTES // (8 * op.batch_size * width * op.in_size))
    for tokens in torch.arange(out, device=op.device).split(chunk):
        index = (tokens[:, None] * width + torch.arange(width, device=op.device)).flatten()
        rows = op.rows(index).reshape(len(tokens), width, op.batch_size, _tokens(op.in_shape), op.in_shape[-1])
        if not torch.isfinite(rows).all():
            raise not_finite(op)
        yield rows.movedim(2, 0).double().cpu()


def block_ends(blocks: Tensor, owner: Tensor, known: Tensor, close: float = 1e-4) -> tuple[Tensor, Tensor]:
    r"""Both ends of :math:`\max_{|u|=1}\sum_j|J_j^\top u|` for rows of blocks, ``(rows, m, n, d)`` → ``(rows,)``.

    Args:
        owner, known: of every row its map, and of every map a norm that it has at least.
        close: rows whose upper end exceeds the norm of their map by no more than this share are left alone.

    >>> blocks = torch.eye(2, dtype=torch.float64)[None, :, :, None]  # |u_1| + |u_2| on the circle
    >>> [round(float(end), 6) for end in block_ends(blocks, torch.tensor([0]), torch.zeros(1).double(), 1e-9)]
    [1.414214, 1.414214]
    """
    known, sizes = known.clone(), torch.linalg.vector_norm(blocks, dim=(1, 3))
    lower, upper = torch.zeros(len(blocks), dtype=blocks.dtype), sizes.sum(-1)  # Frobenius norms, above ‖J_ij‖₂
    squares = sizes.square()
    for turn in range(_ROUNDS):
        active = (upper > (1 + close) * known[owner]).nonzero().flatten()
        if not len(active):
            break
        some = blocks[active]
        above, direction = _weighted(some, squares[active])
        upper[active] = torch.minimum(upper[active], above)
        reached, ends = _climbed(some, direction, _STEPS if turn else _FIRST_STEPS)
        lower[active] = torch.maximum(lower[active], reached)
        known.scatter_reduce_(0, owner[active], reached, "amax")
        # First to where the ascent rests, whose weights are best if u is the top eigenvector; then by Frank–Wolfe.
        step = 2 / (turn + 2)
        seen = torch.einsum("rmnd,rm->rnd", some, direction if turn > 1 else ends).square().sum(-1)
        squares[active] = (1 - step) * squares[active] + step * seen if turn > 1 else seen
    return lower, upper


def _weighted(blocks: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """The upper end with weights √squares, and the top eigenvector of its matrix."""
    weights = squares.sqrt()
    weights = torch.maximum(weights, _FAINT * weights.amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny))
    wide = (blocks / weights.sqrt()[:, None, :, None]).flatten(2)  # (rows, m, n·d)
    if wide.shape[1] <= wide.shape[2]:
        values, vectors = torch.linalg.eigh(wide @ wide.mT)
        top = vectors[..., -1]
    else:
        values, vectors = torch.linalg.eigh(wide.mT @ wide)
        top = torch.nn.functional.normalize((wide @ vectors[..., -1:]).squeeze(-1), dim=-1)
    return (weights.sum(-1) * values[..., -1].clamp_min(0)).sqrt(), top


def _climbed(blocks: Tensor, u: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Where the ascent from u leads: the sum of lengths, which some tokens attain, and the direction."""
    value = torch.zeros(len(blocks), dtype=blocks.dtype)
    for _ in range(steps):
        moved = torch.einsum("rmnd,rnd->rm", blocks, _unit(torch.einsum("rmnd,rm->rnd", blocks, u)))
        length = torch.linalg.vector_norm(moved, dim=-1)
        u = torch.where(length[:, None] > 0, moved / length[:, None].clamp_min(torch.finfo(u.dtype).tiny), u)
        still = bool((length <= (1 + _STILL) * value).all())
        value = torch.maximum(value, length)
        if still:
            break
    return value, u


def _unit(tokens: Tensor) -> Tensor:
    """Every token at length one; one that vanishes in any direction, so that an ascent does not rest on a ridge."""
    lengths = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return torch.where(
        lengths > 0, tokens / lengths.clamp_min(torch.finfo(tokens.dtype).tiny), tokens.shape[-1] ** -0.5
    )


def _ascent(flat: FlatProducts, spectral: Measurement, seed: int) -> Tensor:
    """The largest movement of a token that ascents by products find.

    They begin at the tokens that the top singular vector and random inputs, every token of length one, move most.
    """
    op = flat.op
    into, out = (_tokens(op.in_shape), op.in_shape[-1]), (_tokens(op.out_shape), op.out_shape[-1])
    starts = torch.randn(
        _STARTS, op.batch_size, *into, generator=random_stream(seed, "token norm"), dtype=torch.float64
    )
    assert spectral.right is not None
    starts[0] = spectral.right.reshape(op.batch_size, *into).double().cpu()
    moved = [flat.matvec(_unit(y).to(op.dtype).to(op.device).flatten(1)).reshape(-1, *out) for y in starts]
    squares = torch.stack([one.double().square().sum(-1) for one in moved])
    squares = torch.maximum(squares[0], squares[1:].mean(0))
    best = torch.zeros(op.batch_size, dtype=torch.float64)
    maps = torch.arange(op.batch_size, device=op.device)
    for token in squares.topk(min(_STARTS, out[0])).indices.mT:
        step, reached = moved[0], torch.zeros_like(best)
        for _ in range(_STEPS):
            u = torch.zeros_like(step)
            u[maps, token] = _unit(step[maps, token])
            y = _unit(flat.rmatvec(u.flatten(1)).reshape(-1, *into))
            step = flat.matvec(y.flatten(1)).reshape(-1, *out)
            largest, token = torch.linalg.vector_norm(step.double(), dim=-1).max(-1)
            largest = largest.cpu()
            if not torch.isfinite(largest).all():
                raise not_finite(op)
            rests = bool((largest <= (1 + _ROUGHLY) * reached).all())
            reached = torch.maximum(reached, largest)
            if rests:
                break
        best = torch.maximum(best, reached)
    return best * flat.scale
