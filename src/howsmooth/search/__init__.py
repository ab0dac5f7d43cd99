"""Searches for the input at which a map is least smooth: lower bounds with a witness.

Read `worst_case_search` (`worst_case`) and `search_question` (its checked arguments) first; then `start_inputs` (random
starts and the inputs of theorems), `ascent` and `token_exchange` (the two climbs), `norm_gradient` (their gradient)
and `multi_start` (one search from all its starts). `sandwich_search` adds upper bounds, `worst_measure_search`
searches measures, `attacks` searches adversarial images.
"""

from howsmooth.search.attacks import Attack, minimal_norm_attack, projected_attack
from howsmooth.search.sandwich_result import Sandwich
from howsmooth.search.sandwich_search import sandwich
from howsmooth.search.witness import Witness
from howsmooth.search.worst_case_search import worst_case
from howsmooth.search.worst_measure_search import MeasureWitness, worst_measure

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
