"""Networks of shared modules, subclasses, hooks, parametrisations and containers: certified and attacked or refused."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import howsmooth as hs
from evidence.tables import table
from howsmooth.certificates import CentredNorm, Residual, SelfAttend, SequenceClassifier
from howsmooth.errors import HowsmoothError

TITLE = "Networks as they are read"
COUNT, WIDTH, CLASSES = 400, 4, 3
TIMES = (2, 4, 16)
"""Multiples of a certified radius at which the attack is let loose too, to see what it can do."""
_PLAIN: tuple[type[nn.Module], ...] = (
    *(SequenceClassifier, Residual, SelfAttend, CentredNorm, nn.Sequential, nn.ModuleList, nn.Linear, nn.LayerNorm),
    *(nn.RMSNorm, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.TransformerEncoderLayer, nn.MultiheadAttention),
)


class Doubled(nn.Linear):
    """Twice a linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OnePlus(nn.RMSNorm):
    """A gain of one plus the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class Skip(nn.Sequential):
    """x plus its modules in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Less(Residual):
    """x less its branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.branch(x)


class TwiceMLP(nn.TransformerEncoderLayer):
    """The forward of its class, which calls another block."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return 2 * super()._ff_block(x)


class Backwards(nn.ModuleList):
    """Modules from the last to the first, each of them twice."""

    def __iter__(self) -> Iterator[Any]:
        return iter([module for module in self._modules.values() for _ in range(2)][::-1])


class Away(nn.Identity):
    """The identity on small tokens, three times that on larger ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.norm(dim=-1, keepdim=True) > 2, 3 * x, x)


class Says(nn.Module):
    """A module that offers the map of which it computes the double."""

    def __init__(self, attention: hs.SelfAttention):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.attention(x)

    def attention_map(self, n: int | None = None) -> hs.SelfAttention:
        return self.attention


class MaxPool(SequenceClassifier):
    """The largest number over tokens instead of their mean."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classes(self.layers(self.placed(self.embed(tokens))).amax(-2))


class SameLinear(nn.Linear):
    """A linear map by another name."""


class SameBlock(nn.Sequential):
    """A sequence by another name."""

    def __init__(self, *modules: nn.Module):
        super().__init__(*modules)
        self.note = "of this project"


class Symmetric(nn.Module):
    """A parametrisation by the symmetric part."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.mT) / 2


class Counting(nn.Module):
    """A parametrisation that grows whenever the weight is asked for."""

    def __init__(self, step: float = 0.1):
        super().__init__()
        self.times, self.step = 1.0, step

    def forward(self, weight: Tensor) -> Tensor:
        self.times += self.step
        return self.times * weight


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _encoder_layer(kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer, **options: Any) -> nn.Module:
    return kind(WIDTH, 2, 6, **({"dropout": 0.0, "batch_first": True} | options))


def _symmetric() -> nn.Module:
    return parametrize.register_parametrization(_linear(), "weight", Symmetric())


def _backwards() -> nn.Module:
    encoder = nn.TransformerEncoder(_encoder_layer(), 2, enable_nested_tensor=False)  # type: ignore[arg-type]
    encoder.layers = Backwards(encoder.layers)
    return encoder


def _hooked(hook: Callable[..., Any], before: bool = False) -> nn.Module:
    layer = _linear()
    _ = layer.register_forward_pre_hook(hook) if before else layer.register_forward_hook(hook)
    return nn.Sequential(layer, nn.ReLU())


def _replaced() -> nn.Module:
    layer = _linear()
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)
    return layer


def _attention() -> hs.SelfAttention:
    return hs.SelfAttention(*torch.randn(4, WIDTH, WIDTH) / 2, heads=2)


READ: dict[str, Callable[[], nn.Module]] = {
    "linear maps": lambda: nn.Sequential(_linear(), nn.GELU()),
    "nested containers": lambda: nn.Sequential(nn.Sequential(_linear()), nn.Sequential(nn.SiLU(), nn.Sequential())),
    "residuals": lambda: Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)),
    "attention": lambda: Residual(CentredNorm(WIDTH), SelfAttend(nn.MultiheadAttention(WIDTH, 2))),
    "attention maps": lambda: Residual(nn.RMSNorm(WIDTH), _attention()),
    "encoder layers": lambda: _encoder_layer(norm_first=True, activation="gelu"),
    "encoders": lambda: nn.TransformerEncoder(_encoder_layer(), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False),  # type: ignore[arg-type]
    "subclasses, same forward": lambda: SameBlock(SameLinear(WIDTH, WIDTH), nn.ReLU()),
    "parametrisations": lambda: random.choice(
        [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm]
    )(_linear()),
    "own parametrisations": _symmetric,
}
"""Layers as torch and this package have them."""
FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "sequences with a residual": lambda: Skip(_linear(), nn.ReLU()),
    "linear maps, doubled": lambda: Doubled(WIDTH, WIDTH),
    "gains of one plus a weight": lambda: OnePlus(WIDTH),
    "residuals that subtract": lambda: Less(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)),
    "encoder layers, another block": lambda: _encoder_layer(TwiceMLP),
    "encoders, another order": _backwards,
    "parts that differ off the point": Away,
    "maps offered, not computed": lambda: Says(_attention()),
    "hooks on outputs": lambda: _hooked(lambda module, args, output: 1.5 * output),
    "hooks on inputs": lambda: _hooked(lambda module, args: (-args[0],), before=True),
    "hooks that only look": lambda: _hooked(lambda module, args, output: None),
    "forwards replaced": _replaced,
    "in place within residuals": lambda: Residual(nn.ReLU(inplace=True), _linear()),
    "weights that change": lambda: parametrize.register_parametrization(_linear(), "weight", Counting()),
    "dropout in training": lambda: nn.Sequential(_encoder_layer(dropout=0.3).train()),
}
"""Layers as somebody might write them, which a reader of classes takes for others."""
REFUSED = {
    "parts that differ off the point",
    "maps offered, not computed",
    "weights that change",
    "dropout in training",
    "another pool",
}
"""Those of which there is no certificate."""
SHARED = "modules used again"


@dataclass(frozen=True)
class Case:
    """A random network, an input, its class, and what there is in it."""

    network: SequenceClassifier
    x: Tensor
    label: int
    made_of: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """Whether there is no certificate of it."""
        return bool(REFUSED & {*self.made_of})

    @property
    def foreign(self) -> bool:
        """Whether something in it is not what its class says."""
        return self.refused or bool(FOREIGN.keys() & {*self.made_of})


@dataclass(frozen=True)
class Outcome:
    """A radius, or the sentence that refuses; the least margin met inside and in larger balls; a careless reader's."""

    case: Case
    radius: float | None
    refusal: str
    inside: float
    beyond: tuple[float, ...]
    careless_radius: float
    careless_inside: float


