"""Networks are read as what they compute: repeated modules, subclasses, hooks, parametrisations, encoders."""

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
from howsmooth.certificates.network.parts_ir import rms_eps
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


def twice(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return 2 * output


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


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: Skip(nn.Linear(4, 4)), "layers.0, a Skip that overrides forward of Sequential"),
        (lambda: Reversed(nn.Linear(4, 4), nn.ReLU()), "layers.0, a Reversed that overrides __iter__ of Sequential"),
        (lambda: Doubled(4, 4), "layers.0, a Doubled that overrides forward of Linear"),
        (lambda: OnePlus(4), "layers.0, a OnePlus that overrides forward of RMSNorm"),
        (lambda: Less(nn.Linear(4, 4)), "layers.0, a Less that overrides forward of Residual"),
        (lambda: TwiceMLP(4, 2, 6, 0.0), "layers.0, a TwiceMLP that overrides _ff_block of TransformerEncoderLayer"),
        (FOREIGN["encoders, another order"], "layers.0.layers, a Backwards that overrides __iter__ of ModuleList"),
        (lambda: SelfAttend(OtherOutput(4, 2)), "layers.0.layer, a OtherOutput that overrides combine"),
        (lambda: nn.Sequential(nn.Identity(), Doubled(4, 4)), "layers.0.1, a Doubled"),
        (lambda: nn.AlphaDropout(0.5), "layers.0, a AlphaDropout, has no certificate"),
        (lambda: encoder_layer(activation=nn.GELU("tanh")), "GELU by its tanh formula"),
        (lambda: encoder_layer(activation=torch.tanh), "only ReLU, GELU and SiLU"),
    ],
)
def test_a_class_of_its_own_is_refused_by_name(layer: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        certified(network(layer()))


@pytest.mark.parametrize(("kind", "said"), [(MaxPool, "forward"), (Twice, "placed")])
def test_a_classifier_of_its_own_is_refused(kind: type[SequenceClassifier], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"the network, a {kind.__name__} that overrides {said}"):
        certified(network(nn.Linear(4, 4), kind=kind))


@pytest.mark.parametrize("where", ["layers.0", "layers.0.linear1", "layers.0.dropout2", "layers", "classes", ""])
@pytest.mark.parametrize("kind", ["hook", "pre-hook"])
def test_a_hook_anywhere_is_refused(where: str, kind: str) -> None:
    net = network(encoder_layer()).eval()
    module = net.get_submodule(where)
    handle = (
        module.register_forward_hook(twice)
        if kind == "hook"
        else module.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    )
    with pytest.raises(UnsupportedModel, match=f"{where or 'the network'}, a .* with forward hooks.*remove them first"):
        certified(net)
    handle.remove()
    assert certified(net) > 0


def test_a_hook_for_all_modules_and_a_replaced_forward_are_refused() -> None:
    net = network(nn.Linear(4, 4))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    with pytest.raises(UnsupportedModel, match="under forward hooks for all modules"):
        certified(net)
    handle.remove()
    plain = net.layers[0].forward
    net.layers[0].forward = lambda x: 2 * plain(x)
    with pytest.raises(UnsupportedModel, match=r"layers\.0, a Linear whose forward was replaced"):
        certified(net)


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
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Noisy())
    net, drawn = network(layer), torch.get_rng_state()
    with pytest.raises(UnsupportedModel, match=r"layers\.0, a ParametrizedLinear, computes something else"):
        hs.certify(net, torch.ones(3, 4), 0)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("dropped", ["self_attn", "dropout", "dropout1", "dropout2"])
def test_an_encoder_layer_in_training_mode_with_dropout_is_refused(dropped: str) -> None:
    net = network(encoder_layer(dropout=0.1))
    with pytest.raises(InvalidInput, match=r"training mode.*call \.eval\(\) first"):
        certified(net)
    net.eval()
    assert certified(net) > 0
    getattr(net.layers[0], dropped).train()
    with pytest.raises(InvalidInput, match=r"training mode.*call \.eval\(\) first"):
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
