"""
Lengths in training: σ per block
================================

A curriculum trains on short pieces first (Pouransari et al. 2024). Here the same small character model learns from
chunks of 64 characters and by a curriculum, and σ of every attention block is measured at its real input for several n
at a quarter, half, three quarters and the end of training.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import howsmooth as hs
from howsmooth.models import alice
from howsmooth.papers.training import Corpus, Intervals, TrainingSettings, load_model, train
from howsmooth.papers.training.run_files import TrainingStatus
from howsmooth.reports.figures import new_figure

corpus, lengths, steps = Corpus.split(alice()), (8, 16, 32, 64), 400
valid = corpus.encode(corpus.valid)


def sigma(folder: Path, n: int) -> list[float]:
    """Mean of σ over four windows of n characters, for every block of the model as it is now."""
    model, _ = load_model(folder)
    tokens = torch.stack([valid[start : start + n] for start in (0, 3000, 6000, 9000)])
    with torch.no_grad():
        inputs = [block.norms[0](x) for block, x in zip(model.blocks, model.stream(tokens), strict=False)]
    maps = [block.attention.map(model.mask(), n=n) for block in model.blocks]
    return [float(hs.measure(f, x).value.mean()) for f, x in zip(maps, inputs, strict=True)]


figure, axes = new_figure(2, 5.0, 4.4)
for ax, kind in zip(axes, ("chunks", "curriculum"), strict=True):
    seen: dict[tuple[int, int], list[float]] = {}
    settings = TrainingSettings(
        lengths=kind, depth=2, width=64, heads=4, length=64, batch_tokens=512, steps=steps, rate=3e-3, warmup=50
    )
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"

        def look(now: TrainingStatus, folder: Path = folder, seen: dict[tuple[int, int], list[float]] = seen) -> None:
            if now.step % 100 == 0:
                seen |= {(now.step, n): sigma(folder, n) for n in lengths}

        result = train(corpus, settings, folder, intervals=Intervals(save=100), progress=look)
    print(f"{kind}: {result.valid_bits:.3f} bits per character")
    for (step, n), values in seen.items():
        print(f"  step {step}, n = {n}: σ per block " + ", ".join(f"{value:.2f}" for value in values))
    for step, mark in zip(range(100, steps + 1, 100), "os^D", strict=True):
        for block, line in ((0, "-"), (1, "--")):
            values = [seen[step, n][block] for n in lengths]
            ax.loglog(lengths, values, mark + line, color=f"C{step // 100 - 1}", label=f"block {block}, step {step}")
    ax.set(xlabel="number of tokens n", ylabel="σ_max(J) of a block, mean of 4 windows", title=kind)
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.set_yticks([4, 6, 8, 10, 15], ["4", "6", "8", "10", "15"])
    ax.set_ylim(3.8, 16)
    ax.minorticks_off()
_ = axes[0].legend(fontsize=7, frameon=False, handlelength=4)
