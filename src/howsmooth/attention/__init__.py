"""Attention maps, their masks, positions and token-wise stages; conversion of modules into maps.

Read in this order: `attention_map` (every map), `stages` (functions of single queries, keys and values),
`masks` (terms of the logits, one by one and as one), `dot_product_map` (kinds of attention in closed form),
`composite_map` (maps around a dot product, and cross-attention), `autodiff_maps` (maps without a closed form),
`conversion` (modules as maps), `memory_layout`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
