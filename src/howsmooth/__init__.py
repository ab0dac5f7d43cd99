"""howsmooth: how smooth is this attention?

It measures the local Lipschitz constant of self-attention, from one head to a whole model, exactly and fast.

>>> import torch, howsmooth as hs
>>> attention = hs.SelfAttention.random(64, heads=4, mask="causal")
>>> x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
>>> result = hs.measure(attention, x)
>>> bool(result.lower <= result.value <= result.upper)
True
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from howsmooth import bounds, meanfield, worstcase
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
from howsmooth.certify import Certificate, PatchTransformer, Robustness, certify
from howsmooth.errors import DoesNotApply, HowsmoothError, InvalidInput, NotDifferentiable, UnsupportedModel
from howsmooth.explaining import Explanation, explain, token_influence
from howsmooth.growth import Growth, growth
from howsmooth.jacobians import JacobianOperator, jacobian
from howsmooth.measuring import measure, measure_heads
from howsmooth.norms import Measurement
from howsmooth.scanning import Scan, scan
from howsmooth.worstcase import Witness, worst_case

if TYPE_CHECKING:
    from howsmooth import nn

__version__ = version("howsmooth")


def _write_report(scan: Scan, path: Path | str) -> None:
    from howsmooth.reporting import write_report  # its figures take a second to import

    write_report(scan, path)


Scan.writer = _write_report


def __getattr__(name: str) -> ModuleType:
    """`hs.nn` when it is first asked for: the compiler of torch, which its layers speak to, takes seconds to import."""
    if name == "nn":
        return import_module("howsmooth.nn")
    raise AttributeError(f"module 'howsmooth' has no attribute {name!r}")


__all__ = [
    "ALiBi",
    "Causal",
    "Certificate",
    "CosineAttention",
    "DenseBias",
    "DoesNotApply",
    "Explanation",
    "GradientStepAttention",
    "Growth",
    "HowsmoothError",
    "InvalidInput",
    "JacobianOperator",
    "L2SelfAttention",
    "LipschitzNormAttention",
    "Measurement",
    "NotDifferentiable",
    "Padding",
    "PatchTransformer",
    "RelativeBias",
    "Robustness",
    "Rotary",
    "Scan",
    "SelfAttention",
    "SigmoidAttention",
    "SlidingWindow",
    "UnsupportedModel",
    "Witness",
    "bounds",
    "certify",
    "explain",
    "growth",
    "jacobian",
    "meanfield",
    "measure",
    "measure_heads",
    "nn",
    "scan",
    "token_influence",
    "worst_case",
    "worstcase",
]
