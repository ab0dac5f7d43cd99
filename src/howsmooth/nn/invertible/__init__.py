"""Residual blocks x + f(x) with an inverse: contractive branches, fixed points, log-determinants, flows.

Read `branches` and `contractive_mlp` (f with a Lipschitz bound below 1), `fixed_point` and `running_error` (the inverse
and its error bound), `log_determinant` and `diagonal_blocks`, then `residual`, `actnorm`, `transformer` and `flows`.
"""

from howsmooth.nn.invertible.fixed_point import DidNotConverge
from howsmooth.nn.invertible.residual import Inversion

__all__ = ["DidNotConverge", "Inversion"]
