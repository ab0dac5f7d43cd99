"""Residual blocks x + f(x) that can be inverted: branches that are contractions, inverses, determinants, flows."""

from howsmooth.nn.invertible.actnorm import ActNorm
from howsmooth.nn.invertible.branches import Attending, Composed, Scaled
from howsmooth.nn.invertible.contractive_mlp import ContractiveMLP
from howsmooth.nn.invertible.fixed_point import DidNotConverge
from howsmooth.nn.invertible.log_determinant import LogDeterminant
from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual
from howsmooth.nn.invertible.transformer import InvertibleTransformer

__all__ = [
    "ActNorm",
    "Attending",
    "Composed",
    "ContractiveMLP",
    "DidNotConverge",
    "Inversion",
    "InvertibleResidual",
    "InvertibleTransformer",
    "LogDeterminant",
    "Scaled",
]
