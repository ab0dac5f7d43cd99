"""`howsmooth measure`: one attention block and its heads, at an input or at the stored witness of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import typer
from rich.table import Table
from torch import Tensor

from howsmooth._util.common import printable
from howsmooth._util.validation import check_count, check_seed, fits
from howsmooth.cli.networks import is_network, measure_source
from howsmooth.cli.options import AsJson, Confidence, Figure, Rtol, command, engine_option, what_option, where_option
from howsmooth.cli.source_options import OF_THE_INPUT, MapAtTokens, MapOptions, kinds_of_map, map_sha256, random_options
from howsmooth.cli.terminal import (
    NOT_CONVERGED,
    parse_bytes,
    print_json,
    show,
    solver_progress,
    written,
)
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import Explanation, explain, measure_heads, token_influence
from howsmooth.norms.local_constant import measure_map as measure_block
from howsmooth.search.ascent import norm_at
from howsmooth.search.witness import Witness

_NORMS: dict[str, float | str] = {"2": 2, "inf": math.inf, "1": 1, "fro": "fro", "token": "token"}
_SYMBOLS = {"2": "‖J‖₂", "inf": "‖J‖_∞", "1": "‖J‖₁", "fro": "‖J‖_F", "token": "‖J‖_token"}
_ACCURACY = 1e-3
"""Of a measurement, by which it may lie below what an unfinished search knew."""
_SAME = 1e-9
"""Relative difference that rounding can make between two machines, far below what other weights make."""
_TOP_TOKENS = 3
_MAP_TOKENS = 256
"""More tokens are drawn by their energies: n × n blocks would take long."""
_RELATIVE = (
    "relative: {norm}·|X|/|f(X)|, by what share of itself the output can move when the input moves by a small share of "
    "itself; it compares layers and models, {norm} alone compares inputs, lengths and heads of one layer."
)
_PATHS = (
    "value path, score path: ‖J‖₂ of each part of the Jacobian by itself, each in its own worst direction; they may "
    "cancel, so neither they nor their sum is ‖J‖₂. value share: the part of ‖J‖₂ that goes through the values in the "
    "worst direction of the whole; the rest goes through the scores."
)


@command
def measure(
    options: MapOptions,
    witness: Annotated[
        Path | None, where_option("The input in this file of `howsmooth worst-case`, on its map.")
    ] = None,
    what: Annotated[
        str | None,
        what_option(
            "attention (the block), head or both (both, or the map of the witness); of a network model, layer, "
            "attention, or with a number layer:3 (model)."
        ),
    ] = None,
    norm: Annotated[
        Literal["2", "inf", "1", "fro", "token"] | None,
        what_option("Norm of the Jacobian (2, or that of the witness)."),
    ] = None,
    k: Annotated[int, what_option("Number of singular values (norm 2).", "-k", min=1)] = 1,
    explained: Annotated[
        bool, what_option("Also value and score path, sink, top tokens (norm 2).", "--explain/--no-explain")
    ] = False,
    rtol: Rtol = 1e-3,
    confidence: Confidence = 0.99,
    memory: Annotated[str, engine_option("Memory for attention weights between products.")] = "512MiB",
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Measure the local Lipschitz constant of an attention block and of each of its heads.

    It is the norm of the Jacobian at the given tokens. Every number says whether it is an estimate, a lower or an upper
    bound.

    Examples:
      howsmooth measure random --width 64 --heads 4 --causal
      howsmooth measure random --like gpt2 --length 256 --what attention
      howsmooth measure gpt2.safetensors --prefix h.0.attn. --heads 12 --causal --explain
      howsmooth measure minilm --layer 2 --length 96
      howsmooth measure minilm --what model,layer:2 --length 96
      howsmooth measure net.onnx --input x.npy
      howsmooth measure my.models:make_net --input x.npy --what layer:0,attention:0
      howsmooth measure layer.pt --heads 8 --input tokens.npy --figure heads.png --json
      howsmooth measure minilm --witness howsmooth-output/worst-minilm-4c1f0e-n16-LayerNorm.safetensors
    """
    size = parse_bytes(memory)
    if witness is None and is_network(options, what):
        if explained or figure is not None:
            raise InvalidInput("--explain and --figure are for attention maps: leave them out for a network.")
        measure_source(options, what, norm or "2", k, as_json, rtol=rtol, confidence=confidence, memory=size)
        return
    replay = None if witness is None else Replay.open(witness, options)
    whole = "attention,head" if replay is None else "attention" if replay.witness.head is None else "head"
    maps = kinds_of_map(what or whole)
    norm = norm or ("inf" if replay is not None and replay.witness.norm == math.inf else "2")
    if explained and norm != "2":
        raise InvalidInput(f"--explain splits the 2-norm: leave out --norm {norm}.")
    site = options.open() if replay is None else replay.site
    if figure is not None:
        _check_drawable(site, maps, norm)
    measured: dict[str, Measurement] = {}
    stories: dict[str, Explanation] = {}
    solver: dict[str, Any] = {"rtol": rtol, "seed": site.seeds["solver"], "confidence": confidence, "memory": size}
    for name, solve in (("block", measure_block), ("heads", measure_heads)):
        if name not in maps:
            continue
        with solver_progress(name) as progress:
            measured[name] = solve(site.attention, site.x, _NORMS[norm], k, progress=progress, **solver)
        if explained:
            stories[name] = explain(site.attention, site.x, per_head=name == "heads", influence=False, **solver)
    if figure is not None:
        _draw(site, measured, figure, _SYMBOLS[norm])
    converged = all(bool(m.converged.all()) for m in measured.values())
    if as_json:
        again = {} if replay is None else {"witness": replay.to_dict()}
        print_json(_as_json(site, measured, stories, converged, figure) | again)
    else:
        _print(site, measured, stories, norm, figure)
        if replay is not None:
            show(replay.in_words())
    if not converged:
        raise typer.Exit(NOT_CONVERGED)


