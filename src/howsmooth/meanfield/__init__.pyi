from .distances import conditional, distance, largest_ratio, ratio, w2
from .local_stretch import LocalConstant, local_constant, two_atom, two_atom_measure
from .measure_attention import Measure, field, push

__all__ = [
    "LocalConstant",
    "Measure",
    "conditional",
    "distance",
    "field",
    "largest_ratio",
    "local_constant",
    "push",
    "ratio",
    "two_atom",
    "two_atom_measure",
    "w2",
]
