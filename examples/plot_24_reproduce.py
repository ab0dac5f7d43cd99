"""
Claims of two papers, made again
================================

`howsmooth reproduce` runs the experiments of the papers behind this package: claim, data, figure, verdict. Three of
them take seconds and run here; what all of them said when they were run for this site is printed below them, and
stands with settings and numbers on the page of :doc:`reproduced experiments <../reproduced>`.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.image
from matplotlib import pyplot

from howsmooth.papers import EXPERIMENTS, ExperimentOptions, reproduce

names = ("not-lipschitz", "large-radius", "inversion")
with TemporaryDirectory() as folder:
    made = {name: reproduce(EXPERIMENTS[name], ExperimentOptions("quick"), Path(folder)) for name in names}
figures = {name: one.experiment.draw(one.rows) for name, one in made.items()}
first, second, third = figures.values()

# %%
# What these three say:
for name, one in made.items():
    print(f"{name}: {one.finding.verdict.value}\n  {one.finding.measured}")

# %%
# Every verdict, as recorded:
here = Path.cwd()
docs = next(place / "docs" for place in (here, *here.parents) if (place / "docs" / "evidence").is_dir())
recorded = json.loads((docs / "evidence" / "reproduced.json").read_text(encoding="utf-8"))
for name, sizes in recorded.items():
    print(f"{name}: {EXPERIMENTS[name].title}")
    for size, run in sizes.items():
        print(f"  {size}: {run['verdict']}")

# %%
# And every figure, of the largest size that was run:
sheet, axes = pyplot.subplots(5, 3, figsize=(15, 18), layout="constrained")
for ax, (name, sizes) in zip(axes.flat, recorded.items(), strict=True):
    largest, run = list(sizes.items())[-1]
    ax.imshow(matplotlib.image.imread(docs / "images" / "reproduced" / f"{name}.png"))
    ax.set_title(f"{name}: {run['verdict']} ({largest})", fontsize=10)
    ax.axis("off")