def _print(
    site: MapAtTokens, measured: dict[str, Measurement], stories: dict[str, Explanation], norm: str, figure: Path | None
) -> None:
    facts = site.describe()
    batch = "" if facts["batch"] is None else f"{facts['batch']} inputs of "
    show(site.in_words())
    show(f"tokens: {batch}n = {facts['n']}: {facts['input']}")
    several = any(m.values is not None and m.values.shape[-1] > 1 for m in measured.values())
    table = Table("map", f"{_SYMBOLS[norm]} (estimate)", "lower bound", "upper bound", "relative")
    for name in ["next σ"] * several + ["converged", "products", "seconds"]:
        table.add_column(name)
    for name, m in measured.items():
        for number, index in enumerate(np.ndindex(m.value.shape)):
            value, lower = written(float(m.value[index])), written(float(m.lower[index]), ROUND_FLOOR, 5)
            upper = "none" if not m.confidence else f"≤ {written(float(m.upper[index]), ROUND_CEILING, 5)}"
            following = m.values[index][1:].tolist() if several and m.values is not None else []
            more = [", ".join(map(written, following))] if several else []
            cost = ["″", "″"] if number else [f"{m.products}", f"{m.seconds:.2f}"]
            converged = "yes" if bool(m.converged[index]) else "no"
            relative = "–" if m.relative is None else written(float(m.relative[index]), digits=3)
            table.add_row(_map_name(name, index), value, f"≥ {lower}", upper, relative, *more, converged, *cost)
    show(table)
    for name, m in measured.items():
        show(f"{name}: {m.guarantees}")
    if several:
        show("next σ: the next singular values (estimates).")
    show(_RELATIVE.format(norm=_SYMBOLS[norm]))
    if any(m.value.numel() > 1 for m in measured.values()):
        show("″ solved together with the map above; each upper bound holds with its probability by itself.")
    for note in dict.fromkeys([*site.notes, *(note for m in measured.values() for note in m.notes)]):
        show(f"note: {note}")
    if stories:
        show(_explanations(stories))
        show(_PATHS)
    if figure is not None:
        show(f"figure: {figure}")


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
    site: MapAtTokens,
    measured: dict[str, Measurement],
    stories: dict[str, Explanation],
    converged: bool,
    figure: Path | None,
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
    return content | {"converged": converged, "figure": figure}


