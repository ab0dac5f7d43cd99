"""The experiments of two papers, one module each: claim, test, figure and verdict.

Read `experiment`, `reproduction` (it runs one and saves its files), then any experiment; `experiment_inputs` and
`figure_style` hold their common code, and `training` trains the language models that some of them need.

>>> from howsmooth.papers import EXPERIMENTS
>>> EXPERIMENTS["not-lipschitz"].title
'Dot-product attention is not Lipschitz'
"""

# ruff: noqa: E402  (a missing package is reported before anything imports it)
from howsmooth._util.optional_deps import require

require(("matplotlib", "pandas", "pyarrow", "ot"), "an experiment of the papers")

from howsmooth.papers import (
    adversarial,
    fixed_rate,
    growth_radius,
    growth_text,
    inversion,
    language_models,
    large_radius,
    layer_norm,
    lip_infinity,
    lip_two,
    masked_distance,
    mean_field,
    not_lipschitz,
    recipe_variants,
    released_recipe,
)
from howsmooth.papers.experiment import Experiment, ExperimentOptions, Verdict
from howsmooth.papers.reproduction import Reproduction, reproduce

__all__ = ["EXPERIMENTS", "Experiment", "ExperimentOptions", "Reproduction", "Verdict", "reproduce"]

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.id: module.EXPERIMENT
    for module in (
        growth_text,
        growth_radius,
        adversarial,
        mean_field,
        large_radius,
        layer_norm,
        masked_distance,
        released_recipe,
        recipe_variants,
        not_lipschitz,
        lip_infinity,
        lip_two,
        inversion,
        language_models,
        fixed_rate,
    )
}
"""All experiments by their names, in the order of the papers."""
