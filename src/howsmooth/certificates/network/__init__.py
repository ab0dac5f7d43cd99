"""Certificates of networks of several layers: lower bounds on margins as affine forms with bounded remainders.

Read in this order: `parts_ir` (networks and the parts that are read of them), `affine_form` (tokens, derivatives and
remainders), `taylor_remainders` and `attention_remainder` (bounds on the remainders), `margins` (margins and radii),
`read_check` (the parts compared with the network). Proofs: docs/theory/certificates-network.md.
"""
