"""The direct way: a pass through the model for every layer (or head) that is rounded by itself, and its KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from evidence.rounded_caches_windows import Step, in_windows
from howsmooth.models import OpenModel, Window
from howsmooth.models.forward_pass import attention_computed_by
from howsmooth.rounding import Format
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.quantisation import Tensors
from howsmooth.rounding.rounded_model import Choices, Layers, RoundedModel, rounding, run_whole


def direct(opened: OpenModel, windows: Sequence[Window], form: Format, by_head: bool, tell: Step) -> Tensor:
    """KL of rounding one layer's (or head's) keys or values at a time, a pass for each: ``(layers, 2, heads or 1)``."""
    return direct_by_window(opened, windows, form, by_head, tell).mean(0)


def direct_by_window(opened: OpenModel, windows: Sequence[Window], form: Format, by_head: bool, tell: Step) -> Tensor:
    """The same for every window, windows first."""

    def of(reader: RoundedModel, window: Window) -> Tensors:
        heads, whole = reader.sites[0].attention.kv_heads, Suffixes(reader)
        alone = [[form if h == head else None for h in range(heads)] for head in range(heads)] if by_head else [form]
        rows = [
            [[reader.damage(whole.exact, whole.outcome(layer, part, one)) for one in alone] for part in PARTS]
            for layer in range(len(reader.sites))
        ]
        return {"direct": torch.tensor(rows, dtype=torch.float64)}

    found = in_windows(opened, windows, "direct KL", [form.name, by_head], of, tell)
    return torch.stack([one["direct"] for one in found])


class Suffixes:
    """What a Llama says with one layer rounded: the layers before it are not run again, as they say what they said."""

    def __init__(self, reader: RoundedModel):
        self.reader, self.blocks, self.outputs = reader, list(reader.model.model.layers), list[Any]()
        hooks = [block.register_forward_hook(lambda *call: self.outputs.append(call[2])) for block in self.blocks]
        try:
            self.exact = reader.outcome()
        finally:
            for hook in hooks:
                hook.remove()

    def outcome(self, layer: int, part: str, choices: Choices) -> Tensor:
        """As `RoundedModel.outcome` has it."""
        layers = Layers(len(self.blocks), layer)
        try:
            for block, output in zip(self.blocks[:layer], self.outputs, strict=False):
                block.forward = lambda *args, said=output, **options: said
            with attention_computed_by(
                self.reader.model, rounding(self.reader.rotaries, {(layer, part): choices}, layers)
            ):
                outcome = self.reader.read(run_whole(self.reader))
        finally:
            for block in self.blocks[:layer]:
                del block.forward
        layers.check_all(self.reader.model)
        return outcome


def correlations(guess: Tensor, truth: Tensor) -> list[str]:
    """Spearman's correlation for keys, values and both, ``(layers, 2, …)`` each."""
    pairs = [(guess[:, 0], truth[:, 0]), (guess[:, 1], truth[:, 1]), (guess, truth)]
    return [f"{spearmanr(a.flatten().numpy(), b.flatten().numpy()).statistic:.2f}" for a, b in pairs]
