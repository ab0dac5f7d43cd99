"""Whether the weights of a file are those of the model: each in its place, or a refusal that names the first ones.

transformers fills what a file lacks with random numbers. Here a weight that takes part in what is measured must come
from the file; what does not (a pooler behind the last hidden state, the decoder of which only the encoder is kept) is
set to zero when it is missing, so that a model is the same each time it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from howsmooth._util.common import printable
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3


@dataclass(frozen=True)
class Match:
    """How the tensors of a file fit a model: names of the model that got none, names of the file that fit nowhere."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    mismatched: frozenset[str]

    def judge(self, whole: nn.Module, measured: PreTrainedModel) -> tuple[str, ...]:
        """Refuse weights that are not the model's; put zeros where nothing is measured; what is left to say.

        Args:
            whole: the model that was loaded.
            measured: the part of it that is kept.
        """
        used = _used(whole, measured)
        lacking = sorted((self.missing | self.mismatched) & used)
        if lacking:
            absent, other = self.missing & used, self.mismatched & used
            causes = [f"{len(absent)} are missing"] * bool(absent) + [f"{len(other)} have another shape"] * bool(other)
            lost = sorted(self.unexpected)
            strangers = f", while {len(lost)} of the file fit nowhere, first {_listed(lost)}" if lost else ""
            raise InvalidInput(
                f"the weights do not fit the model: of {len(used)} tensors {' and '.join(causes)}, first "
                f"{_listed(lacking)}{strangers}: give the weights that belong to config.json."
            )
        denied = sorted(name for name in self.unexpected if _inside_a_layer(name, whole))
        if denied:
            raise InvalidInput(
                f"the weights do not fit the model: the file holds {len(denied)} tensors of layers that have no place "
                f"for them, first {_listed(denied)}: give the config.json that belongs to the weights."
            )
        tensors = dict(_tensors(whole))
        for name, tensor in tensors.items():
            if name in used and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise InvalidInput(f"the weight {printable(name)} holds NaN or infinity: give weights that are finite.")
        zeroed = sorted((self.missing | self.mismatched) - used)
        with torch.no_grad():
            for name in zeroed:
                tensors[name].zero_()
        notes = []
        if zeroed:
            notes.append(f"{len(zeroed)} weights that nothing measured uses are not in the file ({_listed(zeroed)})")
        if self.unexpected:
            names = sorted(self.unexpected)
            notes.append(f"{len(names)} tensors of the file are not used by this model ({_listed(names)})")
        return tuple(notes)


def _used(whole: nn.Module, measured: PreTrainedModel) -> set[str]:
    """The names of the tensors that take part: those of the kept part without its pooler, which comes after it."""
    poolers = [module for path, module in measured.named_modules() if "pooler" in path.split(".")[-1]]
    after = {id(tensor) for pooler in poolers for _, tensor in _tensors(pooler)}
    kept = {id(tensor) for _, tensor in _tensors(measured)} - after
    return {name for name, tensor in _tensors(whole) if id(tensor) in kept}


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and stored buffers by every name they have."""
    yield from module.named_parameters(remove_duplicate=False)
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved)


def _inside_a_layer(name: str, whole: nn.Module) -> bool:
    """Whether a tensor belongs into a module of the model that computes with weights of its own, such as a linear one.

    The file then describes another model: biases where config.json has none, an adapter, scales of quantised weights.
    """
    parts = name.split(".")
    prefix = getattr(whole, "base_model_prefix", "")
    for path in (parts, parts[1:] if parts[0] == prefix else [], [prefix, *parts]):
        module: nn.Module | None = whole
        for step in path[:-1]:
            module = getattr(module, step, None)
            if not isinstance(module, nn.Module):
                break
            if module._parameters and not module._modules:
                return True
    return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name)[:100] for name in names[:_SHOWN]) + more
