"""Random calls of the whole public interface: each gives a number or one clear error, and leaves the world as it was.

`python -m evidence.fuzz_api 17 1234` makes the calls of these numbers again and shows what happens.
"""

from __future__ import annotations

import importlib
import inspect
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import howsmooth
from evidence import fuzz_arguments as pool
from evidence.tables import table
from howsmooth.errors import HowsmoothError

TITLE = "Does every call give a number or one clear error?"
CALLS, SECONDS, PROCESSES = 20000, 60.0, 2
PACKAGES = ("attention", "jacobians", "norms", "bounds", "meanfield", "search", "models", "nn", "scans", "reports")
PACKAGES += ("reports.figures", "reports.growth", "papers.training", "sets", "rounding", "certificates", "testing")
RESULTS = {"Measurement", "Explanation", "Growth", "Witness", "Scan", "MeasureWitness", "Sandwich", "Table", "Row"}
RESULTS |= {"HeadNumbers", "LocalConstant", "TwoAtom", "Field", "Stack", "Stage", "Setting", "Ellipsoid", "OpenModel"}
RESULTS |= {"Window", "AttentionInputs", "CapturedSite", "NamedModel", "Inversion", "LogDeterminant", "Group", "Cell"}
RESULTS |= {"Certificate", "Robustness", "Attack", "CachedJacobian"}
RESULTS |= {"Store", "Batch", "Checkpoint", "Result", "Status", "AttentionJacobian", "FunctionJacobian"}
RESULTS |= {"Bound", "Assumption", "Field", "Targets", "Comparison"}
RESULTS |= {
    "Law",
    "Plateau",
    "PowerLaw",
    "Allocation",
    "OutputErrors",
    "ActivationNoise",
    "Quantisation",
    "Scores",
    "Format",
}
RESULTS |= {"RoundedModel", "Alarm"}
RESULTS |= {"ComposedJacobian", "CompositeJacobian", "CapturedCross"}
"""What functions return: their constructors are no doors, their class methods are."""
ABSTRACT = {"AttentionMap", "LogitBias", "JacobianOperator", "InputSet", "AttentionLayer"}
WATCHING = {"nn.JacobianPenalty", "nn.SoftmaxJacobianPenalty", "nn.SmoothnessMonitor", "nn.SpectralCaps"}
"""Objects that stay with a model by hooks, which is what they are for."""
REPLACING = {"nn.replace_attention"}
"""It puts other modules into the model it is given, with hooks and flags of their own."""
DRAWING = ("nn.", "papers.CharacterModel", "papers.UntiedL2Attention")
"""Layers draw their first weights from the random numbers of torch, as all layers of torch do."""
CALLBACKS = ("progress", "files", "wanted", "transform")
"""Functions of the caller, called by these names: their errors are the caller's."""
NAN = {"papers.evaluate": "says so", "nn.load_replaced": "weights of a file"}
"""Where NaN is documented."""
UNKNOWN = (howsmooth.Measurement, "scale")
"""|X|/|f(X)|, which is documented to be NaN where f(X) is zero."""
ASSERTING = "testing.check_"
"""What says by an `AssertionError` of one sentence that something does not hold."""
_HEADROOM = 3 * 2**30


@dataclass(frozen=True)
class Call:
    """A function and the names of its arguments."""

    target: str
    positional: tuple[str, ...]
    named: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        said = [*self.positional, *(f"{name}=<{value}>" for name, value in self.named)]
        return f"{self.target}({', '.join(said)})"


