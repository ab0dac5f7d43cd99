"""Checkpoints: one safetensors file that appears whole or not at all, and can be trusted when it is read again.

The file holds the tensors of the model (buffers included), of the optimiser and of the random number generator, and in
its header a JSON text with the step, the settings, the alphabet and a SHA-256 of all tensors. It is written under a
temporary name in the same folder and then renamed: whoever stops the process at any moment leaves the old file or the
new one. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from howsmooth.errors import InvalidInput
from howsmooth.small import write_whole
from howsmooth.training.settings import Settings

CHECKPOINT = "checkpoint.safetensors"
FORMAT = "howsmooth training checkpoint 1"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
        step: steps done.
        tensors: named ``model.…``, ``optimiser.…`` and ``random``.
        text: SHA-256 of the corpus, so that a run does not go on with another text.
        seconds: time spent so far.
        losses: bits per character of the steps since the last row of numbers.
    """

    step: int
    settings: Settings
    alphabet: str
    text: str
    seconds: float
    losses: list[float]
    tensors: dict[str, Tensor]

    @classmethod
    def take(
        cls,
        step: int,
        settings: Settings,
        alphabet: str,
        text: str,
        seconds: float,
        losses: list[float],
        model: nn.Module,
        optimiser: Optimizer,
    ) -> Checkpoint:
        """A picture of a run between two steps."""
        tensors = {f"model.{name}": tensor for name, tensor in _state(model)}
        for name, parameter in model.named_parameters():
            for entry, value in optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{name}.{entry}"] = value
        tensors["random"] = torch.get_rng_state()
        kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        return cls(step, settings, alphabet, text, seconds, list(losses), kept)

    def restore(self, model: nn.Module, optimiser: Optimizer | None = None) -> None:
        """Put model, optimiser and random numbers back to where they were."""
        wanted = dict(_state(model))
        given = {name.removeprefix("model."): t for name, t in self.tensors.items() if name.startswith("model.")}
        if wanted.keys() != given.keys() or any(wanted[name].shape != given[name].shape for name in wanted):
            raise InvalidInput("the checkpoint holds the tensors of another model: it was written by another version.")
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(given[name])
        if optimiser is None:
            return
        for name, parameter in model.named_parameters():
            start = f"optimiser.{name}."
            state = {key.removeprefix(start): t.clone() for key, t in self.tensors.items() if key.startswith(start)}
            # A parameter may be named like the beginning of another: entries of an optimiser hold no dots.
            optimiser.state[parameter] = {key: value for key, value in state.items() if "." not in key}
        torch.set_rng_state(self.tensors["random"])

    def save(self, path: Path) -> None:
        """Write the file; a file of that name is replaced only by a complete one."""
        header = {
            "format": FORMAT,
            "step": self.step,
            "settings": self.settings.to_dict(),
            "alphabet": self.alphabet,
            "text": self.text,
            "seconds": self.seconds,
            "losses": self.losses,
            "sha256": _digest(self.tensors),
        }
        write_whole(path, save(self.tensors, metadata={"howsmooth": json.dumps(header)}))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` wrote; anything else, or a damaged one, is refused."""
        if not path.is_file():
            raise InvalidInput(f"there is no checkpoint {path}: start the run without --resume.")
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["howsmooth"])
                tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            sound = header["format"] == FORMAT and header["sha256"] == _digest(tensors)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not sound:
            raise _damaged(path, "its content is not what was written")
        return cls(
            header["step"],
            Settings.from_dict(header["settings"]),
            header["alphabet"],
            header["text"],
            header["seconds"],
            header["losses"],
            tensors,
        )


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and all buffers, also those that a state_dict leaves out: warm-started vectors are part of a run."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> InvalidInput:
    return InvalidInput(f"{path} is damaged or no checkpoint of howsmooth ({why}): move it away to start the run anew.")
