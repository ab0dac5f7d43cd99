"""What a search brings back: an input, its local Lipschitz constant, and how it was found."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement
from howsmooth.small import write_whole

Stopped = Literal["steps", "seconds", "interrupted", "settled", "running"]
_FORMAT = "howsmooth witness 1"
_NUMBERS = ("value", "lower", "upper", "values", "residuals")


@dataclass(frozen=True, eq=False)
class Witness:
    """An input on which a map is rough: ``value`` is a lower bound on its Lipschitz constant over the set.

    Attributes:
        x: the input, ``(n, d)``, float64.
        value: ‖J(x)‖, measured anew at x in float64.
        measurement: that measurement, with its singular vectors.
        norm: 2 or inf.
        head: which head of the map, or None for the whole of it.
        over: the set searched, as plain Python.
        start: the start that led here.
        history: the best value after each step.
        seed, steps, seconds: of the search; steps is how many were made.
        stopped: why it ended: "steps", "seconds", "interrupted", "settled", or "running" in a file that a search still
            writes to.
        ids: token ids, for sequences of embeddings.
        source: how the map was made, when the command line made it.
    """

    x: Tensor
    value: float
    measurement: Measurement
    norm: float
    head: int | None
    over: dict[str, Any]
    start: str
    history: list[float]
    seed: int
    steps: int
    seconds: float
    stopped: Stopped
    ids: Tensor | None = None
    source: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        n, d = self.x.shape
        norm = "‖J‖_∞" if self.norm == math.inf else "‖J‖₂"
        return f"Witness({norm} = {self.value:.6g} at {n} × {d}, from {self.start!r}, {self.steps} steps)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, all of it or nothing.

        >>> import howsmooth as hs, tempfile
        >>> from howsmooth.worstcase import worst_case
        >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
        >>> witness = worst_case(head, 4, radius=1.0, starts=1, steps=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     witness.save(folder + "/w.safetensors")
        ...     Witness.load(folder + "/w.safetensors").value == witness.value
        True
        """
        m = self.measurement
        tensors = {"x": self.x, "history": torch.tensor(self.history, dtype=torch.float64), "ids": self.ids}
        tensors |= {"left": m.left, "right": m.right}
        story = {name: getattr(self, name) for name in ("value", "head", "over", "start", "seed", "steps", "seconds")}
        story |= {
            "stopped": self.stopped,
            "source": self.source,
            "norm": "inf" if self.norm == math.inf else 2,
            "measurement": m.to_dict(),
        }
        data = to_bytes(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None},
            {"format": _FORMAT, "witness": json.dumps(story)},
        )
        write_whole(Path(path), data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Witness:
        """Read a file that `save` wrote; one clear error for anything else."""
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(f"there is no file {path}: check the path.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise InvalidInput(f"{path.name} cannot be read: it is damaged, or no safetensors file.") from error
        if metadata.get("format") != _FORMAT or "x" not in tensors:
            raise InvalidInput(f"{path.name} is no witness: give a file that hs.worst_case or Witness.save wrote.")
        try:
            story = json.loads(metadata["witness"])
            plain = story.pop("measurement")
            norm = math.inf if story.pop("norm") == "inf" else 2
            vectors = {side: tensors.get(side) for side in ("left", "right")}
            return cls(
                x=tensors["x"],
                measurement=_measurement(plain, norm, vectors),
                norm=norm,
                history=tensors["history"].tolist(),
                ids=tensors.get("ids"),
                **story,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"{path.name} is a witness of another version, or was changed by hand.") from error


def _measurement(plain: dict[str, Any], norm: float, vectors: dict[str, Tensor | None]) -> Measurement:
    numbers = {name: plain.pop(name) for name in _NUMBERS}
    if numbers["upper"] is None:
        numbers["upper"] = math.inf
    tensors = {
        name: None if number is None else torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()
    }
    plain |= {
        "norm": norm,
        "converged": torch.tensor(plain["converged"]),
        "dtype": getattr(torch, plain["dtype"]),
        "notes": tuple(plain["notes"]),
    }
    return Measurement(**plain, **tensors, **vectors)  # type: ignore[arg-type]
