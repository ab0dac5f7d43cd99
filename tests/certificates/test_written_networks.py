"""Networks as people write them are certified as what they compute, or refused by the operation that is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import howsmooth as hs
from evidence.read_networks import downhill
from howsmooth.certificates import certified_margins
from howsmooth.certificates.network.affine_form import AffineForm
from howsmooth.certificates.read_module import read_classifier
from howsmooth.errors import UnsupportedModel
from howsmooth.network.trace import first_traced
from howsmooth.search.attacks import attack_network
from tests.certificates.test_margins import change
from tests.network.handwritten import CASES, Case

GAPS = {
    "first_gpt2": "bmm in inner",
    "timm_qk_norm": "HeadNorm",
    "contrastive_vit": "quick_gelu",
    "speedrun": "UnitNorm",
    "shared_head_maps": "leaky_relu",
    "soft_capped": "a soft-cap",
}
"""What keeps networks that are read from their certificate."""
QUICK = ("nanogpt_triangle", "vit_mean", "llama_rotary", "torch_encoder_post_relu", "max_pooling", "hooks_that_change")


class Classified(nn.Module):
    """Three classes behind the mean of what a module gives."""

    def __init__(self, case: Case):
        super().__init__()
        self.inner = case.make().double()
        self.others = [other.double() if other.is_floating_point() else other for other in case.others]
        with torch.no_grad():
            width = first_traced(self.inner(case.x().double(), *self.others)).shape[-1]
        self.head = nn.Linear(width, 3).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(3, width, generator=torch.Generator().manual_seed(5)))

    def forward(self, x: Tensor) -> Tensor:
        y = first_traced(self.inner(x, *self.others))
        return self.head(y.reshape(-1, y.shape[-1]).mean(0))


def is_right(net: nn.Module, x: Tensor) -> float:
    """The radius, once nodes, margins and what attacks inside meet are those of the network."""
    read = read_classifier(net, x)
    rows, width = read.x.shape

    def of_tokens(tokens: Tensor) -> Tensor:
        return net(tokens.reshape(x.shape)).reshape(-1)

    with torch.no_grad():
        logits = net(x).reshape(-1)
        there = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        torch.testing.assert_close(read(there.reshape(rows, width))[0], net(there).reshape(-1), rtol=1e-5, atol=1e-8)
        label = int(logits.argmax())
        margins = certified_margins(net, x, label, 0.0)
        torch.testing.assert_close(margins, logits[label] - logits, rtol=0, atol=1e-5)
    proof = hs.certify(net, x, label)
    assert proof.radius > 0
    assert downhill(of_tokens, read.x, label, proof.radius, starts=2, steps=10) > 0  # type: ignore[arg-type]
    nearest = attack_network(net, x, label)
    assert nearest is None or nearest > proof.radius
    return proof.radius


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in CASES]
)
def test_what_people_write_is_certified_as_what_it_computes_or_refused_by_name(case: Case) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, x = Classified(case).eval().requires_grad_(False), case.x().double()
    try:
        radius = is_right(net, x)
    except UnsupportedModel as error:
        refusal = str(error)
    else:
        assert radius > 0
        assert case.expect in ("read", "either")
        assert case.name not in GAPS
        return
    assert case.expect != "read" or GAPS[case.name] in refusal


def rounded(module: nn.Module) -> nn.Module:
    """The module in float64 with no gain of one and no bias of zero."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module


class Written(nn.Module):
    """Pixels to patches, a class token, positions; RMSNorm by hand, attention, a scaled gated MLP; a head."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, d, 2, 2), nn.Parameter(torch.zeros(1, 3, d))
        self.first, self.gain, self.scale = (
            nn.Parameter(torch.zeros(1, 1, d)),
            nn.Parameter(torch.ones(d)),
            nn.Parameter(torch.ones(d)),
        )
        self.temperature = nn.Parameter(torch.ones(()))
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((d, 6), (d, 6), (6, d)))
        self.last, self.head = nn.LayerNorm(d), nn.Linear(d, 3)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT * self.temperature / 2).softmax(-1) @ v)
        y = self.norm(x)
        x = x + self.scale * self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.last(x)[:, 0])


def differentiable(net: nn.Module, x: Tensor) -> None:
    """Gradients of bounds on margins in every parameter, and in the input, are those of finite differences."""
    label = int(net(x).argmax())
    x = x.clone().requires_grad_()

    def bound() -> Tensor:
        margins = certified_margins(net, x, label, 0.02)
        return margins[torch.arange(len(margins)) != label].sum()

    followed = [(name, tensor) for name, tensor in net.named_parameters() if tensor.requires_grad]
    names, tensors = zip(*followed, ("input", x), strict=True)
    for name, tensor, slope in zip(names, tensors, torch.autograd.grad(bound(), tensors), strict=True):
        step = 1e-5 * torch.randn_like(tensor)
        assert change(bound, tensor, step) == pytest.approx(float((slope * step).sum()), rel=1e-3, abs=1e-9), name
        assert float(slope.abs().max()) > 1e-7, name


def test_every_parameter_of_a_network_by_hand_gets_the_gradient_of_finite_differences() -> None:
    torch.manual_seed(0)
    net = rounded(Written())
    x = torch.randn(1, 1, 2, 4, dtype=torch.float64)
    is_right(net, x)
    differentiable(net, x)


class Behind(nn.Module):
    """Two classes behind a function of tokens."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.head = function, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(x).mean(0))


