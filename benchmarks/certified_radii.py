"""Proved radii of a vision transformer beside other ways to such a number."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import mean

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.report import Section, Table, Target
from evidence.certificates import IMAGES, NETWORK
from evidence.real_heads import shared_folder
from howsmooth.bounds.neighbourhood import softmax_ceiling
from howsmooth.certificates import PatchTransformer
from howsmooth.certificates.ball.weight_perturbation import largest_mean
from howsmooth.certificates.certify_any import certify_patches
from howsmooth.certificates.classifier.robust_radius import Classifier
from howsmooth.search.attacks import minimal_norm_attack

TEXT = """Within which Euclidean distance an image keeps its class, for the network published with DeepT on the first
test images it classifies correctly. *Intervals*: every logit, weight, hidden value and margin by its two ends.
*CLEVER* (Weng et al. 2018) of adversarial-robustness-toolbox is an estimate, here of 10 batches of 50 images in a ball
of radius 2, and may be above the truth; *attack* is a distance at which the class does change. DeepT's row is what it
publishes, on 100 images of its own choice. auto_LiRPA is left out: no version of it installs with this torch."""
PUBLISHED = ["DeepT, as published (a GPU)", "proved", "0.1906", "0.0515", "8.2"]
LEAST = 0.1906


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time every way on the same images."""
    section = Section("certified_radii", "Certified radii", TEXT)
    folder = shared_folder()
    if folder is None:
        section.text += " Nothing was run: the network and its images are not here."
        return section
    net = PatchTransformer.open(folder / NETWORK).double()
    data = load_file(folder / IMAGES)
    images, labels = data["images"][:30].double() / 255, data["labels"][:30].long()
    with torch.no_grad():
        right = (net(images).argmax(-1) == labels).nonzero().flatten()[: 2 if quick else 20]
    images, labels = images[right], labels[right]
    folded, patches = net.folded(), net.patches(images)
    rows, means = [], {}
    for name, kind, radii in (
        ("howsmooth", "proved", lambda i: certify_patches(folded, patches[i], int(labels[i])).radius),
        ("intervals", "proved", lambda i: interval_radius(folded, patches[i], int(labels[i]))),
        ("CLEVER", "estimate", clever(net)),
        ("attack", "found", lambda i: float(minimal_norm_attack(net, images[i : i + 1], labels[i : i + 1]).distance)),
    ):
        if radii is None:
            rows.append([name, kind, "not installed", "–", "–"])
            continue
        report(name)
        begun = time.perf_counter()
        found = [radii(images[i] if name == "CLEVER" else i) for i in range(len(images))]
        each = (time.perf_counter() - begun) / len(images)
        means[name] = mean(found)
        rows.append([name, kind, f"{means[name]:.4f}", f"{min(found):.4f}", f"{each:.2f}"])
    columns = ["way", "what it is", "mean radius", "least", "s an image"]
    section.tables = [Table(columns, [*rows[:1], PUBLISHED, *rows[1:]], f"{len(images)} images.")]
    ours = means["howsmooth"]
    section.targets = [Target("mean certified ℓ2 radius, DeepT's network", f"≥ {LEAST}", f"{ours:.4f}", ours >= LEAST)]
    return section


def interval_radius(network: Classifier, tokens: Tensor, label: int, steps: int = 12) -> float:
    """The largest radius, by bisection, for which two ends of everything keep the class."""
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeps(network, tokens, label, middle) else (low, middle)
    return low


def _keeps(network: Classifier, tokens: Tensor, label: int, radius: float) -> bool:
    pool, here = network.pool, network.pool.at(tokens)
    moves = torch.ones_like(here.weights)
    moves[:, : pool.fixed] = 0
    moved = radius * pool.keys.norm(dim=-1)[:, None] * moves
    scores = here.weights.log()
    lowest, highest = softmax_ceiling(scores, -moved)[:, None], softmax_ceiling(scores, moved)[:, None]
    values, wide = here.rows.mT, radius * pool.values.norm(dim=-1)[..., None] * moves[:, None]
    top = largest_mean(values + wide, lowest.expand_as(values), highest.expand_as(values)).sum(0) + pool.constant
    least = -largest_mean(wide - values, lowest.expand_as(values), highest.expand_as(values)).sum(0) + pool.constant
    hidden = [torch.relu(end) for end in _ends(network.hidden, least, top, network.hidden_offset)]
    others = [c for c in range(len(network.direct)) if c != label]
    direct, out = network.direct[label] - network.direct[others], network.out[label] - network.out[others]
    offset = network.direct_offset[label] - network.direct_offset[others]
    margin = _ends(direct, least, top, offset)[0] + _ends(out, hidden[0], hidden[1], torch.zeros_like(offset))[0]
    return bool((margin > 0).all())


def _ends(matrix: Tensor, low: Tensor, high: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of ``matrix @ x + offset`` for x between two ends."""
    centre, width = matrix @ ((low + high) / 2) + offset, matrix.abs() @ ((high - low) / 2)
    return centre - width, centre + width


def clever(net: PatchTransformer) -> Callable[[Tensor], float] | None:
    """CLEVER of one image; None where its package is missing."""
    if find_spec("art") is None:
        return None
    from art.estimators.classification import PyTorchClassifier
    from art.metrics import clever_u

    module = _Single(net)
    classifier = PyTorchClassifier(module, torch.nn.CrossEntropyLoss(), (28, 28), 10, clip_values=(0.0, 1.0))

    def one(image: Tensor) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.random.seed(0)  # noqa: NPY002 – the toolbox draws from numpy's own stream
            return float(clever_u(classifier, image.float().numpy(), 10, 50, 2.0, norm=2, verbose=False))

    return one


class _Single(torch.nn.Module):
    """The network for images in float32, as the toolbox hands them over."""

    def __init__(self, net: PatchTransformer):
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images.double()).float()

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.net.parameters(recurse)
