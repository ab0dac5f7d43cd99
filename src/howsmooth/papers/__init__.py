"""The experiments of two papers, one class each: claim, test, figure and verdict.

Read `experiment` (with `reproduce`, which runs one and saves its files), then any module of experiments;
`experiment_inputs` and `figure_style` hold their common code, and `training` trains the language models of some.

>>> from howsmooth.papers import EXPERIMENTS
>>> EXPERIMENTS["not-lipschitz"].title
'Dot-product attention is not Lipschitz'
"""

# ruff: noqa: E402  (a missing package is reported before anything imports it)
from howsmooth._util.optional_deps import require

require(("matplotlib", "pandas", "pyarrow", "ot"), "an experiment of the papers")

from howsmooth.papers.experiment import Experiment, ExperimentOptions, Reproduction, Verdict, reproduce
from howsmooth.papers.extreme_inputs import Adversarial, LargeRadius
from howsmooth.papers.growth_on_text import GrowthRadius, GrowthText, LayerNorm
from howsmooth.papers.l2_theorems import LipInfinity, LipTwo, NotLipschitz, NumericalInversion
from howsmooth.papers.mean_field_limit import MaskedDistance, MeanField
from howsmooth.papers.released_scripts import RecipeVariants, ReleasedRecipe
from howsmooth.papers.training_depth import FixedRate, LanguageModels

__all__ = ["EXPERIMENTS", "Experiment", "ExperimentOptions", "Reproduction", "Verdict", "reproduce"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment()
    for experiment in (
        *(GrowthText, GrowthRadius, Adversarial, MeanField, LargeRadius, LayerNorm, MaskedDistance),
        *(
            ReleasedRecipe,
            RecipeVariants,
            NotLipschitz,
            LipInfinity,
            LipTwo,
            NumericalInversion,
            LanguageModels,
            FixedRate,
        ),
    )
}
"""All experiments by their names, in the order of the papers."""
