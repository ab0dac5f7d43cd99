"""Norms of Jacobians, each a `Measurement` with a lower and an upper end.

Read in this order: `measurement` (the result), `norm_choice` (`operator_norm`, which chooses a method, also for
operators with dropped tiles), `lanczos` with `bidiagonal`, `restart_filter` and `lanczos_bound` (the 2-norm from
products, with an upper bound that holds with a probability), `entry_norms` and `largest_token` (the other norms), and
on top of them `local_constant` (`hs.measure`, the relative condition, `hs.explain`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
