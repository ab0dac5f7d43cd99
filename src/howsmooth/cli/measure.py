"""`howsmooth measure`: one attention block and its heads."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Column, Table
from typer import Option

from howsmooth._util.common import check_figure_path
from howsmooth.cli.console import lower_bound, parse_bytes, print_json, solver_progress, stdout, upper_bound, written
from howsmooth.cli.exit_codes import NOT_CONVERGED
from howsmooth.cli.figure_output import check_drawable, draw_measurement
from howsmooth.cli.options import AsJson, Picture, command
from howsmooth.cli.replay import Replay
from howsmooth.cli.source_options import Request, Settings, Site
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement
from howsmooth.norms.explanation import Explanation, explain
from howsmooth.norms.local_constant import measure as measure_block
from howsmooth.norms.local_constant import measure_heads

What = Enum("What", {"block": "block", "heads": "heads", "both": "both"})
Norm = Enum("Norm", {"two": "2", "inf": "inf", "one": "1", "fro": "fro", "token": "token"})
_NORMS: dict[str, float | str] = {"2": 2, "inf": math.inf, "1": 1, "fro": "fro", "token": "token"}
_SYMBOLS = {"2": "‖J‖₂", "inf": "‖J‖_∞", "1": "‖J‖₁", "fro": "‖J‖_F", "token": "‖J‖_token"}
_TOP_TOKENS = 3
_WHAT_RELATIVE_IS = (
    "relative: {norm}·|X|/|f(X)|, by what share of itself the output can move when the input moves by a small share of "
    "itself; it compares layers and models, {norm} alone compares inputs, lengths and heads of one layer."
)
_WHAT_PATHS_ARE = (
    "value path, score path: ‖J‖₂ of each part of the Jacobian by itself, each in its own worst direction; they may "
    "cancel, so neither they nor their sum is ‖J‖₂. value share: the part of ‖J‖₂ that goes through the values in the "
    "worst direction of the whole; the rest goes through the scores."
)


@command
def measure(
    request: Request,
    settings: Settings,
    witness: Annotated[
        Path | None, Option(help="At the input that `howsmooth worst-case` has kept in this file, on its map.")
    ] = None,
    what: Annotated[What | None, Option(help="What to measure (both, or what the witness is for).")] = None,
    norm: Annotated[Norm | None, Option(help="Which norm of the Jacobian (2, or the witness's).")] = None,
    k: Annotated[int, Option("-k", min=1, help="How many singular values (norm 2).")] = 1,
    rtol: Annotated[float, Option(help="Relative accuracy to certify.")] = 1e-3,
    confidence: Annotated[float, Option(help="Probability with which an upper bound holds.")] = 0.99,
    memory: Annotated[str, Option(help="Attention weights to keep between products.")] = "512MiB",
    explained: Annotated[bool, Option("--explain", help="Paths, sink and top tokens (norm 2).")] = False,
    figure: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Measure the local Lipschitz constant of an attention block and of each of its heads.

    It is the norm of the Jacobian at the given tokens. Every number says whether it is an estimate, a lower or an upper
    bound.

    Examples:\n
      howsmooth measure random --width 64 --heads 4 --causal\n
      howsmooth measure "random\\[like=gpt2,length=256]" --what block\n
      howsmooth measure gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --explain\n
      howsmooth measure minilm --layer 2 --length 96\n
      howsmooth measure layer.pt --heads 8 --input tokens.npy --figure heads.png --json\n
      howsmooth measure minilm --witness howsmooth-output/worst-minilm-4c1f0e-n16-LayerNorm.safetensors
    """
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
    measured: dict[str, Measurement] = {}
    stories: dict[str, Explanation] = {}
    solver: dict[str, Any] = {"rtol": rtol, "seed": site.seeds["solver"], "confidence": confidence, "memory": kept}
    for name, solve in (("block", measure_block), ("heads", measure_heads)):
        if what.value not in (name, "both"):
            continue
        with solver_progress(name) as progress:
            measured[name] = solve(site.attention, site.x, _NORMS[norm.value], k, progress=progress, **solver)
        if explained:
            stories[name] = explain(site.attention, site.x, per_head=name == "heads", influence=False, **solver)
    if figure is not None:
        draw_measurement(site, measured, figure, _SYMBOLS[norm.value])
    converged = all(bool(m.converged.all()) for m in measured.values())
    if as_json:
        again = {} if replay is None else {"witness": replay.to_dict()}
        print_json(_as_json(site, measured, stories, converged, figure) | again)
    else:
        _print(site, measured, stories, norm.value, figure)
        if replay is not None:
            stdout().print(replay.in_words(), markup=False)
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def _print(
    site: Site, measured: dict[str, Measurement], stories: dict[str, Explanation], norm: str, figure: Path | None
) -> None:
    out, facts = stdout(), site.describe()
    batch = "" if facts["batch"] is None else f"{facts['batch']} inputs of "
    out.print(site.in_words(), markup=False)
    out.print(f"tokens: {batch}n = {facts['n']}: {facts['input']}", markup=False)
    several = any(m.values is not None and m.values.shape[-1] > 1 for m in measured.values())
    ends = [Column("lower bound", no_wrap=True), Column("upper bound", no_wrap=True)]
    table = Table("map", f"{_SYMBOLS[norm]} (estimate)", *ends, "relative")
    for name in ["next σ"] * several + ["converged", "products", "seconds"]:
        table.add_column(name)
    for name, m in measured.items():
        for number, index in enumerate(np.ndindex(m.value.shape)):
            value, both = written(float(m.value[index])), (lower_bound(m, index), upper_bound(m, index))
            following = m.values[index][1:].tolist() if several and m.values is not None else []
            more = [", ".join(map(written, following))] if several else []
            cost = ["″", "″"] if number else [f"{m.products}", f"{m.seconds:.2f}"]
            converged = "yes" if bool(m.converged[index]) else "no"
            relative = "–" if m.relative is None else written(float(m.relative[index]), digits=3)
            table.add_row(_map_name(name, index), value, *both, relative, *more, converged, *cost)
    out.print(table)
    if several:
        out.print("next σ: the next singular values (estimates).", markup=False)
    out.print(_WHAT_RELATIVE_IS.format(norm=_SYMBOLS[norm]), markup=False)
    if any(m.value.numel() > 1 for m in measured.values()):
        out.print("″ solved together with the map above; each upper bound holds with its probability by itself.")
    for note in dict.fromkeys([*site.notes, *(note for m in measured.values() for note in m.notes)]):
        out.print(f"note: {note}", markup=False)
    if stories:
        out.print(_explanations(stories))
        out.print(_WHAT_PATHS_ARE, markup=False)
    if figure is not None:
        out.print(f"figure: {figure}", markup=False)


