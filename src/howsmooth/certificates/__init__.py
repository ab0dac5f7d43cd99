"""Proofs, rounding included: of a Lipschitz constant at an input or on a ball around it, and of a class.

Read in this order: `certificate` (the results), `certify_any` (`hs.certify`, which chooses the proof), then one
subpackage per question. `point` bounds the norm of the Jacobian at an input from both sides; `ball` bounds it for every
input within a radius; `network` bounds the margins of networks of several layers; `classifier` finds the radius within
which the class of a `PatchTransformer` is constant. The proofs are pages of docs/theory; no number here is an estimate.
"""

from howsmooth.certificates.ball.differentiable_constants import certified_constants
from howsmooth.certificates.certificate import Certificate, Robustness
from howsmooth.certificates.certify_any import certify
from howsmooth.certificates.classifier.patch_transformer import PatchTransformer
from howsmooth.certificates.network.margins import certified_margins
from howsmooth.certificates.network.parts_ir import CentredNorm, Residual, SelfAttend, SequenceClassifier

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
