"""Scans that are killed, interrupted, or run out of disk, and then finished: is anything lost, repeated or different?

`python -m evidence.scan_faults FOLDER OUT` runs the small scan of this page once, in a process that can be killed.
"""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.tables import table
from howsmooth.scans import Store, scan
from howsmooth.scans.plan import ScanProgress

TITLE = "Does a scan survive being killed?"
ROOT = Path(__file__).resolve().parents[1]
WORDS = [f"w{i}" for i in range(60)]
TEXT = "text.txt"
KILLS = 20
HELD = 0.8
"""The share of its work after which a scan waits for its input to end, so that no signal comes too late."""


@dataclass(frozen=True)
class Size:
    """How large the scan is."""

    lengths: str = "8,12,16,24,32"
    windows: int = 12
    what: str = "head,attention"


@dataclass
class Story:
    """What happened to a store over many runs."""

    kept: list[int] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    lost: int = 0
    changed: int = 0

    @property
    def begun_again(self) -> int:
        """Batches that more than one run has begun."""
        return len(self.begun) - len(set(self.begun))


def make_model(folder: Path) -> None:
    """A random BERT of two layers with a tokenizer of sixty words, and a text to read."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids = {word: place for place, word in enumerate(special + WORDS)}
    config = BertConfig(
        vocab_size=len(ids),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    (folder / TEXT).write_text(" ".join(random.Random(0).choices(WORDS, k=3000)), encoding="utf-8")


def measure(folder: Path, out: Path, size: Size) -> None:
    """The scan to its end, in a process of its own: what a process did before may change the last bits."""
    _, last_words = start(folder, out, size).communicate(timeout=300)
    assert not last_words, last_words


def _scan(folder: Path, out: Path, size: Size, progress: Callable[[ScanProgress], None]) -> None:
    scan(
        str(folder),
        folder / TEXT,
        lengths=size.lengths,
        windows=size.windows,
        what=size.what,
        out=out,
        progress=progress,
    )


def contents(out: Path) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """All that a sound store holds, by cell, every bit of it but the time it took."""
    with Store.reading(out) as store:
        store.check()
        tokens = {(w["length"], w["window"]): (w["start"], *w["tokens"]) for w in store.windows()}
        rows = store.rows()
    place = ("what", "layer", "head", "length", "window")
    return {
        tuple(row[name] for name in place): (
            *((name, str(value)) for name, value in row.items() if name != "seconds"),
            tokens[row["length"], row["window"]],
        )
        for row in rows
    }


def start(
    folder: Path, out: Path, size: Size, most_bytes: int | None = None, held: bool = False
) -> subprocess.Popen[str]:
    """The scan in a process of its own, which prints a line before every batch and may write files up to a size.

    One that is held cannot end before its input does.
    """

    def limit() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell begin without it
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    command = [sys.executable, "-m", "evidence.scan_faults", folder, out, size.lengths, str(size.windows), size.what]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["stdin"] = subprocess.PIPE if held else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=limit, **pipes)


def disturb(process: subprocess.Popen[str], how: int, delay: float) -> tuple[list[str], str]:
    """Send a signal some time after the first batch began; the lines the process printed, and its last words."""
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(delay)
    process.send_signal(how)
    rest, last_words = process.communicate(timeout=120)
    return [
        line for line in (first + rest).splitlines() if not line.endswith(("reading", "done", "interrupted"))
    ], last_words


def kill_repeatedly(folder: Path, out: Path, size: Size, kills: int, longest: float, seed: int = 0) -> Story:
    """Kill the scan again and again, each time at a random moment, and look at the store after every kill."""
    draw, story = random.Random(seed), Story()
    before: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for _ in range(kills):
        lines, _ = disturb(start(folder, out, size, held=True), signal.SIGKILL, draw.uniform(0.0, longest))
        story.begun += lines
        now = contents(out)
        story.lost += len(before.keys() - now.keys())
        story.changed += sum(now.get(cell, kept) != kept for cell, kept in before.items())
        story.kept.append(len(now))
        before = now
    return story


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    size = Size()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("uninterrupted")
        make_model(folder)
        measure(folder, folder / "whole.sqlite", size)
        whole = contents(folder / "whole.sqlite")
        progress(f"{KILLS} kills")
        story = kill_repeatedly(folder, folder / "killed.sqlite", size, KILLS, longest=0.6)
        measure(folder, folder / "killed.sqlite", size)
        again = contents(folder / "killed.sqlite")
    differing = sum(again.get(cell) != content for cell, content in whole.items())
    return [
        f"A scan of {len(whole)} cells (a random BERT of two layers; heads and blocks, lengths {size.lengths}, "
        f"{size.windows} windows) is killed with SIGKILL at {KILLS} random moments, up to 0.6 s after it has begun to "
        "measure, and started again each time. After every kill the store must pass SQLite's `integrity_check` and "
        "`foreign_key_check`. Then it is left to finish and compared, bit by bit, with the store of a scan that was "
        "never disturbed; only the seconds are left out.",
        table(
            ["", "count"],
            [
                ["kills", KILLS],
                ["cells kept at the kills", f"{min(story.kept)} to {max(story.kept)}"],
                ["cells lost by a kill", story.lost],
                ["cells changed by a kill", story.changed],
                ["batches begun again (at most the one that each kill cut off)", story.begun_again],
                ["cells in the finished store, and in the undisturbed one", f"{len(again)}, {len(whole)}"],
                ["cells that differ", differing],
            ],
        ),
    ]


def _main(folder: str, out: str, lengths: str, windows: str, what: str) -> int:
    """Run the scan, print what begins, and say in one line why it ended early."""
    from howsmooth.errors import HowsmoothError

    def show(now: ScanProgress) -> None:
        print(now.label, flush=True)
        if now.work >= HELD:
            sys.stdin.read()

    try:
        _scan(Path(folder), Path(out), Size(lengths, int(windows), what), show)
    except HowsmoothError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