@dataclass(frozen=True)
class Outcome:
    """What came of a call: returned, refused, wrong call, or a fault in a word, and what was said."""

    number: int
    call: str
    kind: str
    said: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether a promise was broken."""
        return self.kind not in ("returned", "refused", "wrong call")


@cache
def targets() -> dict[str, Callable[..., Any]]:
    """Every public function, class and class method by name; what several packages show is named by its own."""
    found: dict[str, Callable[..., Any]] = {}
    for package in ("", *PACKAGES):
        module = importlib.import_module(f"howsmooth.{package}".rstrip("."))
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
                continue
            home = f"{thing.__module__.split('.')[1]}.{name}"
            if name not in RESULTS | ABSTRACT:
                found[home] = thing
            if inspect.isclass(thing):
                found |= {f"{home}.{part}": getattr(thing, part) for part in _class_methods(thing)}
    found["bounds.get.call"] = _bound
    found["scans.scan"] = _scan
    found["nn.AttentionLayer.lipschitz_bound"] = _layer_bound
    return dict(sorted(found.items()))


def _scan(
    model: Any,
    text: Any = None,
    *,
    lengths: Any = None,
    windows: Any = 1,
    layers: Any = None,
    what: Any = "head",
    out: Any = None,
    resume: Any = True,
    tokenizer: Any = None,
    device: Any = None,
    dtype: Any = None,
    device_map: Any = None,
    column: Any = None,
    reference: Any = None,
    progress: Any = None,
    executor: Any = None,
    jobs: Any = None,
    timeout: Any = 3600.0,
    shard: Any = None,
    **settings: Any,
) -> Any:
    """`howsmooth.scan` with the names of its options, which it takes as one dataclass."""
    options = {name: value for name, value in locals().items() if name != "settings"}
    return howsmooth.scan(**options, **settings)


def _class_methods(kind: type) -> Iterator[str]:
    for name in dir(kind):
        thing = inspect.getattr_static(kind, name)
        ours = getattr(getattr(kind, name), "__module__", "") or ""
        if isinstance(thing, classmethod) and not name.startswith("_") and ours.startswith("howsmooth"):
            yield name


def _bound(name: str, attention: Any, per_head: bool = False, **where: Any) -> Any:
    from howsmooth import bounds

    return bounds.get(name)(attention, per_head=per_head, **where)


def _layer_bound(n: Any, radius: Any = None, norm: Any = "2", mask: Any = None) -> Any:
    return pool.make("l2 layer").lipschitz_bound(n, radius=radius, norm=norm, mask=mask)


def draw(number: int, seed: int = 0) -> Call:
    """The call of that number: right arguments, and usually one or two that are odd or wrong."""
    dice = random.Random(f"{seed} {number}")
    known = targets()
    target = dice.choice(list(known))
    parameters = list(inspect.signature(known[target]).parameters.values())
    if target == "bounds.get.call":
        where = ("n", "over")
        parameters = parameters[:3] + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in where]
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wrong = {p.name for p in dice.sample(plain, min(len(plain), dice.choice((0, 0, 0, 1, 1, 1, 1, 2, 2, 9))))}
    named = []
    for p in plain:
        required = p.default is p.empty or p.name in pool.ALWAYS
        if p.name in wrong or (required and dice.random() > 0.02) or dice.random() < 0.25:
            named.append((p.name, _value(dice, target, p.name, p.name in wrong)))
    if dice.random() < 0.02:
        named.append((dice.choice(("rtoll", "sead", "maks")), "one"))
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    loose = tuple(_value(dice, target, "query", dice.random() < 0.3) for _ in range(3)) if rest else ()
    return Call(target, loose, tuple(named))


def _value(dice: random.Random, target: str, name: str, wrong: bool) -> str:
    right = pool.SPECIAL.get(f"{target}.{name}") or pool.BY_NAME.get(name)
    if right and not wrong:
        return dice.choice(right)
    if right and dice.random() < 0.25:
        return f"{pool.NAN_IN}{dice.choice(right)}"
    odd = [value for value in pool.ODD if not (name in pool.LASTING and value in pool.HUGE)]
    return dice.choice(odd if dice.random() < 0.8 else list(pool.RIGHT))


def perform(number: int, seed: int = 0) -> Outcome:
    """Make a call and judge what comes of it."""
    call = draw(number, seed)
    function = targets()[call.target]
    arguments = {name: pool.make(value) for name, value in call.named}
    loose = [pool.make(value) for value in call.positional]
    before, given = _world(arguments), _contents(arguments)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        kind, said = _judged(call, function, loose, arguments)
    heard = [w for w in heard if "torch.jit.script" not in str(w.message)]  # torch's own, see pyproject.toml
    after = _world(arguments)
    changed = [name for name in before if before[name] != after[name]]
    if call.target.startswith(DRAWING) and "torch random numbers" in changed:
        changed.remove("torch random numbers")
    if call.target in WATCHING and "hooks" in changed:
        changed.remove("hooks")
    if call.target in REPLACING:
        changed = [name for name in changed if name not in ("hooks", "training flags")]
    if heard and kind in ("returned", "refused"):
        kind, said = "warning", f"{heard[0].category.__name__}: {heard[0].message}"
    if changed:
        kind, said = "state changed", ", ".join(changed)
    if not _same(given, _contents(arguments)):
        kind, said = "argument changed", ""
    _restore()
    return Outcome(number, str(call), kind, said[:300])


def _judged(call: Call, function: Callable[..., Any], loose: list[Any], arguments: dict[str, Any]) -> tuple[str, str]:
    try:
        found = function(*loose, **arguments)
        if inspect.isgenerator(found):
            found = list(found)
    except HowsmoothError as error:
        words = str(error)
        fits = words and "\n" not in words.strip() and len(words) < 2000
        return ("refused", words) if fits else ("unclear error", words)
    except AssertionError as error:
        return ("refused", str(error)) if call.target.startswith(ASSERTING) and str(error) else _bare(error)
    except TypeError as error:
        return ("wrong call", str(error)) if _does_not_fit(function, loose, arguments, error) else _bare(error)
    except BaseException as error:
        return _bare(error)
    if call.target not in NAN and _holds_nan(found, skip=_modules(arguments)):
        return "nan", repr(found)
    return "returned", type(found).__name__


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(Path(howsmooth.__file__).parent)


def _bare(error: BaseException) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _is_ours(frame)]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    called = ours and any(f"{name}(" in (ours[-1].line or "") for name in CALLBACKS)
    told = any(note.startswith("howsmooth called f ") for note in getattr(error, "__notes__", ()))
    if frames and (called or told or Path(frames[-1].filename) == Path(pool.__file__)):
        return "refused", "the error of the function that was given"
    return "bare error", f"{type(error).__name__}: {' '.join(str(error).split())} ({where})"


def _does_not_fit(function: Callable[..., Any], loose: list[Any], arguments: dict[str, Any], error: TypeError) -> bool:
    alone = not any(map(_is_ours, traceback.extract_tb(error.__traceback__)))
    try:
        inspect.signature(function).bind(*loose, **arguments)
    except TypeError:
        return True
    return bool({"rtoll", "sead", "maks"} & arguments.keys()) or alone  # passed on by **options, or by *args


def _modules(arguments: Mapping[str, Any]) -> frozenset[int]:
    """The modules that were given, with all their parts: what keeps one keeps its weights as they are."""
    given = [value for value in arguments.values() if isinstance(value, nn.Module)]
    return frozenset(id(part) for module in given for part in module.modules())


def _holds_nan(value: Any, depth: int = 0, skip: frozenset[int] = frozenset()) -> bool:
    """Whether there is a NaN anywhere in what was returned, in the modules to ``skip`` excepted."""
    if isinstance(value, Tensor):
        readable = value.layout is torch.strided and not value.is_meta and not value.is_nested
        return readable and not value.is_quantized and value.is_floating_point() and bool(value.isnan().any())
    if isinstance(value, float | np.floating):
        return math.isnan(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and bool(np.isnan(value).any())
    if depth > 6 or isinstance(value, str | bytes | int | type(None)):
        return False
    if isinstance(value, nn.Module):
        own = [part for part in value.modules() if id(part) not in skip]
        held = [t for part in own for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
        return any(_holds_nan(tensor) for tensor in held if not _uninitialised(tensor))
    if isinstance(value, Mapping):
        return any(_holds_nan(part, depth + 1, skip) for part in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_nan(part, depth + 1, skip) for part in value)
    ours = type(value).__module__.startswith("howsmooth")
    if ours and hasattr(value, "__dict__"):
        parts = {name: part for name, part in vars(value).items() if (type(value), name) != UNKNOWN}
        return any(_holds_nan(part, depth + 1, skip) for part in parts.values())
    return False


def _uninitialised(tensor: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


def _world(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a call may not change."""
    modules = [value for value in arguments.values() if isinstance(value, nn.Module)]
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch random numbers": hash(torch.get_rng_state().numpy().tobytes()),
        "random numbers of Python": hash(random.getstate()),
        "random numbers of numpy": hash(np.random.get_state()[1].tobytes()),  # type: ignore[index, union-attr]  # noqa: NPY002
        "signals": (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
        "folder": os.getcwd(),
        "environment": hash(tuple(sorted(os.environ.items()))),
        "training flags": [part.training for module in modules for part in module.modules()],
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for m in modules for part in m.modules()],
    }


