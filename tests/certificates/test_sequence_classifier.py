"""Classifiers of sequences are read as what they compute: repeated modules, subclasses, hooks, encoders, weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import howsmooth as hs
from evidence.read_networks import FOREIGN, Doubled, Less, MaxPool, OnePlus, Skip, TwiceMLP, downhill
from howsmooth.certificates import CentredNorm, Residual, SelfAttend, SequenceClassifier, certified_margins
from howsmooth.certificates.read_module import read_classifier, rms_eps
from howsmooth.errors import InvalidInput, UnsupportedModel
from tests.certificates.test_margins import change

WIDTH = 4


class Reversed(nn.Sequential):
    """Its modules from the last to the first, with the forward of the class it comes from."""

    def __iter__(self) -> Any:
        return iter(list(self._modules.values())[::-1])


class Renamed(nn.Linear):
    """A linear map by another name."""

    def extra_repr(self) -> str:
        return "renamed"


class OtherOutput(hs.nn.DotProductAttention):
    """A layer that says of another map that it is its own."""

    def combine(self, mixed: Tensor, sight: Any) -> Tensor:
        return 2 * super().combine(mixed, sight)


class Twice(SequenceClassifier):
    """Tokens that are doubled on their way in, so that radii are those of other tokens."""

    def placed(self, vectors: Tensor) -> Tensor:
        return 2 * vectors


class Noisy(nn.Module):
    """A parametrisation that draws a weight anew whenever it is asked for."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


class Stored(nn.Linear):
    """A weight that is put together anew for every call, as old parametrisations do."""

    def __init__(self, width: int):
        super().__init__(width, width)
        self.register_forward_pre_hook(lambda module, args: setattr(module, "made", module.weight.T * 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.made + self.bias  # type: ignore[operator]


def bent(module: object, args: object, output: Tensor) -> Tensor:
    """A hook that scales every channel by a number of its own."""
    return output * torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)


def encoder_layer(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=dropout, batch_first=True, **options)


def network(*layers: nn.Module, kind: type[SequenceClassifier] = SequenceClassifier) -> SequenceClassifier:
    return kind(layers, nn.Linear(WIDTH, 3)).double()


def certified(net: SequenceClassifier, n: int = 3) -> float:
    """The radius of a random input."""
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        label = int(net(x.to(net.classes.weight.dtype)).argmax())  # type: ignore[union-attr, arg-type]
    return hs.certify(net, x, label).radius


def test_one_activation_used_twice_is_read_twice() -> None:
    """A radius of 0.1207 was certified of this network without its last ReLU; at 0.1086 it has another class."""
    torch.manual_seed(11)
    act = nn.ReLU()
    net = SequenceClassifier([nn.Linear(4, 8), act, nn.Linear(8, 8), act], nn.Linear(8, 2)).double()
    x = torch.randn(3, 4).double()
    label = int(net(x).argmax())
    apart = SequenceClassifier([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()], nn.Linear(8, 2)).double()
    apart.load_state_dict(net.state_dict())
    radius = hs.certify(net, x, label).radius
    assert 0 < radius == hs.certify(apart, x, label).radius
    assert downhill(net, x, label, radius) > 0
    assert downhill(net, x, label, 0.1207) < 0


def test_a_shared_layer_is_read_wherever_it_stands() -> None:
    torch.manual_seed(0)
    layer = encoder_layer(norm_first=True)
    both, once = network(layer, layer).eval(), network(layer).eval()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for net in (both, once):
        torch.testing.assert_close(certified_margins(net, x, 0, 0.0), net(x)[0] - net(x), rtol=0, atol=1e-8)


def is_right(net: nn.Module, n: int = 3) -> float:
    """The radius of a random input, once nodes, margins and what an attack inside meets are those of the network."""
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    there = x + 0.3 * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    read = read_classifier(net, x)
    with torch.no_grad():
        logits = net(x)
        for point in (x, there):
            own, _ = read.root.linearize(point, 0, bounded=False)
            torch.testing.assert_close(own[0], net(point), rtol=1e-10, atol=1e-10)
        label = int(logits.argmax())
        margins = certified_margins(net, x, label, 0.0)
        torch.testing.assert_close(margins, logits[label] - logits, rtol=0, atol=1e-8)
        assert bool((margins <= logits[label] - logits + 1e-14).all())
    radius = hs.certify(net, x, label).radius
    assert radius > 0
    assert downhill(net, x, label, radius) > 0
    return radius


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Skip(nn.Linear(4, 4)),
        lambda: Reversed(nn.Linear(4, 4), nn.ReLU()),
        lambda: Doubled(4, 4),
        lambda: OnePlus(4),
        lambda: Less(nn.Linear(4, 4)),
        lambda: TwiceMLP(4, 2, 6, 0.0),
        FOREIGN["encoders, another order"],
        lambda: nn.Sequential(nn.Identity(), Doubled(4, 4)),
        lambda: Stored(4),
    ],
)
def test_a_class_of_its_own_is_read_as_what_it_computes(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = network(layer()).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # gains of one would not tell a gain from one plus it
            parameter += 0.2 * torch.randn_like(parameter)
    is_right(net)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: SelfAttend(OtherOutput(4, 2)), "differs from its own output by a relative 1"),
        (lambda: nn.AlphaDropout(0.5), r"layers\.0 is dropout in training mode"),
        (lambda: encoder_layer(activation=nn.GELU("tanh")), "gelu_tanh"),
        (lambda: encoder_layer(activation=nn.Softplus()), r"activation softplus in layers\.0.*only relu, gelu"),
        (FOREIGN["parts that differ off the point"], r"is not known: \w+ in layers\.0"),
    ],
)
def test_what_has_no_certificate_is_refused_by_what_it_does(layer: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        certified(network(layer()))


def test_the_largest_over_tokens_is_refused_by_name_and_another_way_in_is_read() -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match=r"not known: amax\.$"):
        certified(network(nn.Linear(4, 4), kind=MaxPool))
    doubled, plain = network(nn.Linear(4, 4), kind=Twice), network(nn.Linear(4, 4))
    plain.load_state_dict(doubled.state_dict())
    with torch.no_grad():
        plain.layers[0].weight *= 2  # type: ignore[operator]
    assert is_right(doubled) == pytest.approx(is_right(plain), rel=1e-9)


