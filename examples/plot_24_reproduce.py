"""
Claims of two papers, made again
================================

`howsmooth reproduce` runs the experiments of the papers behind this package. These three take seconds; all,
with figures and verdicts, stand on the page of :doc:`reproduced experiments <../reproduced>`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from howsmooth.papers import EXPERIMENTS, Asked, reproduce

names = ("not-lipschitz", "large-radius", "inversion")
with TemporaryDirectory() as folder:
    made = {name: reproduce(EXPERIMENTS[name], Asked("quick"), Path(folder)) for name in names}
figures = {name: one.experiment.draw(one.rows) for name, one in made.items()}
first, second, third = figures.values()

# %%
# The verdicts:
for name, one in made.items():
    print(f"{name}: {one.finding.verdict.value}\n  {one.finding.measured}")
