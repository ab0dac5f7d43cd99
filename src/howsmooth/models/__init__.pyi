from .captured_sites import CapturedSite, attention_inputs, capture, capture_cross, site
from .layerwise import LayeredModel
from .model_inputs import Window, alice
from .module_names import MODEL_TYPES
from .named_models import NAMED
from .open_source import OpenModel, open_model
from .targets import Targets, target

__all__ = [
    "MODEL_TYPES",
    "NAMED",
    "CapturedSite",
    "LayeredModel",
    "OpenModel",
    "Targets",
    "Window",
    "alice",
    "attention_inputs",
    "capture",
    "capture_cross",
    "open_model",
    "site",
    "target",
]
