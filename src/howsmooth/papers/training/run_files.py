"""The files of a training run: a ledger with its numbers and its result, and a checkpoint.

The checkpoint is one safetensors file, written atomically and verified when it is read. It holds the tensors of the
model (buffers included), of the optimiser and of the random number generator, and in its header a JSON text with the
step, the settings and the alphabet, all under one checksum (see `howsmooth._util.checksummed`). It is written under a
temporary name in the same folder and then renamed: an interrupted process leaves the old file or the new one. Before
anything is restored, the names, shapes, dtypes and values of all tensors are compared with the run that resumes: the
fused optimiser of torch would write past the end of a short tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from howsmooth._util.checksummed import Damaged, checksummed_bytes, read_checksummed, read_json
from howsmooth._util.common import write_whole
from howsmooth._util.ledger import Ledger
from howsmooth._util.sqlite_files import EmptyFile
from howsmooth._util.validation import Count, NotNegative, Size, check_fields, validated
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.papers.training.training_settings import TrainingSettings

LEDGER, RESULT = "run.sqlite", "result"


@dataclass(frozen=True)
class Intervals:
    """Steps between rows of metrics, validations (on ``validate_on`` characters) and checkpoints."""

    report: Count = 50
    validate: Count = 500
    validate_on: Count = 20_000
    save: Count = 200

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TrainingStatus:
    """The progress of a run."""

    step: int
    steps: int
    bits: float
    bound: float | None
    steps_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes:
        settings: settings of the run.
        train_bits: bits per character over the last interval of training.
        valid_bits: bits per character on the validation part, all of it; None when the run diverged.
        bound: largest Lipschitz bound among the attention blocks, None where there is none; in the 2-norm, but
            in the ∞-norm for contractive-inf in contractive blocks.
        diverged: the step at which the loss became NaN or infinite, or None.
        tokens, seconds: characters seen and time spent in training, without validation.
        parameters: number of trained parameters.
        how: how the text was split.
        rows: the numbers of every interval, as the ledger of the run holds them.
    """

    settings: TrainingSettings
    train_bits: NotNegative | None
    valid_bits: NotNegative | None
    bound: NotNegative | None
    diverged: Size | None
    tokens: Size
    seconds: NotNegative
    parameters: Size
    how: str
    text: str
    rows: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the ledger, which has no rows."""
        content = {name: value for name, value in asdict(self).items() if name != "rows"}
        return content | {"settings": self.settings.to_dict()}

    @classmethod
    @validated
    def read(cls, folder: Path) -> TrainingResult | None:
        """The result of a finished run, or None."""
        path = Path(folder) / LEDGER
        if not path.is_file():
            return None
        try:
            with Ledger.reading(path) as ledger:
                items = ledger.read_json()
            content = items.pop(RESULT, None)
            if content is None:
                return None
            settings = TrainingSettings.from_dict(content.pop("settings"))
            result = cls(settings, **content, rows=list(items.values()))
            check_fields(result)
            return result
        except EmptyFile:
            return None  # another process begins the run at this moment
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = str(error).rstrip(".")
            raise InvalidInput(f"{path} is damaged ({why}): move it away to make it anew with --resume.") from error


CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_FORMAT = "howsmooth training checkpoint 2"
_ENTRIES = ("step", "exp_avg", "exp_avg_sq")
"""The state of AdamW for a parameter."""
_NAMES = ("step", "settings", "alphabet", "text", "seconds", "losses")
"""The entries of the header."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The state of a run between two steps.

    Attributes:
        step: number of finished steps.
        tensors: named ``model.…``, ``optimiser.…`` and ``random``, see `run_tensors`.
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
            if header.pop("format", None) != CHECKPOINT_FORMAT or not has_checksum:
                raise Damaged("its format is not known here")
            return _checked(header, tensors)
        except (Damaged, HowsmoothError) as error:
            why = f"{path} is damaged or no checkpoint of howsmooth ({str(error).rstrip('.')})"
            raise InvalidInput(f"{why}: move it away to start the run anew.") from error


def run_tensors(model: nn.Module, optimiser: Optimizer) -> dict[str, Tensor]:
    """Copy the tensors of a model, of its optimiser and of the random number generator, by name."""
    tensors = {f"model.{name}": tensor for name, tensor in _state(model)}
    for name, parameter in model.named_parameters():
        for entry, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{name}.{entry}"] = value
    tensors["random"] = torch.get_rng_state()
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and all buffers, also those missing in a state_dict: warm-started vectors are part of a run."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


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
