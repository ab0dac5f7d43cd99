"""Texts: the one that comes with the package, and those in files."""

from __future__ import annotations

import os
import stat
from importlib.resources import files
from pathlib import Path

from howsmooth._util.common import printable
from howsmooth.errors import InvalidInput

LARGEST_TEXT = 64 * 2**20
"""Bytes of the largest text that is read: all of it is turned into tokens before windows are cut."""
LARGEST_FILE = 2**30
"""Bytes of the largest image or sound."""


def alice() -> str:
    """Lewis Carroll, *Alice's Adventures in Wonderland* (1865), in the public domain.

    >>> alice()[:55]
    "[Alice's Adventures in Wonderland by Lewis Carroll 1865"
    """
    return (files("howsmooth.models") / "data" / "alice.txt").read_text(encoding="utf-8")


def read_content(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a plain file: no folder, no pipe or device that may never end, and none that is too large."""
    name = printable(str(path))
    try:
        # Opened without waiting, so that a pipe nobody writes to is noticed too.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise InvalidInput(f"{name} is not a plain file but a pipe or device: give a file.")
            if about.st_size > most:
                raise InvalidInput(
                    f"{name} has {about.st_size / 2**20:.0f} MB, but at most {most // 2**20} are read: cut a part out."
                )
            return file.read(most)
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {name}: check the path.") from None
    except IsADirectoryError:
        raise InvalidInput(f"{name} is a folder: give a file.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"{name} cannot be read ({printable(reason)}): check the path.") from None


def decoded(content: bytes, name: str) -> str:
    """A text in UTF-8 that holds more than spaces."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidInput(f"{printable(name)} is not a text in UTF-8: give plain text.")
    if not text.strip():
        raise InvalidInput(f"{printable(name)} is empty: give a text to read.")
    return text


def read_text(path: Path) -> str:
    """The text in a file."""
    return decoded(read_content(path, LARGEST_TEXT), str(path))
