"""`howsmooth models`: the models that can be measured, and how to get them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from howsmooth.cli.options import AsJson, command
from howsmooth.cli.terminal import print_json, show
from howsmooth.models import MODEL_TYPES, NAMED
from howsmooth.models.module_names import RANDOM_NAMES

_FACTS = ("name", "description", "precision", "licence", "install", "sha256")


@command
def models(as_json: AsJson = False) -> None:
    """List the models that need no hub, with size, licence and how to get them.

    Example: howsmooth models
    """
    rows: list[dict[str, Any]] = [
        {fact: getattr(model, fact) for fact in _FACTS} | {"bytes": model.size, "installed": model.available()}
        for model in NAMED.values()
    ]
    if as_json:
        print_json({"models": rows, "random": list(RANDOM_NAMES), "architectures": list(MODEL_TYPES)})
        return
    table = Table("name", "what it is", "precision", "download", "licence", "state")
    for row in rows:
        size, state = f"{row['bytes'] / 1e6:.0f} MB", "installed" if row["installed"] else "not installed"
        table.add_row(row["name"], row["description"], row["precision"], size, row["licence"], state)
    show(table)
    for row in rows:
        if not row["installed"]:
            show(f"To get {row['name']}: {row['install']}")
    show(f"\nRandom weights: random:NAME[layers=2,width=64,…] with NAME one of {', '.join(RANDOM_NAMES)}.")
    show(
        "Your own: a folder with config.json and safetensors weights, a .gguf file, or an id on the Hugging Face hub. "
        f"Read by name: {', '.join(MODEL_TYPES)}; others through transformers' attention interface.",
    )
