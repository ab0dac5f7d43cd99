"""The result of a search: an input, its local Lipschitz constant, and the way it was found."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR
from typing import Any, Literal

import torch
from torch import Tensor

from howsmooth._util.common import rounded, write_whole
from howsmooth._util.display import card
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import NotNegative, Size, check_path, validated
from howsmooth.norms import Measurement
from howsmooth.search import witness_files

Stopped = Literal["steps", "seconds", "interrupted", "settled", "running"]


@dataclass(frozen=True, eq=False)
class Witness:
    """An input on which a map is rough: the Lipschitz constant over the set is at least ``lower``.

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
    value: NotNegative
    measurement: Measurement
    norm: float
    head: Size | None
    over: dict[str, Any]
    start: str
    history: list[float]
    seed: int
    steps: Size
    seconds: NotNegative
    stopped: Stopped
    ids: Tensor | None = None
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def lower(self) -> float:
        """The lower end of the measurement at x, and so of the constant over the set."""
        return float(self.measurement.lower)

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of the lower end."""
        return self.measurement.lower_holds

    def __repr__(self) -> str:
        n, d = self.x.shape
        norm = "‖J‖_∞" if self.norm == math.inf else "‖J‖₂"
        end = f"≥ {rounded(self.lower, ROUND_FLOOR)}, {self.lower_holds.words()}"
        return f"Witness({norm} = {self.value:.6g} ({end}) at {n} × {d}, from {self.start!r}, {self.steps} steps)"

    def _repr_html_(self) -> str:
        facts = [("over", str(self.over.get("set", "the set"))), ("from", self.start), ("ended by", self.stopped)]
        return card(
            repr(self), facts, ["The lower end holds for the Lipschitz constant over the set: this input attains it."]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, all of it or nothing.

        >>> import howsmooth as hs, tempfile
        >>> from howsmooth.search import worst_case
        >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
        >>> witness = worst_case(head, 4, over=hs.sets.Ball(1.0), starts=1, steps=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     witness.save(folder + "/w.safetensors")
        ...     Witness.load(folder + "/w.safetensors").value == witness.value
        True
        """
        m = self.measurement
        history = torch.tensor(self.history, dtype=torch.float64)
        tensors = {"x": self.x, "history": history, "ids": self.ids, "left": m.left, "right": m.right}
        story = {name: getattr(self, name) for name in ("value", "head", "over", "start", "seed", "steps", "seconds")}
        story |= {
            "stopped": self.stopped,
            "source": self.source,
            "norm": "inf" if self.norm == math.inf else 2,
            "measurement": {name: said for name, said in m.to_dict().items() if name != "relative"},
        }
        write_whole(check_path(path, "path"), witness_files.content(tensors, story))

    @classmethod
    @validated
    def load(cls, path: str | os.PathLike[str]) -> Witness:
        """Read a file that `save` wrote; one clear error for anything else."""
        return witness_files.read(check_path(path, "path"), cls)
