"""`howsmooth measure`: one attention block and its heads."""

from __future__ import annotations

import math
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor

from howsmooth.cli.console import (
    NOT_CONVERGED,
    lower_bound,
    parse_bytes,
    print_json,
    set_threads,
    solver_progress,
    stdout,
    upper_bound,
    written,
)
from howsmooth.cli.pictures import check_drawable, draw_measurement
from howsmooth.cli.replay import Replay
from howsmooth.cli.sources import Request, Settings, Site, spread
from howsmooth.errors import InvalidInput
from howsmooth.explaining import Explanation, explain
from howsmooth.figures import check_figure_path
from howsmooth.measuring import measure as measure_block
from howsmooth.measuring import measure_heads
from howsmooth.norms import Measurement

What = Enum("What", {"block": "block", "heads": "heads", "both": "both"})
Norm = Enum("Norm", {"two": "2", "inf": "inf", "one": "1", "fro": "fro"})
_NORMS: dict[str, float | str] = {"2": 2, "inf": math.inf, "1": 1, "fro": "fro"}
_SYMBOLS = {"2": "‖J‖₂", "inf": "‖J‖_∞", "1": "‖J‖₁", "fro": "‖J‖_F"}
_TOP_TOKENS = 3
_WHAT_PATHS_ARE = (
    "value path, score path: ‖J‖₂ of each part of the Jacobian by itself, each in its own worst direction; they may "
    "cancel, so neither they nor their sum is ‖J‖₂. value share: the part of ‖J‖₂ that goes through the values in the "
    "worst direction of the whole; the rest goes through the scores."
)

_EXAMPLES = """Examples:\n
  howsmooth measure random --width 64 --heads 4 --causal\n
  howsmooth measure "random\\[like=gpt2,length=256]" --what block\n
  howsmooth measure gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --explain\n
  howsmooth measure minilm --layer 2 --length 96\n
  howsmooth measure layer.pt --heads 8 --input tokens.npy --figure heads.png --json\n
  howsmooth measure minilm --witness howsmooth-output/worst-minilm-4c1f0e-n16-LayerNorm.safetensors
"""


