"""Kim et al.'s comparison on characters: what does it cost to make attention contract, and by which bound to divide?

`python -m evidence.training_grid` works on cells that nobody else works on, so that it may run in several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from evidence.real_heads import shared_folder
from evidence.tables import FOLDER, table
from howsmooth.figures import new_figure, save_figure
from howsmooth.models import alice
from howsmooth.training import Corpus, Grid, Result, Settings, gap_closed, mean_bits, run_grid
from howsmooth.training.grid import KINDS, Cell, write_table

TITLE = "What does contractive attention cost?"
RUNS = Path(__file__).resolve().parents[1] / "howsmooth-output" / "evidence"
BASE = Settings(width=128, heads=4, length=64, batch_tokens=512, steps=1500, rate=3e-3, warmup=100)
DEPTHS, SEEDS = (2, 4, 6), (0, 1)
Show = Callable[[str], None]


def text() -> tuple[str, Corpus]:
    """Tiny Shakespeare where it is at hand, else Alice in Wonderland, which comes with the package."""
    folder = shared_folder()
    path = None if folder is None else folder / "data" / "tinyshakespeare.txt"
    if path is not None and path.is_file():
        return "tiny Shakespeare", Corpus.read(path)
    return "Alice in Wonderland", Corpus.split(alice())


def grids(base: Settings = BASE, depths: Sequence[int] = DEPTHS, seeds: Sequence[int] = SEEDS) -> dict[str, Grid]:
    """The five kinds in the usual pre-norm blocks, and the two contractive ones in blocks that contract as a whole."""
    return {
        "pre-norm": Grid(replace(base, blocks="pre-norm"), KINDS, depths, seeds),
        "contractive": Grid(replace(base, blocks="contractive", attention="contractive-2"), KINDS[3:], depths, seeds),
    }


def run(folder: Path, corpus: Corpus, wanted: dict[str, Grid], progress: Show) -> dict[str, list[Result]]:
    """All cells that are not there yet; those that are finished."""

    def show(cell: Cell) -> None:
        progress(f"{cell.name} ({cell.number}/{cell.total}), step {cell.status.step}, {cell.status.bits:.3f} bits")

    return {name: run_grid(corpus, grid, folder / name, progress=show) for name, grid in wanted.items()}


def bits(results: Sequence[Result], kind: str, depth: int) -> str:
    """Mean over the seeds, and half their range."""
    found = [r.valid_bits for r in results if (r.settings.attention, r.settings.depth) == (kind, depth)]
    values = [value for value in found if value is not None]
    mean = mean_bits(results, kind, depth)
    return f"{len(found) - len(values)} of {len(found)} diverged" if mean is None else f"{mean:.3f} ± {_half(values)}"


def summary(found: dict[str, list[Result]], wanted: dict[str, Grid]) -> str:
    """A row for every kind of attention and block, a column for every depth."""
    depths = next(iter(wanted.values())).depths
    rows = [
        [f"`{kind}`", f"{name} blocks", *(bits(found[name], kind, depth) for depth in depths), bound(found[name], kind)]
        for name, grid in wanted.items()
        for kind in grid.kinds
    ]
    return table(["attention", "in", *(f"depth {depth}" for depth in depths), "Lipschitz bound"], rows)


def gaps(found: dict[str, list[Result]], depths: Sequence[int] = DEPTHS) -> str:
    """How much of the loss by the ∞-norm bound the 2-norm bound wins back."""
    tied = [result for result in found["pre-norm"] if result.settings.attention == "l2-tied"]
    rows = []
    for name, label in (("pre-norm", "attention alone contracts"), ("contractive", "every branch contracts")):
        shares = [gap_closed([*found[name], *(tied if name != "pre-norm" else [])], depth) for depth in depths]
        rows.append([label, *("no gap" if share is None else f"{100 * share:.0f} %" for share in shares)])
    return table(["", *(f"depth {depth}" for depth in depths)], rows)


def bound(results: Sequence[Result], kind: str) -> str:
    """Least and largest proved bound of an attention block, over depths and seeds."""
    values = [r.bound for r in results if r.settings.attention == kind and r.bound is not None]
    if not values:
        return "none"
    return (
        f"{min(values):.3g}" if f"{min(values):.3g}" == f"{max(values):.3g}" else f"{min(values):.3g}–{max(values):.3g}"
    )


def draw(found: dict[str, list[Result]], wanted: dict[str, Grid], path: Path) -> None:
    """Validation bits against depth."""
    figure, (ax,) = new_figure(1, 7.0, 4.6)
    for name, grid in wanted.items():
        for kind in grid.kinds:
            means = [mean_bits(found[name], kind, depth) for depth in grid.depths]
            values = [float("nan") if value is None else value for value in means]
            ax.plot(list(grid.depths), values, "o-" if name == "pre-norm" else "s--", label=f"{kind}, {name} blocks")
    ax.set(xlabel="blocks", ylabel="validation bits per character", xticks=list(next(iter(wanted.values())).depths))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def parts(progress: Show = lambda text: None) -> list[str]:
    """The page."""
    name, corpus = text()
    wanted = grids()
    found = run(RUNS / "training-grid", corpus, wanted, progress)
    results = [result for some in found.values() for result in some]
    total = sum(len(grid.cells()) for grid in wanted.values())
    write_table(FOLDER, results, "training-grid.csv")
    draw(found, wanted, FOLDER / "training-grid.png")
    page = [
        f"Character language models on {name} ({corpus.how}), width {BASE.width}, {BASE.heads} heads, windows of "
        f"{BASE.length} characters, {BASE.batch_tokens} characters in each of {BASE.steps:,} steps, the same for all: "
        f"AdamW at {BASE.rate:g} with {BASE.warmup} steps of warm-up and cosine decay. Validation bits per character, "
        f"mean over {len(SEEDS)} seeds ± half their range; the rows are in [training-grid.csv](training-grid.csv).",
        summary(found, wanted),
        "![Validation bits against depth](training-grid.png)",
        "`l2` has keys of its own and no Lipschitz constant. `contractive-inf` divides tied L2 attention by the bound "
        "in the ∞-norm of Kim et al. (2021), `contractive-2` by the sharper one in the 2-norm; c = "
        f"{BASE.coefficient:g}. In pre-norm blocks only the attention contracts; in contractive blocks the MLP does "
        "too and ActNorm takes the place of LayerNorm, so that every block can be inverted. The Lipschitz bound is the "
        "largest of an attention block for these windows: in the 2-norm, but in the ∞-norm for `contractive-inf` in "
        "contractive blocks; after its LayerNorm for dot-product attention.",
        "Share of the gap between `contractive-inf` and `l2-tied` (in pre-norm blocks) that `contractive-2` closes:",
        gaps(found),
        f"{len(results)} of {total} cells; {sum(result.seconds for result in results) / 60:.0f} minutes of training on "
        "one core in all.",
    ]
    return page


def _half(values: list[float]) -> str:
    return f"{(max(values) - min(values)) / 2:.3f}"


if __name__ == "__main__":
    run(RUNS / "training-grid", text()[1], grids(), lambda text: print(text, flush=True))
