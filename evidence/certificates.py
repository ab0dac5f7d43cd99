"""Certificates against what they certify: enclosures on a grid of maps, attacks inside balls, real heads, a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import process_time

import torch
from safetensors.torch import load_file
from torch import Tensor

import howsmooth as hs
from evidence import attention_cases
from evidence.real_heads import shared_folder
from evidence.tables import table
from howsmooth.attention import AttentionMap
from howsmooth.certificates import PatchTransformer
from howsmooth.certificates.ball.on_ball import enclose_heads_around, move_radii
from howsmooth.certificates.certify_any import certify_patches, certify_tokens
from howsmooth.certificates.point.enclosure import enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.models import alice, attention_inputs, open_model
from howsmooth.models.attention_reader import from_transformers
from howsmooth.search.attacks import minimal_norm_attack, projected_attack
from howsmooth.sets import Around, Point

TITLE = "Certificates under attack"
NETWORK, IMAGES = "weights/deept_mnist_vit.safetensors", "data/mnist-test-1000.safetensors"
SHARES = (1e-4, 1e-3, 1e-2)
"""Radii around real tokens, as shares of their mean norm."""
MASKS = (None, "causal", "window", "boolean", "additive")


@dataclass(frozen=True)
class Tally:
    """How many were tried, how many passed their certificate, and how close the closest came (1: attained)."""

    tried: int
    passed: int
    closest: float

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.tried + other.tried, self.passed + other.passed, max(self.closest, other.closest))


NONE = Tally(0, 0, 0.0)


def enclosures(kind: str, mask: str, every: int = 1) -> tuple[Tally, float]:
    """The grid of maps: autograd's dense ‖J‖ between the proved ends; also the largest ratio of the ends."""
    found, widest = NONE, 1.0
    for number, (_, attention) in enumerate(attention_cases.grid(kind, mask)):
        if number % every:
            continue
        x = attention_cases.tokens()
        proof = certify_tokens(attention, Point(x))
        size = dense_norm(attention, x)
        outside = not float(proof.lower) * (1 - 1e-13) <= size <= float(proof.upper)
        found = found + Tally(1, outside, size / float(proof.upper) if float(proof.upper) else 0.0)
        widest = max(widest, float(proof.ratio)) if float(proof.lower) > 1e-9 else widest
    return found, widest


def dense_norm(attention: AttentionMap, x: Tensor) -> float:
    """σ_max of the Jacobian that autograd writes out."""
    matrix = torch.autograd.functional.jacobian(attention, x)
    return float(torch.linalg.matrix_norm(matrix.reshape(-1, x.numel()), 2))


