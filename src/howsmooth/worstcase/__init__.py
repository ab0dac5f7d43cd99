"""The least smooth input: worst-case search with the theorems' constructions among its starts."""

from howsmooth.sets import Ball, Embeddings, Everywhere, InputSet, Neighbourhood, Normalised, Sphere
from howsmooth.worstcase.attacks import Attack, minimal_norm_attack, projected_attack
from howsmooth.worstcase.both_ends import Sandwich
from howsmooth.worstcase.measures import MeasureWitness, worst_measure
from howsmooth.worstcase.sandwich_search import sandwich
from howsmooth.worstcase.search import worst_case
from howsmooth.worstcase.witness import Witness

__all__ = [
    "Attack",
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
    "minimal_norm_attack",
    "projected_attack",
    "sandwich",
    "worst_case",
    "worst_measure",
]
