from .attacks import Attack, minimal_norm_attack, projected_attack
from .sandwich_search import Sandwich, sandwich
from .witness import Witness
from .worst_case_search import worst_case
from .worst_measure_search import MeasureWitness, worst_measure

__all__ = [
    "Attack",
    "MeasureWitness",
    "Sandwich",
    "Witness",
    "minimal_norm_attack",
    "projected_attack",
    "sandwich",
    "worst_case",
    "worst_measure",
]
