"""Small helpers that every package uses.

Numbers rounded to the side where they hold, random streams, digests, modules in evaluation, the tensor of an output,
files written atomically, by one process at a time and never over an input, text made safe to show.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import InvalidInput

if TYPE_CHECKING:  # torch takes a second to import, and the first line of a help is due before
    import torch
    from torch import Tensor, nn

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, direction marks, halves of pairs, line separators
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_NO_ROOM = re.compile(
    r"(can't|cannot) allocate memory|not enough memory|out of memory|failed to allocate|invalid buffer size|"
    r"DefaultCPUAllocator|bad_alloc",
    re.IGNORECASE,
)


FORMATS = (".png", ".svg", ".pdf")
"""Endings of the files that a picture can be written to."""


def check_figure_path(path: Path) -> None:
    """Refuse a file name that no picture can be written to, before any work is done."""
    if not isinstance(path, Path):
        raise InvalidInput(f"a picture is written to a pathlib.Path, not to {type(path).__name__}.")
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"{path} does not end like a picture: use {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder of {path} does not exist: create it first.")


class Busy(InvalidInput):
    """A file or folder that another process, or another thread, works in."""


def rounded(x: float, rounding: str = ROUND_HALF_EVEN, digits: int = 5) -> str:
    """``x`` in few digits, rounded towards the side on which the statement stays true.

    >>> rounded(1.23456, digits=4), rounded(1.23456, "ROUND_FLOOR"), rounded(1.23451, "ROUND_CEILING")
    ('1.235', '1.2345', '1.2346')
    """
    if not math.isfinite(x):
        return "∞" if x > 0 else str(x)
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(x))):.{digits}g}"


def relative_error(value: Tensor, reference: Tensor, offset: Tensor | None = None) -> float:
    """‖value − reference‖ / ‖reference − offset‖: 0 when they agree, infinite when only the denominator vanishes.

    >>> import torch
    >>> relative_error(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]))
    0.5
    >>> relative_error(torch.tensor([3.0]), torch.tensor([2.0]), offset=torch.tensor([1.0]))
    1.0
    """
    import torch

    size = reference if offset is None else reference - offset
    error, scale = (float(torch.linalg.vector_norm(difference)) for difference in (value - reference, size))
    return 0.0 if error == 0 else error / scale if scale else math.inf


def foreign_hooks(module: nn.Module) -> int:
    """The number of forward hooks, which may change the output of a module, of neither howsmooth nor transformers.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.register_forward_pre_hook(print)
    >>> foreign_hooks(layer)
    1
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    plain = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    homes = [getattr(hook, "__module__", "").partition(".")[0] for hook in plain]
    return sum(home not in ("howsmooth", "transformers") for home in homes)


