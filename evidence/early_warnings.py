"""Which signal of the monitor warns before training diverges, how early, and how often for nothing?

The learning rate of a small character model is raised until its loss runs away; a twin of the same seed keeps its rate.
Every signal has the same rule: it warns when it leaves its own median over the last `WINDOW` steps by more than it ever
does in the steady runs of the nine other seeds. So nobody chose thresholds, and the steady run of the tenth seed counts
false alarms.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from matplotlib.figure import Figure

from evidence.tables import FOLDER, table
from howsmooth.models import alice
from howsmooth.nn import SmoothnessMonitor
from howsmooth.papers.training import CharacterModel, Corpus, TrainingSettings
from howsmooth.papers.training.loop import nats
from howsmooth.papers.training.text_batches import plan
from howsmooth.reports.figures.style import ACCENT, BLUE, light_grid, new_figure, save_figure

TITLE = "Does σ warn before training diverges?"
SIGNALS = ("σ", "largest logit", "entropy", "‖P‖", "relative condition", "gradient norm", "loss")
_OF_MONITOR = {"σ": "sigma_lower", "largest logit": "largest_logit", "entropy": "entropy", "‖P‖": "weights_norm"}
_OF_MONITOR["relative condition"] = "condition"
BASE = TrainingSettings(
    attention="dot-product", depth=2, width=32, heads=2, length=32, batch_tokens=256, rate=2e-3, warmup=0, clip=0.0
)
SEEDS = tuple(range(10))
STEADY, MOST, EVERY, WINDOW = 100, 300, 5, 60
"""Steps before the rate rises, steps in all, steps from one measurement to the next, and of the median."""
GROWTH = 1.04
"""Factor on the rate from one step to the next."""
APART, MEAN = 0.5, 5
"""A run has diverged when the mean loss of the last `MEAN` steps is this many nats above the least such mean before."""


@dataclass
class Run:
    """What was seen in one run: for every signal its values at the steps that were measured."""

    seed: int
    rising: bool
    diverged: int | None = None
    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SIGNALS})


def train(seed: int, rising: bool, corpus: Corpus, settings: TrainingSettings = BASE, most: int = MOST) -> Run:
    """One run: at a steady rate, or with one that rises after `STEADY` steps until the loss runs away."""
    run, pieces = Run(seed, rising), plan(corpus, "fixed", settings.length, settings.batch_tokens, seed, most)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CharacterModel(settings, corpus.symbols)
        optimiser = torch.optim.AdamW(model.groups(settings.weight_decay), lr=settings.rate, betas=(0.9, 0.98))
        losses: list[float] = []
        least = math.inf
        with SmoothnessMonitor(model, every=EVERY, heads=True) as monitor:
            for step in range(most):
                for group in optimiser.param_groups:
                    group["lr"] = settings.rate * (GROWTH ** max(0, step - STEADY) if rising else 1.0)
                optimiser.zero_grad()
                loss = nats(model, pieces.batch(step))
                loss.backward()
                norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                seen = monitor.step(step)
                losses.append(loss.item())
                if seen:
                    _note(run, step, seen, float(torch.stack(norms).norm()), losses[-1])
                optimiser.step()
                mean = sum(losses[-MEAN:]) / len(losses[-MEAN:])
                if not math.isfinite(mean) or (step >= STEADY and mean > least + APART):
                    run.diverged = step
                    break
                least = min(least, mean) if len(losses) >= MEAN else least
    return run


def _note(run: Run, step: int, seen: dict[str, float], gradient: float, loss: float) -> None:
    run.steps.append(step)
    for name, key in _OF_MONITOR.items():
        of_heads = [value for path, value in seen.items() if path.startswith(f"{key}/")]
        run.values[name].append(min(of_heads) if name == "entropy" else max(of_heads))
    run.values["gradient norm"].append(gradient)
    run.values["loss"].append(loss)


def departures(run: Run, signal: str) -> list[float]:
    """How far, in logarithms, a signal is above its median over the last `WINDOW` steps (entropy: below).

    >>> run = Run(0, False, None, [0, 5, 10], {"σ": [1.0, 1.0, math.e]})
    >>> departures(run, "σ")
    [0.0, 0.0, 1.0]
    """
    sign = -1 if signal == "entropy" else 1
    logs = [sign * math.log(max(value, 1e-12)) for value in run.values[signal]]
    before = WINDOW // EVERY
    return [value - median(logs[max(0, i - before) : i] or [value]) for i, value in enumerate(logs)]


@dataclass(frozen=True)
class Verdict:
    """Of one signal: steps from its warning to the divergence of each run (None: no warning), and false alarms."""

    signal: str
    leads: tuple[int | None, ...]
    false_alarms: int

    @property
    def warned(self) -> list[int]:
        """The leads of the runs that were warned of before they diverged."""
        return [lead for lead in self.leads if lead is not None and lead > 0]


def judge(steady: Sequence[Run], rising: Sequence[Run]) -> list[Verdict]:
    """The verdict on every signal; each seed is judged by a threshold from the steady runs of the others."""
    verdicts = []
    for signal in SIGNALS:
        most = [max(_late(run, signal).values(), default=0.0) for run in steady]
        leads, false_alarms = list[int | None](), 0
        for number, run in enumerate(rising):
            limit = max(most[:number] + most[number + 1 :])
            false_alarms += most[number] > limit
            first = next((step for step, value in _late(run, signal).items() if value > limit), None)
            leads.append(None if first is None or run.diverged is None else run.diverged - first)
        verdicts.append(Verdict(signal, tuple(leads), false_alarms))
    return verdicts


def _late(run: Run, signal: str) -> dict[int, float]:
    """The departures after the first `STEADY` steps, in which everything moves."""
    pairs = zip(run.steps, departures(run, signal), strict=True)
    return {step: value for step, value in pairs if step >= STEADY}


def corpus() -> Corpus:
    """Alice in Wonderland."""
    return Corpus.split(alice())


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    text, runs = corpus(), list[Run]()
    for seed in SEEDS:
        for rises in (False, True):
            runs.append(train(seed, rises, text))
            progress(f"seed {seed}, {'rising' if rises else 'steady'}: diverged at {runs[-1].diverged}")
    return page(runs)


def page(runs: Sequence[Run]) -> list[str]:
    """The page of some runs."""
    steady, rising = ([run for run in runs if run.rising is rises] for rises in (False, True))
    _write(runs)
    verdicts = judge(steady, rising)
    draw(rising, verdicts)
    best = max(verdicts, key=lambda v: (len(v.warned), median(v.warned or [0])))
    return [
        f"Character models ({BASE.depth} blocks of width {BASE.width}, {BASE.heads} heads, pieces of {BASE.length} "
        f"characters of Alice in Wonderland, AdamW at {BASE.rate:g}, no clipping), seeds 0 to {len(SEEDS) - 1}. From "
        f"step {STEADY} the learning rate grows by {100 * (GROWTH - 1):.3g} % a step until the mean loss of {MEAN} "
        f"steps is {APART:g} nats above the least before: the run has diverged. A twin keeps its rate for {MOST} "
        f"steps. Diverged: {sum(run.diverged is not None for run in rising)} of {len(rising)} rising runs (steps "
        f"{min(run.diverged or MOST for run in rising)} to {max(run.diverged or 0 for run in rising)}) and "
        f"{sum(run.diverged is not None for run in steady)} of {len(steady)} steady ones.",
        "Every signal warns by the same rule: when it leaves its own median over the last "
        f"{WINDOW} steps by more than in any steady run of the nine other seeds. Of layers and heads the roughest "
        "counts. The lead is the number of steps from the warning to divergence; a false alarm is a warning in the "
        "steady run of the same seed. With this rule the loudest of the steady runs, and it alone, is a false alarm of "
        "every signal: leads are compared at one and the same rate.",
        table(
            ["signal", "warned before divergence", "median lead", "leads", "false alarms"],
            [_row(verdict, len(rising)) for verdict in verdicts],
        ),
        "![Lead of every signal](early-warnings.png)",
        _conclusion(verdicts, best),
        "The values of all runs are in [early-warnings.csv](early-warnings.csv).",
    ]


def _row(verdict: Verdict, count: int) -> list[object]:
    leads = ", ".join("–" if lead is None else str(lead) for lead in verdict.leads)
    middle = f"{median(verdict.warned):g}" if verdict.warned else "–"
    return [verdict.signal, f"{len(verdict.warned)}/{count}", middle, leads, f"{verdict.false_alarms}/{count}"]


def _conclusion(verdicts: Sequence[Verdict], best: Verdict) -> str:
    of_sigma = next(verdict for verdict in verdicts if verdict.signal == "σ")
    by_sigma = f"{len(of_sigma.warned)} runs, with a median lead of {median(of_sigma.warned or [0]):g} steps"
    if best.signal == "σ":
        return f"Here σ is the best signal: it warned of {by_sigma}."
    of_best = f"{len(best.warned)} with a median lead of {median(best.warned or [0]):g}"
    pairs = [(a or 0, b or 0) for a, b in zip(of_sigma.leads, best.leads, strict=True)]
    earlier, later = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return (
        f"**σ is not the best signal here.** It warned of {by_sigma}; the {best.signal} warned of {of_best}, "
        f"earlier than σ in {earlier} runs and later in {later}. Loss and norm of the gradient warn late or not at "
        "all. These are small models whose rate is raised on purpose; nothing follows for other ways to diverge."
    )


def _write(runs: Sequence[Run]) -> None:
    with (FOLDER / "early-warnings.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seed", "rate", "diverged", "step", *SIGNALS])
        for run in runs:
            for i, step in enumerate(run.steps):
                numbers = [f"{run.values[name][i]:.5g}" for name in SIGNALS]
                writer.writerow([run.seed, "rising" if run.rising else "steady", run.diverged, step, *numbers])


def draw(rising: Sequence[Run], verdicts: Sequence[Verdict]) -> None:
    """The picture of the page."""
    save_figure(leads_figure({verdict.signal: verdict.leads for verdict in verdicts}), FOLDER / "early-warnings.png")


def leads_figure(leads: Mapping[str, Sequence[int | None]]) -> Figure:
    """Steps from a signal's warning to divergence, one dot per run and a line at the median of the warned runs.

    Args:
        leads: of every signal, for each run; None where it did not warn.
    """
    figure, (ax,) = new_figure(1, 7.6, 0.5 * len(leads) + 1.6)
    labels = []
    for row, (name, steps) in enumerate(reversed(leads.items())):
        warned = [lead for lead in steps if lead is not None and lead > 0]
        ax.plot(warned, [row] * len(warned), "o", color=BLUE, alpha=0.6, markersize=5)
        if warned:
            ax.plot([median(warned)] * 2, [row - 0.3, row + 0.3], color=ACCENT, linewidth=2.5)
        labels.append(f"{name} ({len(warned)} of {len(steps)})")
    ax.set_yticks(range(len(labels)), labels=labels)
    ax.set_xlim(left=0)
    ax.set(xlabel="steps from the warning to divergence (median: line)", title="How early does each signal warn?")
    light_grid(ax)
    return figure


if __name__ == "__main__":
    from evidence.tables import write

    write("early-warnings", TITLE, parts(lambda text: print(text, flush=True)))
