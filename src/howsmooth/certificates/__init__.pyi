from .ball.on_ball import certified_constants
from .certify_any import Certificate, Robustness, certify
from .classifier.patch_transformer import PatchTransformer
from .network.margins import certified_margins
from .network.sequence_classifier import CentredNorm, Residual, SelfAttend, SequenceClassifier

__all__ = [
    "CentredNorm",
    "Certificate",
    "PatchTransformer",
    "Residual",
    "Robustness",
    "SelfAttend",
    "SequenceClassifier",
    "certified_constants",
    "certified_margins",
    "certify",
]
