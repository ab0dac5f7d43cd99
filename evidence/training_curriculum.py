"""Short pieces first: is a curriculum of lengths better per character or per second, and is the model as smooth?

`python -m evidence.training_curriculum` works on runs that nobody else works on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

import howsmooth as hs
from evidence.tables import FOLDER, table
from evidence.training_grid import RUNS, text
from howsmooth._util.common import Busy, write_whole
from howsmooth.papers.training import CharacterModel, Corpus, Intervals, TrainingSettings, load_model, train
from howsmooth.papers.training.run_files import TrainingResult
from howsmooth.reports.figures import new_figure, save_figure

TITLE = "Does a curriculum of lengths pay?"
BASE = TrainingSettings(depth=4, width=64, heads=4, length=256, batch_tokens=1024, steps=2000, rate=3e-3, warmup=100)
SEEDS = (0, 1)
WINDOWS = 4
"""Windows of the validation part on which σ is measured, for each length."""
INTERVALS = Intervals(validate=100)
Runs = dict[str, list[tuple[TrainingResult, Path]]]


def arms(base: TrainingSettings = BASE) -> dict[str, TrainingSettings]:
    """What is compared: every step at full length, and two curricula."""
    return {
        "chunks": replace(base, lengths="chunks"),
        "curriculum, 1 cycle": replace(base, lengths="curriculum"),
        "curriculum, 4 cycles": replace(base, lengths="curriculum", cycles=4),
    }


def run(
    folder: Path,
    corpus: Corpus,
    wanted: dict[str, TrainingSettings],
    seeds: Sequence[int],
    intervals: Intervals,
    progress: Callable[[str], None],
) -> Runs:
    """All runs, those that are there taken as they are; a run of another process is left to it."""
    found: Runs = {name: [] for name in wanted}
    for seed in seeds:
        for name, settings in wanted.items():
            place = folder / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            show = lambda now, name=name: progress(f"{name}, step {now.step}, {now.bits:.3f} bits")  # noqa: E731
            with suppress(Busy):
                result = train(
                    corpus, replace(settings, seed=seed), place, resume=True, intervals=intervals, progress=show
                )
                found[name].append((result, place))
    return found


def sigma(model: CharacterModel, corpus: Corpus, n: int, windows: int = WINDOWS) -> list[float]:
    """For each block σ_max of its attention at its real input, mean over windows of n characters."""
    starts = torch.linspace(1, len(corpus.valid) - n - 1, windows).long()
    valid = corpus.encode(corpus.valid)
    tokens = torch.stack([valid[start : start + n] for start in starts])
    with torch.no_grad():
        entering = model.stream(tokens)[:-1]
        inputs = [block.norms[0](x) for block, x in zip(model.blocks, entering, strict=True)]  # type: ignore[operator, index]
    return [
        float(hs.measure(block.attention.map(model.mask(), n=n), x).value.mean())  # type: ignore[operator, union-attr]
        for block, x in zip(model.blocks, inputs, strict=True)
    ]


def smoothness(runs: Runs, corpus: Corpus, lengths: Sequence[int]) -> list[dict[str, object]]:
    """A row for every run, length and block."""
    rows = []
    for name, done in runs.items():
        for result, place in done:
            model, _ = load_model(place)
            for n in lengths:
                for layer, value in enumerate(sigma(model, corpus, n)):
                    rows.append({"run": name, "seed": result.settings.seed, "n": n, "layer": layer, "sigma": value})
    return rows


def learning(runs: Runs) -> list[dict[str, object]]:
    """A row for every run and time of validation."""
    return [
        {"run": name, "seed": result.settings.seed, **{key: row[key] for key in ("tokens", "seconds", "valid_bits")}}
        for name, done in runs.items()
        for result, _ in done
        for row in result.rows
        if row.get("valid_bits") is not None
    ]


def draw(runs: Runs, rows: list[dict[str, object]], path: Path) -> None:
    """Loss against tokens and against time, and σ of the roughest block against n."""
    figure, (tokens, seconds, rough) = new_figure(3, 4.6, 4.0)
    for number, name in enumerate(runs):
        colour = f"C{number}"
        for row_of, axes in (("tokens", tokens), ("seconds", seconds)):
            for result, _ in runs[name]:
                kept = [row for row in result.rows if row.get("valid_bits") is not None]
                label = name if result is runs[name][0][0] else None
                axes.plot([row[row_of] for row in kept], [row["valid_bits"] for row in kept], color=colour, label=label)
        mine = [row for row in rows if row["run"] == name]
        lengths = sorted({int(row["n"]) for row in mine})  # type: ignore[call-overload]
        rough.plot(lengths, [_roughest(mine, n) for n in lengths], "o-", color=colour, label=name)
    tokens.set(xlabel="characters seen", ylabel="validation bits per character")
    seconds.set(xlabel="seconds of training", ylabel="validation bits per character")
    rough.set(xlabel="n", ylabel="σ of the roughest block")
    for scale, axis in ((rough.set_xscale, rough.xaxis), (rough.set_yscale, rough.yaxis)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    tokens.legend(fontsize=8, frameon=False)
    for axes in (tokens, seconds, rough):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def results_table(runs: Runs) -> str:
    """The end of every run."""
    rows = []
    for name, done in runs.items():
        results = [result for result, _ in done]
        if results:
            ends = [f"{r.valid_bits:.3f}" if r.valid_bits is not None else f"diverged at {r.diverged}" for r in results]
            speed = mean(r.tokens / r.seconds for r in results)
            rows.append([name, ", ".join(ends), f"{mean(r.seconds for r in results):.0f}", f"{speed:,.0f}"])
    return table(
        ["run", "validation bits per character, by seed", "seconds of training", "characters per second"], rows
    )


def sigma_table(rows: list[dict[str, object]]) -> str:
    """σ per block, mean over seeds, against n."""
    lengths = sorted({int(row["n"]) for row in rows})  # type: ignore[call-overload]
    keys = list(dict.fromkeys((row["run"], row["layer"]) for row in rows))
    return table(
        ["run", "block", *(f"n = {n}" for n in lengths)],
        [
            [
                name,
                layer,
                *(
                    f"{_mean([r for r in rows if (r['run'], r['layer'], r['n']) == (name, layer, n)]):.2f}"
                    for n in lengths
                ),
            ]
            for name, layer in keys
        ],
    )


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    name, corpus = text()
    runs = run(RUNS / "training-curriculum", corpus, arms(), SEEDS, INTERVALS, progress)
    progress("measuring")
    rows = smoothness(runs, corpus, [8, 16, 32, 64, 128, 256])
    write_rows(FOLDER / "training-curriculum.csv", learning(runs))
    write_rows(FOLDER / "training-curriculum-sigma.csv", rows)
    draw(runs, rows, FOLDER / "training-curriculum.png")
    return [
        f"Dot-product character models on {name}: {BASE.depth} pre-norm blocks of width {BASE.width}, {BASE.steps:,} "
        f"steps of {BASE.batch_tokens:,} characters, {len(SEEDS)} seeds. Documents are paragraphs. *Chunks* are "
        f"{BASE.length} characters of shuffled documents with cross-document masks; a *curriculum* cuts documents into "
        f"pieces of powers of two up to {BASE.length} and goes from short to long, once or four times. All are "
        f"validated on the same chunks of {BASE.length} characters. Time is that of the steps on one core, without "
        "validation.",
        results_table(runs),
        "![Loss against characters and time, and σ against n](training-curriculum.png)",
        f"The curves are validated on the first {INTERVALS.validate_on:,} characters of the validation part, the table "
        "on all of it.",
        "Local Lipschitz constant σ of each attention block at the end of training, at its real input (after "
        f"LayerNorm) on {WINDOWS} windows of n characters of the validation part, mean over windows and seeds "
        "(estimates, within 0.1 %):",
        sigma_table(rows),
        "Rows: [training-curriculum.csv](training-curriculum.csv), "
        "[training-curriculum-sigma.csv](training-curriculum-sigma.csv).",
    ]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def _mean(rows: list[dict[str, object]]) -> float:
    return mean(float(row["sigma"]) for row in rows)  # type: ignore[arg-type]


def _roughest(rows: list[dict[str, object]], n: int) -> float:
    layers = {row["layer"] for row in rows}
    return max(_mean([row for row in rows if (row["n"], row["layer"]) == (n, layer)]) for layer in layers)


if __name__ == "__main__":
    show = lambda text: print(text, flush=True)  # noqa: E731
    run(RUNS / "training-curriculum", text()[1], arms(), SEEDS, INTERVALS, show)