def random_stream(seed: int, purpose: str) -> torch.Generator:
    """Random numbers for one purpose, unrelated to what ``torch.manual_seed(seed)`` or another purpose would draw.

    The upper end needs a start that has nothing to do with the operator. With the seed itself, the start would be the
    very input of someone who wrote ``torch.manual_seed(0); x = torch.randn(n, d)`` and left ``seed=0``.

    >>> import torch
    >>> plain = torch.randn(4, generator=torch.Generator().manual_seed(0))
    >>> torch.equal(plain, torch.randn(4, generator=random_stream(0, "start")))
    False
    """
    import torch

    mixed = hashlib.sha256(f"howsmooth {purpose} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))


def digest(tensors: Mapping[str, Tensor], preface: bytes = b"") -> str:
    """SHA-256 of a preface and then of tensors in the order of their names, each with name, dtype, shape and numbers.

    >>> import torch
    >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(2, 1)})
    False
    """
    import torch

    total = hashlib.sha256(preface)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous().flatten()
        total.update(f"{name} {tensor.dtype} {tuple(tensors[name].shape)}\n".encode("utf-8", "surrogatepass"))
        total.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module as at evaluation; every part in its own mode again when the block ends.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(net):
    ...     [layer.training for layer in net]
    [False, False]
    >>> [layer.training for layer in net]
    [True, False]
    """
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def first_tensor(output: Any) -> Tensor:
    """The tensor in the result of a function or model.

    A tensor is itself; a transformers ``ModelOutput`` gives ``last_hidden_state`` or else its first tensor; a tuple,
    list or mapping gives the first tensor in it, however deep.

    >>> import torch
    >>> first_tensor((None, (torch.ones(2), "text"), torch.zeros(3)))
    tensor([1., 1.])
    """
    tensor = next(_tensors(output), None)
    if tensor is None:
        kind = type(output).__name__
        raise InvalidInput(f"f returned no tensor but {kind}: make it return the tensor to differentiate.")
    return tensor


def _tensors(output: Any) -> Iterator[Tensor]:
    from torch import Tensor

    named = getattr(output, "last_hidden_state", None)
    if isinstance(named, Tensor):
        output = named
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time, by a lock on a file of this name, which is empty and removed afterwards.

    The folder is made when missing. The lock ends with the process that holds it, however that ends.

    Raises:
        Busy: somebody else holds it.
        InvalidInput: there is a link, a folder or a file with content, which is no lock.
        OSError: none can be made there, or the file system has no locks: a file that only marks one would outlive a
            process that is killed, and stop every later one.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and (not path.is_file() or path.stat().st_size)):
        raise InvalidInput(f"{path} is in the way: it is no lock of howsmooth, so remove it, or take another name.")
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(f"{path} is held by another process: wait until it ends.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        path.unlink(missing_ok=True)
        raise OSError(error.errno, "its file system has no locks") from error
    try:
        yield
    finally:
        with suppress(OSError):  # where an open file cannot be removed, an empty one stays
            path.unlink()
        lock.release()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a fresh temporary name in the same folder, then rename it: it is never seen half-written.

    The temporary name cannot be guessed and is created exclusively, so a link planted beside the file is not followed.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


Named = tuple[str, Path | str | None]


def distinct_files(read: Iterable[Named], written: Iterable[Named]) -> None:
    """Refuse to write over what is read, or twice to the same file; links count as the files they lead to.

    Args:
        read, written: a name of each file, for the message, and its path; None for none.

    >>> distinct_files(read=[("--text", "a.txt")], written=[("--out", "s.sqlite"), ("--export", "./s.sqlite")])
    Traceback (most recent call last):
    ...
    howsmooth.errors.InvalidInput: --export s.sqlite is also --out, which it would overwrite: choose another name.
    """
    taken = [(name, Path(path)) for name, path in read if path is not None]
    for name, path in written:
        if path is None:
            continue
        for other, theirs in taken:
            if same_file(Path(path), theirs):
                raise InvalidInput(
                    f"{name} {Path(path)} is also {other}, which it would overwrite: choose another name."
                )
        taken.append((name, Path(path)))


def same_file(one: Path, other: Path) -> bool:
    """True when two names lead to the same file, by links of any kind, or would once it is made."""
    with suppress(OSError, ValueError):
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


def unwritable(path: Path, error: OSError) -> InvalidInput:
    """The error for a file that cannot be written."""
    reason = error.strerror or str(error)
    return InvalidInput(
        f"cannot write {path} ({reason}): free some space, or choose another place; a run that was cut short goes on "
        "with --resume."
    )


def spreadsheet_safe(cell: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula: texts that begin like one get an apostrophe.

    >>> spreadsheet_safe("=cmd()"), spreadsheet_safe("-x"), spreadsheet_safe(-1.5), spreadsheet_safe("a=b")
    ("'=cmd()", "'-x", -1.5, 'a=b')
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def first_line(error: BaseException, hidden: str = "", kind: bool = False) -> str:
    """The first line of an error's message, safe to show; its kind before it, or where the message is empty.

    Args:
        hidden: removed from it, such as the place of a copy that is unknown to the user.

    >>> first_line(ValueError("too long.\\nHint: shorten it")), first_line(KeyError(), kind=True)
    ('too long', 'KeyError')
    """
    lines = str(error).replace(hidden, "").strip().splitlines()
    name = type(error).__name__
    text = f"{name}: {lines[0]}" if lines and kind else lines[0] if lines else name
    return printable(text[:200]).rstrip(".")


def out_of_memory(error: BaseException) -> bool:
    """True for an error of Python, the system or torch that reports exhausted memory.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), out_of_memory(RuntimeError("no"))
    (True, False)
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_ROOM.search(str(error))))


def printable(text: str) -> str:
    """Text from a file or a model with every control, direction mark and line separator shown as �.

    A terminal obeys escape sequences and a page direction marks, wherever they come from.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a�[2Jb�c'
    """
    return "".join("�" if unicodedata.category(letter) in _HIDDEN else letter for letter in text)
