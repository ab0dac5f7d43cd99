"""Proofs, rounding included: of a Lipschitz constant at an input or on a ball around it, and of a class.

Read in this order: `certify_any` (the results, and `hs.certify`, which chooses the proof), then one subpackage per
question. `point` bounds the norm of the Jacobian at an input from both sides; `ball` bounds it for every
input within a radius; `network` bounds the margins of networks of several layers; `classifier` finds the radius within
which the class of a `PatchTransformer` is constant. The proofs are pages of docs/theory; no number here is an estimate.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
