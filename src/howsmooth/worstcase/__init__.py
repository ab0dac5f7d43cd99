"""The least smooth input: worst-case search with the theorems' constructions among its starts."""

from howsmooth.sets import Ball, Embeddings, Everywhere, InputSet, Neighbourhood, Normalised, Sphere
from howsmooth.worstcase.both_ends import Sandwich
from howsmooth.worstcase.measures import MeasureWitness, worst_measure
from howsmooth.worstcase.sandwich_search import sandwich
from howsmooth.worstcase.search import worst_case
from howsmooth.worstcase.witness import Witness

__all__ = [
    "Ball",
    "Embeddings",
    "Everywhere",
    "InputSet",
    "MeasureWitness",
    "Neighbourhood",
    "Normalised",
    "Sandwich",
    "Sphere",
    "Witness",
    "sandwich",
    "worst_case",
    "worst_measure",
]
