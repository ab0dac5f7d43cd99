"""Jacobians as operators: closed forms for attention, automatic differentiation for every other function.

Read in this order: `operator` (what every Jacobian can do), `evaluation_point` and `softmax_products` (the products of
one attention map), `attention_jacobian` (its closed form), `product_error` (how far rounding moves a product),
`composite_jacobian` and `cache_jacobian` (attention in several stages; derivatives in keys and values), `algebra` and
`closed_maps` (sums, products and compositions), `function_jacobian` with `linearization` (any function of torch).
`dropped_tiles` leaves small tiles of attention weights out of a product and bounds the error.
"""

from howsmooth.jacobians.algebra import IdentityJacobian, Product, Sum
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian, attention_jacobian
from howsmooth.jacobians.cache_operator import CachedJacobian, cached_jacobian
from howsmooth.jacobians.closed_maps import ClosedMap, ComposedJacobian, composed_jacobian
from howsmooth.jacobians.closed_or_autodiff import jacobian
from howsmooth.jacobians.composite_operator import CompositeJacobian, composite_jacobian
from howsmooth.jacobians.function_operator import FunctionJacobian, function_jacobian
from howsmooth.jacobians.operator import JacobianOperator, MatrixOperator

__all__ = [
    "DEFAULT_MEMORY",
    "AttentionJacobian",
    "CachedJacobian",
    "ClosedMap",
    "ComposedJacobian",
    "CompositeJacobian",
    "FunctionJacobian",
    "IdentityJacobian",
    "JacobianOperator",
    "MatrixOperator",
    "Product",
    "Sum",
    "attention_jacobian",
    "cached_jacobian",
    "composed_jacobian",
    "composite_jacobian",
    "function_jacobian",
    "jacobian",
]