def root_mean_square(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x).clamp(max=1e4),
        lambda x: F.gelu(x).clamp(-65504, 65504),
        lambda x: x.clamp(-50, 50) * root_mean_square(x),
        lambda x: x * root_mean_square(x.clamp(-50, 50)),
        lambda x: F.silu(x * 1e-3),
    ],
)
def test_what_differs_far_away_only_is_not_taken_for_what_it_resembles(function: Callable[[Tensor], Tensor]) -> None:
    """A bound on numbers, far from the input, is part of the function: read rightly, or refused by name."""
    torch.manual_seed(0)
    net, x = Behind(function).double(), torch.randn(3, 4, dtype=torch.float64)
    refusal = ""
    try:
        is_right(net, x)
    except UnsupportedModel as error:
        refusal = str(error)
    if refusal:
        assert "activation without a name" in refusal
    else:
        torch.testing.assert_close(read_classifier(net, x)(1e6 * x)[0], net(1e6 * x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 3 * x * root_mean_square(3 * x),
        lambda x: torch.relu(x) * root_mean_square(torch.relu(x)),
        lambda x: x[:1] * root_mean_square(x[:1]),
        lambda x: torch.relu(2 * x),
        lambda x: F.gelu(x / 2) + 2 * F.silu(-x),
        lambda x: torch.relu(x[[0, 2]] * torch.arange(4.0)),
    ],
)
def test_scales_in_front_of_what_is_known_cost_no_certificate(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    is_right(Behind(function).double(), torch.randn(3, 4, dtype=torch.float64))


class Alike(nn.Module):
    """Two branches that begin with the same weights, each behind a scale of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.other.load_state_dict(self.one.state_dict())
        self.scales = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.relu(self.one(x)), torch.relu(self.other(x))
        return self.head((self.scales[0] * one + self.scales[1] * other + x).mean(0))


def test_a_parameter_keeps_its_gradient_whatever_its_numbers() -> None:
    """Gains and scales of one, and weights that are equal, look like one constant, which they are not."""
    torch.manual_seed(0)
    differentiable(Written().double(), torch.randn(1, 1, 2, 4, dtype=torch.float64))
    differentiable(Alike().double(), torch.randn(3, 4, dtype=torch.float64))


class Swish(nn.Module):
    """A gate whose slope is learned, one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.head = nn.Parameter(torch.ones(())), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * torch.sigmoid(self.slope * x)).mean(0))


class Biased(nn.Module):
    """Attention with a learned bias of every pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.qkv, self.head = nn.Parameter(torch.randn(3, 3)), nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(((q @ k.mT / 2 + self.bias).softmax(-1) @ v).mean(0))


def test_a_learned_slope_of_a_gate_and_a_learned_bias_of_logits_are_followed() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    differentiable(Biased().double(), x)
    net = Swish().double()
    is_right(net, x)
    logits = net(x)
    (exact,) = torch.autograd.grad(logits[0] - logits[1], net.slope)
    (found,) = torch.autograd.grad(certified_margins(net, x, 0, 0.0)[1], net.slope)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_a_weight_that_was_read_as_a_number_is_refused_where_gradients_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient that is not there is an error, for training would go on without it."""
    torch.manual_seed(0)
    net, x = Biased().double(), torch.randn(3, 4, dtype=torch.float64)
    sound = AffineForm.linear
    monkeypatch.setattr(AffineForm, "linear", lambda form, weight, bias: sound(form, weight.detach(), bias))
    with pytest.raises(UnsupportedModel, match=r"head\.weight was read as a number that does not change"):
        certified_margins(net, x, 0, 0.01)
    net.head.weight.requires_grad_(False)
    differentiable(net, x)