def draw(seed: int) -> Case:
    """Two to four things in a row, half of the time a foreign one, often one of them again, in float64."""
    torch.manual_seed(seed)
    random.seed(seed)
    names = random.choices(list(READ), k=random.randint(1, 3))
    if random.random() < 0.4:
        names.insert(random.randrange(len(names) + 1), random.choice(list(FOREIGN)))
    layers = [(READ | FOREIGN)[name]() for name in names]
    trained = [layer for name, layer in zip(names, layers, strict=True) if name == "dropout in training"]
    if random.random() < 0.5:
        again = random.randrange(len(layers))
        layers.append(layers[again])
        names = [*names, SHARED]
    pooled = random.random() < 0.05
    kind = MaxPool if pooled else SequenceClassifier
    head = nn.Linear(WIDTH, CLASSES)
    net = kind(layers, head, positions=torch.randn(5, WIDTH), pool=random.choice(["mean", "first"]))
    net = net.double().requires_grad_(False).eval()
    for layer in trained:
        layer.train()
    x = torch.randn(random.randint(2, 4), WIDTH, dtype=torch.float64)
    made_of = (*dict.fromkeys(names), *(["another pool"] if pooled else []))
    return Case(net, x, int(net(x).argmax()), made_of)


def careless(network: SequenceClassifier) -> SequenceClassifier:
    """The network that is seen without care: every module once, as its base class or offer, without hooks."""
    seen = copy.deepcopy(network)
    for module in list(seen.modules()):
        kind = next((kind for kind in _PLAIN if isinstance(module, kind)), type(module))
        if parametrize.is_parametrized(module):
            weight = module.weight.detach().clone()
            del module._modules["parametrizations"]
            module.__class__ = kind
            module.register_parameter("weight", nn.Parameter(weight))
        module.__class__ = kind
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        vars(module).pop("forward", None)
        offers = {name: inner.attention for name, inner in module._modules.items() if isinstance(inner, Says)}
        module._modules.update(offers)
        if kind is nn.Sequential:
            module._modules = dict(module.named_children())
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return seen.eval()


