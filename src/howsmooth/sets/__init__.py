"""Sets of inputs: the places where a map is bounded, searched and proved about, one noun for every ``over=``.

Read `input_sets` first: `InputSet` and its subclasses `Ball`, `Sphere`, `Normalised` and `Everywhere`; then
`near_sets` (`Point`, `Around` and `Box`: inputs near a given one), `tokens` (sequences of given tokens) and `set_text`
(the texts of the command line, such as ``around:1%``). `ellipsoid` holds the value that theorems take from a set: the
ellipsoid in which every single token lies.
"""

from howsmooth.sets.input_sets import Ball, Everywhere, InputSet, Normalised, Sphere
from howsmooth.sets.near_sets import Around, Box, Point
from howsmooth.sets.set_text import SetText
from howsmooth.sets.tokens import Tokens

__all__ = [
    "Around",
    "Ball",
    "Box",
    "Everywhere",
    "InputSet",
    "Normalised",
    "Point",
    "SetText",
    "Sphere",
    "Tokens",
]
