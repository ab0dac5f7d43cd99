"""Single bytes of checkpoints and witnesses are changed: is every such file refused, or read with the same content?"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from evidence.tables import table
from howsmooth._util.common import digest
from howsmooth.errors import HowsmoothError
from howsmooth.papers.training import CharacterModel, TrainingSettings
from howsmooth.papers.training.run_files import TrainingCheckpoint, run_tensors
from howsmooth.search import Witness, worst_case
from howsmooth.sets import Ball

TITLE = "Are damaged files noticed?"
TRIALS = 600
Case = tuple[bytes, Callable[[Path], Any]]
_SETTINGS = TrainingSettings(attention="contractive-2", depth=1, width=8, heads=2, length=4, batch_tokens=8, steps=30)


def checkpoint_case() -> Case:
    """A checkpoint after one step, and how a run goes on from it."""
    torch.manual_seed(0)
    model, optimiser = fresh_run()
    model(torch.tensor([[0, 1, 2, 3]])).square().sum().backward()
    optimiser.step()
    tensors = run_tensors(model, optimiser)
    checkpoint = TrainingCheckpoint(7, _SETTINGS, "abc", "0" * 64, 1.5, [2.5, 2.25], tensors)
    return _file(checkpoint.save), _go_on


def witness_case() -> Case:
    """A witness of a small search, and all it says."""
    import howsmooth as hs

    found = worst_case(hs.SelfAttention.random(4, 2), 3, over=Ball(1.5), starts=1, steps=5, source={"source": "random"})
    return _file(found.save), _all_of_it


def fresh_run() -> tuple[CharacterModel, torch.optim.Optimizer]:
    """A model and its optimiser before the first step."""
    model = CharacterModel(_SETTINGS, symbols=4)
    return model, torch.optim.AdamW(model.groups(0.0), fused=True)


def damages(content: bytes, trials: int, seed: int = 0) -> Iterator[bytes]:
    """Copies with one byte changed, every second one by one bit, and every second one in the header."""
    draw = random.Random(seed)
    header = 8 + int.from_bytes(content[:8], "little")
    for trial in range(trials):
        place = draw.randrange(header if trial % 2 else len(content))
        change = 1 << draw.randrange(8) if trial // 2 % 2 else draw.randrange(1, 256)
        yield content[:place] + bytes([content[place] ^ change]) + content[place + 1 :]


def outcomes(case: Case, trials: int, seed: int = 0) -> Counter[str]:
    """How often a damaged file was refused, read with the same content, read with another one, or met an error."""
    content, read = case
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        path.write_bytes(content)
        sound = read(path)
        for damaged in damages(content, trials, seed):
            path.write_bytes(damaged)
            try:
                counts["same content" if read(path) == sound else "other content"] += 1
            except HowsmoothError as error:
                counts["refused" if "\n" not in str(error) else "other error"] += 1
            except Exception:
                counts["other error"] += 1
    return counts


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    rows = []
    for name, case in (("checkpoint", checkpoint_case), ("witness", witness_case)):
        progress(name)
        found = outcomes(case(), TRIALS)
        names = ("refused", "same content", "other content", "other error")
        rows.append([name, TRIALS, *(found[outcome] for outcome in names)])
    return [
        f"One byte of a file is changed, {TRIALS} times, every second time in its header and every second time by one "
        "bit. The file must be refused in one sentence, or give what the whole file gives: for a checkpoint all that "
        "the model, the optimiser and the random numbers are set to, for a witness everything it says.",
        table(["file", "changes", "refused", "same content", "other content", "other errors or crashes"], rows),
    ]


def _file(save: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "file.safetensors")
        return (Path(folder) / "file.safetensors").read_bytes()


def _go_on(path: Path) -> tuple[object, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        found = TrainingCheckpoint.load(path)
        model, optimiser = fresh_run()
        found.restore(model, optimiser)
        again = digest(run_tensors(model, optimiser))
        return found.step, found.settings, found.alphabet, found.text, found.seconds, found.losses, again


def _all_of_it(path: Path) -> dict[str, object]:
    found = Witness.load(path)
    said = vars(found) | {"x": found.x.tolist(), "ids": None, "measurement": found.measurement.to_dict(vectors=True)}
    return said
