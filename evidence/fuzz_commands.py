"""Random command lines, mostly sensible, over sound and hostile files: each must end as the documentation says."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.fuzz_grammar import OPTIONS, draw_command
from evidence.fuzz_inputs import digests, make_inputs
from evidence.tables import table

TITLE = "Does any command line end in a crash?"
CASES = 1500
SECONDS, BUSY = 60, 10
"""Seconds of computing before a command counts as hanging, and how many times longer it may take on a busy machine;
most take less than one."""
ROOM = 6 * 2**30
"""Address space that a command may take beyond what it begins with."""
DOCUMENTED = (0, 1, 2, 3, 129, 130, 141, 143)
"""Exit codes that are no fault; 70 is an error that nobody foresaw."""
_WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


@dataclass(frozen=True)
class Case:
    """A command line, which of its paths it may write to, the signal that it is sent, and which input is damaged."""

    args: tuple[str, ...]
    outputs: frozenset[str] = frozenset()
    stop: int | None = None
    after: float = 0.0
    damaged: str | None = None
    seed: int = 0

    def __str__(self) -> str:
        stop = f" (signal {self.stop})" if self.stop else ""
        return (
            " ".join(["howsmooth", *map(repr, self.args)]) + stop + (f" ({self.damaged} damaged)" * bool(self.damaged))
        )

    def damage(self, place: Path) -> None:
        """Change a few random bytes of the input that is to be damaged."""
        path = place / (self.damaged or "")
        if self.damaged and path.is_file() and (content := bytearray(path.read_bytes())):
            draw = random.Random(self.seed)
            for at in draw.choices(range(len(content)), k=draw.choice([1, 1, 2, 8])):
                content[at] = draw.randrange(256)
            path.write_bytes(content)


@dataclass
class Ending:
    """How a command ended: None for the code of one that did not."""

    code: int | None
    out: str
    err: str
    seconds: float
    strayed: list[str] = field(default_factory=list)


def draw_case(seed: int) -> Case:
    """The command line of a seed."""
    draw = random.Random(seed)
    args, outputs = draw_command(draw)
    if draw.random() < 0.06:
        return Case(args, outputs, draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]), draw.uniform(0, 1))
    files = [arg for arg in args if arg.startswith("inputs/")]
    if files and draw.random() < 0.15:
        return Case(args, outputs, damaged=draw.choice(files), seed=seed)
    return Case(args, outputs)


def problems(case: Case, ending: Ending, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What a command did that none may do."""
    found = [f"wrote to {path}" for path in ending.strayed]
    code, lines = ending.code, ending.err.splitlines()
    if code is None:
        found.append("did not end")
    elif code not in DOCUMENTED and not (case.stop and code == -case.stop):  # it came before the command had begun
        found.append(f"exit code {code}")
    if "Traceback" in ending.err + ending.out and "--debug" not in case.args:
        found.append("traceback")
    if "howsmooth: unexpected " in ending.err:
        found.append("unexpected error")
    refused = code == 2 and "--debug" not in case.args and not ending.out.strip().startswith("Usage:")
    if refused and not (len(lines) == 1 and lines[0].startswith("howsmooth: ")):
        found.append(f"{len(lines)} lines of error")
    if code in (0, 1) and not all(line.startswith("howsmooth: ") for line in lines):
        found.append("noise on stderr")
    if any(unicodedata.category(letter) in ("Cc", "Cf") and letter != "\n" for letter in ending.out + ending.err):
        found.append("controls in the output")
    if code in (0, 1) and "--json" in case.args and "--help" not in case.args and not _is_json(ending.out):
        found.append("--json is no JSON")
    found += [f"changed {name}" for name, said in before.items() if after.get(name) != said and not _may(case, name)]
    return found


def _may(case: Case, name: str) -> bool:
    """Whether the command was told to write to this input."""
    return any(Path("inputs", name).is_relative_to(output) for output in case.outputs)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class Playground:
    """A folder with a fresh copy of all inputs for every command, which runs in a fork of this process."""

    def __init__(self, folder: Path):
        self.folder, self.inputs = folder, folder / "originals"
        make_inputs(self.inputs)

    def run(self, case: Case) -> tuple[Ending, list[str]]:
        """How the command ends, and what is wrong with that."""
        place = self.folder / "case"
        shutil.copytree(self.inputs, place / "inputs", symlinks=True)
        for folder in ("out", "temporary"):
            (place / folder).mkdir()
        try:
            case.damage(place)
            before = digests(place / "inputs")
            ending = run_forked(case, place)
            left = [path.name for path in (place / "temporary").iterdir() if not path.name.startswith(_OF_TORCH)]
            wrong = problems(case, ending, before, digests(place / "inputs"))
            return ending, wrong + [f"left {name} among the temporary files" for name in left]
        finally:
            shutil.rmtree(place)


