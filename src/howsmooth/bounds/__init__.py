"""Theorems about the Lipschitz constant of attention, each knowing where it holds.

One module per paper, this project's own in `own`. Every entry of the catalogue is called with an
attention map and where to bound it, and refuses outside its assumptions.

>>> import torch, howsmooth as hs
>>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
>>> round(float(hs.bounds.get("howsmooth.sqrt_n")(head, n=100, radius=1.0)), 2)
21.0
"""

from howsmooth.bounds import (
    castin2024,
    composition,
    dasoulas2021,
    emadi2026,
    furuya2026,
    kim2021,
    nair2025,
    qi2023,
    ramapuram2024,
    yudin2025,
    zhai2023,
)
from howsmooth.bounds import layer_constants as layers
from howsmooth.bounds import model_stack as stacks
from howsmooth.bounds.bound_table import Row, Table, table
from howsmooth.bounds.catalogue import CATALOGUE, SCOPES, Assumption, Bound, applicable, get, least_upper_bound
from howsmooth.bounds.composition import Stack, Stage
from howsmooth.bounds.head_constants import HeadNumbers, head_numbers
from howsmooth.bounds.model_stack import measured_variances, stack
from howsmooth.bounds.own import composed_attention as composed
from howsmooth.bounds.own import gradient_step_bound as gradient_step
from howsmooth.bounds.own import l2_bounds as l2
from howsmooth.bounds.own import lipschitz_norm_bound as lipschitz_norm
from howsmooth.bounds.own import local_bound as local
from howsmooth.bounds.own import lower_bounds as lower
from howsmooth.bounds.own import neighbourhood, normalised, softmax_jacobian, three_path
from howsmooth.bounds.own import sigmoid_bound as sigmoid
from howsmooth.bounds.own import token_set_bounds as sets
from howsmooth.bounds.question_setting import Setting, setting
from howsmooth.sets import TokenSet

__all__ = ["CATALOGUE", "SCOPES", "Assumption", "Bound", "HeadNumbers", "Row", "Setting", "Stack", "Stage"]
__all__ += ["Table", "TokenSet", "applicable", "get", "head_numbers", "least_upper_bound", "measured_variances"]
__all__ += ["setting", "stack", "table"]
# The modules of papers, of what is put together, and of this project's own theorems.
__all__ += ["castin2024", "dasoulas2021", "furuya2026", "kim2021", "nair2025", "qi2023", "ramapuram2024", "yudin2025"]
__all__ += ["composition", "emadi2026", "layers", "stacks", "zhai2023"]
__all__ += ["composed", "gradient_step", "l2", "lipschitz_norm", "local", "lower", "neighbourhood", "normalised"]
__all__ += ["sets", "sigmoid", "softmax_jacobian", "three_path"]
