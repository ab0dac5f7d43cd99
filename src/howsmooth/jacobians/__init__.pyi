from .algebra import IdentityJacobian
from .attention_operator import attention_jacobian
from .cache_operator import cached_jacobian
from .closed_or_autodiff import jacobian
from .function_operator import function_jacobian
from .operator import Accuracy, JacobianOperator, MatrixOperator

__all__ = [
    "Accuracy",
    "IdentityJacobian",
    "JacobianOperator",
    "MatrixOperator",
    "attention_jacobian",
    "cached_jacobian",
    "function_jacobian",
    "jacobian",
]
