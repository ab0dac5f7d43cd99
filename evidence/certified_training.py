"""Training with a certificate: digits, plainly, with certified margins in the loss, and with contractive layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from evidence.certificates import IMAGES
from evidence.real_heads import shared_folder
from evidence.tables import table
from howsmooth.certificates import CentredNorm, Residual, SelfAttend, SequenceClassifier, certified_margins
from howsmooth.nn import ContractiveL2Attention, ContractiveMLP

TITLE = "Training with a certificate"
RADIUS = 0.1
"""ℓ2 distance of 8 × 8 images of pixels from 0 to 1."""
WIDTH, HEADS, HIDDEN, PATCHES, CLASSES = 16, 2, 32, 4, 10
TRAINED = 700


@dataclass(frozen=True)
class Digits:
    """Patches ``(count, 4, 16)`` and labels of images to train on, and of others."""

    patches: Tensor
    labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor


@dataclass(frozen=True)
class Outcome:
    """Shares of the held-out images: right, and proved right on the whole ball."""

    way: str
    right: float
    certified: float


def digits(folder: Path) -> Digits:
    """MNIST test images, the middle 24 × 24 pixels averaged to 8 × 8, cut into four patches."""
    data = load_file(folder / IMAGES)
    images = nn.functional.avg_pool2d(data["images"][:, None, 2:26, 2:26].double() / 255, 3)[:, 0]
    patches = images.unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3).reshape(len(images), PATCHES, -1)
    labels = data["labels"].long()
    return Digits(patches[:TRAINED], labels[:TRAINED], patches[TRAINED:], labels[TRAINED:])


def plain_network(seed: int = 0) -> SequenceClassifier:
    """One layer of attention and a ReLU MLP between patches and the mean over tokens."""
    torch.manual_seed(seed)
    mlp = nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
    layers = [
        nn.Linear(16, WIDTH),
        Residual(CentredNorm(WIDTH), SelfAttend(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))),
        Residual(CentredNorm(WIDTH), *mlp),
    ]
    net = SequenceClassifier(layers, nn.Linear(WIDTH, CLASSES), positions=0.1 * torch.randn(PATCHES, 16))
    return net.double()


class Contractive(nn.Module):
    """The same with branches whose Lipschitz constant is at most 0.9 on all inputs, and a global bound."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.patch, self.classes = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention = ContractiveL2Attention(WIDTH, HEADS, coefficient=0.9, max_tokens=PATCHES)
        self.mlp = ContractiveMLP(WIDTH, HIDDEN, coefficient=0.9)
        self.places = nn.Parameter(0.1 * torch.randn(PATCHES, WIDTH))

    def forward(self, patches: Tensor) -> Tensor:
        """Logits."""
        x = self.patch(patches) + self.places
        x = x + self.attention(x)[0]
        x = x + self.mlp(x)
        return self.classes(x.mean(-2))

    def certified(self, patches: Tensor, labels: Tensor, radius: float) -> Tensor:
        """Whether margins exceed the radius times the global bounds ‖patch‖(1 + 0.9)²‖row difference‖/√n."""
        rows = self.classes.weight
        logits = self(patches)
        steep = torch.linalg.matrix_norm(self.patch.weight, 2) * 1.9**2 / PATCHES**0.5
        differences = (rows[labels][:, None] - rows).norm(dim=-1)
        margins = logits.gather(1, labels[:, None]) - logits
        others = nn.functional.one_hot(labels, CLASSES) == 0
        return ((margins > radius * steep * differences) | ~others).all(-1)


def fit(net: nn.Module, data: Digits, steps: int, seed: int = 0) -> None:
    """Cross-entropy, Adam."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        chosen = torch.randint(len(data.labels), (64,), generator=generator)
        loss = nn.functional.cross_entropy(net(data.patches[chosen]), data.labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def fit_certified(
    net: SequenceClassifier, data: Digits, steps: int, batch: int = 8, radius: float = RADIUS, seed: int = 0
) -> None:
    """Cross-entropy of the certified worst case, its radius growing to the one asked for."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(steps):
        near = radius * min(1.0, 2 * (step + 1) / steps)
        chosen = torch.randint(len(data.labels), (batch,), generator=generator).tolist()
        worst = torch.stack([-certified_margins(net, data.patches[i], int(data.labels[i]), near) for i in chosen])
        clean = net(data.patches[chosen])
        labels = data.labels[chosen]
        loss = nn.functional.cross_entropy(worst, labels) + nn.functional.cross_entropy(clean, labels)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()


@torch.no_grad()
def outcome(way: str, net: SequenceClassifier, data: Digits, count: int, radius: float = RADIUS) -> Outcome:
    """Held-out images that are right, and certified at the radius."""
    right, proved = 0, 0
    for x, label in zip(data.held_out[:count], data.held_out_labels[:count].tolist(), strict=True):
        right += int(net(x).argmax()) == label
        margins = certified_margins(net, x, label, radius)
        proved += bool((margins[torch.arange(CLASSES) != label] > 0).all())
    return Outcome(way, right / count, proved / count)


def outcomes(data: Digits, first: int = 300, steps: int = 40, count: int = 60, batch: int = 8) -> list[Outcome]:
    """Plain training, the same and then with certified margins, contractive layers."""
    plain = plain_network()
    fit(plain, data, first)
    found = [outcome("plain", plain, data, count)]
    for number, radius in enumerate((0.6 * RADIUS, RADIUS, RADIUS)):
        fit_certified(plain, data, steps, batch, radius, seed=number)
    found.append(outcome("certified margins in the loss", plain, data, count))
    contractive = Contractive().double()
    fit(contractive, data, first)
    contractive.eval()
    with torch.no_grad():
        patches, labels = data.held_out[:count], data.held_out_labels[:count]
        right = float((contractive(patches).argmax(-1) == labels).double().mean())
        proved = float(contractive.certified(patches, labels, RADIUS).double().mean())
    found.append(Outcome("contractive layers, global bound", right, proved))
    return found


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    folder = shared_folder()
    if folder is None:
        return ["Left out: there are no images here."]
    progress("digits")
    rows = [[o.way, f"{100 * o.right:.0f} %", f"{100 * o.certified:.0f} %"] for o in outcomes(digits(folder))]
    return [
        f"MNIST digits of 8 × 8 pixels, {TRAINED} to train on: one layer of attention over four patches. Certified: no "
        f"image within ℓ2 distance {RADIUS} has another class, 60 held-out images.",
        table(["training", "right", f"certified at {RADIUS}"], rows),
    ]
