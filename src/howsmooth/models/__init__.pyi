from .attention_reader import from_transformers
from .captured_sites import CapturedCross, CapturedSite, capture, capture_cross, site
from .in_memory import held_model
from .input_capture import AttentionInputs, attention_inputs
from .input_files import alice
from .layerwise import LayeredModel
from .module_names import MODEL_TYPES, RANDOM_NAMES
from .named_models import NAMED, NamedModel
from .open_source import OpenModel, load, open_model
from .targets import WHATS, Targets, target
from .text_windows import Window

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
