from .input_sets import Ball, Everywhere, InputSet, Normalised, Sphere, Tokens
from .near_sets import Around, Box, Point, SetText

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