def downhill(net: nn.Module, x: Tensor, label: int, radius: float, starts: int = 3, steps: int = 25) -> float:
    """The least margin met when every token moves by at most the radius: projected descent, and walks to other classes.

    A walk leads from x towards a random point of another class, as far as the ball goes.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def within(move: Tensor) -> Tensor:
        return move * (radius / move.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp(max=1)

    def margin(move: Tensor) -> Tensor:
        logits = net(x + move)
        others = torch.arange(len(logits)) != label
        return logits[label] - logits[others].amax()

    least = float(margin(torch.zeros_like(x)).detach())
    for start in range(starts):
        move = within(radius * drawn()) if start else torch.zeros_like(x)
        for step in range(steps):
            with torch.enable_grad():
                move.requires_grad_()
                value = margin(move)
                slope = torch.autograd.grad(value, move, allow_unused=True)[0] if value.requires_grad else None
            least = min(least, float(value.detach()))
            slope = drawn() if slope is None else slope
            unit = slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            move = within(move.detach() - radius * (1 if step < 2 else 2 / step) * unit)
        least = min(least, float(margin(move).detach()))
    with torch.no_grad():
        points = [scale * drawn() for scale in (1, 2, 4) for _ in range(8)]
        others = [point for point in points if int(net(point).argmax()) != label]
        for other in others:
            move = within(1e6 * (other - x))
            least = min(least, *(float(margin(share * move)) for share in (0.25, 0.5, 0.75, 1.0)))
    return least


def tried(seed: int) -> Outcome:
    """One network: asked for its certificate and attacked inside, then the same for a careless reader."""
    case = draw(seed)
    radius, refusal, inside, beyond = None, "", torch.inf, ()
    try:
        radius = hs.certify(case.network, case.x, case.label).radius
        inside, *rest = (downhill(case.network, case.x, case.label, times * radius) for times in (1, *TIMES))
        beyond = tuple(rest)
    except HowsmoothError as error:
        refusal = str(error)
    wrong = hs.certify(careless(case.network), case.x, case.label).radius
    return Outcome(case, radius, refusal, inside, beyond, wrong, downhill(case.network, case.x, case.label, wrong))


def reason(refusal: str) -> str:
    """A refusal without the names of this network."""
    known = {
        r"training mode|draws random numbers": "dropout or a spectral norm in training mode",
        r"other outputs at every call": "other outputs at every call",
        r"differs from its own output": "other outputs than those of what was read",
        r"derivative of what was read": "other derivatives than those of what was read",
        r"is not known: (\w+)": r"an operation without a certificate, \1",
    }
    for pattern, words in known.items():
        found = re.search(pattern, refusal)
        if found:
            return found.expand(words)
    return refusal


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    found = []
    for seed in range(COUNT):
        if seed % 20 == 0:
            progress(f"network {seed} of {COUNT}")
        found.append(tried(seed))
    return page(found)


def page(found: list[Outcome]) -> list[str]:
    """Counts by outcome, by what networks are made of and by reason."""

    def row(name: str, among: list[Outcome]) -> list[object]:
        certified = [one for one in among if one.radius is not None]
        broken = [one for one in certified if one.radius and one.inside <= 0]
        careless_broken = [one for one in among if one.careless_radius > 0 and one.careless_inside <= 0]
        return [name, len(among), len(certified), len(among) - len(certified), len(broken), len(careless_broken)]

    head = ["networks with", "drawn", "certified", "refused", "falsified", "falsified, read carelessly"]
    kinds = [*READ, SHARED, *FOREIGN, "another pool"]
    rows = [row(name, [one for one in found if name in one.case.made_of]) for name in kinds]
    plain = [one for one in found if not one.case.foreign]
    certified = [one for one in found if one.radius is not None]
    outside = ", ".join(f"{sum(o.beyond[i] <= 0 for o in certified)} at {t} times" for i, t in enumerate(TIMES))
    careless_radii = sum(one.careless_radius > 0 for one in found)
    reasons = Counter(reason(one.refusal) for one in found if one.radius is None)
    return [
        f"{len(found)} random networks, each asked for the radius within which its class stays when every token moves. "
        "A certified radius is attacked by projected descent of the margin from three starts and by walks towards "
        "points of other classes, in float64. The last column is a negative control: the certificate of the network "
        "that a reader without care sees (every module once, as its base class, without hooks), attacked in the same "
        "way on the network itself.",
        table(head, [row("anything", found), row("nothing foreign", plain), *rows]),
        f"Of {len(certified)} radii {sum(bool(one.radius) for one in certified)} are above zero; beyond them the same "
        f"attack changes the class of {outside} the radius. A careless reader certifies {careless_radii} radii above "
        "zero. Networks are read by the operations that they perform, so that hooks, subclasses and replaced forwards "
        "are read as what they do. Refused for:",
        table(["reason", "networks"], reasons.most_common()),
    ]
