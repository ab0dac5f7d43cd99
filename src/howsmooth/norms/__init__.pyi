from .entry_norms import dense_norm, frobenius_norm, inf_norm, one_norm
from .lanczos import golub_kahan
from .largest_token import token_norm
from .measurement import Measurement
from .norm_choice import operator_norm

__all__ = [
    "Measurement",
    "dense_norm",
    "frobenius_norm",
    "golub_kahan",
    "inf_norm",
    "one_norm",
    "operator_norm",
    "token_norm",
]
