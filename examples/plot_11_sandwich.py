"""
Between a witness and a theorem
===============================

For several numbers of tokens and several radii: what a search reaches, and what a theorem allows. The Lipschitz
constant lies in the band.
"""

import torch

import howsmooth as hs

head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
cells = hs.search.sandwich(head, lengths=[4, 8, 16], over=[hs.sets.Ball(1.0), hs.sets.Ball(2.0)], starts=2, steps=20)
figure = cells.figure()
