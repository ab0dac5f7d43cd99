"""Jacobians as operators: closed forms for attention, automatic differentiation for every other function.

Read in this order: `operator` (the interface of every Jacobian, sums and products), `tiles`, `projection` and
`softmax_products` (the products of one attention map), `attention_operator` (its closed form), `product_error` (bounds
on the rounding of a product), `composite_operator` and `cache_operator` (maps around attention; derivatives in keys and
values), `tokenwise` and `linear_moves` (stages and moves of tokens), `function_operator` with `function_checks` (any
function of torch), `closed_or_autodiff` (`hs.jacobian`). `dropped_tiles` and `truncated_operator` drop tiles of small
attention weights and bound the error.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
