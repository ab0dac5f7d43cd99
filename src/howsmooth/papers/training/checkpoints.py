"""Checkpoints of training runs: one safetensors file, written atomically and verified when it is read.

The file holds the tensors of the model (buffers included), of the optimiser and of the random number generator, and in
its header a JSON text with the step, the settings and the alphabet, all under one checksum (see
`howsmooth._util.checksummed`). It is written under a temporary name in the same folder and then renamed: an interrupted
process leaves the old file or the new one. Before anything is restored, the names, shapes, dtypes and values of all
tensors are compared with the run that resumes: the fused optimiser of torch would write past the end of a short tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from howsmooth._util.checksummed import Damaged, checksummed_bytes, read_checksummed, read_json
from howsmooth._util.common import digest, write_whole
from howsmooth._util.validation import NotNegative, Size, check_fields, validated
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.papers.training.training_settings import TrainingSettings

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_FORMAT = "howsmooth training checkpoint 2"
_FIRST_FORMAT = "howsmooth training checkpoint 1"
"""It had a hash of its tensors alone, inside the JSON text."""
_ENTRIES = ("step", "exp_avg", "exp_avg_sq")
"""The state of AdamW for a parameter."""
_NAMES = ("step", "settings", "alphabet", "text", "seconds", "losses")
"""The entries of the header."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The state of a run between two steps.

    Attributes:
        step: number of finished steps.
        tensors: named ``model.…``, ``optimiser.…`` and ``random``.
        text: SHA-256 of the corpus, so that a run does not resume with another text.
        seconds: time spent so far.
        losses: bits per character of the steps since the last row of metrics.
    """

    step: Size
    settings: TrainingSettings
    alphabet: str
    text: str
    seconds: NotNegative
    losses: list[float]
    tensors: dict[str, Tensor]

    @classmethod
    @validated
    def take(
        cls,
        step: int,
        settings: TrainingSettings,
        alphabet: str,
        text: str,
        seconds: float,
        losses: list[float],
        model: nn.Module,
        optimiser: Optimizer,
    ) -> TrainingCheckpoint:
        """Copy the state of a run between two steps."""
        tensors = {f"model.{name}": tensor for name, tensor in _state(model)}
        for name, parameter in model.named_parameters():
            for entry, value in optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{name}.{entry}"] = value
        tensors["random"] = torch.get_rng_state()
        copied = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        return cls(step, settings, alphabet, text, seconds, list(losses), copied)

    def restore(self, model: nn.Module, optimiser: Optimizer | None = None) -> None:
        """Restore model, optimiser and random numbers, all of them or, after an error, none."""
        wanted = dict(_state(model))
        parameters = dict(model.named_parameters())
        self._check_model(wanted)
        self._check_optimiser(parameters)
        self._check_random()
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(self.tensors[f"model.{name}"])
        if optimiser is None:
            return
        for name, parameter in parameters.items():
            entries = self._entries(name)
            optimiser.state[parameter] = {entry: t.to(parameter.device, copy=True) for entry, t in entries.items()}
        torch.set_rng_state(self.tensors["random"])

    def _check_model(self, wanted: dict[str, Tensor]) -> None:
        """Check that every parameter and buffer of the model is present, with its shape and dtype, and finite."""
        given = {name.removeprefix("model."): t for name, t in self.tensors.items() if name.startswith("model.")}
        if wanted.keys() != given.keys() or any(not _alike(wanted[name], given[name]) for name in wanted):
            raise InvalidInput("the checkpoint holds the tensors of another model: it was written by another version.")
        for name, tensor in given.items():
            if not bool(torch.isfinite(tensor).all()):
                raise InvalidInput(f"the checkpoint holds a NaN or infinity in {name}: start the run anew.")

    def _check_optimiser(self, parameters: dict[str, nn.Parameter]) -> None:
        """Check that the state of AdamW for a parameter is complete or absent, and that nothing else is present."""
        unknown = {name for name in self.tensors if not name.startswith("model.") and name != "random"}
        for name, parameter in parameters.items():
            entries = self._entries(name)
            unknown -= {f"optimiser.{name}.{entry}" for entry in entries}
            if entries:
                self._check_entries(name, parameter, entries)
        if unknown:
            raise InvalidInput(f"the checkpoint holds {min(unknown)!r}, which belongs to no parameter of this model.")

    def _entries(self, name: str) -> dict[str, Tensor]:
        """Return the stored optimiser state of a parameter."""
        names = {entry: f"optimiser.{name}.{entry}" for entry in _ENTRIES}
        return {entry: self.tensors[full] for entry, full in names.items() if full in self.tensors}

    def _check_entries(self, name: str, parameter: Tensor, entries: dict[str, Tensor]) -> None:
        pairs = zip(entries.values(), (torch.zeros(()), parameter, parameter), strict=False)
        if len(entries) < len(_ENTRIES) or not all(_alike(tensor, wanted) for tensor, wanted in pairs):
            raise InvalidInput(
                f"the checkpoint holds the optimiser of another model: its state of {name} does not fit."
            )
        step, mean, square = entries.values()
        counted = float(step).is_integer() and 0 <= float(step) <= self.step
        if not (counted and bool((square >= 0).all()) and not bool(mean.isnan().any())):
            raise InvalidInput(
                f"the checkpoint holds numbers for {name} that no optimiser reaches: start the run anew."
            )

    def _check_random(self) -> None:
        """Check that a generator accepts the stored random state."""
        state = self.tensors.get("random")
        if state is None or not _alike(state, torch.get_rng_state()):
            raise InvalidInput("the checkpoint holds no state of the random numbers of this version of torch.")
        try:
            torch.Generator().set_state(state)
        except RuntimeError as error:
            raise InvalidInput(f"the checkpoint holds no state of random numbers ({error}).") from error

    def save(self, path: Path) -> None:
        """Write the file; an existing file is replaced only by a complete one."""
        header = {"format": CHECKPOINT_FORMAT} | {name: getattr(self, name) for name in _NAMES}
        header |= {"settings": self.settings.to_dict()}
        write_whole(path, checksummed_bytes(self.tensors, {"howsmooth": json.dumps(header)}))

    @classmethod
    @validated
    def load(cls, path: Path) -> TrainingCheckpoint:
        """Read a file that `save` wrote; other or damaged files are refused."""
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(f"there is no checkpoint {path}: start the run without --resume.")
        try:
            tensors, texts, has_checksum = read_checksummed(path)
            header = read_json(texts.get("howsmooth", ""))
            _check_format(header, tensors, has_checksum)
            return _checked(header, tensors)
        except (Damaged, HowsmoothError) as error:
            why = f"{path} is damaged or no checkpoint of howsmooth ({str(error).rstrip('.')})"
            raise InvalidInput(f"{why}: move it away to start the run anew.") from error


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and all buffers, also those missing in a state_dict: warm-started vectors are part of a run."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _check_format(header: dict[str, Any], tensors: dict[str, Tensor], has_checksum: bool) -> None:
    """A known format, with the hash that belongs to it."""
    written = header.pop("format", None)
    if written == _FIRST_FORMAT and not has_checksum:
        if header.pop("sha256", None) != digest(tensors):
            raise Damaged("its content is not what was written")
    elif written != CHECKPOINT_FORMAT or not has_checksum:
        raise Damaged("its format is not known here")


def _checked(header: dict[str, Any], tensors: dict[str, Tensor]) -> TrainingCheckpoint:
    """Make the checkpoint of a file, and check the type and range of every field."""
    if header.keys() != set(_NAMES):
        raise Damaged(f"its header has other names: {', '.join(sorted(map(repr, header.keys() ^ set(_NAMES))))}")
    checkpoint = TrainingCheckpoint(
        **header | {"settings": TrainingSettings.from_dict(header["settings"])}, tensors=tensors
    )
    check_fields(checkpoint)
    step, steps, losses = checkpoint.step, checkpoint.settings.steps, checkpoint.losses
    if step > steps:
        raise Damaged(f"it is at step {step} of {steps}")
    if len(losses) > step or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise Damaged("its losses are not those of its steps")
    if len(set(checkpoint.alphabet)) != len(checkpoint.alphabet):
        raise Damaged("its alphabet has a character twice")
    return checkpoint
