"""Networks as nodes: what any function of torch computes, read from one run of it.

Read in this order: `nodes` (maps of tokens with their values and Jacobians) and `composed_jacobian` (a whole network as
one operator); then how nodes come about: `trace` (the operations of one run), `values` and `rules` (each operation in
terms of tokens), `attention_forms` (attention among them), `tree` (values as nodes), `reader` (all of it, and the
comparison with the function itself), `description`, `activations`; `onnx_module` and `onnx_operations` run ONNX files
as modules of torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
