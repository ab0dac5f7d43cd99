"""Where inputs live: balls and ellipsoids of tokens, spheres, neighbourhoods, sequences of embeddings.

A `TokenSet` is what theorems know of single tokens; an `InputSet` holds whole inputs, to project onto and to search.
"""

from howsmooth.sets.embeddings import Embeddings
from howsmooth.sets.input_sets import Ball, Everywhere, InputSet, Neighbourhood, Normalised, Sphere, as_set
from howsmooth.sets.token_sets import TokenSet

__all__ = ["Ball", "Embeddings", "Everywhere", "InputSet", "Neighbourhood", "Normalised", "Sphere", "TokenSet"]
__all__ += ["as_set"]
