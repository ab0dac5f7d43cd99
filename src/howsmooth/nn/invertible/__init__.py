"""Residual blocks x + f(x) that can be inverted: branches that are contractions, inverses, determinants, flows."""

from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual

__all__ = ["Inversion", "InvertibleResidual"]
