"""Programs that a reader may trip over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.network.handwritten.drawing import draw
from tests.network.handwritten.language import NanoBlock
from tests.network.handwritten.plain import PlainAttention, Stack


class ControlFlow(Stack):
    """Which branch runs depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.mean() > 0:
            return torch.relu(y)
        return y - 0.5 * torch.tanh(y)


class NumberFromData(Stack):
    """Divides by a Python number taken from the data, which a trace would freeze."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().max().item())


class InPlace(PlainAttention):
    """Additions, masks, scales and activations in place, where autograd allows them; norms after."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__(d, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-2, -1)
        scores *= self.size**-0.5
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), float("-inf"))
        y = self.o(self.merge(scores.softmax(-1) @ v))
        y += x
        y = self.norm1(y)
        h = self.fc2(F.relu(self.fc1(y), inplace=True))
        h.mul_(0.5).add_(0.1)
        h += y
        return self.norm2(h)


@dataclass
class EncoderOutput:
    """What a model returns to whoever wants more than its result."""

    last_hidden_state: Tensor
    pooled: Tensor


class StructuredOutput(Stack):
    """Returns a tuple with a missing loss, a dictionary of one, or an object of two tensors."""

    def __init__(self, kind: str, d: int = 16, heads: int = 2) -> None:
        super().__init__(partial(PlainAttention, d, heads), d)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        if self.kind == "tuple":
            return x, None
        if self.kind == "dict":
            return {"last_hidden_state": x}
        return EncoderOutput(last_hidden_state=x, pooled=x.mean(dim=1))


class NoBatch(nn.Module):
    """Tokens as the rows of a matrix, and one head as in a formula."""

    def __init__(self, d: int, scale: float) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Parameter(torch.empty(d, d)) for _ in range(3))
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        A = torch.softmax((x @ self.W_q) @ (x @ self.W_k).T * self.scale, dim=1)
        x = self.norm(x + A @ (x @ self.W_v))
        return x + self.mlp(x)


class HeadLoop(nn.Module):
    """A Python loop over the heads, whose slices of the output projection are added up."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, d // heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        d, size = x.shape[-1], self.size
        qkv = self.qkv(x)
        total: Tensor = self.out.bias
        for h in range(self.heads):
            q = qkv[..., h * size : (h + 1) * size]
            k = qkv[..., d + h * size : d + (h + 1) * size]
            v = qkv[..., 2 * d + h * size : 2 * d + (h + 1) * size]
            weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / size**0.5, dim=2)
            total = total + F.linear(torch.bmm(weights, v), self.out.weight[:, h * size : (h + 1) * size])
        return total


class EmptyBuffer(PlainAttention):
    """Writes the outputs of its heads into an empty tensor."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        out = x.new_empty(x.shape)
        for h in range(self.heads):
            out[..., h * self.size : (h + 1) * self.size] = self.weights(self.logits(q[:, h], k[:, h])) @ v[:, h]
        return self.o(out)


class DetachedScaleNorm(nn.Module):
    """LayerNorm whose standard deviation is cut from the graph."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        std = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt().detach()
        return centred / std * self.weight + self.bias


class DataResidual(Stack):
    """One branch is computed from ``x.data``, which autograd does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.data)


class AlwaysDropout(Stack):
    """Functional dropout whose flag for training nobody set."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1))


class Noise(Stack):
    """Adds fresh noise to its input in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.01 * torch.randn_like(x))


def steered(factory: Callable[[], nn.Module], d: int) -> nn.Module:
    """The module with hooks that change what goes into its first MLP and what comes out of its first attention."""
    module: Any = factory()
    vector = draw(d, seed=5)
    module.attentions[0].register_forward_hook(lambda _module, _inputs, output: 2.0 * output + vector.to(output.dtype))
    module.mlps[0].register_forward_pre_hook(lambda _module, inputs: (0.5 * inputs[0],))
    return module


def recorded(factory: Callable[[], nn.Module]) -> nn.Module:
    """The module with hooks that keep what its attentions gave and leave it as it was."""
    module: Any = factory()
    features: dict[int, Tensor] = {}

    def keep(index: int, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        features[index] = output.detach()

    for index, attention in enumerate(module.attentions):
        attention.register_forward_hook(partial(keep, index))
    return module


class Checkpointed(nn.Module):
    """Blocks whose inner values are computed again in the backward pass."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NanoBlock(d, heads, 16, flash=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Scriptable(nn.Module):
    """A block in the part of Python that TorchScript takes."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads: int = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * (d // self.heads) ** -0.5, dim=-1)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RoundStraightThrough(torch.autograd.Function):
    """Rounds to eighths and pretends that it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return grad[0]


class CustomRounding(Stack):
    """Rounds the output of its blocks by a function with a derivative of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return RoundStraightThrough.apply(super().forward(x))


class DetachedRounding(Stack):
    """Rounds by adding a difference that is cut from the graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (torch.round(y * 8) / 8 - y).detach()


class CustomScaling(torch.autograd.Function):
    """Scales the value by two and the gradient by two, as it should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return 2.0 * grad[0]


class CustomHonest(Stack):
    """A function of one's own whose derivative is right."""

    def forward(self, x: Tensor) -> Tensor:
        return CustomScaling.apply(super().forward(x))


class Counting(Stack):
    """Counts its calls in a buffer that nothing else uses."""

    calls: Tensor

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__(partial(PlainAttention, d, heads), d)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)
