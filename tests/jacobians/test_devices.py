"""Products on another device, simulated: no tensor on the wrong device, and no wait for a number on the host.

There is no accelerator here. Tensors on the meta device have a shape but no numbers: asking for one, which on a real
accelerator would make the host wait, raises. `OneDevice` looks at every operation below autograd, and raises when a
tensor with axes is, or is made, anywhere else.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import howsmooth as hs
from howsmooth.jacobians import JacobianOperator, attention_jacobian
from howsmooth.jacobians.tiles import TILE_SIZE, tile_size
from howsmooth.jacobians.tokenwise import Activation, Affine, GatedActivation
from howsmooth.jacobians.truncated_operator import truncated_jacobian
from howsmooth.network.composed_jacobian import composed_jacobian
from howsmooth.network.nodes import Attend, MixTokens, Parallel, Rearrange, Series, Skip, Tokenwise

N, D = 12, 8


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors that are not on the meta device, numbers apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.device.type != "meta":
                raise AssertionError(f"{func} met a tensor of shape {tuple(leaf.shape)} on the {leaf.device}")
        return result


def moved(thing: Any) -> Any:
    """A copy with all tensors, however deep, on a simulated accelerator."""
    if isinstance(thing, Tensor):
        return torch.empty(thing.shape, dtype=thing.dtype, device="meta")
    if isinstance(thing, tuple | list):
        return type(thing)([moved(each) for each in thing]) if type(thing) in (tuple, list) else thing
    if isinstance(thing, torch.nn.Module):
        thing = copy.deepcopy(thing)
        for module in thing.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = moved(buffer)
        return thing
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {field.name: moved(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
        return dataclasses.replace(thing, **fields)
    if isinstance(thing, JacobianOperator):
        other = copy.copy(thing)
        for name, value in vars(thing).items():
            setattr(other, name, moved(value))
        other.device = torch.device("meta")
        return other
    if type(thing).__name__ == "Workspace":
        return type(thing)()
    if type(thing).__name__ == "Terms":
        return type(thing)([moved(term) for term in thing])
    return thing


def operators() -> dict[str, JacobianOperator]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    causal, plain = (hs.SelfAttention.random(D, heads=2, seed=0, mask=mask) for mask in ("causal", None))
    rotary = hs.SelfAttention(*torch.randn(3, D, D), heads=2, rotary=hs.Rotary.standard(4), mask="causal")
    mlp = Tokenwise(Affine(torch.randn(12, D)), GatedActivation(torch.nn.functional.silu), Affine(torch.randn(D, 6)))
    relu = Tokenwise(Affine(torch.randn(6, D)), Activation(torch.relu), Affine(torch.randn(D, 6)))
    moves = Rearrange(torch.arange(N * D).reshape(N, D).flip(0), torch.randn(N, D))
    pooled = Series(moves, MixTokens(torch.full((1, N), 1 / N)))
    layer = Series(Parallel(Skip(), Attend(causal)), Parallel(Skip(), mlp), relu)
    return {
        "block": attention_jacobian(plain, x),
        "causal, streamed": attention_jacobian(causal, x, memory=0),
        "heads": attention_jacobian(causal, x, per_head=True, reduced=True),
        "rotary": attention_jacobian(rotary, x),
        "tiles left out": truncated_jacobian(causal, x, 1e-3),
        "layer": composed_jacobian(layer, x),
        "moved and mixed": composed_jacobian(pooled, x),
    }


@pytest.mark.parametrize("name", operators())
def test_products_stay_on_their_device_and_never_wait_for_the_host(name: str) -> None:
    operator = operators()[name]
    there = moved(operator)
    with OneDevice():
        v = torch.empty((*operator.batch_shape, *operator.in_shape), device="meta")
        u = there.matvec(v)
        assert u.device.type == "meta"
        assert u.shape == (*operator.batch_shape, *operator.out_shape)
        assert there.rmatvec(u).device.type == "meta"


class Wrong(JacobianOperator):
    """A negative control: what the test must catch."""

    method = "wrong"

    def __init__(self, kind: str):
        self.kind, self.device = kind, torch.device("meta")

    def matvec(self, v: Tensor) -> Tensor:
        if self.kind == "device":
            return v + torch.ones(v.shape)
        return v * float(v.max())

    rmatvec = matvec


def test_a_tensor_on_the_wrong_device_is_caught() -> None:
    with OneDevice(), pytest.raises((AssertionError, RuntimeError), match="cpu"):
        Wrong("device").matvec(torch.empty(3, device="meta"))


def test_a_wait_for_the_host_is_caught() -> None:
    with OneDevice(), pytest.raises(RuntimeError, match="item"):
        Wrong("host").matvec(torch.empty(3, device="meta"))


def test_tiles_have_the_size_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return 64 * 2**28, 2**40

    monkeypatch.setattr(torch, "get_device_module", lambda device: Memory)
    assert tile_size(torch.device("cpu")) == TILE_SIZE
    assert tile_size(torch.device("cuda")) == 2**28
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert tile_size(torch.device("cuda")) == TILE_SIZE
