"""Hugging Face models: their attention as maps, the inputs it really sees, named models and texts.

>>> from howsmooth.models import capture, open_model
>>> opened = open_model("random:bert[layers=2,width=32]")
>>> [window] = opened.windows("Down the rabbit hole", length=12)
>>> [site.name for site in capture(opened.model, opened.inputs(window))]
['encoder.layer.0.attention', 'encoder.layer.1.attention']
"""

from typing import TYPE_CHECKING

from howsmooth.small import on_demand

if TYPE_CHECKING:
    from howsmooth.models.conventions import MODEL_TYPES, RANDOM_NAMES
    from howsmooth.models.crossing import CapturedCross, capture_cross
    from howsmooth.models.held import held_model
    from howsmooth.models.inputs import AttentionInputs, attention_inputs
    from howsmooth.models.layerwise import LayeredModel
    from howsmooth.models.maps import from_transformers
    from howsmooth.models.named import NAMED, NamedModel
    from howsmooth.models.opened import OpenModel, load, open_model
    from howsmooth.models.sites import CapturedSite, capture, site
    from howsmooth.models.targets import WHATS, Targets, target
    from howsmooth.models.texts import alice
    from howsmooth.models.windows import Window

__getattr__, __dir__ = on_demand(
    __name__,
    {
        "conventions": ("MODEL_TYPES", "RANDOM_NAMES"),
        "crossing": ("CapturedCross", "capture_cross"),
        "held": ("held_model",),
        "inputs": ("AttentionInputs", "attention_inputs"),
        "layerwise": ("LayeredModel",),
        "maps": ("from_transformers",),
        "named": ("NAMED", "NamedModel"),
        "opened": ("OpenModel", "load", "open_model"),
        "sites": ("CapturedSite", "capture", "site"),
        "targets": ("WHATS", "Targets", "target"),
        "texts": ("alice",),
        "windows": ("Window",),
    },
)

__all__ = [
    "MODEL_TYPES",
    "NAMED",
    "RANDOM_NAMES",
    "WHATS",
    "AttentionInputs",
    "CapturedCross",
    "CapturedSite",
    "LayeredModel",
    "NamedModel",
    "OpenModel",
    "Targets",
    "Window",
    "alice",
    "attention_inputs",
    "capture",
    "capture_cross",
    "from_transformers",
    "held_model",
    "load",
    "open_model",
    "site",
    "target",
]
