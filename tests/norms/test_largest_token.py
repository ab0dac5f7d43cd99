"""The norm from largest token to largest token: both ends against enumeration, search and known maps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator, MatrixOperator
from howsmooth.norms import token_norm
from howsmooth.norms.largest_token import block_ends


class Blocks(JacobianOperator):
    """A dense matrix between tokens, ``(m, e, n, d)``."""

    method, batch_shape = "blocks", torch.Size([])

    def __init__(self, blocks: Tensor):
        self.blocks, self.dtype, self.device = blocks, blocks.dtype, blocks.device
        self.out_shape, self.in_shape = blocks.shape[:2], blocks.shape[2:]

    def matvec(self, v: Tensor) -> Tensor:
        return torch.einsum("mend,nd->me", self.blocks, v)

    def rmatvec(self, u: Tensor) -> Tensor:
        return torch.einsum("mend,me->nd", self.blocks, u)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_signs(blocks: Tensor) -> float:
    """The norm for tokens of width one: a convex function of signs is largest at one of their corners."""
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=blocks.shape[2])), dtype=torch.float64)
    moved = torch.einsum("mend,cn->cme", blocks, corners)
    return float(torch.linalg.vector_norm(moved, dim=-1).max())


@pytest.mark.parametrize("seed", range(20))
def test_ends_enclose_the_enumerated_norm(seed: int) -> None:
    blocks = gaussian(4, 3, 9, 1, seed=seed)
    truth, m = by_signs(blocks), token_norm(Blocks(blocks))
    assert float(m.lower) <= truth * (1 + 1e-12)
    assert truth <= float(m.upper) * (1 + 1e-12)
    assert float(m.upper) <= 1.26 * float(m.lower)  # √(π/2), where signs are relaxed to unit vectors


@pytest.mark.parametrize(("n", "d", "heads"), [(3, 4, 2), (12, 8, 2), (16, 16, 4)])
def test_value_is_between_the_ends_and_no_input_moves_a_token_further(n: int, d: int, heads: int) -> None:
    attention = hs.SelfAttention.random(d, heads=heads, dtype=torch.float64)
    x = 3 * gaussian(n, d)
    m = hs.measure(attention, x, norm="token")
    dense = torch.func.jacrev(attention)(x)
    y = torch.nn.functional.normalize(gaussian(2000, n, d, seed=1), dim=-1)
    moved = torch.linalg.vector_norm(torch.einsum("iajb,cjb->cia", dense, y), dim=-1).max()
    assert float(moved) <= float(m.value) <= float(m.upper)
    assert bool(m.converged)
    blocks = torch.linalg.matrix_norm(dense.transpose(1, 2), 2)
    rows = torch.linalg.matrix_norm(dense.flatten(2), 2)
    assert float(m.upper) <= min(float(blocks.sum(1).max()), math.sqrt(n) * float(rows.max())) * (1 + 1e-9)


def test_of_one_token_is_the_two_norm() -> None:
    matrix = gaussian(5, 7)
    assert float(token_norm(MatrixOperator(matrix))) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), 1e-9)


def test_heads_in_their_own_coordinates_have_the_same_norm() -> None:
    attention = hs.SelfAttention.random(32, heads=4, dtype=torch.float64)
    x = gaussian(6, 32)
    together = hs.measure_heads(attention, x, norm="token")
    for head in range(4):
        alone = hs.SelfAttention(
            *(
                w.reshape(4, 8, 32)[head]
                for w in (attention.query_weight, attention.key_weight, attention.value_weight)
            ),
            attention.output_weight[head].T,
            heads=1,
        )
        assert float(hs.measure(alone, x, norm="token")) == pytest.approx(float(together.value[head]), 1e-6)


def test_products_alone_give_an_enclosure() -> None:
    attention, x = hs.SelfAttention.random(16, heads=4), gaussian(32, 16).float()
    blocks = hs.measure(attention, x, norm="token")
    products = hs.measure(attention, x, norm="token", exact_limit=1)
    assert products.method == "token ascent"
    assert float(products.lower) <= float(blocks.upper)
    assert float(blocks.lower) <= float(products.upper)
    assert float(products.value) >= 0.8 * float(blocks.value)
    assert products.confidence == 0.99
    assert any("lower bound" in note for note in products.notes)


def test_zero_map_gives_zero_and_scales_carry_over() -> None:
    assert float(token_norm(Blocks(torch.zeros(2, 3, 4, 2, dtype=torch.float64)))) == 0
    blocks = gaussian(3, 2, 4, 2)
    one = float(token_norm(Blocks(blocks)))
    for power in (-600, 500):
        assert float(token_norm(Blocks(blocks * 2.0**power))) == pytest.approx(one * 2.0**power, 1e-9)


def test_weights_from_one_eigenvector_are_not_enough_everywhere() -> None:
    """Negative control: at a resting point that is no maximum the upper end must not be the value there."""
    blocks = torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64))[None, :, :, None].expand(1, 2, 2, 1).clone()
    lower, upper = block_ends(blocks, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.float64))
    assert float(lower) == pytest.approx(math.hypot(1, 0.1), 1e-9)
    assert float(upper) >= float(lower) * (1 - 1e-12)


def test_a_number_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no tokens"):
        hs.measure(torch.sin, torch.tensor(0.5), norm="token")
