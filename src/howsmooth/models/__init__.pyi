from .captured_sites import CapturedSite, attention_inputs, capture, capture_cross, site
from .input_files import alice
from .layerwise import LayeredModel
from .module_names import MODEL_TYPES
from .named_models import NAMED
from .open_source import OpenModel, open_model
from .targets import Targets, target
from .text_windows import Window

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
