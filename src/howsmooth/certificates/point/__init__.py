"""Certificates at an input: the norm of the Jacobian of a head or a block between two proved ends.

Read in this order: `head_gram` (the Gram matrix of a head and of all heads together, with rounding),
`proved_eigenvalue` (the largest eigenvalue by Cholesky factorisation or deflation), `enclosure` (the choice among
them). Proofs: docs/theory/certificates-point.md.
"""
