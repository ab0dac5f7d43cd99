"""howsmooth: how smooth is this attention?

It measures the local Lipschitz constant of self-attention, from one head to a whole model, exactly and fast.

>>> import torch, howsmooth as hs
>>> attention = hs.SelfAttention.random(64, heads=4, mask="causal")
>>> x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
>>> result = hs.measure(attention, x)
>>> bool(result.lower <= result.value <= result.upper)
True
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from howsmooth.small import on_demand

if TYPE_CHECKING:
    from howsmooth import bounds, meanfield, nn, worstcase
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
    from howsmooth.scanning import Comparison, Scan, compare, scan
    from howsmooth.worstcase import Witness, worst_case

    __version__: str

_find, __dir__ = on_demand(
    __name__,
    {
        "attention": (
            *("ALiBi", "Causal", "CosineAttention", "DenseBias", "GradientStepAttention", "L2SelfAttention"),
            *("LipschitzNormAttention", "Padding", "RelativeBias", "Rotary", "SelfAttention", "SigmoidAttention"),
            "SlidingWindow",
        ),
        "certify": ("Certificate", "PatchTransformer", "Robustness"),
        "errors": ("DoesNotApply", "HowsmoothError", "InvalidInput", "NotDifferentiable", "UnsupportedModel"),
        "explaining": ("Explanation", "explain", "token_influence"),
        "growth": ("Growth",),
        "jacobians": ("JacobianOperator", "jacobian"),
        "measuring": ("measure", "measure_heads"),
        "norms": ("Measurement",),
        "scanning": ("Comparison", "Scan", "compare", "scan"),
        "worstcase": ("Witness", "worst_case"),
    },
)
_ROOMS_OF_ONE_FUNCTION = ("certify", "growth")
"""`hs.growth(…)` is the function of the room `howsmooth.growth`, and so is `hs.certify(…)`."""


def __getattr__(name: str) -> Any:
    """What is asked for is imported then: torch alone takes seconds, and `howsmooth --help` needs none of it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("howsmooth")
    attribute = _find(name)
    return globals()[name] if name in _ROOMS_OF_ONE_FUNCTION else attribute


def _write_report(scan: Any, path: Path | str) -> None:
    from howsmooth.reporting import write_report  # its figures take a second to import

    write_report(scan, path)


def _page_of(scan: Any) -> str:
    from howsmooth.reporting.page import page
    from howsmooth.reporting.source import groups

    return page(groups(scan))


class _Package(ModuleType):
    """The package as an object that is told when one of its rooms has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS_OF_ONE_FUNCTION and isinstance(value, ModuleType):
            value = getattr(value, name)
        if name == "scanning":
            value.Scan.writer = _write_report
            value.Scan.shower = _page_of
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


__all__ = [
    "ALiBi",
    "Causal",
    "Certificate",
    "Comparison",
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
    "compare",
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
