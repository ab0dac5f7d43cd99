from . import (
    bounds,
    meanfield,
    nn,
    search,
)
from .attention import (
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
from .certificates import Certificate, PatchTransformer, Robustness, certify
from .errors import DoesNotApply, HowsmoothError, InvalidInput, NotDifferentiable, UnsupportedModel
from .jacobians import JacobianOperator, jacobian
from .norms import Measurement
from .norms.explanation import Explanation, explain, token_influence
from .norms.local_constant import measure, measure_heads
from .reports.growth import Growth, growth
from .scans import Comparison, Scan, compare, scan
from .search import Witness, worst_case

__version__: str

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
    "search",
    "token_influence",
    "worst_case",
]
