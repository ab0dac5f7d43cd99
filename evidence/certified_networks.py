"""Proved radii of networks: random ones of several layers, and DeepT's in three norms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import load_file

from evidence.certificates import IMAGES, NETWORK
from evidence.deep_networks import attacked, draw_network
from evidence.real_heads import shared_folder
from evidence.tables import table
from howsmooth.certificates import PatchTransformer
from howsmooth.certificates.certify_any import certify_patches

TITLE = "Certified networks"
PUBLISHED = {2: "0.1906", 1: "0.668", torch.inf: "0.0192"}
"""Mean radii published with DeepT, on 100 images of its own choice."""
BEHIND = (
    "In ℓ1 and ℓ∞ the means are behind what DeepT publishes on its own images. Curvature and remainders are bounded "
    "there on the Euclidean ball around the other one (of radius r in ℓ1, r√784 in ℓ∞), and no parabolas are used for "
    "the ReLUs; only gradients meet the ball itself. The images differ, so the rows say where the method stands, not "
    "which is better on one image."
)


def norms(folder: Path, count: int = 200) -> dict[float, list[float]]:
    """Radii of DeepT's network on the images it classifies correctly, by norm."""
    net = PatchTransformer.open(folder / NETWORK).double()
    data = load_file(folder / IMAGES)
    images, labels = data["images"][:count].double() / 255, data["labels"][:count].long()
    with torch.no_grad():
        right = (net(images).argmax(-1) == labels).nonzero().flatten()
    folded, patches = net.folded(), net.patches(images)
    return {
        norm: [certify_patches(folded, patches[i], int(labels[i]), norm).radius for i in right] for norm in PUBLISHED
    }


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    progress("random networks")
    found = [attacked(draw_network(seed), starts=4) for seed in range(150)]
    page = [
        f"Random networks of one to three layers (norms that subtract the mean, LayerNorm, RMSNorm; ReLU, GELU, SiLU; "
        f"masks, rotary positions, grouped heads; mean or first token), one token moving: {len(found)} radii, "
        f"{4 * len(found)} attacks inside them, changes of class {sum(f.inside <= 0 for f in found)}, margins below "
        f"their bound {sum(f.excess > 1e-12 for f in found)}. Certified ÷ attacked: mean "
        f"{mean(f.radius / f.nearest for f in found if f.nearest < torch.inf):.3f}, most "
        f"{max(f.radius / f.nearest for f in found):.3f}."
    ]
    folder = shared_folder()
    if folder is not None:
        progress("images")
        radii = norms(folder)
        lines = [
            [{2: "ℓ2", 1: "ℓ1"}.get(norm, "ℓ∞"), f"{mean(r):.4f}", f"{min(r):.4f}", PUBLISHED[norm]]
            for norm, r in radii.items()
        ]
        page += [
            "DeepT's vision transformer, test images 0–199 that it classifies correctly, pixels from 0 to 1.",
            table(["norm", "mean radius", "least", "DeepT, mean over its own 100 images"], lines),
            BEHIND,
        ]
    return page