@pytest.mark.parametrize("where", ["layers.0", "layers.0.linear1", "layers.0.dropout2", "layers", "classes", ""])
@pytest.mark.parametrize("kind", ["hook", "pre-hook"])
def test_a_hook_anywhere_is_part_of_what_is_read(where: str, kind: str) -> None:
    torch.manual_seed(0)
    net = network(encoder_layer()).eval()
    without = is_right(net)
    module = net.get_submodule(where)
    handle = (
        module.register_forward_hook(bent)
        if kind == "hook"
        else module.register_forward_pre_hook(lambda module, args: (bent(module, args, args[0]),))
    )
    assert is_right(net) != pytest.approx(without, rel=1e-3)
    handle.remove()
    assert is_right(net) == without


def test_a_hook_for_all_modules_and_a_replaced_forward_are_part_of_what_is_read() -> None:
    torch.manual_seed(0)
    net = network(nn.Linear(4, 4))
    without = is_right(net)
    handle = nn.modules.module.register_module_forward_hook(bent)
    try:
        assert is_right(net) != pytest.approx(without, rel=1e-3)
    finally:
        handle.remove()
    plain = net.layers[0].forward
    net.layers[0].forward = lambda x: bent(None, (), plain(x))
    assert is_right(net) != pytest.approx(without, rel=1e-3)
    with pytest.raises(UnsupportedModel, match="does not run on this input in float64"):
        certified(net.float())  # the copy in float64 still calls the layer in float32


def test_a_subclass_that_computes_the_same_is_read() -> None:
    torch.manual_seed(0)
    renamed, plain = network(Renamed(4, 4)), network(nn.Linear(4, 4))
    plain.load_state_dict(renamed.state_dict())
    assert certified(renamed) == certified(plain) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["weight_norm", "orthogonal", "spectral_norm"])
def test_parametrised_weights_are_read(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = network(getattr(parametrizations, name)(nn.Linear(4, 4))).to(dtype).eval()
    plain, double = network(nn.Linear(4, 4)), copy.deepcopy(net).double()
    with torch.no_grad():
        plain.layers[0].weight.copy_(double.layers[0].weight)  # type: ignore[operator, union-attr, arg-type]
        plain.layers[0].bias.copy_(double.layers[0].bias)  # type: ignore[operator, union-attr, arg-type]
        plain.classes.load_state_dict(net.classes.state_dict())
    assert certified(net) == pytest.approx(certified(plain), rel=1e-9)


def test_weights_that_do_not_keep_still_are_refused() -> None:
    net = network(parametrizations.spectral_norm(nn.Linear(4, 4)))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(InvalidInput, match="a spectral norm in training mode, changes at every call"):
        hs.certify(net, torch.zeros(3, 4), 0)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    old = nn.utils.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match=r"layers\.0, a spectral norm in training mode, changes at every call"):
        hs.certify(network(old), torch.zeros(3, 4), 0)
    is_right(network(old).eval())
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Noisy())
    net, drawn = network(layer), torch.get_rng_state()
    with pytest.raises(UnsupportedModel, match="gives other outputs at every call"):
        hs.certify(net, torch.ones(3, 4), 0)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("dropped", ["self_attn", "dropout", "dropout1", "dropout2"])
