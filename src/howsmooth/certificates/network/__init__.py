"""Certificates of networks of several layers: lower bounds on margins as affine forms with bounded remainders.

Read in this order: `affine_form` (tokens, derivatives and remainders), `taylor_remainders` and `attention_remainder`
(bounds on the remainders), `margins` (the nodes of a network as affine forms, margins and radii); `sequence_classifier`
has modules to build networks of. Proofs: docs/theory/certificates-network.md.
"""
