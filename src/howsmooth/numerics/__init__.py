"""Floating-point error: unit roundoff, γ, probabilistic bounds on norms, and running error analysis.

Read in this order: `roundoff` (u, γ_m, and the error of sums), `spectral_norms` (upper bounds on matrix norms, with a
stated probability for large ones), `running_error` (a bound on the rounding error of any computation of torch). The
error of products with a Jacobian is in `howsmooth.jacobians.product_error`, that of a bound at an input in
`howsmooth.bounds.point_error`.
"""
