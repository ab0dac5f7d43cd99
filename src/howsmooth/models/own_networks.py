"""Networks of one's own as models that can be scanned: each input that is given is a window."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import digest
from howsmooth._util.validation import Device, check_finite, shown
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.model_inputs import Window
from howsmooth.models.network_parts import NetworkTargets
from howsmooth.models.network_source import is_of_transformers, names_network, open_network
from howsmooth.models.open_source import UNLIMITED, Dtype, OpenModel
from howsmooth.models.targets import Targets

MODALITY = "tensor"
"""The modality of a network of one's own: it reads tensors."""


class OwnNetwork(OpenModel):
    """A module, an ONNX file or an exported program, with the interface of a model of transformers that is open.

    >>> own = own_network(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    >>> [window] = own.windows(torch.zeros(1, 5, 8), 5)
    >>> targets_at(own, window).layers
    1
    """

    def on(self, device: Device | None) -> OpenModel:
        if device is None:
            return self
        raise InvalidInput("a network of your own is measured where it is: move it there and leave device out.")

    def in_dtype(self, dtype: Dtype | None) -> OpenModel:
        name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        if name in ("auto", "float32"):
            return self
        if name != "float64":
            raise InvalidInput("a network of your own is measured in float32 or float64: leave dtype out.")
        return replace(self, model=copy.deepcopy(self.model).double(), dtype=name)

    def windows(self, source: Any, length: int | None = None, count: int = 1, seed: int | None = 0) -> list[Window]:
        """The inputs, each a window; a batch of them along the first axis of ``(count, n, d)``."""
        items = _items(source)
        if count > len(items):
            raise InvalidInput(f"{count} windows were requested, but there are {len(items)} inputs: give more.")
        n = self.usual_length(source)
        if length not in (None, n):
            raise InvalidInput(f"the inputs have {n} tokens, not {length}: leave the lengths out.")
        like = torch.float64 if self.dtype == "float64" else torch.float32
        tensors = [item.to(like) if item.is_floating_point() else item for item in items[:count]]
        return [Window(tensor, [str(i) for i in range(n)], index) for index, tensor in enumerate(tensors)]

    def usual_length(self, source: Any) -> int:
        """The number of tokens of an input; an image is one."""
        first = _items(source)[0]
        if not first.is_floating_point():
            return first.shape[-1]
        return first.shape[-2] if first.dim() in (2, 3) else 1


def own_network(source: Any) -> OwnNetwork:
    """A module, or a text that names a network, as a model that can be scanned."""
    module = open_network(source) if isinstance(source, str | Path) else getattr(source, "_orig_mod", source)
    if not isinstance(module, nn.Module):
        raise InvalidInput(f"what is scanned is a module or a text that names a model, got {shown(source)}.")
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()}) or ["float32"]
    if any(p.dtype.itemsize < 4 for p in module.parameters() if p.is_floating_point()):
        raise UnsupportedModel(f"this {type(module).__name__} is in half precision: convert it by .float().")
    name = str(source) if isinstance(source, str | Path) else f"{type(module).__name__} in memory"
    sha256 = digest(module.state_dict(), str(module).encode())
    words = " and ".join(kinds)
    return OwnNetwork(name, module, None, MODALITY, sha256, words, UNLIMITED, "not stated")  # type: ignore[arg-type]


def is_own(source: Any) -> bool:
    """Whether a source is a network of one's own and no model of transformers."""
    if isinstance(source, str | Path):
        return names_network(str(source))
    inner = getattr(source, "_orig_mod", source)
    adapted = hasattr(inner, "merge_and_unload")
    return isinstance(inner, nn.Module) and not adapted and not is_of_transformers(inner)


def read_inputs(inputs: Any) -> tuple[str, Any, str]:
    """Name, content and sha256 of the inputs of a network of one's own."""
    items = _items(inputs)
    for item in items:
        if item.is_floating_point():
            check_finite(item, "an input")
    shapes = " and ".join(dict.fromkeys(" × ".join(map(str, item.shape)) for item in items))
    count = f"{len(items)} inputs of {shapes}" if len(items) > 1 else f"an input of {shapes}"
    return count, items, digest({str(number): item for number, item in enumerate(items)})


def _items(inputs: Any) -> list[Tensor]:
    """The inputs one by one, each with a batch axis of one where a batch was given."""
    if isinstance(inputs, Tensor):
        batched = inputs.dim() == (3 if inputs.is_floating_point() else 2) or inputs.dim() == 4
        return list(inputs.split(1)) if batched else [inputs]
    known = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if known and len(inputs) and all(isinstance(one, Tensor) for one in inputs):
        return list(inputs)
    raise InvalidInput(
        f"a network of your own is scanned on tensors, as it takes them: one, a batch or a list, got {shown(inputs)}."
    )


def targets_at(model: OpenModel, window: Window, **options: Any) -> Targets | NetworkTargets:
    """The parts of a model, or of a network of one's own, at a window."""
    if isinstance(model, OwnNetwork):
        return NetworkTargets(model.model, window.ids)
    return Targets(model, window, **options)
