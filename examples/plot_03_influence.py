"""
Which token moves which?
========================

:math:`\\|J_{ij}\\|_2` says how far output token i follows input token j. Under a causal mask nothing lies above the
diagonal, and the first columns are the strongest.
"""

import torch

import howsmooth as hs
from howsmooth.reports.figures import influence_map

attention = hs.SelfAttention.random(32, heads=4, mask="causal")
x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
figure = influence_map(hs.token_influence(attention, x))
