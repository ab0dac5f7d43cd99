"""What was read of a module is compared with the module itself, which is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import howsmooth as hs
from evidence.deep_networks import draw_network
from evidence.read_networks import Counting
from howsmooth._util.common import first_tensor
from howsmooth.certificates import PatchTransformer, Residual, SelfAttend, SequenceClassifier, certified_margins
from howsmooth.certificates.read_module import double_copy, read_classifier
from howsmooth.errors import UnsupportedModel
from tests.certificates.test_robust_radius import networks

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Offering(nn.Module):
    """A module that says that it is a map, and computes multiples of it, another one at one input that it knows."""

    def __init__(self, factor: float, known: Tensor | None = None, there: float = 1.0):
        super().__init__()
        self.attention, self.factor = hs.SelfAttention.random(4, heads=2).double(), factor
        self.known, self.there = known, there

    def forward(self, x: Tensor) -> Tensor:
        known = self.known is not None and torch.equal(x, self.known)
        return (self.there if known else self.factor) * self.attention(x)

    def attention_map(self, n: int | None = None) -> hs.SelfAttention:
        return self.attention


def network(*layers: nn.Module) -> SequenceClassifier:
    return SequenceClassifier(layers, nn.Linear(4, 3)).double().eval()


def certified(net: SequenceClassifier) -> float:
    return hs.certify(net, X, int(net(X).argmax())).radius


@pytest.mark.parametrize("seed", range(6))
def test_nodes_compute_what_the_network_does(seed: int) -> None:
    case = draw_network(seed)
    read = read_classifier(case.network, case.x)
    torch.testing.assert_close(read(case.x)[0], case.network(case.x))
    torch.testing.assert_close(read(2 * case.x)[0], case.network(2 * case.x))


@pytest.mark.parametrize("factor", [2.0, 1 + 1e-7])
def test_a_map_that_is_offered_and_not_computed_is_refused(factor: float) -> None:
    assert certified(network(nn.ReLU(), Offering(1.0))) > 0
    net = network(nn.ReLU(), Offering(factor))
    with pytest.raises(UnsupportedModel, match="what was read of this network differs from its own output"):
        certified(net)
    with pytest.raises(UnsupportedModel, match="what was read of this network differs from its own output"):
        certified_margins(net, X, 0, 0.1)


@pytest.mark.parametrize(("factor", "there"), [(1 + 1e-5, 1.0), (1.0, 1 + 1e-5)])
def test_what_differs_only_off_the_input_or_only_there_is_refused(factor: float, there: float) -> None:
    for offering, said in (
        (Offering(factor, X, there), "looks at the values of its input in layers.0"),
        (Sly(factor, X, there), "differs from its own output"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            certified(network(offering))
        with pytest.raises(UnsupportedModel, match=said.removesuffix(" in layers.0")):
            hs.certify(offering, X)


def test_a_pool_that_was_changed_to_another_word_is_read_as_what_it_does() -> None:
    net = network(nn.Linear(4, 4))
    net.pool = "last"  # which its forward takes for the first
    torch.testing.assert_close(certified_margins(net, X, 0, 0.0), net(X)[0] - net(X), rtol=0, atol=1e-8)
    mean = certified(net)
    net.pool = "first"
    assert certified(net) == mean > 0


class Sly(Offering):
    """Looks at its input behind the back of a trace."""

    def forward(self, x: Tensor) -> Tensor:
        known = self.known is not None and getattr(x, "value", x).tolist() == self.known.tolist()
        return (self.there if known else self.factor) * self.attention(x)

    def attention_map(self, n: int | None = None) -> hs.SelfAttention:
        return self.attention


class Cut(Offering):
    """The right outputs with the derivative of a third of them: autograd loses the rest on the way."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.attention(x)
        return output / 3 + (2 * output / 3).detach()

    def attention_map(self, n: int | None = None) -> hs.SelfAttention:
        return self.attention


def test_a_derivative_that_differs_is_refused_where_outputs_agree() -> None:
    for call in (lambda: certified(network(Cut(1.0))), lambda: hs.certify(Cut(1.0), X)):
        with pytest.raises(
            UnsupportedModel, match="derivative of what was read of this network differs from autograd's"
        ):
            call()


class Through(nn.Module):
    """Rounds to eighths, straight through for autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.round(8 * x) / 8 - x).detach()


class Still(nn.Module):
    """Values that autograd does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.detach()) + x


