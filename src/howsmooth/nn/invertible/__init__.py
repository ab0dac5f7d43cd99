"""Residual blocks x + f(x) with an inverse: contractive branches, fixed points, log-determinants, flows.

Read `branches` (f with a Lipschitz bound below 1, and the diagonal blocks of its Jacobian), `fixed_point` (the inverse
and its error bound) and `log_determinant`, then `residual`, `transformer` and `flows`.
"""

from howsmooth.nn.invertible.fixed_point import DidNotConverge
from howsmooth.nn.invertible.residual import Inversion

__all__ = ["DidNotConverge", "Inversion"]
