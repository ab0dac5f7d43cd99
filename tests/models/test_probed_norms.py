"""What normalisation modules give out, read off their answers: every norm class of transformers, right or refused."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers.models
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.models.probed_norms import read_norm
from howsmooth.sets.ellipsoid import Ellipsoid

WIDTH = 8
FEW = {
    "gemma.GemmaRMSNorm": ("RMSNorm", 1.0),
    "gemma2.Gemma2RMSNorm": ("RMSNorm", 1.0),
    "gemma3.Gemma3RMSNorm": ("RMSNorm", 1.0),
    "qwen3_next.Qwen3NextRMSNorm": ("RMSNorm", 1.0),
    "nemotron.NemotronLayerNorm1P": ("LayerNorm", 1.0),
    "t5.T5LayerNorm": ("RMSNorm", 0.0),
    "longt5.LongT5LayerNorm": ("RMSNorm", 0.0),
    "imagegpt.ImageGPTLayerNorm": ("RMSNorm", 0.0),
    "llama.LlamaRMSNorm": ("RMSNorm", 0.0),
    "cohere.CohereLayerNorm": ("LayerNorm", 0.0),
}


def classes(folder: str) -> Iterator[type[nn.Module]]:
    """The norm classes that a model of transformers defines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except Exception:  # models that need a library that is not installed
            return
    for name, entry in vars(module).items():
        own = inspect.isclass(entry) and issubclass(entry, nn.Module) and entry.__module__ == module.__name__
        if own and "norm" in name.lower():
            yield entry


def folders_with_norms() -> Iterator[str]:
    """The models of transformers whose source defines a class with "norm" in its name: the others take long to load."""
    for folder in map(Path, transformers.models.__path__):
        for source in sorted(folder.glob("*/modeling_*.py")):
            named_alike = source.stem == f"modeling_{source.parent.name}"
            if named_alike and re.search(r"^\s*class \w*norm\w*\(", source.read_text(encoding="utf-8"), re.I | re.M):
                yield source.parent.name


def built(entry: type[nn.Module]) -> nn.Module | None:
    """The class at width 8 with weights unlike one another, or None when it wants other arguments."""
    try:
        norm = entry(WIDTH)
    except Exception:
        return None
    torch.manual_seed(0)
    for parameter in norm.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.3, 0.5)
    return norm.double().eval()


def inputs() -> Tensor:
    """Tokens of many sizes, with and without a mean, and the extreme ones: axes and constants."""
    drawn = torch.randn(300, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    axes = torch.eye(WIDTH, dtype=torch.float64)
    scaled = [size * (drawn + offset) for size in (1e-3, 1.0, 1e3) for offset in (0.0, 1.0, 5.0)]
    return torch.cat([*scaled, 1e4 * axes, -1e4 * axes, torch.full((1, WIDTH), 1e4, dtype=torch.float64)])


def verdict(norm: nn.Module) -> str:
    """Whether the set is refused, right (holds every answer and is reached) or wrong."""
    try:
        found = Ellipsoid.after(norm)
    except hs.InvalidInput:
        return "refused"
    with torch.no_grad():
        answers = norm(inputs()).double()
    z = torch.linalg.lstsq(found.axes, (answers - found.centre).mT, driver="gelsd").solution.mT
    outside = (answers - found.centre - z @ found.axes.mT).norm(dim=-1).max() / found.radius
    reached = float(z.norm(dim=-1).max()) / found.reach
    return "right" if float(outside) < 1e-4 and 0.99 <= reached <= 1 + 1e-4 else "wrong"


@pytest.mark.parametrize("name", FEW)
def test_gains_and_means_are_read_off_the_answers(name: str) -> None:
    folder, _, wanted = name.partition(".")
    norm = next(found for entry in classes(folder) if entry.__name__ == wanted and (found := built(entry)))
    kind, extra = FEW[name]
    assert verdict(norm) == "right"
    assert Ellipsoid.after(norm).origin == kind
    assert torch.equal(read_norm(norm).gain, extra + norm.weight.detach())


def test_what_is_no_normalisation_of_single_tokens_is_refused() -> None:
    none = next(found for entry in classes("mobilebert") if entry.__name__ == "NoNorm" and (found := built(entry)))
    for norm in (none, nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm((3, 4))):
        with pytest.raises(hs.InvalidInput):
            Ellipsoid.after(norm)


def test_bounds_behind_such_norms_hold() -> None:
    gemma = next(built(entry) for entry in classes("gemma") if entry.__name__ == "GemmaRMSNorm")
    assert gemma is not None
    nn.init.constant_(gemma.weight, 0.01)
    head = hs.SelfAttention.from_bilinear(*(sign * torch.eye(WIDTH, dtype=torch.float64) for sign in (-1, 1)))
    x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        measured = float(hs.measure(head, gemma(x)).lower)
    assert measured > 2
    assert float(hs.bounds.get("howsmooth.mean_field")(head, n=6, over=gemma)) >= measured


def test_norms_without_weights_take_the_width_of_the_attention() -> None:
    plain = nn.RMSNorm(4, elementwise_affine=False)
    assert Ellipsoid.after(plain).radius == 2.0
    assert float(hs.bounds.get("howsmooth.sqrt_n")(hs.SelfAttention.random(4), n=3, over=plain)) > 0


@pytest.mark.slow
def test_every_norm_class_of_transformers_is_right_or_refused() -> None:
    counts = {"right": 0, "refused": 0}
    for folder in folders_with_norms():
        for cls in classes(folder):
            norm = built(cls)
            if norm is not None:
                found = verdict(norm)
                assert found != "wrong", cls
                counts[found] += 1
    assert counts["right"] >= 200
    assert counts["right"] + counts["refused"] >= 230
