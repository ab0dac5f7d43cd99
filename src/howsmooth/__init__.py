"""howsmooth: how smooth is this attention?

It measures the local Lipschitz constant of self-attention, from one head to a whole model, exactly and fast.

>>> import torch, howsmooth as hs
>>> attention = hs.SelfAttention.random(64, heads=4, mask="causal")
>>> x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
>>> result = hs.measure(attention, x)
>>> bool(result.lower <= result.value <= result.upper)
True
"""

from importlib.metadata import version

from howsmooth import bounds, meanfield
from howsmooth.attention import (
    ALiBi,
    Causal,
    CosineAttention,
    DenseBias,
    GradientStepAttention,
    L2SelfAttention,
    LipschitzNormAttention,
    Padding,
    RelativeBias,
    Rotary,
    SelfAttention,
    SigmoidAttention,
    SlidingWindow,
)
from howsmooth.errors import DoesNotApply, HowsmoothError, InvalidInput, NotDifferentiable, UnsupportedModel
from howsmooth.explaining import Explanation, explain, token_influence
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.measuring import measure, measure_heads
from howsmooth.norms import Measurement
from howsmooth.scanning import Scan, scan

__version__ = version("howsmooth")

__all__ = [
    "ALiBi",
    "Causal",
    "CosineAttention",
    "DenseBias",
    "DoesNotApply",
    "Explanation",
    "GradientStepAttention",
    "HowsmoothError",
    "InvalidInput",
    "JacobianOperator",
    "L2SelfAttention",
    "LipschitzNormAttention",
    "Measurement",
    "NotDifferentiable",
    "Padding",
    "RelativeBias",
    "Rotary",
    "Scan",
    "SelfAttention",
    "SigmoidAttention",
    "SlidingWindow",
    "UnsupportedModel",
    "bounds",
    "explain",
    "jacobian",
    "meanfield",
    "measure",
    "measure_heads",
    "scan",
    "token_influence",
]