_TENSORS = ("value_share", "sink", "sink_token", "entropy", "input_energy", "output_energy")


def _energies(m: Measurement, maps: int, which: int) -> tuple[Tensor, Tensor]:
    """Energy per token, ``(n,)``, of one map's leading right and left singular vector; with -k they come first."""
    assert m.right is not None
    assert m.left is not None
    right, left = (v.reshape(maps, -1, *v.shape[-2:])[which, 0].square().sum(-1) for v in (m.right, m.left))
    return right, left


def _check_drawable(site: MapAtTokens, maps: list[str], norm: str) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured."""
    if site.x.dim() == 3 and len(site.x) > 1:
        raise InvalidInput(f"--figure draws one input, but --input holds {len(site.x)}: store one of them by itself.")
    if norm != "2" and (maps == ["block"] or site.x.shape[-2] > _MAP_TOKENS):
        raise InvalidInput(
            f"--figure shows singular vectors for a block alone, or for more than {_MAP_TOKENS} tokens: use --norm 2."
        )


def _draw(site: MapAtTokens, measured: dict[str, Measurement], path: Path, symbol: str) -> None:
    """The picture of `howsmooth measure`: all heads, and the roughest one in detail; or the block's token energies."""
    from howsmooth.reports.figures import head_bars, influence_map, new_figure, save_figure, token_energies

    if "heads" not in measured:
        came, went = _energies(measured["block"], 1, 0)
        save_figure(token_energies(came, went, title="Block: where the worst perturbation sits and shows"), path)
        return
    m = measured["heads"]
    figure, (left, right) = new_figure(2, 6.8, 5.6)
    head_bars(m.value.reshape(-1), m.lower.reshape(-1), m.upper.reshape(-1), quantity=symbol, ax=left)
    head = int(m.value.reshape(-1).argmax())
    if site.x.shape[-2] <= _MAP_TOKENS:
        influence = token_influence(site.attention, site.x.reshape(site.x.shape[-2:]), head=head)
        influence_map(influence, title=f"Head {head}: which token moves which", ax=right)
    else:
        came, went = _energies(m, site.attention.heads, head)
        token_energies(came, went, title=f"Head {head}: where the worst perturbation sits and shows", ax=right)
    save_figure(figure, path)


