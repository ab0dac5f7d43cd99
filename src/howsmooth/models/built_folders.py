"""A cache of folders that are built once: models joined or unpacked from the files of a package."""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from howsmooth._util.common import file_digest
from howsmooth.errors import InvalidInput

_SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\]+)")
_DAY = 24 * 60 * 60


def cache_folder() -> Path:
    """The folder of built models: ``HOWSMOOTH_CACHE``, or ``howsmooth`` in the user's cache directory."""
    given = os.environ.get("HOWSMOOTH_CACHE")
    return Path(given) if given else user_cache_path("howsmooth", appauthor=False, opinion=False)


class Built(NamedTuple):
    """A folder, and the sha256 of each of its files, which a reader checks."""

    folder: Path
    sums: Mapping[str, str]


def is_built(name: str) -> bool:
    """Whether a folder of this name has been built; its content is not checked."""
    return (cache_folder() / name / _SUMS).is_file()


def cached(name: str, pins: Mapping[str, str] | None = None) -> Path | None:
    """The folder of this name, if it exists and its files are unchanged since they were built.

    Args:
        pins: file → sha256, where the expected content is known; otherwise the list beside the files counts, unless
            another user can have written it.
    """
    folder = cache_folder() / name
    sums = pins if pins is not None else _own_sums(folder)
    if not sums:
        return None
    same = all((folder / file).is_file() and file_digest(folder / file) == digest for file, digest in sums.items())
    return folder if same else None


def built(name: str, build: Callable[[Path], None], pins: Mapping[str, str] | None = None) -> Built:
    """The cached folder of this name, built by ``build(folder)`` when it is missing, damaged or differs from ``pins``.

    The folder gets its name only when it is complete, so that an interrupted build never looks finished, and two
    processes that build at the same time do not disturb each other. Only the user can enter it.
    """
    folder = cached(name, pins)
    if folder is not None:
        return Built(folder, pins or _own_sums(folder))
    try:
        root = cache_folder()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(root, name)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-{os.getpid()}-") as temporary:
            fresh = Path(temporary, name)
            fresh.mkdir(mode=0o700)
            build(fresh)
            files = sorted(path for path in fresh.rglob("*") if path.is_file())
            sums = {path.relative_to(fresh).as_posix(): file_digest(path) for path in files}
            (fresh / _SUMS).write_text(
                "".join(f"{digest}  {file}\n" for file, digest in sums.items()), encoding="utf-8"
            )
            if not _put(fresh, root / name, pins):
                sums = dict(pins or _own_sums(root / name))
    except OSError as error:
        raise InvalidInput(
            f"the cache folder {cache_folder()} cannot be written ({error.strerror or error}): make room or set "
            "HOWSMOOTH_CACHE to a folder that can."
        ) from error
    return Built(root / name, sums)


def _own_sums(folder: Path) -> dict[str, str]:
    """The checksums in the list beside the files; none when it is missing, damaged, or writable by other users."""
    try:
        lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
        about = folder.stat()
    except (OSError, UnicodeDecodeError):
        return {}
    if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        return {}
    pairs = [_LINE.fullmatch(line) for line in lines]
    return {pair[2]: pair[1] for pair in pairs if pair is not None} if pairs and all(pairs) else {}


def _sweep(root: Path, name: str) -> None:
    """Remove the temporary folders of builds that were killed."""
    for folder in root.glob(f".{glob.escape(name)}-*"):
        pid = folder.name.removeprefix(f".{name}-").partition("-")[0]
        with suppress(OSError):
            old = time.time() - folder.stat().st_mtime > _DAY
            if not folder.is_symlink() and (old or (pid.isdecimal() and not _alive(int(pid)))):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    """Whether a process runs; True on Windows, where the query would end it."""
    try:
        if sys.platform != "win32":
            os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _put(fresh: Path, final: Path, pins: Mapping[str, str] | None) -> bool:
    """Move a complete folder to its place and replace a damaged one there.

    Returns whether it was moved, which fails where another process was quicker.
    """
    if final.is_symlink():
        final.unlink()
    if final.exists() and cached(final.name, pins) is None:
        shutil.rmtree(final)
    try:
        fresh.rename(final)
    except OSError:
        if cached(final.name, pins) is None:
            raise
        return False
    return True
