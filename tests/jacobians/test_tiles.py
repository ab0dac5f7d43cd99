"""The buffers behind products: one set for all operators, one per thread, none when the operators are gone."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

import howsmooth as hs
from howsmooth.jacobians import attention_jacobian
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.jacobians.tiles import Workspace

N, D = 64, 16


def operators(count: int, dtype: torch.dtype = torch.float32) -> list[AttentionJacobian]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    maps = (hs.SelfAttention.random(D, heads=2, seed=i, mask="causal") for i in range(count))
    return [attention_jacobian(attention.in_dtype(dtype), x) for attention in maps]


def test_operators_share_their_buffers_and_products_stay_their_own() -> None:
    first, second = operators(2)
    v = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    before = first.matvec(v)
    assert first.mixing.work is second.mixing.work
    second.rmatvec(second.matvec(v))
    torch.testing.assert_close(first.matvec(v), before, rtol=0, atol=0)


def test_operators_of_two_dtypes_do_not_meet() -> None:
    [single], [double] = operators(1), operators(1, torch.float64)
    v = torch.randn(N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    double.matvec(v)
    torch.testing.assert_close(single.matvec(v.float()), double.matvec(v).float(), rtol=1e-4, atol=1e-5)


def test_buffers_leave_with_the_last_who_has_them() -> None:
    class Own(Workspace):
        _known: ClassVar[WeakValueDictionary[str, Workspace]] = WeakValueDictionary()

    first, second = Own.shared(), Own.shared()
    assert first is second
    del first, second
    gc.collect()
    assert not Own._known


def test_every_thread_has_buffers_of_its_own() -> None:
    [operator] = operators(1)
    here = operator.matvec(torch.ones(N, D))
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(operator.matvec, torch.ones(N, D)).result()
        buffers = pool.submit(lambda: dict(operator.mixing.work.buffers)).result()
    torch.testing.assert_close(there, here, rtol=0, atol=0)
    assert buffers
    for key, buffer in buffers.items():
        assert buffer.data_ptr() != operator.mixing.work.buffers[key].data_ptr()


def test_a_product_in_inference_mode_spoils_nothing_for_others() -> None:
    first, second = operators(2)
    with torch.inference_mode():
        first.matvec(torch.ones(N, D))
    assert bool(second.matvec(torch.ones(N, D)).isfinite().all())
