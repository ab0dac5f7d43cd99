"""The least smooth input: worst-case search with the theorems' constructions among its starts."""

from howsmooth.search.attacks import Attack, minimal_norm_attack, projected_attack
from howsmooth.search.sandwich_result import Sandwich
from howsmooth.search.sandwich_search import sandwich
from howsmooth.search.witness import Witness
from howsmooth.search.worst_case_search import worst_case
from howsmooth.search.worst_measure_search import MeasureWitness, worst_measure
from howsmooth.sets import Ball, Embeddings, Everywhere, InputSet, Neighbourhood, Normalised, Sphere

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
