"""Any order in memory gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import Rotary, UnitNorm, memory_layout
from howsmooth.attention.memory_layout import (
    FEW_TOKENS,
    add_product,
    channels_first,
    in_layout,
    interleave_channels,
    is_channels_first,
    join_channels,
    join_heads,
    matmul,
    to_preferred_layout,
    zeros_in_layout,
)
from howsmooth.attention.stages import HeadNorm
from howsmooth.jacobians import attention_jacobian

KINDS = {
    "plain": {},
    "causal": {"mask": "causal"},
    "shared keys": {"kv_heads": 2},
    "rotary": {"kv_heads": 2, "rotary": Rotary.standard(6)},
    "interleaved": {"rotary": Rotary.standard(4, interleaved=True)},
    "unit norm": {"qk_norm": (UnitNorm.rms(6), UnitNorm.rms(6))},
    "head norm": {"qk_norm": (HeadNorm(1e-5, torch.rand(6)), HeadNorm(1e-5, torch.rand(6)))},
    "soft-cap": {"softcap": 2.0},
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("order", [lambda x: x, channels_first])
def test_every_function_of_tokens_and_channels(order) -> None:  # type: ignore[no-untyped-def]
    a, b, matrix = order(random(3, 5, 4)), order(random(3, 5, 4, seed=1)), random(4, 7, seed=2)
    assert torch.equal(join_channels([a, b]), torch.cat([a, b], dim=-1))
    assert torch.equal(interleave_channels(a, b), torch.stack([a, b], dim=-1).flatten(-2))
    assert (
        is_channels_first(join_channels([a, b])) == is_channels_first(interleave_channels(a, b)) == is_channels_first(a)
    )
    torch.testing.assert_close(matmul(a[0], matrix), a[0] @ matrix)
    torch.testing.assert_close(matmul(a[:1], matrix), a[:1] @ matrix)
    torch.testing.assert_close(matmul(a, matrix), a @ matrix)
    heads = a[None]
    assert torch.equal(join_heads(heads), heads.transpose(1, 2).flatten(2))
    assert torch.equal(in_layout(a, lambda t: t.repeat_interleave(2, dim=0)), a.repeat_interleave(2, dim=0))
    total = zeros_in_layout(a)
    assert is_channels_first(total) == is_channels_first(a)
    assert (total == 0).all()
    weights = random(3, 5, 5, seed=3)
    add_product(total, weights, b)
    add_product(total[:2, 1:3], weights[:2, 1:3], b[:2])
    expected = weights @ b
    expected[:2, 1:3] *= 2
    torch.testing.assert_close(total, expected)


def test_the_order_changes_for_one_input_of_few_tokens_in_single_precision_only() -> None:
    assert is_channels_first(to_preferred_layout(random(FEW_TOKENS, 3)))
    assert is_channels_first(to_preferred_layout(random(1, 4, 3)))
    assert not is_channels_first(to_preferred_layout(random(FEW_TOKENS + 1, 3)))
    assert not is_channels_first(to_preferred_layout(random(2, 4, 3)))
    assert not is_channels_first(to_preferred_layout(random(4, 3, dtype=torch.float64)))
    assert to_preferred_layout(random(4)).shape == (4,)


@pytest.mark.parametrize("n", [1, 2, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_a_block_do_not_depend_on_the_order(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = hs.SelfAttention.random(24, heads=4, seed=1, **KINDS[kind]), random(n, 24)  # type: ignore[arg-type]
    fast = attention_jacobian(attention, x)
    assert is_channels_first(fast.mixing.value) or n == 1  # either, for one token
    monkeypatch.setattr(memory_layout, "FEW_TOKENS", 0)
    plain = attention_jacobian(attention, x)
    assert not is_channels_first(plain.mixing.value) or n == 1
    assert fast.accuracy.product == plain.accuracy.product
    u, v = random(n, 24, seed=4), random(n, 24, seed=5)
    monkeypatch.undo()
    ahead, back = fast.matvec(v), fast.rmatvec(u)
    monkeypatch.setattr(memory_layout, "FEW_TOKENS", 0)
    size = float(plain.dense().norm())
    assert float((ahead - plain.matvec(v)).norm()) <= 1e-6 * size * float(v.norm())
    assert float((back - plain.rmatvec(u)).norm()) <= 1e-6 * size * float(u.norm())
    assert abs(float((u * ahead).sum() - (v * back).sum())) <= 1e-6 * size * float(u.norm() * v.norm())


@pytest.mark.parametrize("shape", [(FEW_TOKENS + 1, 24), (2, 5, 24)])
def test_many_tokens_and_batches_keep_their_order_all_the_way(shape: tuple[int, ...]) -> None:
    J = attention_jacobian(hs.SelfAttention.random(24, heads=4, kv_heads=2), random(*shape))
    assert not any(is_channels_first(t) for t in J.tangents(random(*shape, seed=1)))
    assert J.matvec(random(*shape)).is_contiguous()
