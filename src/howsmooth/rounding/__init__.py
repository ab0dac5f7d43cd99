"""Rounding: number formats for cached keys and values, their effect on a model, and the best choice within a budget.

Read in this order: `number_formats` and `number_codes` (the formats), `kv_cache` (keys and values), `output_error` (the
proved effect on one attention block), `rounded_model` and `sensitivity` (the effect on the model), `allocation` (a
format for every cache), `quantisation` (`quantise`, all of it together), `engine_exports` (the choice for an inference
engine); `activation_noise` is about low precision of activations.

>>> from howsmooth.rounding import quantise
>>> quantisation = quantise("random:llama[layers=2,width=32]", formats="int8,int4", length=12, windows=1)
>>> all(row["actual"] <= row["proved"] for row in quantisation.rows())
True
"""

from howsmooth.rounding.activation_noise import ActivationNoise, noise
from howsmooth.rounding.allocation import Allocation, allocate
from howsmooth.rounding.number_formats import Format, parse_format, parse_formats
from howsmooth.rounding.output_error import output_errors_at
from howsmooth.rounding.quantisation import Quantisation, quantise

__all__ = [
    "ActivationNoise",
    "Allocation",
    "Format",
    "Quantisation",
    "allocate",
    "noise",
    "output_errors_at",
    "parse_format",
    "parse_formats",
    "quantise",
]
