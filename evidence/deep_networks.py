"""Random networks of several layers under attack: their certificates, their remainders, what is inside their radii."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.attention.stages import TokenStage
from howsmooth.certificates import CentredNorm, Residual, SequenceClassifier
from howsmooth.certificates.network.margins import LinearisedNetwork
from howsmooth.certificates.read_module import read_classifier
from howsmooth.jacobians.tokenwise import Activation, GatedActivation, Norm
from howsmooth.network.nodes import Attend, Beside, Multiply, Node, Parallel, Series, Tokenwise
from howsmooth.search.attacks import minimal_norm_attack, projected_attack

NORMS = {"mean only": CentredNorm, "standard": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
MASKS = ("none", "causal", "window", "boolean")
CLASSES = 3


@dataclass(frozen=True)
class Case:
    """A random network, an input, its class, and what it is made of."""

    network: SequenceClassifier
    x: Tensor
    label: int
    norm: str
    activation: str
    mask: str


@dataclass(frozen=True)
class Attacked:
    """A proved radius; the least margin met inside; the nearest change of class; by how much bounds were passed."""

    radius: float
    inside: float
    nearest: float
    excess: float


def cases(count: int) -> Iterator[Case]:
    """The first random networks."""
    return (draw_network(seed) for seed in range(count))


def draw_network(seed: int) -> Case:
    """One to three pre-norm layers of any norm, activation, mask, grouping and pool, and an input, in float64."""
    torch.manual_seed(seed)

    def pick(*choices: object) -> object:
        return choices[int(torch.randint(len(choices), ()))]

    n, d, depth = int(torch.randint(2, 6, ())), 4, int(torch.randint(1, 4, ()))
    norm, activation, mask = str(pick(*NORMS)), str(pick(*ACTIVATIONS)), str(pick(*MASKS))
    masks = {
        "none": None,
        "causal": "causal",
        "window": hs.SlidingWindow(2),
        "boolean": (torch.rand(n, n) > 0.4) | torch.eye(n, dtype=torch.bool),
    }
    layers: list[nn.Module] = []
    for _ in range(depth):
        weights = [torch.randn(d, d) for _ in range(4)]
        kv = int(pick(1, 2))  # type: ignore[call-overload]
        rotary = hs.Rotary.standard(2) if bool(pick(False, True)) else None
        weights[1], weights[2] = weights[1][: 2 * kv], weights[2][: 2 * kv]
        attention = hs.SelfAttention(*weights, heads=2, kv_heads=kv, mask=masks[mask], rotary=rotary)  # type: ignore[arg-type]
        mlp = nn.Linear(d, 6), ACTIVATIONS[activation](), nn.Linear(6, d)
        layers += [Residual(NORMS[norm](d), attention), Residual(NORMS[norm](d), *mlp)]
    head = nn.Sequential(NORMS[norm](d), nn.Linear(d, CLASSES))
    net = SequenceClassifier(layers, head, positions=torch.randn(n, d), pool=str(pick("mean", "first")))
    net = net.double().requires_grad_(False)
    x = 2 * torch.randn(n, d, dtype=torch.float64)
    return Case(net, x, int(net(x).argmax()), norm, activation, mask)


def attacked(case: Case, starts: int = 2, steps: int = 20) -> Attacked:
    """Attacks on the class inside and outside the radius of one token, and on the bounds of all margins inside."""
    token = case.label % len(case.x)
    lines = LinearisedNetwork(read_classifier(case.network, case.x).root, case.x, [token])
    radius = lines.radius(case.label)[0]
    bounds = lines.margins(case.label, torch.full((1,), radius, dtype=torch.float64))

    def moved(delta: Tensor) -> Tensor:
        place = nn.functional.one_hot(torch.tensor(token), len(case.x)).double()
        return case.network(case.x + place[:, None] * delta[:, None])

    zero, label = torch.zeros(1, case.x.shape[1], dtype=torch.float64), torch.tensor([case.label])
    inside = projected_attack(moved, zero, label, radius, steps=steps, starts=starts)
    logits = moved(inside.point)[0]
    excess = bounds - (logits[case.label] - logits)
    nearest = minimal_norm_attack(moved, zero, label, steps=4 * steps).distance
    return Attacked(radius, float(inside.margin), float(nearest), float(excess.max()))


def left_over(case: Case, draws: int = 16, share: float = 1.0) -> float:
    """By how much true remainders pass their bounds at random moves on a sphere of one token; at most 0 when sound."""
    token, radius = case.label % len(case.x), share * 0.2
    root, start = read_classifier(case.network, case.x).root, case.x
    lines = LinearisedNetwork(root, start, [token])
    reach, worst = torch.tensor([1.0, radius], dtype=torch.float64), -torch.inf
    ends = []
    for left in lines.remainders:
        ends.append((*left.numbers(reach), left.lengths(reach)))
        reach = torch.cat([reach, ends[-1][2]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        move = torch.randn(case.x.shape[1], generator=generator, dtype=torch.float64)
        there = start.clone()
        there[token] += radius * move / move.norm()
        for true, (lower, upper, lengths) in zip(true_remainders(root, start, there), ends, strict=True):
            groups = true.unflatten(-1, (upper.shape[-1], -1))
            numbers = groups[..., 0] if groups.shape[-1] == 1 else groups.norm(dim=-1)
            worst = max(worst, float((numbers - upper).max()), float((true.norm(dim=-1) - lengths).max()))
            if groups.shape[-1] == 1:
                worst = max(worst, float((lower - numbers).max()))
    return worst


Bent = Norm | Activation | AttentionMap | Multiply
"""What leaves a remainder: a division, an activation, the heads of an attention map, a product."""


def bends(node: Node) -> list[Bent]:
    """What leaves a remainder, in the order in which it acts."""
    found = [bent for inner in node.children for bent in bends(inner)]
    if isinstance(node, Attend):
        assert isinstance(node.attention, AttentionMap)
        found.append(node.attention)
    if isinstance(node, Multiply):
        found.append(node)
    for stage in node.stages if isinstance(node, Tokenwise) else ():
        if isinstance(stage, Norm | Activation):
            found.append(stage)
        elif isinstance(stage, GatedActivation):
            found += [Activation(stage.function, stage.name), Multiply()]
    return found


def true_remainders(root: Node, start: Tensor, there: Tensor) -> list[Tensor]:
    """What Taylor's formula at ``start`` leaves of everything that is not linear, when the network is at ``there``.

    Tokens are ``(…, n, d)``.
    """
    found: list[Tensor] = []

    def left(f: Callable[[Tensor], Tensor], here: Tensor, there: Tensor) -> None:
        value, slope = torch.autograd.functional.jvp(f, here, there - here)
        found.append(f(there) - value - slope)

    def through(node: Node, here: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        match node:
            case Series():
                for inner in node.nodes:
                    here, there = through(inner, here, there)
                return here, there
            case Tokenwise():
                for stage in node.stages:
                    _staged(stage, here, there, left, found)
                    here, there = stage(here), stage(there)
                return here, there
            case Parallel() | Beside() | Multiply():
                ends = [through(inner, here, there) for inner in node.nodes]
                if isinstance(node, Multiply):
                    found.append(_product(*ends))
                one, other = (_joined(node, list(several)) for several in zip(*ends, strict=True))
                return one, other
            case Attend():
                left(_heads(node.attention), here, there)
        return node(here), node(there)

    through(root, start.expand_as(there).clone(), there)
    return found


def _staged(stage: TokenStage, here: Tensor, there: Tensor, left: Callable[..., None], found: list[Tensor]) -> None:
    """The remainders of a stage."""
    match stage:
        case Norm():
            ends = (z - z.mean(-1, keepdim=True) if stage.centred else z for z in (here, there))
            left(lambda z: z / (z.square().mean(-1, keepdim=True) + stage.eps).sqrt(), *ends)
        case Activation():
            left(stage.function, here, there)
        case GatedActivation():
            (gate, up), (moved_gate, moved_up) = (z.chunk(2, -1) for z in (here, there))
            left(stage.function, gate, moved_gate)
            found.append(_product((stage.function(gate), stage.function(moved_gate)), (up, moved_up)))


def _product(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """What a₀u₀ + a₀Δu + u₀Δa leaves of a product."""
    (a, moved_a), (u, moved_u) = one, other
    return (moved_a - a) * (moved_u - u)


def _joined(node: Node, values: list[Tensor]) -> Tensor:
    """What a node makes of the values of its branches."""
    if isinstance(node, Beside):
        return torch.cat(values, -1)
    total = values[0]
    for value in values[1:]:
        total = total * value if isinstance(node, Multiply) else total + value
    return total


def _heads(attention: Any) -> Callable[[Tensor], Tensor]:
    """The map whose remainder a source holds: heads before they are put together."""

    def heads(x: Tensor) -> Tensor:
        query, key, value = attention.staged(x.reshape(-1, *x.shape[-2:]))
        mixed = attention._weights(query, key) @ value
        return mixed.transpose(1, 2).flatten(2).reshape(*x.shape[:-1], -1)

    return heads