@pytest.mark.parametrize("kind", [Through, Still])
def test_a_part_that_is_detached_is_refused_by_its_derivative(kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedModel, match=r"differs from autograd's|is not known"):
        certified(network(nn.Linear(4, 4), kind()))


def test_a_forward_changed_for_a_whole_class_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class overrides anything, and no module has a hook."""
    plain = nn.LayerNorm.forward
    net = network(nn.Linear(4, 4), nn.LayerNorm(4))
    before = certified_margins(net, X, 0, 0.0)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: 1.01 * plain(self, x))
    margins = certified_margins(net, X, 0, 0.0)
    torch.testing.assert_close(margins, net(X)[0] - net(X), rtol=0, atol=1e-8)
    assert not torch.allclose(margins, before, atol=1e-6)


def test_an_activation_in_place_that_changes_its_residual_is_read() -> None:
    """x + relu_(x) is twice the ReLU, as the network itself has it."""
    torch.manual_seed(0)
    assert certified(network(nn.ReLU(inplace=True))) > 0
    net = network(nn.Linear(4, 4), Residual(nn.ReLU(inplace=True)))
    plain = network(nn.Linear(4, 4), nn.ReLU(), Twice())
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(certified_margins(net, X, 0, 0.0), net(X)[0] - net(X), rtol=0, atol=1e-8)
    assert certified(net) == pytest.approx(certified(plain), rel=1e-9)


class Twice(nn.Module):
    """Twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_weights_that_change_from_call_to_call_are_refused() -> None:
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Counting(1e-6))
    with pytest.raises(UnsupportedModel, match="gives other outputs at every call"):
        certified(network(layer))


def test_a_network_that_does_not_run_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"does not run on this input in float64 .*'key' and 'value'"):
        hs.certify(network(nn.MultiheadAttention(4, 2)), X, 0)


@pytest.mark.parametrize("call", ["certify", "margins"])
def test_the_network_and_the_random_numbers_are_left_as_they_were(call: str) -> None:
    net = network(nn.Dropout(0.5), Residual(nn.LayerNorm(4), SelfAttend(nn.MultiheadAttention(4, 2, dropout=0.1))))
    net.layers[0].p = 0.0
    net.layers[0].train()
    x, state = X.clone(), {name: value.clone() for name, value in net.state_dict().items()}
    modes, drawn = [module.training for module in net.modules()], torch.get_rng_state()
    before = [sorted(vars(module)) for module in net.modules()]
    _ = certified(net) if call == "certify" else certified_margins(net, x, 0, 0.1)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert [sorted(vars(module)) for module in net.modules()] == before
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(x, X)


