"""A window is read once: how often a scan runs the model, counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from howsmooth.models import OpenModel, open_model
from howsmooth.scans import scan
from tests.models.test_captured_sites import other_model


def passes(model: OpenModel, text: Path | str, what: str, **asked: object) -> int:
    """How often the model runs, and each time must run to its end."""
    runs: list[torch.nn.Module] = []
    hook = model.model.register_forward_hook(lambda module, args, output: runs.append(module))
    try:
        scan(model, text, what=what, **asked)  # type: ignore[arg-type]
    finally:
        hook.remove()
    return len(runs)


@pytest.mark.parametrize("what", ["head", "head,attention", "mlp,head"])
def test_every_window_is_read_once_whatever_is_measured(folder: Path, text: Path, what: str) -> None:
    model = open_model(str(folder))
    assert passes(model, text, what, lengths="4,5", windows=2, layers=[0], explain=False, bounds="none") == 4


def test_an_architecture_without_names_is_read_once_for_its_heads() -> None:
    model = other_model("bart").requires_grad_(False)
    model.set_attn_implementation("eager")
    opened = OpenModel("random:bart", model, None, "text", "", "float32", 99, "")
    assert passes(opened, "0 1 2 3 4 5 6", "head", lengths=5, explain=False, bounds="none") == 1
