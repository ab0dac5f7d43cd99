"""Attention layers with a known Lipschitz bound, called like `torch.nn.MultiheadAttention`, and what trains with them.

Read `layers` (attention_layer, then one module per kind), `hosting` (replacement of the attention of trained models),
`invertible` (residual blocks with an inverse), then `monitor` and `penalties` for training.

>>> import torch
>>> from howsmooth.nn import ContractiveL2Attention
>>> layer = ContractiveL2Attention(16, num_heads=4, coefficient=0.9).eval()
>>> bool(layer.lipschitz_bound(n=10) <= 0.9 * (1 + 1e-6))
True
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
