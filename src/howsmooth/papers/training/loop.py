"""The training loop: steps, metrics, checkpoints and interruption.

A run lives in a folder: ``checkpoint.safetensors`` (see `howsmooth.papers.training.run_files`) and ``run.sqlite``, a
ledger (`howsmooth._util.ledger`) with one row of numbers per interval, and the result of a finished run. Ctrl-C lets
the step end, saves and stops; a process that is killed loses the steps since the last checkpoint. A run that goes on
is, bit by bit on the same machine with the same number of threads, the run that was never stopped.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from howsmooth._util.common import Busy, evaluating, exclusive, unwritable
from howsmooth._util.ledger import Ledger
from howsmooth._util.validation import Device, check_device, validated
from howsmooth.errors import InvalidInput
from howsmooth.papers.training.model import CharacterModel
from howsmooth.papers.training.run_files import (
    CHECKPOINT,
    LEDGER,
    RESULT,
    Intervals,
    TrainingCheckpoint,
    TrainingResult,
    TrainingStatus,
    run_tensors,
)
from howsmooth.papers.training.text_batches import Corpus, TextBatch, plan, validation
from howsmooth.papers.training.training_settings import TrainingSettings

StatusCallback = Callable[[TrainingStatus], None]
_CHARACTERS_AT_ONCE = 8192


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C stopped the run and the run was saved; ``step`` steps are done."""

    def __init__(self, step: int):
        super().__init__(f"stopped after {step} steps")
        self.step = step


@validated
def train(
    corpus: Corpus,
    settings: TrainingSettings,
    folder: Path | None = None,
    *,
    resume: bool = False,
    intervals: Intervals | None = None,
    progress: StatusCallback = lambda status: None,
    device: Device | None = None,
) -> TrainingResult:
    """Train a character language model and return its result.

    Args:
        corpus: see `Corpus.read`.
        folder: folder of checkpoint, metrics and result; None writes no files.
        resume: continue from the checkpoint of the folder, if there is one. Other settings or another text than those
            of the checkpoint are refused.
        progress: called after every row of metrics, and at least once a second.
        device: device of the model, for example "cuda"; None for the CPU. Initial weights and batches are drawn on the
            CPU, so that a seed has the same effect everywhere; random states of other devices are not saved.
    """
    intervals, place = intervals or Intervals(), check_device(device or "cpu")
    run = settings.to_dict() | {"text": corpus.sha256}
    if folder is None:
        with Ledger.writing(None, run) as ledger:
            return _Run(corpus, settings, None, ledger, intervals, progress, place).go()
    folder = Path(folder)
    with locked(folder):
        if not resume and any((folder / name).exists() for name in (CHECKPOINT, LEDGER)):
            raise InvalidInput(f"{folder} holds a run already: continue it with --resume, or choose another folder.")
        done = TrainingResult.read(folder)
        if done is not None:
            _check_same(folder, done.settings, done.text, settings, corpus)
            return done
        with Ledger.writing(folder / LEDGER, run) as ledger:
            return _Run(corpus, settings, folder, ledger, intervals, progress, place).go()


