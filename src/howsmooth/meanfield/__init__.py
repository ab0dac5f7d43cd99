"""Attention on measures: any number of tokens at once, with unequal weights, masked or not.

A measure Σ w_i δ_{x_i} stands for every sequence whose tokens are distributed like it, however long. Three atoms with
weights (10⁻⁹, …) answer for 10⁹ tokens.

>>> import torch, howsmooth as hs
>>> from howsmooth import meanfield
>>> head = hs.SelfAttention.from_bilinear(-10 * torch.eye(1), torch.eye(1))
>>> rare = meanfield.Measure(torch.tensor([[-1.0], [0.5], [1.0]]), [1e-9, 0.3, 0.7 - 1e-9])
>>> meanfield.local_constant(head, rare)
4470 in W₂ (≥ 4469.9, ≤ 4470, rounding modelled), moving (splitting one atom: 0.3374)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
