"""What a run says of itself: how often, while it lasts, and at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from howsmooth._util.ledger import Ledger
from howsmooth._util.validation import NotNegative, Size, check_count, check_fields, validated
from howsmooth.errors import InvalidInput
from howsmooth.papers.training.training_settings import Settings

LEDGER, RESULT = "run.sqlite", "result"


@dataclass(frozen=True)
class Intervals:
    """How often, in steps: a row of numbers, the validation bits in it (on so many characters), a checkpoint."""

    report: int = 50
    validate: int = 500
    validate_on: int = 20_000
    save: int = 200

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(value, f"the interval {name}")


@dataclass(frozen=True)
class Status:
    """How a run stands, for whoever watches."""

    step: int
    steps: int
    bits: float
    bound: float | None
    steps_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        settings: of the run.
        train_bits: bits per character over the last interval of training.
        valid_bits: bits per character on the validation part, all of it; None when the run diverged.
        bound: largest proved Lipschitz bound among the attention blocks, None where there is none; in the 2-norm, but
            in the ∞-norm for contractive-inf in contractive blocks.
        diverged: the step at which the loss was no number any more, or None.
        tokens, seconds: characters seen and time spent in training, without validation.
        parameters: number of trained parameters.
        how: how the text was split.
        rows: the numbers of every interval, as the ledger of the run holds them.
    """

    settings: Settings
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
        """As JSON keeps it, without the rows."""
        kept = {name: value for name, value in asdict(self).items() if name != "rows"}
        return kept | {"settings": self.settings.to_dict()}

    @classmethod
    @validated
    def read(cls, folder: Path) -> Result | None:
        """The result of a finished run, or None."""
        path = Path(folder) / LEDGER
        if not path.is_file():
            if (path.parent / "result.json").exists():
                raise InvalidInput(f"the run in {folder} was written by an earlier version: train it anew.")
            return None
        try:
            with Ledger.reading(path) as ledger:
                items = ledger.read_json()
            content = items.pop(RESULT, None)
            if content is None:
                return None
            settings = Settings.from_dict(content.pop("settings"))
            result = cls(settings, **content, rows=list(items.values()))
            check_fields(result)
            return result
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = str(error).rstrip(".")
            raise InvalidInput(f"{path} is damaged ({why}): move it away to make it anew with --resume.") from error
