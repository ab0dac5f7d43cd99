"""howsmooth: how smooth is this attention?

It measures the local Lipschitz constant of self-attention, from one head to a whole model, exactly and fast.

>>> import torch, howsmooth as hs
>>> attention = hs.SelfAttention.random(64, heads=4, mask="causal")
>>> x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
>>> result = hs.measure(attention, x)
>>> bool(result.lower <= result.value <= result.upper)
True
"""

import lazy_loader

__version__ = "0.2.0"

# Names are imported when they are first used: torch alone takes seconds, and `howsmooth --help` needs none of it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
