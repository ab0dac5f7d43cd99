from . import (
    attention,
    bounds,
    certificates,
    engines,
    jacobians,
    meanfield,
    models,
    nn,
    norms,
    papers,
    reports,
    rounding,
    scans,
    search,
    sets,
    testing,
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
from .errors import (
    DoesNotApply,
    HowsmoothError,
    InvalidInput,
    MissingPackage,
    NotDifferentiable,
    UnsupportedModel,
)
from .jacobians import JacobianOperator, jacobian
from .models.network_parts import measure
from .models.network_source import read_network
from .norms import Measurement
from .norms.local_constant import Explanation, explain, measure_heads, token_influence
from .papers.experiment import reproduce
from .papers.training.loop import train
from .reports import report
from .reports.growth import Growth, growth
from .rounding.activation_noise import noise
from .rounding.quantisation import quantise
from .scans import Comparison, Scan, compare, merge, scan
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
    "MissingPackage",
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
    "attention",
    "bounds",
    "certificates",
    "certify",
    "compare",
    "engines",
    "explain",
    "growth",
    "jacobian",
    "jacobians",
    "meanfield",
    "measure",
    "measure_heads",
    "merge",
    "models",
    "nn",
    "noise",
    "norms",
    "papers",
    "quantise",
    "read_network",
    "report",
    "reports",
    "reproduce",
    "rounding",
    "scan",
    "scans",
    "search",
    "sets",
    "testing",
    "token_influence",
    "train",
    "worst_case",
]
