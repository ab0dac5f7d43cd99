"""Certificates on a ball: an upper bound on the norm of the Jacobian for every input within a radius.

Read in this order: `on_ball` (the minimum of three bounds), `weight_perturbation` and `weight_boxes` (attention weights
on the ball), `head_ball` with `leave_one_out` (one head), `block_ball` (heads together), `norm_of_partitioned_sum` and
`norm_of_head_sum` (norms of sums), `nonlinear_ball` (other attentions), `differentiable_constants` (for training),
`radius_sweep` (certified beside worst found). Proofs: docs/theory/certificates-ball.md.
"""
