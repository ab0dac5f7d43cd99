"""What a model reads in a scan: a text, or the file of an image or sound; with its name and the hash of its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from howsmooth.errors import InvalidInput
from howsmooth.models import alice


def read_input(source: str | Path | None, modality: str = "text") -> tuple[str, str | Path, str]:
    """Name, content (of an image or sound its path) and sha256 of what a model of this modality reads.

    Args:
        source: a text, the path of a file, or None for Alice in Wonderland.
        modality: "text", "image" or "audio".

    >>> read_input("Drink me")[:2]
    ('given text', 'Drink me')
    """
    if modality != "text":
        if not isinstance(source, Path):
            raise InvalidInput(f"this model reads {modality}, not text: give the path of an {modality} file.")
        return source.name, source, hashlib.sha256(source.read_bytes()).hexdigest()
    if source is None:
        name, content = "Alice in Wonderland", alice().encode()
    elif isinstance(source, Path):
        name, content = source.name, source.read_bytes()
    else:
        name, content = "given text", source.encode()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidInput(f"{name} is not a text in UTF-8: give plain text.")
    if not text.strip():
        raise InvalidInput(f"{name} is empty: give a text to read.")
    return name, text, hashlib.sha256(content).hexdigest()
