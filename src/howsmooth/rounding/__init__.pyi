from .activation_noise import ActivationNoise, noise
from .allocation import Allocation, allocate
from .number_formats import Format, parse_format, parse_formats
from .output_error import output_errors_at
from .quantisation import Quantisation, quantise

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