def draw(seed: int) -> tuple[AttentionMap, Tensor, float]:
    """A random map of any shape, mask, grouping and positions, an input, and a radius up to the token norm."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices: object) -> object:
        return choices[int(torch.randint(len(choices), (), generator=g))]

    n, d = int(torch.randint(2, 7, (), generator=g)), 2 * int(torch.randint(1, 4, (), generator=g))
    heads = d // 2 if bool(pick(False, True)) else 1
    kv_heads, width = int(pick(heads, 1)), d // heads  # type: ignore[call-overload]
    mask = pick(*MASKS)
    if mask == "window":
        mask = hs.SlidingWindow(2)
    elif mask == "boolean":
        mask = (torch.rand(n, n, generator=g) > 0.4) | torch.eye(n, dtype=torch.bool)
    elif mask == "additive":
        mask = torch.randn(n, n, generator=g).double()
    sizes = (heads * width, kv_heads * width, kv_heads * width)
    weights = [torch.randn(size, d, generator=g).double() for size in sizes]
    weights.append(torch.randn(d, heads * width, generator=g).double())
    rotary = hs.Rotary.standard(width) if bool(pick(False, True)) and width % 2 == 0 else None
    bias = torch.randn(sizes[0], generator=g).double() if bool(pick(False, True)) else None
    attention = hs.SelfAttention(
        *weights,
        heads=heads,
        kv_heads=kv_heads,
        mask=mask,
        rotary=rotary,
        query_bias=bias,  # type: ignore[arg-type]
    )
    x = torch.randn(n, d, generator=g).double()
    share = 10 ** float(-3 + 3 * torch.rand((), generator=g))
    return attention, x, share * float(x.norm(dim=-1).mean())


def ball_attacks(seeds: range, steps: int = 12, starts: int = 2) -> Tally:
    """Gradient ascent on ‖J‖ inside certified balls of random maps."""
    found = NONE
    for seed in seeds:
        attention, x, radius = draw(seed)
        upper = float(certify_tokens(attention, Around(x, radius)).upper)
        for start in range(starts):
            worst = ascend(attention, x, radius, steps, seed + 10_000 * start, bool(start))
            found = found + Tally(1, worst > upper, worst / upper)
    return found


CURVED = ("l2", "sigmoid", "cosine", "soft-cap", "rms q/k-norm", "sigmoid with soft-cap")
"""Kinds whose balls are certified by `howsmooth.certificates.ball.nonlinear_ball`."""


def draw_curved(kind: str, seed: int) -> tuple[AttentionMap, Tensor, float]:
    """A random map of one of these kinds, an input, and a radius up to a third of the token norm."""
    g = torch.Generator().manual_seed(seed)
    n, d, heads = int(torch.randint(2, 6, (), generator=g)), 4, 2
    mask = (None, "causal")[seed % 2]
    weights = [torch.randn(d, d, generator=g).double() for _ in range(4)]
    x = torch.randn(n, d, generator=g).double()
    radius = 10 ** float(-3 + 2.5 * torch.rand((), generator=g)) * float(x.norm(dim=-1).mean())
    attention: AttentionMap
    if kind == "l2":
        attention = hs.L2SelfAttention(*weights[:3], heads=heads, mask=mask)
    elif kind == "cosine":
        attention = hs.CosineAttention(*weights, heads=heads, mask=mask, temperature=2.0, eps=0.1)
    elif kind.startswith("sigmoid"):
        cap = 1.5 if "soft-cap" in kind else None
        attention = hs.SigmoidAttention(*weights, heads=heads, mask=mask, softcap=cap)
    elif kind == "soft-cap":
        attention = hs.SelfAttention(*weights, heads=heads, mask=mask, softcap=1.5)
    else:
        attention = hs.SelfAttention(*weights, heads=heads, mask=mask, qk_norm="rms", rotary=hs.Rotary.standard(2))
    return attention, x, radius


def curved_attacks(kind: str, seeds: range, steps: int = 12, starts: int = 2) -> Tally:
    """Gradient ascent on ‖J‖ inside certified balls of maps of one kind."""
    found = NONE
    for seed in seeds:
        attention, x, radius = draw_curved(kind, seed)
        upper = float(certify_tokens(attention, Around(x, radius)).upper)
        for start in range(starts):
            worst = ascend(attention, x, radius, steps, seed + 10_000 * start, bool(start))
            found = found + Tally(1, worst > upper, worst / upper)
    return found


def ascend(attention: AttentionMap, x: Tensor, radius: float, steps: int, seed: int, scattered: bool) -> float:
    """The largest ‖J‖ met by projected gradient ascent, every token within the radius of its place."""
    move = torch.zeros_like(x)
    if scattered:
        move = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).double()
        move = radius * move / move.norm(dim=-1, keepdim=True)
    worst = 0.0
    for step in range(steps):
        here = (x + move).requires_grad_()
        matrix = torch.autograd.functional.jacobian(attention, here, create_graph=True)
        size = torch.linalg.matrix_norm(matrix.reshape(-1, x.numel()), 2)
        worst = max(worst, float(size.detach()))
        (slope,) = torch.autograd.grad(size, here)
        move = move + radius * (1 - step / steps) * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        move = (move * (radius / move.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)).detach()
    return worst


@dataclass(frozen=True)
class Heads:
    """One layer: the ratios of the proved upper end to the lower one, per head, at the input and on balls."""

    layer: int
    at: list[float]
    around: dict[float, list[float]]
    seconds: float


def minilm(
    layers: tuple[int, ...] = tuple(range(6)), length: int = 96, shares: tuple[float, ...] = SHARES
) -> Iterator[Heads]:
    """MiniLM heads at a window of Alice in Wonderland."""
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    text = alice()
    inputs = attention_inputs(model, tokenizer, text[text.index("Alice was beginning") :], length, layers)
    for layer, hidden in sorted(inputs.hidden.items()):
        attention, x = from_transformers(model, layer), hidden[0]
        start = process_time()
        at = HeadsAt(attention, x, stored=True)
        here = enclose_heads(at)
        seconds = process_time() - start
        size = float(x.norm(dim=-1).mean())
        around = {}
        for share in shares:
            near = enclose_heads_around(at, move_radii(length, share * size, None), here)
            around[share] = [head.upper / head.lower for head in near]
        yield Heads(layer, [head.upper / head.lower for head in here], around, seconds)


@dataclass(frozen=True)
class Image:
    """One image of the network: proved radius, radius of the attack, least margin met inside, processor time."""

    index: int
    radius: float
    attacked: float
    margin: float
    seconds: float


def network(folder: Path, count: int = 200, steps: int = 40) -> list[Image]:
    """The vision transformer of DeepT on the first test images it classifies correctly, attacked inside and out."""
    net = PatchTransformer.open(folder / NETWORK).double()
    data = load_file(folder / IMAGES)
    images, labels = data["images"][:count].double() / 255, data["labels"][:count].long()
    with torch.no_grad():
        right = (net(images).argmax(-1) == labels).nonzero().flatten()
    images, labels = images[right], labels[right]
    folded, patches = net.folded(), net.patches(images)
    proofs, times = [], [process_time()]
    for one, label in zip(patches, labels, strict=True):
        proofs.append(certify_patches(folded, one, int(label)))
        times.append(process_time())
    radii = torch.tensor([proof.radius for proof in proofs], dtype=torch.float64)
    outside = minimal_norm_attack(net, images, labels).distance
    inside = projected_attack(net, images, labels, radii, steps=steps).margin
    return [
        Image(int(i), proof.radius, float(far), float(margin), times[n + 1] - times[n])
        for n, (i, proof, far, margin) in enumerate(zip(right, proofs, outside, inside, strict=True))
    ]


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    rows = []
    for kind in attention_cases.KINDS:
        total, widest = NONE, 1.0
        for mask in attention_cases.MASKS:
            progress(f"{kind}, {mask}")
            tally, ratio = enclosures(kind, mask, every=4)
            total, widest = total + tally, max(widest, ratio)
        rows.append([kind, total.tried, total.passed, f"{widest:.5f}"])
    page = [
        "Proved ends against the dense Jacobian of autograd in float64, on every fourth map of the grid.",
        table(["kind", "maps", "outside", "largest upper ÷ lower"], rows),
    ]
    progress("balls")
    balls = ball_attacks(range(1000), steps=6)
    page.append(
        f"Gradient ascents inside certified balls of random maps (2–6 tokens, masks, biases, rotary positions, grouped "
        f"heads, radii from 0.1 % of the token norm to the norm itself): {balls.tried}, above the certificate: "
        f"{balls.passed}, closest {balls.closest:.4f} of it."
    )
    progress("other kinds")
    lines = []
    for kind in CURVED:
        tally = curved_attacks(kind, range(100), steps=6)
        lines.append([kind, tally.tried, tally.passed, f"{tally.closest:.3f}"])
    page += [
        "The same for maps whose queries or keys are not linear, whose logits are capped or whose weights are "
        "sigmoids, radii up to a third of the token norm.",
        table(["kind", "ascents", "above", "closest"], lines),
    ]
    progress("MiniLM")
    layers = list(minilm())
    lines = [
        [layer.layer, f"{max(layer.at):.5f}", *(_span(layer.around[share]) for share in SHARES), f"{layer.seconds:.0f}"]
        for layer in layers
    ]
    every = {share: median(r for layer in layers for r in layer.around[share]) for share in SHARES}
    lines.append(
        [
            "all",
            f"{max(max(x.at) for x in layers):.5f}",
            *(f"{every[s]:.2f}" for s in SHARES),
            f"{sum(x.seconds for x in layers):.0f}",
        ]
    )
    page += [
        "MiniLM, all heads at 96 tokens of Alice in Wonderland: proved upper end ÷ proved lower end at the input "
        "(largest), and on balls around it (median, largest) whose radius is a share of the mean token norm.",
        table(
            ["layer", "at the input", *(f"{100 * share:g} %" for share in SHARES), "processor seconds (input)"], lines
        ),
    ]
    folder = shared_folder()
    if folder is None:
        return page
    progress("network")
    images = network(folder)
    changed = sum(image.margin <= 0 for image in images)
    lines = [
        ["certified", f"{mean(i.radius for i in images):.4f}", f"{min(i.radius for i in images):.4f}"],
        ["attacked", f"{mean(i.attacked for i in images):.4f}", f"{min(i.attacked for i in images):.4f}"],
        ["certified ÷ attacked", *(f"{f(i.radius / i.attacked for i in images):.3f}" for f in (mean, min))],
        ["processor seconds", f"{mean(i.seconds for i in images):.2f}", f"{min(i.seconds for i in images):.2f}"],
    ]
    page += [
        f"The vision transformer of DeepT, ℓ2 in pixels, the {len(images)} of test images 0–199 that it classifies "
        f"correctly; DeepT's published radii have mean 0.1906 and least 0.0515 on 100 images of its own choice. Class "
        f"changes met by projected gradient inside the certified balls: {changed}.",
        table(["ℓ2", "mean", "least"], lines),
    ]
    return page


def _span(ratios: list[float]) -> str:
    return f"{median(ratios):.2f}, {max(ratios):.2f}"
