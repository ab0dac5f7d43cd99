"""Proofs, rounding included: of a Lipschitz constant at an input or on a ball around it, and of a class.

Read in this order: `certificate` (the results), `certify_any` (`hs.certify`, which chooses), then one subpackage per
question. `point`: the norm of the Jacobian at an input, between two proved ends. `ball`: an upper end for every input
within a radius. `network`: the margins of a network of several layers as affine forms with bounded remainders.
`classifier`: the radius within which a `PatchTransformer` keeps its class. No number here is an estimate.
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