def _contents(arguments: Mapping[str, Any]) -> list[Any]:
    kept = []
    for value in arguments.values():
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_nested:
            kept.append((value, value.detach().clone()))
        elif isinstance(value, list | dict):
            kept.append((value, repr(value)))
    return kept


def _same(before: list[Any], after: list[Any]) -> bool:
    return all(
        repr(old[1]) == repr(new[1]) if isinstance(old[1], str) else _equal(old[1], new[1])
        for old, new in zip(before, after, strict=True)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_quantized or one.shape != other.shape:
        return torch.equal(one, other)
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _restore() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)


def run(
    numbers: Sequence[int], seed: int = 0, processes: int = PROCESSES, progress: Callable[[str], None] = lambda s: None
) -> list[Outcome]:
    """The calls of these numbers, in processes of their own, which may crash and are ended when they hang."""
    context = multiprocessing.get_context("fork")
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a process that is forked while threads of torch are at work may hang
        pool.prepare()
        try:
            waiting = [list(numbers[part::processes]) for part in range(processes)]
            workers = [_Worker(context, some, seed) for some in waiting if some]
            while workers:
                multiprocessing.connection.wait([worker.pipe for worker in workers], timeout=1.0)
                for worker in workers:
                    found += worker.news()
                workers = [worker for worker in workers if worker.left]
                progress(f"{len(found)} of {len(numbers)} calls, {sum(one.is_fault for one in found)} faults")
        finally:
            torch.set_num_threads(threads)
    return sorted(found, key=lambda one: one.number)


