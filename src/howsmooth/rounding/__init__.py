"""What may be rounded: formats of cached keys and values, what they do to a model, and which to choose.

>>> from howsmooth.rounding import quantise
>>> quantisation = quantise("random:llama[layers=2,width=32]", formats="int8,int4", length=12, windows=1)
>>> all(row["actual"] <= row["proved"] for row in quantisation.rows())
True
"""

from howsmooth.rounding.activation_noise import Noise, noise, rounding_noise
from howsmooth.rounding.allocation import Allocation, allocate, first_and_last, uniform
from howsmooth.rounding.number_formats import FORMATS, Format, parse_format, parse_formats
from howsmooth.rounding.output_error import Answers, answers, answers_at
from howsmooth.rounding.quantisation import Quantisation, quantise
from howsmooth.rounding.rounded_model import Reader
from howsmooth.rounding.sensitivity import Scores, sampled_scores

__all__ = [
    "FORMATS",
    "Allocation",
    "Answers",
    "Format",
    "Noise",
    "Quantisation",
    "Reader",
    "Scores",
    "allocate",
    "answers",
    "answers_at",
    "first_and_last",
    "noise",
    "parse_format",
    "parse_formats",
    "quantise",
    "rounding_noise",
    "sampled_scores",
    "uniform",
]
