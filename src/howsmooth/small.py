"""Small things that every room borrows: files written whole and never over what is read, text made safe to show."""

from __future__ import annotations

import os
import secrets
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from howsmooth.errors import InvalidInput

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, direction marks, halves of pairs, line separators
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


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
        read, written: what each file is, for the message, and its path; None for none.

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
    """Whether two names lead to the same file, by links of any kind, or would once it is made."""
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


def printable(text: str) -> str:
    """Text from a file or a model with every control, direction mark and line separator shown as �.

    A terminal obeys escape sequences and a page direction marks, wherever they come from.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a�[2Jb�c'
    """
    return "".join("�" if unicodedata.category(letter) in _HIDDEN else letter for letter in text)
