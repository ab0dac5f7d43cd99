"""Jacobians as operators: closed forms for attention, automatic differentiation for every other function.

Read in this order: `operator` (the interface of every Jacobian), `evaluation_point`, `projection` and
`softmax_products` (the products of one attention map), `attention_operator` (its closed form), `product_error` (bounds
on the rounding of a product), `composite_operator` and `cache_operator` (maps around attention; derivatives in keys and
values), `algebra` and `closed_maps` (sums, products and compositions), `function_operator` with `linearization` (any
function of torch), `closed_or_autodiff` (`hs.jacobian`). `dropped_tiles` drops tiles of small attention weights and
bounds the error.
"""

from howsmooth.jacobians.algebra import IdentityJacobian
from howsmooth.jacobians.attention_operator import attention_jacobian
from howsmooth.jacobians.cache_operator import cached_jacobian
from howsmooth.jacobians.closed_maps import ClosedMap
from howsmooth.jacobians.closed_or_autodiff import jacobian
from howsmooth.jacobians.function_operator import function_jacobian
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, MatrixOperator

__all__ = [
    "Accuracy",
    "ClosedMap",
    "IdentityJacobian",
    "JacobianOperator",
    "MatrixOperator",
    "attention_jacobian",
    "cached_jacobian",
    "function_jacobian",
    "jacobian",
]
