"""Certificates on a ball: an upper bound on the norm of the Jacobian for every input within a radius.

Read in this order: `on_ball` (the minimum of three bounds, its derivative, and the largest norm that a search finds),
`weight_perturbation` (attention weights on the ball), `head_ball` (one head), `block_ball` (heads together),
`nonlinear_ball` (other attentions). Proofs: docs/theory/certificates-ball.md.
"""
