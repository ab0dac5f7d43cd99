"""The Jacobian of a whole network of nodes: what it says of its rounding, what it stores and what it has computed."""

from __future__ import annotations

import math
import weakref
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import howsmooth as hs
from howsmooth.jacobians import tiles
from howsmooth.jacobians.tiles import Workspace
from howsmooth.jacobians.tokenwise import Diagonal
from howsmooth.network.composed_jacobian import ComposedJacobian, composed_jacobian
from howsmooth.network.nodes import Parallel, Series, Tokenwise
from howsmooth.norms.lanczos import golub_kahan
from tests.network.blocks import D, block, norm_stage, randomised, tokens


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time, storage by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if isinstance(tensor, Tensor):
                place = tensor.untyped_storage().data_ptr()
                self.holders[place] = self.holders.get(place, 0) + 1
                self.bytes[place] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, self._drop, place)
        self.most = max(self.most, sum(self.bytes.values()))
        return given

    def _drop(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place], self.bytes[place]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 2**29])
def test_memory_of_a_layer_grows_with_the_tokens_and_not_with_their_square(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building and products together; a negative control keeps the weights."""
    for name, size in {"TILE_ROWS": 64, "TILE_COLS": 64, "TILE_SIZE": 2**12, "BAND_SIZE": 2**12}.items():
        monkeypatch.setattr(tiles, name, size)
    closed, _ = block()
    most = []
    for n in (256, 1024):
        x = tokens(n=n).float()
        monkeypatch.setattr(Workspace, "_known", WeakValueDictionary())  # none left by operators still alive
        with LiveBytes() as live:
            J = hs.jacobian(closed, x, memory=memory)
            J.rmatvec(J.matvec(x))
        most.append(live.most)
    exponent = math.log(most[1] / most[0]) / math.log(4)
    assert exponent <= 1.1 if memory == 0 else exponent > 1.5


@pytest.mark.parametrize("depth", [1, 6])
def test_blur_in_single_precision_covers_the_whole_error(depth: int) -> None:
    maps = [block(seed)[0] for seed in range(depth)]
    closed = Series(*maps)
    x = tokens().float()
    J = composed_jacobian(closed, x)
    exact = composed_jacobian(closed, x.double()).dense()
    error = float(torch.linalg.matrix_norm(J.dense().double() - exact, 2) / torch.linalg.matrix_norm(exact, 2))
    assert error <= J.accuracy.point <= 5e-5
    m = hs.measure(closed, x, dense_limit=1)
    assert m.lower <= torch.linalg.matrix_norm(exact, 2) <= m.upper
    assert bool(m.converged)


def test_far_tokens_cost_no_digits_in_single_precision() -> None:
    """At 10⁶ ± 1 float32 would keep one digit of what a normalisation leaves of them: activations are in float64."""
    closed = Series(Tokenwise(norm_stage(randomised(nn.LayerNorm(D)))), block()[0])
    x = (1e6 + tokens()).float()
    J, exact = composed_jacobian(closed, x), composed_jacobian(closed, x.double()).dense()
    assert J.dtype == torch.float32
    assert float(
        torch.linalg.matrix_norm(J.dense().double() - exact, 2)
    ) <= J.accuracy.point * torch.linalg.matrix_norm(exact, 2)


def test_what_single_precision_cannot_resolve_is_computed_in_double() -> None:
    """10⁶ − (10⁶ − 1) = 1: every product loses six digits."""
    closed = Parallel(Tokenwise(Diagonal(1e6)), Tokenwise(Diagonal(1 - 1e6)))
    J = composed_jacobian(Series(closed, block()[0]), tokens().float())
    assert J.dtype == torch.float64
    assert J.accuracy.point < 5e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_measurement_starts_with_the_product_that_building_has_made(dtype: torch.dtype) -> None:
    J = composed_jacobian(block()[0], tokens().to(dtype))
    assert J.cached_product is not None
    start, product = J.cached_product
    assert torch.equal(product, J.matvec(start))
    known, elsewhere = golub_kahan(J), golub_kahan(J, seed=1)
    J.cached_product = None
    anew = golub_kahan(J)
    assert known.products == anew.products - 1
    assert torch.equal(torch.stack([known.value, known.upper]), torch.stack([anew.value, anew.upper]))
    J.cached_product = (start, 2 * product)  # would be seen where it is used, and is not where it is not
    assert golub_kahan(J, max_steps=2).upper != golub_kahan(replaced(J), max_steps=2).upper
    assert torch.equal(golub_kahan(J, seed=1).upper, elsewhere.upper)


def replaced(J: ComposedJacobian) -> ComposedJacobian:
    return ComposedJacobian(J.parts, J.accuracy.point, J.output)


def test_half_precision_is_computed_in_single() -> None:
    assert composed_jacobian(block()[0], tokens().half()).dtype == torch.float32
