"""The input of a model: a text or the file of an image or sound, with its name and the hash of its content."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from howsmooth._util.common import printable
from howsmooth._util.validation import did_you_mean, shown
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


def read_content(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """The bytes of a plain file: no folder, no pipe or device that may never end, and none that is too large."""
    name = printable(str(path))
    try:
        # Opened without waiting, so that a pipe without a writer is noticed too.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise InvalidInput(f"{name} is not a plain file but a pipe or device: give a file.")
            if about.st_size > limit:
                raise InvalidInput(
                    f"{name} has {about.st_size / 2**20:.0f} MB, but at most {limit // 2**20} are read: cut a part out."
                )
            return file.read(limit)
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


def file_named(source: str | Path | None) -> tuple[str | Path | None, tuple[str, ...]]:
    """A string that names a file as its path, with a note about it; anything else unchanged.

    >>> file_named("Drink me")
    ('Drink me', ())
    """
    if isinstance(source, str) and os.path.exists(source):  # False where a text is too long for a name
        return Path(source), (f"{printable(source)} is the name of a file, so what was read is its content",)
    return source, ()


def joined_texts(source: object, column: str | None = None) -> tuple[str, str]:
    """The texts of a list, or of a column of a dataset, joined into one, with a name for it.

    Args:
        source: strings, or rows with names, such as a dataset of Hugging Face.
        column: the column of the rows; "text" by default.

    >>> joined_texts(["Drink me", "Eat me"])
    ('2 given texts', 'Drink me\\n\\nEat me')
    """
    wanted = "text" if column is None else column
    names = getattr(source, "column_names", None)
    if names is not None:
        _check_column(wanted, names)
    if isinstance(source, Mapping):
        raise InvalidInput(f"a dictionary is no list of texts: choose one of {', '.join(map(str, source))}.")
    if not isinstance(source, Iterable):
        raise InvalidInput(
            f"what a model reads is a text, the path of a file, or a list or dataset of texts, not {shown(source)}."
        )
    texts, size = list[str](), 0
    for row in source:
        if isinstance(row, Mapping):
            _check_column(wanted, row)
            row = row[wanted]
        if not isinstance(row, str):
            raise InvalidInput(f"a list of texts holds texts, but text {len(texts)} is {shown(row)}.")
        texts.append(row)
        size += len(row)
        if size >= LARGEST_TEXT:
            break
    if not any(text.strip() for text in texts):
        raise InvalidInput("the texts are empty: give some to read.")
    return f"{len(texts)} given texts", "\n\n".join(texts)


def _check_column(wanted: str, names: Iterable[object]) -> None:
    known = [str(name) for name in names]
    if wanted not in known:
        hint = did_you_mean(wanted, known) or f": it has {', '.join(known)}."
        raise InvalidInput(f"the dataset has no column {wanted!r}{hint}")


def read_input(source: str | Path | None, modality: str = "text") -> tuple[str, str | Path, str]:
    """Name, content (of an image or sound its path) and sha256 of the input of a model of this modality.

    Args:
        source: a text, the path of a file (also as a string, where there is such a file), or None for Alice in
            Wonderland.
        modality: "text", "image" or "audio".

    >>> read_input("Drink me")[:2]
    ('given text', 'Drink me')
    """
    source, _ = file_named(source)
    if source is not None and not isinstance(source, str | Path):
        raise InvalidInput(f"what a model reads is a text or the path of a file, not {type(source).__name__}.")
    if modality != "text":
        if not isinstance(source, Path):
            raise InvalidInput(f"this model reads {modality}, not text: give the path of an {modality} file.")
        return source.name, source, hashlib.sha256(read_content(source, LARGEST_FILE)).hexdigest()
    if source is None:
        name, content = "Alice in Wonderland", alice().encode()
    elif isinstance(source, Path):
        name, content = source.name, read_content(source, LARGEST_TEXT)
    else:
        name, content = "given text", _encoded(source)
    return name, decoded(content, name), hashlib.sha256(content).hexdigest()


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("the text holds halves of surrogate pairs, which UTF-8 cannot hold: remove them.") from None
