"""Switches of the whole process: taken by one call at a time, and given back."""

from __future__ import annotations

import gc
import linecache
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import graph_module

import howsmooth as hs
from howsmooth._util.torch_globals import full_precision, without_sources


def sources() -> int:
    return len(graph_module._loader.eval_cache) + sum("eval_with_key" in name for name in linecache.cache)


def trace() -> None:
    torch.fx.symbolic_trace(nn.Linear(2, 2))


@pytest.mark.slow
def test_measuring_functions_leaves_no_sources_behind() -> None:
    x = torch.randn(3, 2)
    hs.measure(lambda x: x.softmax(-1) @ x.T, x)
    before = sources()
    for _ in range(3):
        assert hs.jacobian(lambda x: x.softmax(-1) @ x.T, x).method == "torch.func linearize"
    gc.collect()
    assert sources() == before


def test_only_the_sources_of_this_thread_are_forgotten() -> None:
    before = sources()
    with without_sources():
        other = threading.Thread(target=trace)
        other.start()
        other.join()
        trace()
    assert before < sources() <= before + 2  # its key in both places
    trace()
    assert sources() > before + 2


def test_the_loader_is_given_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), without_sources():
        raise RuntimeError("on purpose")
    assert "cache" not in vars(graph_module._loader)


@pytest.mark.slow
def test_functions_are_measured_in_threads_as_alone() -> None:
    """Forward mode is one switch for all threads: at the same time, one in ten ended in an error."""
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    inputs = [torch.randn(3, 8, dtype=torch.float64) for _ in range(6)]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    alone = [float(hs.measure(module, x)) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: float(hs.measure(module, x)), inputs * 2))
    assert together == pytest.approx(alone * 2, rel=1e-12)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


@pytest.mark.parametrize("name", ["measure", "measure_heads", "token_influence"])
def test_autocast_of_the_caller_changes_nothing(name: str) -> None:
    attention, x = hs.SelfAttention.random(8, heads=2), torch.randn(5, 8)
    call = getattr(hs, name)
    expected = call(attention, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(attention, x)
    first, second = (getattr(result, "value", result) for result in (expected, found))
    assert torch.equal(first, second)


def test_products_and_explanations_are_those_without_autocast() -> None:
    attention, x = hs.SelfAttention.random(8, heads=2), torch.randn(5, 8)
    expected, plain = hs.explain(attention, x), hs.jacobian(attention, x).matvec(x)
    layer = nn.Linear(8, 8)
    alone = hs.measure(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = hs.explain(attention, x)
        assert torch.equal(hs.jacobian(attention, x).matvec(x), plain)
        assert float(hs.measure(layer, x)) == float(alone)
    assert found.influence is not None
    assert expected.influence is not None
    assert torch.equal(found.influence, expected.influence)


def test_full_precision_keeps_name_and_result() -> None:
    @full_precision
    def product(a: torch.Tensor) -> torch.Tensor:
        """A product."""
        return a @ a

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(torch.eye(2)).dtype == torch.float32
    assert (product.__name__, product.__doc__) == ("product", "A product.")


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "measure": lambda f, x: hs.measure(f, x).value,
    "measure_heads": lambda f, x: hs.measure_heads(f, x).value,
    "explain": lambda f, x: hs.explain(f, x).total.value,
    "certify": lambda f, x: hs.certify(f, x).upper,
    "certify, heads": lambda f, x: hs.certify(f, hs.sets.Around(x, 0.01), per_head=True).upper,
    "certify, ball": lambda f, x: hs.certify(f, hs.sets.Around(x, 0.01)).upper,
    "table": lambda f, x: [row.value for row in hs.bounds.table(f, over=x).rows],
    "worst_case": lambda f, x: hs.worst_case(f, 3, over=hs.sets.Ball(1.0), starts=2, steps=2).value,
}


@contextmanager
def default(what: torch.dtype | str) -> Iterator[None]:
    """Torch with another default dtype, or another default device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(what if isinstance(what, torch.dtype) else before)
    try:
        with torch.device(what if isinstance(what, str) else "cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", [torch.float64, pytest.param(torch.float16, marks=pytest.mark.slow), "meta"])
def test_numbers_do_not_depend_on_the_defaults_of_torch(what: torch.dtype | str, call: str) -> None:
    attention = hs.SelfAttention.random(4, heads=2, mask="causal", rotary=hs.Rotary.standard(2))
    x = torch.randn(2, 4)
    usual = CALLS[call](attention, x)
    with default(what):
        found = CALLS[call](attention, x)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(usual))
