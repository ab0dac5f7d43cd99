"""Where inputs live: balls and ellipsoids of tokens, spheres, neighbourhoods, sequences of embeddings."""

from howsmooth.sets.inputs import Ball, Embeddings, Everywhere, InputSet, Neighbourhood, Normalised, Sphere, as_set
from howsmooth.sets.tokens import TokenSet

__all__ = [
    "Ball",
    "Embeddings",
    "Everywhere",
    "InputSet",
    "Neighbourhood",
    "Normalised",
    "Sphere",
    "TokenSet",
    "as_set",
]
