"""Certificates of a vision transformer of one layer: the radius within which its class is constant.

Read in this order: `patch_transformer` (the network), `cls_token` (derivatives of attention at the class token),
`relu_relaxation` (bounds on ReLU), `robust_radius` (quadratics on a ball, margins and the largest radius). Proofs:
docs/theory/certificates-classifier.md.
"""
