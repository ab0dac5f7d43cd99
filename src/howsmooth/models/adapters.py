"""Folders that hold an adapter of PEFT: a few matrices, and the name of the model they are for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.extras import need
from howsmooth.models.files import Loaded, load_pretrained, quiet
from howsmooth.small import first_line, printable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(spec: str) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.isfile(Path(spec) / CONFIG) and not os.path.isfile(Path(spec) / "config.json")


def load_adapted(folder: str, head: bool = False) -> Loaded:
    """The model that an adapter is for, with the adapter merged into its weights.

    The base model is looked for under the name that the adapter gives, as it stands and beside the adapter; weights of
    both are read from safetensors only.
    """
    path = Path(folder)
    base = base_of(path)
    if not (path / WEIGHTS).is_file():
        raise InvalidInput(f"the adapter {printable(folder)} has no {WEIGHTS}: save it with safe_serialization=True.")
    peft: Any = need("peft", "an adapter")
    try:
        loaded = load_pretrained(base, head=True)
    except HowsmoothError as error:
        raise InvalidInput(
            f"the adapter {printable(folder)} is for the model {printable(base)}, which cannot be opened "
            f"({str(error).rstrip('.')}): put it there, or correct base_model_name_or_path in {CONFIG}."
        ) from error
    with quiet():
        try:
            adapted = peft.PeftModel.from_pretrained(loaded.model, folder, torch_device="cpu").merge_and_unload()
        except Exception as error:  # whatever adapter and model make it stumble over
            raise InvalidInput(
                f"the adapter {printable(folder)} does not fit {printable(base)}: {first_line(error)}"
            ) from error
    whole = adapted if head else adapted.base_model
    note = f"the adapter {printable(folder)} is merged into the weights of {printable(base)}"
    return Loaded(whole.eval(), loaded.processor, loaded.stored, (*loaded.notes, note))


def base_of(folder: Path) -> str:
    """The model that an adapter is for."""
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
