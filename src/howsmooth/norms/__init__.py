"""Norms of Jacobians, each a `Measurement` with a lower and an upper end.

Read in this order: `measurement` (the result), `norm_choice` (`operator_norm`, which chooses a method), `dense` (small
matrices), `lanczos` with `bidiagonal`, `singular_triplets`, `restart_filter` and `lanczos_bound` (the 2-norm from
products, with an upper bound that holds with a probability), `entry_norms`, `frobenius` and `largest_token` (the other
norms), `truncated_norm` (operators with dropped tiles), and on top of them `local_constant` (`hs.measure`),
`relative_condition` and `explanation` (`hs.explain`).
"""

from howsmooth.norms.dense import dense_norm
from howsmooth.norms.entry_norms import inf_norm, one_norm
from howsmooth.norms.frobenius import frobenius_norm
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.norms.largest_token import token_norm
from howsmooth.norms.measurement import Measurement
from howsmooth.norms.norm_choice import operator_norm
from howsmooth.norms.truncated_norm import truncated_norm as _truncated_norm  # noqa: F401  registers itself

__all__ = [
    "Measurement",
    "dense_norm",
    "frobenius_norm",
    "golub_kahan",
    "inf_norm",
    "one_norm",
    "operator_norm",
    "token_norm",
]
