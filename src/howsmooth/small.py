"""Small things that every room borrows: files written whole, text from elsewhere made safe to show."""

from __future__ import annotations

import os
import secrets
import unicodedata
from contextlib import suppress
from pathlib import Path

from howsmooth.errors import InvalidInput

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, direction marks, halves of pairs, line separators


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


def unwritable(path: Path, error: OSError) -> InvalidInput:
    """The error for a file that cannot be written."""
    reason = error.strerror or str(error)
    return InvalidInput(
        f"cannot write {path} ({reason}): free some space, or choose another place; a run that was cut short goes on "
        "with --resume."
    )


def printable(text: str) -> str:
    """Text from a file or a model with every control, direction mark and line separator shown as �.

    A terminal obeys escape sequences and a page direction marks, wherever they come from.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a�[2Jb�c'
    """
    return "".join("�" if unicodedata.category(letter) in _HIDDEN else letter for letter in text)