@validated
def bits_per_character(model: CharacterModel, batch: TextBatch) -> float:
    """Return the bits per character of a model on pieces of text; NaN where its loss is NaN."""
    total = 0.0
    rows = max(1, _CHARACTERS_AT_ONCE // batch.inputs.shape[1])
    with evaluating(model), torch.no_grad():
        for start in range(0, len(batch.inputs), rows):
            some = slice(start, start + rows)
            document = None if batch.document is None else batch.document[some]
            pieces = TextBatch(batch.inputs[some], batch.targets[some], document)
            total += float(nats(model, pieces)) * pieces.tokens
    return total / batch.tokens / math.log(2)


def nats(model: CharacterModel, batch: TextBatch) -> Tensor:
    """Return the mean negative log-likelihood of the targets, on the model's device."""
    batch = batch.to(model.tokens.weight.device)
    logits = model(batch.inputs, batch.positions(), batch.seen())
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


@validated
def load_model(folder: Path) -> tuple[CharacterModel, TrainingCheckpoint]:
    """Load the model of a run from its last checkpoint, in evaluation mode, and that checkpoint."""
    checkpoint = TrainingCheckpoint.load(Path(folder) / CHECKPOINT)
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
        model = CharacterModel(checkpoint.settings, len(checkpoint.alphabet) + 1)
    checkpoint.restore(model)
    return model.eval(), checkpoint


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one process, and make it when missing; the lock ends with the process."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder / ".lock"))
        except Busy:
            raise Busy(f"another process is training in {folder}: wait for it, or choose another folder.") from None
        except OSError as error:
            raise unwritable(folder, error) from error
        yield


class _Run:
    """One run from its first or next step to its end."""

    def __init__(
        self,
        corpus: Corpus,
        settings: TrainingSettings,
        folder: Path | None,
        ledger: Ledger,
        intervals: Intervals,
        progress: StatusCallback,
        device: torch.device,
    ):
        settings.check_memory(corpus.symbols)
        self.corpus, self.settings, self.folder, self.ledger = corpus, settings, folder, ledger
        self.intervals, self.progress, self.device = intervals, progress, device
        sizes = settings.length, settings.batch_tokens, settings.seed, settings.steps, settings.cycles
        self.plan = plan(corpus, settings.lengths, *sizes)
        self.rows: list[dict[str, Any]] = []
        self.step, self.seconds, self.losses = 0, 0.0, list[float]()

    def go(self) -> TrainingResult:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            self.model = CharacterModel(self.settings, self.corpus.symbols).to(self.device)
            self.optimiser = torch.optim.AdamW(
                self.model.groups(self.settings.weight_decay), lr=self.settings.rate, betas=(0.9, 0.98), fused=True
            )
            self._restore()
            self.model.train()
            with _between_steps() as stopping:
                diverged = self._steps(stopping)
            return self._finish(diverged)

    def _restore(self) -> None:
        if self.folder is None:
            return
        path = self.folder / CHECKPOINT
        if path.exists():
            checkpoint = TrainingCheckpoint.load(path)
            _check_same(self.folder, checkpoint.settings, checkpoint.text, self.settings, self.corpus)
            checkpoint.restore(self.model, self.optimiser)
            self.step, self.seconds, self.losses = checkpoint.step, checkpoint.seconds, list(checkpoint.losses)
        rows = self.ledger.read_json()
        self.ledger.remove([item for item, row in rows.items() if row["step"] > self.step])
        self.rows = [row for row in rows.values() if row["step"] <= self.step]

    def _steps(self, stopping: threading.Event) -> int | None:
        """Run all steps; return the step at which the loss became NaN or infinite, if it did."""
        begun, first, shown = perf_counter(), self.step, -math.inf
        while self.step < self.settings.steps:
            start = perf_counter()
            loss = self._one_step()
            self.seconds += perf_counter() - start
            if not math.isfinite(loss):
                return self.step
            self.step += 1
            self.losses.append(loss / math.log(2))
            last = self.step == self.settings.steps
            if last or self.step % self.intervals.report == 0:
                self._report()
            if last or self.step % self.intervals.save == 0:
                self._save()
            now = perf_counter()
            if last or now - shown > 1 or self.step % self.intervals.report == 0:
                self._show((self.step - first) / (now - begun))
                shown = now
            if stopping.is_set() and not last:
                self._save()
                raise TrainingStopped(self.step)
        return None

    def _one_step(self) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate_at(self.step)
        self.optimiser.zero_grad(set_to_none=True)
        loss = nats(self.model, self.plan.batch(self.step))
        loss.backward()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimiser.step()
        return loss.item()

    def _report(self) -> None:
        """Add a row: the mean over the steps since the last one, the bound, at intervals the validation bits."""
        row = {
            "step": self.step,
            "tokens": self.step * self.settings.batch_tokens,
            "length": self.plan.length(self.step - 1),
            "rate": self.settings.rate_at(self.step - 1),
            "train_bits": sum(self.losses) / len(self.losses),
            "bound": self.model.attention_bound(self.settings.length),
            "seconds": round(self.seconds, 3),
        }
        if self.step % self.intervals.validate == 0:
            row["valid_bits"] = self._valid_bits(self.intervals.validate_on)
        self.losses = []
        self.rows.append(row)
        self.ledger.write_json(f"step {self.step}", row)

    def _show(self, speed: float) -> None:
        latest, steps = self.losses or [row["train_bits"] for row in self.rows[-1:]], self.settings.steps
        bits, bound = sum(latest) / len(latest), self.rows[-1]["bound"] if self.rows else None
        self.progress(TrainingStatus(self.step, steps, bits, bound, speed, (steps - self.step) / speed))

    def _save(self) -> None:
        """Write a checkpoint, unless a parameter has become NaN or infinite."""
        if self.folder is None or not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            return
        state = self.step, self.settings, self.corpus.alphabet, self.corpus.sha256, self.seconds, self.losses
        TrainingCheckpoint(*state, run_tensors(self.model, self.optimiser)).save(self.folder / CHECKPOINT)

    def _valid_bits(self, limit: int | None = None) -> float | None:
        """Return the bits on the validation part, or on its first characters; None when they are not finite."""
        pieces = validation(self.corpus, self.settings.lengths, self.settings.length, limit)
        bits = bits_per_character(self.model, pieces)
        return bits if math.isfinite(bits) else None

    def _finish(self, diverged: int | None) -> TrainingResult:
        valid_bits = bound = None
        if diverged is None:
            valid_bits, bound = self._valid_bits(), self.model.attention_bound(self.settings.length)
        result = TrainingResult(
            self.settings,
            self.rows[-1]["train_bits"] if self.rows else None,
            valid_bits,
            bound,
            diverged,
            self.step * self.settings.batch_tokens,
            round(self.seconds, 3),
            sum(parameter.numel() for parameter in self.model.parameters()),
            self.corpus.how,
            self.corpus.sha256,
            self.rows,
        )
        self.ledger.write_json(RESULT, result.to_dict())
        return result


def _check_same(folder: Path, settings: TrainingSettings, text: str, wanted: TrainingSettings, corpus: Corpus) -> None:
    difference = settings.difference(wanted)
    if difference:
        raise InvalidInput(
            f"the run in {folder} has other settings (there ≠ here: {difference}): use the same, or choose "
            "another folder."
        )
    if text != corpus.sha256:
        raise InvalidInput(f"the run in {folder} was trained on another text: give the same, or choose another folder.")


@contextmanager
def _between_steps() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, so that the step is completed; the second interrupts at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