@contextmanager
def playground() -> Iterator[Playground]:
    """A playground in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield Playground(Path(folder).resolve())


def run_forked(case: Case, place: Path) -> Ending:
    """The command in a fork of this process, which has imported all that takes long."""
    import howsmooth.cli  # noqa: F401  (before the fork, once for all)

    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(case, place)
    code = _wait(child, case, began)
    out, err = (place.parent / f"case.{name}" for name in ("out", "err"))
    said = [path.read_text(encoding="utf-8", errors="surrogateescape") for path in (out, err)]
    strays = [line.removeprefix(_STRAY) for line in said[1].splitlines() if line.startswith(_STRAY)]
    rest = "".join(line + "\n" for line in said[1].splitlines() if not line.startswith(_STRAY))
    return Ending(code, said[0], rest, time.monotonic() - began, strays)


_STRAY = "stray write: "
_OF_TORCH = "torchinductor_"
"""How a folder begins that torch makes for itself in the temporary one when its compiler is imported."""


def _wait(child: int, case: Case, began: float) -> int | None:
    stop, pause = case.stop, 0.002
    while time.monotonic() - began < SECONDS * BUSY:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        if stop is not None and time.monotonic() - began > 0.05 + case.after:
            os.kill(child, stop)
            stop = None
        time.sleep(pause)
        pause = min(0.05, 1.3 * pause)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _child(case: Case, place: Path) -> None:
    """Never returns: becomes the command, with its streams in files and writes elsewhere noted."""
    code: Any = 99
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(place)
        for number, name in ((0, os.devnull), (1, "../case.out"), (2, "../case.err")):
            os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        _fresh_streams()
        tempfile.tempdir = os.environ["TMPDIR"] = str(place / "temporary")
        os.environ["HOWSMOOTH_CACHE"] = str(place / "cache")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        sys.addaudithook(_watch(place))
        from howsmooth.cli import main

        signal.signal(signal.SIGINT, signal.default_int_handler)
        main(case.args)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def _fresh_streams() -> None:
    """Streams as an interpreter has them: those of a test runner go elsewhere."""
    import torch

    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)


def _watch(place: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Note every write outside the folder of the case, and refuse the network."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            raise OSError("no network here")
        if event == "sqlite3.connect":
            _note(str(args[0]).removeprefix("file:").partition("?")[0])
        elif event in _WRITES and not (event == "open" and not _for_writing(args)):
            _note(args[1] if event in ("os.rename", "os.link", "os.symlink") else args[0])

    def _note(path: Any) -> None:
        if not isinstance(path, str | bytes) or path == ":memory:":
            return
        whole = os.path.realpath(os.fsdecode(path))
        if not whole.startswith((f"{place}/", "/dev/", "/proc/")) and whole != str(place) and _OF_TORCH not in whole:
            os.write(2, f"{_STRAY}{whole}\n".encode(errors="replace"))

    return hook


def _for_writing(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


Fault = tuple[int, Case, list[str], str]
"""A seed, its command line, what is wrong, and the end of what it wrote on stderr."""


@dataclass
class Tally:
    """What came of many command lines."""

    codes: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def fuzz(
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
    tell: Callable[[Fault], None] = lambda fault: None,
) -> Tally:
    """Run the command line of every seed; faults are told as they are found."""
    tally = Tally()
    with playground() as ground:
        for seed in seeds:
            case = draw_case(seed)
            progress(f"{len(tally.seconds)} of {len(seeds)}: {case.args[:1]}, {len(tally.faults)} faults")
            ending, wrong = ground.run(case)
            tally.codes[str(ending.code)] += 1
            tally.commands[case.args[0] if case.args else ""] += 1
            tally.seconds.append(ending.seconds)
            if wrong:
                tally.faults.append((seed, case, wrong, ending.err[-400:]))
                tell(tally.faults[-1])
    return tally


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    return said_of(fuzz(range(CASES), progress))


def said_of(tally: Tally) -> list[str]:
    """What came of the seeds from 0 on, for the documentation."""
    cases = len(tally.seconds)
    said = {"0": "done", "1": "done, not converged", "2": "refused in one line", "129": "terminal closed"}
    said |= {"130": "interrupted", "143": "terminated", "141": "broken pipe"}
    said |= {str(-number): "stopped before the command had begun" for number in (1, 2, 15)}
    commands = ", ".join(f"{name} {tally.commands[name]}" for name in OPTIONS)
    rows = [[code, said.get(code, "fault"), count] for code, count in sorted(tally.codes.items())]
    return [
        f"{cases} command lines, drawn from the seeds 0 to {cases - 1}: all commands with mostly sensible options and "
        "some odd ones, over sound, damaged and hostile files (weights, models, stores, witnesses, texts, TOML of "
        "every wrong type), some with an input of which a few bytes are changed, some stopped by a signal at a random "
        f"moment. By command: {commands}.",
        "Each runs in a process of its own with a fresh copy of all files and must end within a minute of computing, "
        "with a documented exit code, without a traceback or unexpected error, with one line on stderr if it refuses, "
        "without controls in its output, with valid JSON where that was asked for, and must not change a file that it "
        "was only given to read, nor write outside its folder, nor leave temporary files.",
        table(["exit code", "meaning", "commands"], rows),
        f"Faults: {len(tally.faults)}."
        + "".join(f"\n- seed {seed}: {', '.join(wrong)}" for seed, _, wrong, _ in tally.faults),
    ]


if __name__ == "__main__":
    first, last = (int(word) for word in sys.argv[1:3])
    result = fuzz(
        range(first, last), tell=lambda f: print(f"{f[0]}: {f[1]}\n   {'; '.join(f[2])}\n   {f[3]!r}", flush=True)
    )
    print(f"{dict(result.codes)}, longest {max(result.seconds):.1f} s, sum {sum(result.seconds):.0f} s")
    sys.exit(bool(result.faults))
