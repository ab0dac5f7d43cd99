"""Sets of inputs: the places where a map is bounded, searched and proved about, one noun for every ``over=``.

Read `input_sets` first: `InputSet` and its subclasses `Ball`, `Sphere`, `Normalised`, `Everywhere` and `Tokens`
(sequences of given tokens); then `near_sets` (`Point`, `Around` and `Box`: inputs near a given one; `SetText`: the
texts of the command line, such as ``around:1%``). `ellipsoid` holds the value that theorems take from a set: the
ellipsoid in which every single token lies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
