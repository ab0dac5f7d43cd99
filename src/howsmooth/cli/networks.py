"""Networks as the SOURCE of commands: ONNX files, exported programs, modules of Python, classifiers of transformers."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from howsmooth._util.common import printable
from howsmooth._util.validation import shown
from howsmooth.cli.source_options import MapOptions
from howsmooth.cli.terminal import NOT_CONVERGED, print_json, show, solver_progress, step_progress, written
from howsmooth.errors import InvalidInput
from howsmooth.models.model_inputs import read_input
from howsmooth.models.network_parts import part_of
from howsmooth.models.network_source import is_of_transformers, names_network, open_network, stated_input
from howsmooth.models.open_source import open_model
from howsmooth.models.weight_files import load_tokens
from howsmooth.norms.local_constant import measure_map
from howsmooth.sets import SetText

_OF_RANDOM = ("prefix", "width", "heads", "causal", "like", "attention", "kv_heads", "window", "rope", "rope_base")
_MORE_OF_RANDOM = ("alibi", "softcap", "qk_norm", "scale", "dtype", "device")
PARTS = ("model", "layer", "residual", "mlp", "prefix", "logits")
"""Parts of a network besides its attention."""


def is_network(options: MapOptions, what: str | None = None) -> bool:
    """Whether a command is about a network, or about a part of a model that is no attention block."""
    parts = {one.strip().partition(":")[0] for one in (what or "").split(",")}
    numbered = ":" in (what or "") and "[" not in (what or "")
    return names_network(options.source) or (options.names_model and (numbered or not parts.isdisjoint(PARTS)))


def network_and_input(options: MapOptions, head: bool = False) -> tuple[Any, Any]:
    """The network that SOURCE names and its input: of --input, of a text, or random numbers of the shape it states."""
    given = [name for name in (*_OF_RANDOM, *_MORE_OF_RANDOM) if getattr(options, name) is not None]
    if given:
        raise InvalidInput(f"--{given[0].replace('_', '-')} is for attention maps: leave it out for a network.")
    if not names_network(options.source):
        opened = open_model(options.source, head=head)
        if options.input is not None:
            return opened.model, load_tokens(options.input, options.input_name)
        _, content, _ = read_input(options.text, opened.modality)
        (window,) = opened.windows(content, options.tokens or opened.usual_length(content), 1, options.seed)
        return opened.model if head else opened, window.ids
    if options.text is not None:
        raise InvalidInput("--text is for models of transformers: give --input, a file with the input of the network.")
    network = open_network(options.source)
    if options.input is not None:
        return network, load_tokens(options.input, options.input_name)
    if is_of_transformers(network):
        raise InvalidInput("give --input, a file with numbers of tokens, or the folder of the model as SOURCE.")
    return network, stated_input(network, options.tokens or 8)


def measure_source(options: MapOptions, what: str | None, norm: str, k: int, as_json: bool, **solver: Any) -> None:
    """`howsmooth measure` of a part of a network."""
    kinds = [one.strip() for one in (what or "model").split(",")]
    head = "logits" in kinds
    network, x = network_and_input(options, head)
    norms: dict[str, float | str] = {"2": 2, "inf": torch.inf, "1": 1, "fro": "fro", "token": "token"}
    results, sizes = {}, ""
    for kind in kinds:
        name, colon, _ = kind.partition(":")
        part = kind if colon or name in ("model", "logits") else f"{name}:{options.layer or 0}"
        f, tokens = part_of(network, x, part)
        sizes = f"n = {tokens.shape[-2]}, d = {tokens.shape[-1]}"
        with solver_progress(part) as progress:
            results[part] = measure_map(f, tokens, norms[norm], k, progress=progress, seed=options.seed, **solver)
    converged = all(bool(m.converged.all()) for m in results.values())
    if as_json:
        content = {part: m.to_dict() for part, m in results.items()}
        print_json({"setting": {"source": options.source}} | content | {"converged": converged})
    else:
        show(f"{printable(options.source)}: {sizes}")
        table = Table("part", "‖J‖ (estimate)", "lower bound", "upper bound", "relative", "converged")
        for part, m in results.items():
            value, lower = written(float(m.value)), written(float(m.lower), ROUND_FLOOR, 5)
            upper = "none" if not m.confidence else f"≤ {written(float(m.upper), ROUND_CEILING, 5)}"
            relative = "–" if m.relative is None else written(float(m.relative), digits=3)
            table.add_row(part, value, f"≥ {lower}", upper, relative, "yes" if bool(m.converged) else "no")
        show(table)
        for part, m in results.items():
            show(f"{part}: {m.guarantees}")
        for note in dict.fromkeys(note for m in results.values() for note in m.notes):
            show(f"note: {note}")
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def bound_source(options: MapOptions, over: str, as_json: bool) -> None:
    """`howsmooth bounds` of a whole network: the product bound, node by node."""
    from howsmooth.bounds.model_stack import stack

    network, x = network_and_input(options)
    named = SetText.parse(over)
    regions = [] if named.near_input else named.sets()
    bound = stack(getattr(network, "model", network), x=x, over=regions[0] if regions else None)
    if as_json:
        print_json({"setting": {"source": options.source}} | bound.to_dict())
    else:
        show(f"{printable(options.source)}: product bound on the whole network\n")
        show(str(bound))


def certify_source(
    options: MapOptions, label: int | None, moving: str | None, distance: float, attack: bool, as_json: bool
) -> None:
    """`howsmooth certify --label`: the distance within which a class is proved not to change, and an attack."""
    from howsmooth.certificates.certify_any import certify
    from howsmooth.scans.plan import parse_numbers
    from howsmooth.search.attacks import attack_network

    network, x = network_and_input(options, head=True)
    if not isinstance(x, Tensor):
        raise InvalidInput("a class is certified at an input of the network: give --input.")
    x = x[0] if x.dim() == 2 and not x.is_floating_point() else x
    tokens = None if moving is None else list(parse_numbers(moving, "tokens"))
    if label is None:
        with torch.no_grad():
            label = int(_logits(network, x).argmax())
    attacked = attack and distance == 2
    near = None
    with step_progress(1 + attacked) as begin:
        begin("certificate")
        proof = certify(network, x, label, tokens=tokens, norm=distance)
        if attacked and proof.predicted == label:
            begin("attack")
            near = attack_network(network, x, label, tokens)
    if as_json:
        print_json({"setting": {"source": options.source}} | proof.to_dict() | {"attacked": near})
        return
    show(repr(proof))
    moves = "every token within it of its own place" if tokens is None else f"token {moving} moves, the others stay"
    show(f"radius: {moves}; it holds in exact arithmetic, rounding included")
    if near is not None:
        share = f", certified ÷ attacked {proof.radius / near:.2g}" if near > 0 else ""
        show(f"attack: another class at distance {written(near, ROUND_CEILING)}{share}")
    for note in proof.notes:
        show(f"note: {note}")


def _logits(network: Any, x: Tensor) -> Tensor:
    from howsmooth.models.network_source import as_function
    from howsmooth.network.trace import first_traced

    function, start, _ = as_function(network, x)
    logits = first_traced(function(start))
    if logits.numel() < 2 or logits.shape.numel() != logits.shape[-1]:
        raise InvalidInput(f"SOURCE gives an output of shape {shown(tuple(logits.shape))}, no logits of classes.")
    return logits.reshape(-1)