class _Worker:
    """A process at work on a list of calls, and one after it where it died or was ended."""

    def __init__(self, context: Any, numbers: list[int], seed: int):
        self.context, self.left, self.seed = context, numbers, seed
        self._begin()

    def _begin(self) -> None:
        self.pipe, far = self.context.Pipe(duplex=False)
        self.process = self.context.Process(target=_work, args=(far, list(self.left), self.seed), daemon=True)
        self.process.start()
        far.close()
        self.since = time.monotonic()

    def news(self) -> list[Outcome]:
        """What it has finished; a call that took too long or took the process down is a fault of its own."""
        found: list[Outcome] = []
        try:
            while self.left and self.pipe.poll():
                found.append(self.pipe.recv())
                self.left.remove(found[-1].number)
                self.since = time.monotonic()
        except EOFError:
            self.process.join()
            found.append(self._lost(f"crash ({self.process.exitcode})"))
        if self.left and time.monotonic() - self.since > SECONDS:
            self.process.kill()
            self.process.join()
            found.append(self._lost("hang"))
        if not self.left:
            self.process.join()
        return found

    def _lost(self, kind: str) -> Outcome:
        number = self.left.pop(0)
        if self.left:
            self._begin()
        return Outcome(number, str(draw(number, self.seed)), kind)


def _work(pipe: Any, numbers: list[int], seed: int) -> None:
    """Make the calls one after the other and report each; memory is limited to a few GiB more than there is now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + _HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    for number in numbers:
        pipe.send(perform(number, seed))
    pipe.close()


def summary(found: Sequence[Outcome]) -> str:
    """A table of outcomes by package."""
    kinds = ["returned", "refused", "wrong call"]
    kinds += sorted({one.kind.partition(" (")[0] for one in found} - set(kinds))
    rows = []
    for package in [*sorted({one.call.partition(".")[0] for one in found}), "all"]:
        some = [one for one in found if package in ("all", one.call.partition(".")[0])]
        counts = Counter(one.kind.partition(" (")[0] for one in some)
        rows.append([package, len(some), *(counts[kind] for kind in kinds)])
    return table(["package", "calls", *kinds], rows)


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    found = run(range(CALLS), progress=progress)
    faults = [one for one in found if one.is_fault]
    listed = [
        [one.number, f"`{one.call}`".replace("|", "\\|"), one.kind, one.said.replace("|", "\\|")] for one in faults
    ]
    return [
        f"{CALLS} random calls of {len(targets())} public functions, classes and class methods (seed 0). Arguments are "
        f"right, odd or wrong: {len(pool.RIGHT)} and {len(pool.ODD)} kinds, among them tensors of every dtype and "
        "layout, NaN, infinities, huge numbers, functions that raise, modules, paths. A call must return without a "
        "NaN, also when it was given one (only a module that it was given and keeps may hold NaN among its weights), "
        "or raise one of this package's errors in one line, or a TypeError where it does not fit the signature; "
        "an error of a function that was given passes through. It may not warn, hang, crash, change its arguments, or "
        "leave anything changed: default dtype, threads, gradient mode, random numbers, training flags, hooks, "
        "signals, folder, environment.",
        summary(found),
        *([table(["call", "", "fault", "said"], listed)] if listed else ["No promise was broken."]),
    ]


def _main(numbers: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        pool.prepare()
        for number in map(int, numbers):
            call = draw(number)
            print(number, call)
            try:
                arguments = {name: pool.make(value) for name, value in call.named}
                print(targets()[call.target](*(pool.make(value) for value in call.positional), **arguments))
            except BaseException:
                traceback.print_exc()
            print(perform(number))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