def test_an_encoder_layer_in_training_mode_with_dropout_is_refused(dropped: str) -> None:
    net = network(encoder_layer(dropout=0.1))
    with pytest.raises(UnsupportedModel, match=r"call \.eval\(\) first"):
        certified(net)
    net.eval()
    assert certified(net) > 0
    getattr(net.layers[0], dropped).train()
    with pytest.raises(UnsupportedModel, match=r"call \.eval\(\) first"):
        certified(net)


def test_an_activation_that_torch_replaces_on_its_fast_path_is_refused() -> None:
    """In batches and without gradients torch still runs the activation with which the layer was made."""
    net = network(encoder_layer()).eval()
    net.layers[0].activation = nn.functional.silu
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        fast = net(x)
    assert float((fast - net(x)).detach().abs().max()) > 1e-3
    with pytest.raises(UnsupportedModel, match="replaced by silu, but without gradients torch still runs relu"):
        certified(net)


@pytest.mark.parametrize(
    ("kind", "norm_first"),
    [("layer", False), ("layer", True), pytest.param("encoder", False, marks=pytest.mark.slow)],
)
def test_every_parameter_of_an_encoder_gets_the_gradient_of_finite_differences(kind: str, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer: nn.Module = encoder_layer(norm_first=norm_first, activation="gelu")
    if kind == "encoder":
        layer = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)  # type: ignore[arg-type]
    net = network(layer)
    with torch.no_grad():
        for parameter in net.parameters():  # zero biases and gains of one hide mistakes
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(2, WIDTH, dtype=torch.float64)

    def bound() -> Tensor:
        return certified_margins(net, x, 0, 0.02)[1:].sum()

    names, parameters = zip(*net.named_parameters(), strict=True)
    slopes = torch.autograd.grad(bound(), parameters)
    assert len(names) == (2 if kind == "layer" else 4) + 12 * (1 if kind == "layer" else 2)
    for name, parameter, slope in zip(names, parameters, slopes, strict=True):
        step = 1e-5 * torch.randn_like(parameter)
        assert change(bound, parameter, step) == pytest.approx(float((slope * step).sum()), rel=1e-3, abs=1e-9), name
        assert float(slope.abs().max()) > 1e-6, name


def test_the_vectors_of_words_get_gradients_where_words_are_given_by_number() -> None:
    torch.manual_seed(0)
    layers = [Residual(CentredNorm(4), nn.Linear(4, 4)), nn.GELU()]
    net = SequenceClassifier(layers, nn.Linear(4, 2), nn.Embedding(7, 4), torch.randn(3, 4)).double()
    ids = torch.tensor([5, 2, 5])
    label = int(net(ids).argmax())

    def bound() -> Tensor:
        return certified_margins(net, ids, label, 0.05)[1 - label]

    (slope,) = torch.autograd.grad(bound(), net.embedding.weight)  # type: ignore[union-attr]
    assert slope.norm(dim=-1).nonzero().flatten().tolist() == [2, 5]
    step = 1e-5 * torch.randn_like(slope)
    found = change(bound, net.embedding.weight, step)  # type: ignore[union-attr, arg-type]
    assert found == pytest.approx(float((slope * step).sum()), rel=1e-3)
    vectors = net.embedding(ids)  # type: ignore[misc]
    assert hs.certify(net, ids, label).radius == hs.certify(net, vectors.detach(), label).radius


def test_the_epsilon_of_an_rms_norm_is_that_of_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        norm = nn.RMSNorm(1, elementwise_affine=False)
        x = torch.tensor([1e-3 if dtype != torch.float64 else 1e-8], dtype=dtype)
        found = (float(x) / float(norm(x))) ** 2 - float(x) ** 2
        assert found == pytest.approx(rms_eps(dtype), rel=0.05)


def test_positions_are_added_in_double() -> None:
    """The centre of a ball is that of the network in float64, not a sum rounded to float32."""
    torch.manual_seed(0)
    layers = [Residual(CentredNorm(4), nn.Linear(4, 4)), nn.ReLU()]
    net = SequenceClassifier(layers, nn.Linear(4, 2), positions=1e3 * torch.randn(3, 4))
    x = torch.randn(3, 4)
    label = int(net(x).argmax())
    double = SequenceClassifier(layers, net.classes, positions=net.positions.detach()).double()  # type: ignore[union-attr]
    assert hs.certify(net.float(), x, label).radius == hs.certify(double, x.double(), label).radius