def _explanations(stories: dict[str, Explanation]) -> Table:
    table = Table("map", "value path, score path (estimates)", "value share", "sink", "tokens that move it most")
    for name, story in stories.items():
        for index in np.ndindex(story.total.value.shape):
            sinks, positions = story.sink[index].reshape(-1), story.sink_token[index].reshape(-1)
            head = int(sinks.argmax())  # of the block: the largest over its heads
            energy = story.input_energy[index]
            top = energy.topk(min(_TOP_TOKENS, len(energy)))
            shares = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            table.add_row(
                _map_name(name, index),
                f"{written(float(story.value_path.value[index]))}, {written(float(story.score_path.value[index]))}",
                f"{100 * float(story.value_share[index]):.0f} %",
                f"token {int(positions[head])} receives {written(float(sinks[head]), digits=3)}",
                ", ".join(f"{token} ({100 * share:.0f} %)" for token, share in shares),
            )
    return table


def _map_name(name: str, index: tuple[int, ...]) -> str:
    head = f"head {index[-1]}" if name == "heads" else "block"
    item = index[:-1] if name == "heads" else index
    return head if not item else f"input {item[0]}, {head}"


def _as_json(
    site: Site, measured: dict[str, Measurement], stories: dict[str, Explanation], converged: bool, figure: Path | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"setting": site.describe()}
    content |= {name: m.to_dict() for name, m in measured.items()}
    if stories:
        content["explanation"] = {
            name: {
                "value_path": story.value_path.to_dict(),
                "score_path": story.score_path.to_dict(),
                **{fact: getattr(story, fact).tolist() for fact in _TENSORS},
            }
            for name, story in stories.items()
        }
    return content | {"converged": converged, "figure": None if figure is None else str(figure)}


_TENSORS = ("value_share", "sink", "sink_token", "entropy", "input_energy", "output_energy")