def test_rounding_alone_is_no_difference() -> None:
    """Large weights, nearly constant tokens and outputs that cancel are certified as before."""
    torch.manual_seed(0)
    wild = network(*(Residual(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(8)))
    cancelling = network(nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in wild.parameters():
            parameter *= 30
        cancelling.classes.weight.fill_(1.0)  # type: ignore[union-attr, operator]
        still = torch.ones(3, 4, dtype=torch.float64) + 1e-9 * X
        for net, x in ((wild, X), (cancelling, X), (network(nn.LayerNorm(4), nn.LayerNorm(4)), still)):
            assert hs.certify(net, x, int(net(x).argmax())).radius > 0
        cancelling.classes.bias.zero_()  # type: ignore[union-attr, operator]
        assert "vacuous" in hs.certify(cancelling, X, int(cancelling(X).argmax())).notes[-1]


def test_networks_are_certified_in_inference_mode_and_margins_at_inputs_in_single_precision() -> None:
    net = network(Residual(nn.LayerNorm(4), SelfAttend(nn.MultiheadAttention(4, 2))), nn.GELU())
    usual = certified(net)
    with torch.inference_mode():
        assert certified(net) == usual > 0
    single = X.float()
    assert torch.equal(certified_margins(net, single, 0, 0.1), certified_margins(net, single.double(), 0, 0.1))


def test_weights_that_autograd_follows_into_a_map_keep_their_gradients() -> None:
    layer = hs.nn.DotProductAttention(4, 2).double()
    certified_margins(network(Residual(layer.attached_map(None, 3))), X, 0, 0.1).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_copy_in_double_keeps_what_torch_takes_from_the_dtype() -> None:
    norm = nn.RMSNorm(4).half()
    x = torch.full((4,), 1e-3, dtype=torch.float16)
    torch.testing.assert_close(double_copy(norm)(x.double()).half(), norm(x), rtol=2e-3, atol=0)


class Louder(nn.MultiheadAttention):
    """Twice the attention of its class, by another way than its forward."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return 2 * super().__call__(*args, **options)[0], None


class LouderMap(hs.SelfAttention):
    """A map with another forward than its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LouderLayer(hs.nn.DotProductAttention):
    """A layer with another output than the map it says it is."""

    def combine(self, mixed: Tensor, sight: Any) -> Tensor:
        return 2 * super().combine(mixed, sight)


def hooked() -> nn.Module:
    layer = nn.MultiheadAttention(4, 2)
    layer.register_forward_hook(lambda module, args, output: (2 * output[0], None))
    return layer


def inside() -> nn.Module:
    layer = hs.nn.DotProductAttention(4, 2)
    layer.in_proj.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


@pytest.mark.parametrize("radius", [0.0, 0.01])
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: LouderMap(*torch.eye(4).expand(4, 4, 4)), "that overrides forward of SelfAttention"),
        (lambda: LouderLayer(4, 2), "differs from its own output"),
        (lambda: Offering(2.0), "differs from its own output"),
        (lambda: nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4)), "does not run"),
        (lambda: Residual(SelfAttend(nn.MultiheadAttention(4, 2))), "computes more than attention: pass the label"),
    ],
)
def test_an_attention_that_is_something_else_has_no_certificate(made: Any, said: str, radius: float) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        hs.certify(made(), hs.sets.Around(X, radius))


@pytest.mark.parametrize("radius", [0.0, 0.01])
@pytest.mark.parametrize("made", [lambda: Louder(4, 2), hooked, inside])
def test_an_attention_that_is_changed_on_its_way_is_certified_as_what_it_computes(made: Any, radius: float) -> None:
    torch.manual_seed(0)
    layer = made()
    double = copy.deepcopy(layer).double()

    def call(z: Tensor) -> Tensor:
        return first_tensor(double(z, z, z) if isinstance(layer, nn.MultiheadAttention) else double(z))

    proof = hs.certify(layer, hs.sets.Around(X, radius))
    for step in range(8 if radius else 1):
        move = torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        there = X + radius * move / move.norm(dim=-1, keepdim=True)
        exact = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(call, there).reshape(12, 12), 2)
        assert float(exact) <= float(proof.upper) * (1 + 1e-12)
    exact = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(call, X).reshape(12, 12), 2)
    assert float(proof.lower) <= float(exact) * (1 + 1e-12)
    assert float(proof.upper) <= 2 * float(exact)


@pytest.mark.parametrize("kind", ["DotProductAttention", "L2Attention", "ContractiveL2Attention", "CosineAttention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_keep_their_certificates(kind: str, dtype: torch.dtype) -> None:
    layer = getattr(hs.nn, kind)(4, 2).to(dtype).eval()
    proof = hs.certify(layer, X.to(dtype))
    jacobian = torch.autograd.functional.jacobian(lambda z: layer.double()(z)[0], X.to(dtype).double())
    assert 0 < float(proof.lower) <= float(torch.linalg.matrix_norm(jacobian.reshape(12, 12), 2)) <= float(proof.upper)


class Brighter(PatchTransformer):
    """A vision transformer that looks at other images than it is given."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(2 * images)


def test_a_vision_transformer_that_is_something_else_has_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    ((net, image, label),) = networks(1)
    assert hs.certify(net, image, label).radius > 0
    handle = net.up.register_forward_hook(lambda module, args, output: -output)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModel, match="up, a AffineLayer with forward hooks"):
        hs.certify(net, image, label)
    handle.remove()
    plain = PatchTransformer.forward
    monkeypatch.setattr(PatchTransformer, "forward", lambda self, images: 1.01 * plain(self, images))
    with pytest.raises(UnsupportedModel, match="the network computes something else"):
        hs.certify(net, image, label)
    net.down = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModel, match="down, a Linear, has no certificate"):
        hs.certify(net, image, label)
    net.__class__ = Brighter
    with pytest.raises(UnsupportedModel, match="that overrides forward of PatchTransformer"):
        hs.certify(net, image, label)
