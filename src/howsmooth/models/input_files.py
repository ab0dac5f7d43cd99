"""What a model reads in a scan: a text, or the file of an image or sound; with its name and the hash of its content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from howsmooth.errors import InvalidInput
from howsmooth.models.texts import LARGEST_FILE, LARGEST_TEXT, alice, decoded, read_content
from howsmooth.small import printable


def file_named(source: str | Path | None) -> tuple[str | Path | None, tuple[str, ...]]:
    """A string that names what exists on disk as its path, with a note that says so; anything else as it is.

    >>> file_named("Drink me")
    ('Drink me', ())
    """
    if isinstance(source, str) and os.path.exists(source):  # False where a text is too long for a name
        return Path(source), (f"{printable(source)} is the name of a file, so what was read is its content",)
    return source, ()


def read_input(source: str | Path | None, modality: str = "text") -> tuple[str, str | Path, str]:
    """Name, content (of an image or sound its path) and sha256 of what a model of this modality reads.

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
