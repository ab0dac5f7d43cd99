"""Folders of PEFT adapters: a few matrices, and the name of their base model."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from howsmooth._util.common import first_line, printable
from howsmooth._util.optional_deps import need
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.models.pretrained_files import Loaded, load_pretrained, quiet

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(spec: str) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.isfile(Path(spec) / CONFIG) and not os.path.isfile(Path(spec) / "config.json")


def load_adapted(folder: str, head: bool = False) -> Loaded:
    """The base model of an adapter, with the adapter merged into its weights.

    The base model is searched under the name in the adapter, first as a path of its own and then beside the adapter;
    the weights of both are read from safetensors only.
    """
    path = Path(folder)
    base = base_of(path)
    if not (path / WEIGHTS).is_file():
        raise InvalidInput(f"the adapter {printable(folder)} has no {WEIGHTS}: save it with safe_serialization=True.")
    peft: Any = need("peft", "an adapter")
    refused: Exception | None = None
    for with_head in (True, False):  # adapters name the modules of the model they were made for, with its head or not
        try:
            loaded = load_pretrained(base, head=with_head)
            adapted = _merged(peft, loaded.model, path)
        except HowsmoothError as error:
            refused = refused or error
            continue
        whole = adapted if head or not with_head else adapted.base_model
        note = f"the adapter {printable(folder)} is merged into the weights of {printable(base)}"
        return Loaded(whole.eval(), loaded.processor, loaded.stored, (*loaded.notes, note))
    raise InvalidInput(
        f"the adapter {printable(folder)} is for the model {printable(base)}, which cannot be opened with it "
        f"({str(refused).rstrip('.')}): put it there, or correct base_model_name_or_path in {CONFIG}."
    ) from refused


def _merged(peft: Any, model: Any, path: Path) -> Any:
    """The model with the adapter in its weights, once every matrix of the adapter has found its place."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(path), torch_device="cpu")
            placed = peft.get_peft_model_state_dict(adapted)
        except Exception as error:  # any error that adapter and model cause in PEFT
            raise InvalidInput(f"the adapter does not fit: {first_line(error)}") from error
    stored = load_file(path / WEIGHTS)
    alike = {name: torch.equal(stored[name].float(), placed[name].float()) for name in stored if name in placed}
    misplaced = [name for name in stored if not alike.get(name)]
    if misplaced or not stored:
        first = printable(misplaced[0]) if misplaced else "an adapter without matrices"
        raise InvalidInput(f"the model has no place for {first}")
    return adapted.merge_and_unload()


def base_of(folder: Path) -> str:
    """The base model of an adapter."""
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base.strip():
        raise InvalidInput(
            f"the adapter {printable(str(folder))} does not say which model it is for: write "
            f"base_model_name_or_path into its {CONFIG}."
        )
    beside = folder / base
    return str(beside) if not os.path.exists(base) and beside.is_dir() else base
