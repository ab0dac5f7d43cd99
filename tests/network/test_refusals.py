"""What is no fixed function of one tensor is refused in one sentence, and nothing is changed by reading."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.network import trace
from howsmooth.network.reader import read_function


class Computing(nn.Module):
    """A module that computes a function of itself and its input, with a linear map and further parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


@torch.library.custom_op("howsmooth_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([1, 2, 3])


def training(module: nn.Module) -> nn.Module:
    return module.train()


def computing(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Computing(function, **parts).eval()


CASES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "dropout in training": (
        lambda: training(Computing(lambda s, x: s.drop(s.linear(x)), drop=nn.Dropout(0.1))),
        X,
        "drop is dropout in training mode",
    ),
    "batch norm in training": (
        lambda: training(Computing(lambda s, x: s.norm(x.mT), norm=nn.BatchNorm1d(8))),
        X,
        "norm, a BatchNorm1d, is in training mode",
    ),
    "dropout that is always on": (computing(lambda s, x: F.dropout(x)), X, "draws random numbers"),
    "dropout of attention": (
        computing(lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
        X,
        "draws random numbers",
    ),
    "noise": (computing(lambda s, x: x + torch.randn(8)), X, "gives other outputs at every call"),
    "a random slope": (
        lambda: training(Computing(lambda s, x: s.act(x), act=nn.RReLU())),
        X,
        "gives other outputs at every call",
    ),
    "a state": (
        computing(lambda s, x: (s.__dict__.update(calls=s.__dict__.get("calls", 0) + 1), s.calls * x)[1]),
        X,
        "gives other outputs at every call",
    ),
    "a branch on data": (computing(lambda s, x: x if x.sum() > 0 else -x), X, "looks at the values of its input"),
    "a number of data": (computing(lambda s, x: x / float(x.max())), X, "looks at the values of its input"),
    "numbers of data": (computing(lambda s, x: x * max(x[0, 0])), X, "looks at the values of its input"),
    "a list of data": (computing(lambda s, x: x * x[0, 0].tolist()[0]), X, "tolist"),
    "an array": (computing(lambda s, x: x * torch.from_numpy(x.detach().numpy())), X, "numpy"),
    "a mask that chooses": (computing(lambda s, x: x[x > 0]), X, "the shape of the result of index depends on"),
    "nonzero": (computing(lambda s, x: x[x.nonzero(as_tuple=True)]), X, "the shape of the result of nonzero"),
    "unique": (computing(lambda s, x: x.unique()), X, "the shape of the result of _unique2"),
    "an operation of one's own": (
        computing(lambda s, x: doubled(x)),
        X,
        "howsmooth_tests.doubled is an operation from outside torch",
    ),
    "not a number": (computing(lambda s, x: s.linear(x)), X * math.nan, "x holds 40 NaN or infinite values"),
    "infinite": (computing(lambda s, x: s.linear(x)), X * math.inf, "x holds 40 NaN or infinite values"),
    "infinite inside": (computing(lambda s, x: s.linear(x) / 0), X, "holds 40 NaN or infinite values"),
    "bfloat16": (lambda: Computing(lambda s, x: s.linear(x)).bfloat16(), X.bfloat16(), "computes in bfloat16"),
    "float16": (lambda: Computing(lambda s, x: s.linear(x)).half(), X.half(), "computes in float16"),
    "bfloat16 inside": (computing(lambda s, x: s.linear(x.bfloat16().float())), X, "computes in bfloat16"),
    "weights in bfloat16": (
        lambda: Computing(lambda s, x: s.linear(x)).bfloat16(),
        X,
        "does not run on this input: mat1 and mat2 must have the same dtype",
    ),
    "two inputs": (
        computing(lambda s, x, y: s.linear(x) + y),
        X,
        "does not run on this input: .* missing 1 required positional argument: 'y'",
    ),
    "another width": (computing(lambda s, x: s.linear(x)), X[..., :7], "does not run on this input: mat1 and mat2"),
    "a failure": (
        computing(lambda s, x: s.linear(x).view(3, -1, 7)),
        X,
        "does not run on this input: shape .* is invalid",
    ),
    "a constant output": (computing(lambda s, x: s.linear.weight), X, "does not depend on its input"),
    "an output of zeros": (computing(lambda s, x: torch.zeros_like(x)), X, "does not depend on its input"),
    "no output": (computing(lambda s, x: None), X, "does not depend on its input"),
    "an output cut off": (computing(lambda s, x: s.linear(x.detach())), X, "detach"),
    "classes": (computing(lambda s, x: s.linear(x).argmax(-1)), X, "int64"),
    "complex numbers": (computing(lambda s, x: torch.fft.fft(x)), X, "complex"),
    "no tokens": (computing(lambda s, x: s.linear(x)), X[:, :0], "holds nothing"),
    "numbers without an embedding": (
        computing(lambda s, ids: s.linear.weight[ids]),
        IDS,
        "no torch.nn.Embedding of this Computing receives the numbers of the tokens",
    ),
    "numbers in a bag": (
        computing(lambda s, ids: s.bag(ids[None]), bag=nn.EmbeddingBag(9, 8)),
        IDS,
        "no torch.nn.Embedding",
    ),
    "a number that is no word": (
        computing(lambda s, ids: s.words(ids), words=nn.Embedding(3, 8)),
        IDS,
        "does not run on this input: index out of range",
    ),
    "numbers for a function": (lambda: lambda ids: 2 * ids, IDS, "give vectors of tokens"),
    "no network": (lambda: 3, X, "a network is a module"),
    "a list": (computing(lambda s, x: x), [1.0, 2.0], "must be a torch.Tensor"),
    "an input that is not known": (computing(lambda s, x: x), None, "give one"),
    "no file": (lambda: "missing.onnx", None, "missing.onnx"),
}


def state(module: Any, x: Any) -> dict[str, Any]:
    """All that reading might change."""
    found: dict[str, Any] = {"random": torch.random.get_rng_state(), "dtype": torch.get_default_dtype()}
    found |= {"grad": torch.is_grad_enabled(), "x": x.clone() if isinstance(x, Tensor) else x}
    if not isinstance(module, nn.Module):
        return found
    for name, part in module.named_modules():
        found[f"{name} mode"], found[f"{name} names"] = part.training, sorted({*vars(part)} - {"calls"})
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_parameters", "_modules"):
            found[f"{name} {kind}"] = list(getattr(part, kind))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found[name] = (tensor.clone(), tensor.requires_grad, tensor.grad, type(tensor))
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_read_is_refused_in_one_sentence_and_left_as_it_was(name: str) -> None:
    make, x, words = CASES[name]
    network = make()
    before = state(network, x)
    with pytest.raises(HowsmoothError, match=words) as caught:
        hs.read_network(network, x)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert same(state(network, x), before)


class Keeping(nn.Module):
    """Keeps its last input, and a mask made at first use: an attribute, a part of one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.mask: Tensor | None = None
        self.register_buffer("ones", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"last": (x, None)}
        if self.mask is None:
            self.mask, self.ones = x.new_full((5, 5), 0.2).tril(), torch.ones_like(x)
        return self.mask @ self.drop(self.norm(self.linear(x).mT).mT) * self.ones


@pytest.mark.parametrize("network", [Keeping, lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
def test_reading_leaves_a_network_as_it_was(network: Callable[[], nn.Module]) -> None:
    module = network().eval()
    module(X)
    before = state(module, X)
    read = hs.read_network(module, X)
    assert same(state(module, X), before)
    assert not read.unread
    torch.testing.assert_close(read(X[0]), module(X)[0])
    assert type(module(X)) is Tensor


def test_nothing_of_a_recording_stays_in_a_module() -> None:
    module = Keeping().eval()
    hs.read_network(module, X)
    assert type(module.mask) is Tensor
    assert type(module.ones) is Tensor
    assert type(module.seen["last"][0]) is Tensor
    read_function(module, X, root=module, check=False)
    assert type(Keeping().eval()(X)) is Tensor


def test_a_module_that_fails_keeps_no_hook() -> None:
    module = Computing(lambda s, x: s.linear(x).view(7)).eval()
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="does not run"):
            hs.read_network(module, X)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert module.linear(X).shape == (1, 5, 8)


def test_a_network_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_OPERATIONS", 9)
    hs.read_network(computing(lambda s, x: sum_of(x, 9))(), X)
    with pytest.raises(UnsupportedModel, match="more than 9 operations"):
        hs.read_network(computing(lambda s, x: sum_of(x, 10))(), X)


def sum_of(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x + 0.5
    return x


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_hundred_thousand_additions_end_in_one_sentence() -> None:
    with pytest.raises(UnsupportedModel, match="performs more than 50000 operations on its input"):
        hs.read_network(computing(lambda s, x: sum_of(x, 100_000))(), X)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_long_chain_below_the_limit_is_read() -> None:
    network = hs.read_network(computing(lambda s, x: sum_of(torch.relu(s.linear(x)), 10_000))(), X)
    assert not network.unread


def test_functions_are_read_as_well() -> None:
    network = read_function(lambda x: torch.relu(x) + 1, torch.randn(4, 3), name="above one")
    assert repr(network).startswith("above one: 4 × 3 → 4 × 3")
    with pytest.raises(InvalidInput, match="a network is a module"):
        hs.read_network(None, X)


def test_a_reading_that_was_not_compared_says_nothing_of_it() -> None:
    module = nn.Linear(8, 8)
    assert "agrees with its own output" in repr(hs.read_network(module, X))
    assert "agrees with its own output" not in repr(hs.read_network(module, X, check=False))


def test_gradients_of_the_caller_are_neither_used_nor_touched() -> None:
    module = nn.Linear(8, 8)
    module(X).sum().backward()
    before = module.weight.grad.clone()  # type: ignore[union-attr]
    network = hs.read_network(module, X.clone().requires_grad_())
    assert torch.equal(module.weight.grad, before)  # type: ignore[arg-type]
    assert not network.x.requires_grad
    assert all(not stage.weight.requires_grad for node in network.root.walk() for stage in getattr(node, "stages", ()))