@spread
def measure(
    request: Request,
    settings: Settings,
    witness: Annotated[
        Path | None, typer.Option(help="At the input that `howsmooth worst-case` has kept in this file, on its map.")
    ] = None,
    what: Annotated[What | None, typer.Option(help="What to measure (both, or what the witness is for).")] = None,
    norm: Annotated[Norm | None, typer.Option(help="Which norm of the Jacobian (2, or the witness's).")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many singular values (norm 2).")] = 1,
    rtol: Annotated[float, typer.Option(help="Relative accuracy to certify.")] = 1e-3,
    confidence: Annotated[float, typer.Option(help="Probability with which an upper bound holds.")] = 0.99,
    memory: Annotated[str, typer.Option(help="Attention weights to keep between products.")] = "512MiB",
    explained: Annotated[bool, typer.Option("--explain", help="Paths, sink and top tokens (norm 2).")] = False,
    figure: Annotated[Path | None, typer.Option(help="Write a picture: .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    set_threads(threads)
    kept = parse_bytes(memory)
    if figure is not None:
        check_figure_path(figure)
    replay = None if witness is None else Replay.open(witness, request, settings)
    what = what or (What.both if replay is None else What.block if replay.witness.head is None else What.heads)
    norm = norm or (Norm.inf if replay is not None and replay.witness.norm == math.inf else Norm.two)
    if explained and norm is not Norm.two:
        raise InvalidInput(f"--explain splits the 2-norm: leave out --norm {norm.value}.")
    site = request.open(settings) if replay is None else replay.site
    if figure is not None:
        check_drawable(site, what.value, norm.value)
    found: dict[str, Measurement] = {}
    stories: dict[str, Explanation] = {}
    for name, solve in (("block", measure_block), ("heads", measure_heads)):
        if what.value not in (name, "both"):
            continue
        with solver_progress(name) as progress:
            found[name] = solve(
                site.attention,
                site.x,
                _NORMS[norm.value],
                k,
                rtol,
                site.seeds["solver"],
                confidence=confidence,
                memory=kept,
                progress=progress,
            )
        if explained:
            stories[name] = explain(
                site.attention,
                site.x,
                per_head=name == "heads",
                influence=False,
                rtol=rtol,
                seed=site.seeds["solver"],
                confidence=confidence,
                memory=kept,
            )
    if figure is not None:
        draw_measurement(site, found, figure, _SYMBOLS[norm.value])
    converged = all(bool(m.converged.all()) for m in found.values())
    if as_json:
        again = {} if replay is None else {"witness": replay.to_dict()}
        print_json(_as_json(site, found, stories, converged, figure) | again)
    else:
        _print(site, found, stories, norm.value, figure)
        if replay is not None:
            stdout().print(replay.in_words(), markup=False)
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


measure.__doc__ = (
    "Measure the local Lipschitz constant of an attention block and of each of its heads.\n\n"
    "It is the norm of the Jacobian at the given tokens. Every number says whether it is an estimate, a lower or an "
    "upper bound.\n\n" + _EXAMPLES
)


def _print(
    site: Site, found: dict[str, Measurement], stories: dict[str, Explanation], norm: str, figure: Path | None
) -> None:
    out, facts = stdout(), site.describe()
    batch = "" if facts["batch"] is None else f"{facts['batch']} inputs of "
    out.print(site.in_words(), markup=False)
    out.print(f"tokens: {batch}n = {facts['n']}: {facts['input']}", markup=False)
    several = any(m.values is not None and m.values.shape[-1] > 1 for m in found.values())
    table = Table("map", f"{_SYMBOLS[norm]} (estimate)", "lower bound", "upper bound")
    for name in ["next singular values (estimates)"] * several + ["converged", "products", "seconds"]:
        table.add_column(name)
    for name, m in found.items():
        for first, index in _indices(m.value):
            more = (
                [", ".join(written(float(s)) for s in m.values[index][1:])] if several and m.values is not None else []
            )
            cost = [f"{m.products}", f"{m.seconds:.2f}"] if first else ["″", "″"]
            table.add_row(
                _map_name(name, index),
                written(float(m.value[index])),
                lower_bound(m, index),
                upper_bound(m, index),
                *more,
                "yes" if bool(m.converged[index]) else "no",
                *cost,
            )
    out.print(table)
    if any(m.value.numel() > 1 for m in found.values()):
        out.print("″ solved together with the map above; each upper bound holds with its probability by itself.")
    for note in dict.fromkeys([*site.notes, *(note for m in found.values() for note in m.notes)]):
        out.print(f"note: {note}", markup=False)
    if stories:
        out.print(_explanations(stories))
        out.print(_WHAT_PATHS_ARE, markup=False)
    if figure is not None:
        out.print(f"figure: {figure}", markup=False)


def _explanations(stories: dict[str, Explanation]) -> Table:
    table = Table("map", "value path, score path (estimates)", "value share", "sink", "tokens that move it most")
    for name, story in stories.items():
        for _, index in _indices(story.total.value):
            sinks, places = story.sink[index].reshape(-1), story.sink_token[index].reshape(-1)
            head = int(sinks.argmax())  # of the block: the largest over its heads
            energy = story.input_energy[index]
            top = energy.topk(min(_TOP_TOKENS, len(energy)))
            table.add_row(
                _map_name(name, index),
                f"{written(float(story.value_path.value[index]))}, {written(float(story.score_path.value[index]))}",
                f"{100 * float(story.value_share[index]):.0f} %",
                f"token {int(places[head])} receives {written(float(sinks[head]), digits=3)}",
                ", ".join(
                    f"{i} ({100 * e:.0f} %)" for i, e in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ),
            )
    return table


def _indices(value: Tensor) -> list[tuple[bool, tuple[int, ...]]]:
    """Every index of a batch, and whether it is the first."""
    places = list(product(*(range(size) for size in value.shape)))
    return [(i == 0, place) for i, place in enumerate(places)]


def _map_name(name: str, index: tuple[int, ...]) -> str:
    head = f"head {index[-1]}" if name == "heads" else "block"
    item = index[:-1] if name == "heads" else index
    return head if not item else f"input {item[0]}, {head}"


def _as_json(
    site: Site,
    found: dict[str, Measurement],
    stories: dict[str, Explanation],
    converged: bool,
    figure: Path | None,
) -> dict[str, Any]:
    content: dict[str, Any] = {"setting": site.describe()}
    content |= {name: m.to_dict() for name, m in found.items()}
    if stories:
        content["explanation"] = {
            name: {
                "value_path": story.value_path.to_dict(),
                "score_path": story.score_path.to_dict(),
                **{part: getattr(story, part).tolist() for part in _TENSORS},
            }
            for name, story in stories.items()
        }
    return content | {"converged": converged, "figure": None if figure is None else str(figure)}


_TENSORS = ("value_share", "sink", "sink_token", "entropy", "input_energy", "output_energy")