@dataclass(frozen=True)
class Replay:
    """A stored witness and the map it was found for.

    Attributes:
        file: where it is stored.
        witness: as stored.
        site: its map and its tokens.
        again: the norm of the Jacobian there, measured now in the same way.
        moved: the SOURCE that the file names, where the command names another one.
    """

    file: Path
    witness: Witness
    site: MapAtTokens
    again: float
    moved: str | None = None

    @classmethod
    def open(cls, file: Path, options: MapOptions) -> Replay:
        """The witness of a file, with the map that the command names.

        A file may come from anywhere, so that it opens nothing by itself: a model, a folder or a weights file must be
        named by the command too. Random weights are drawn as the file states. When both name the same SOURCE and the
        command has no other option, the options are those of the file. Refuses a map with other weights than those
        of the witness.
        """
        if any(getattr(options, name) is not None for name in ("input", "text", "length")):
            raise InvalidInput("--witness holds the tokens: leave out --input, --text and --length.")
        witness = Witness.load(file)
        recalled = _stored_options(witness.source, file) if witness.source else None
        options = _chosen(options, recalled, witness, file)
        site = replace(options, length=None if options.names_model else "1").open()
        moved = None if recalled is None or recalled.source == options.source else printable(recalled.source)
        stored = witness.source.get("sha256")
        if stored is not None and map_sha256(site.attention) != stored:
            other = "" if moved is None else f" (it names {moved})"
            raise InvalidInput(
                f"{file} was found for other weights, masks or positions than those of {site.source}{other}: name the "
                "map it belongs to, with the options it had."
            )
        if witness.x.shape[-1] != site.attention.in_features:
            raise InvalidInput(
                f"{file} holds tokens of width {witness.x.shape[-1]}, but {site.source} takes "
                f"{site.attention.in_features}: name the map it belongs to."
            )
        alone = site.attention if witness.head is None else site.attention.head(witness.head)
        again = float(norm_at(alone, witness.x, witness.norm))
        same = math.isclose(again, witness.value, rel_tol=_SAME)
        if not same and not (_unfinished(witness) and again > witness.value * (1 - _ACCURACY)):
            raise InvalidInput(
                f"{file} says {witness.value:.9g}, but {site.source} gives {again:.9g} at its input: name the map it "
                "belongs to, with the options it had."
            )
        return cls(file, witness, replace(site, x=witness.x, tokens=f"the witness {file}"), again, moved)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON."""
        norm = "inf" if math.isinf(self.witness.norm) else 2
        facts = {"file": self.file, "norm": norm, "head": self.witness.head, "over": self.witness.over}
        return facts | {"stored": self.witness.value, "value": self.again}

    def in_words(self) -> str:
        """The stored and the new value in one line."""
        which = "the block" if self.witness.head is None else f"head {self.witness.head}"
        same, more = "the same as stored ({:.9g})", "at least {:.9g}, which the search knew"
        how = (more if _unfinished(self.witness) else same).format(self.witness.value)
        other = "" if self.moved is None else f"; the file names {self.moved}, of the same weights"
        return f"witness: {self.again:.9g} for {which}, {how}{other}"


def _unfinished(witness: Witness) -> bool:
    """Whether the search was killed, or interrupted twice: its value is then the lower bound it had until then."""
    return not bool(witness.measurement.converged.all())


def _chosen(options: MapOptions, recalled: MapOptions | None, witness: Witness, file: Path) -> MapOptions:
    """The map to open: that of the command; that of the file if the command confirms it or nothing is opened."""
    if options != MapOptions():
        only_named = options == MapOptions(options.source)
        return recalled if recalled is not None and only_named and recalled.source == options.source else options
    if recalled is None:
        raise InvalidInput(f"{file} does not say which map it belongs to: name the weights before --witness.")
    drawn = random_options(recalled)
    if drawn is None:
        name = printable(recalled.source)
        raise InvalidInput(
            f"{file} names {name} as its map, and a file alone opens nothing: name it yourself, "
            f"as in howsmooth measure {name} --witness {file}."
        )
    if drawn.width != witness.x.shape[-1]:
        raise InvalidInput(f"{file} names a map of width {drawn.width} for tokens of width {witness.x.shape[-1]}.")
    return recalled


def _stored_options(source: dict[str, Any], file: Path) -> MapOptions:
    """The options that were written beside the witness, each of its kind."""
    kinds = {name: kind for name, kind in get_type_hints(MapOptions).items() if name not in OF_THE_INPUT}
    named = {name: value for name, value in source.items() if name != "sha256"}
    known = all(name in kinds and fits(value, kinds[name]) for name, value in named.items())
    if not known or "source" not in source or not isinstance(source.get("sha256", ""), str):
        raise InvalidInput(f"{file} names its map in a way that is not known here: name the weights before --witness.")
    check_seed(named.get("seed", 0))
    for name in ("width", "heads", "kv_heads", "window"):
        if name in named:
            check_count(named[name], name)
    return MapOptions(**named)
