"""What may be rounded: formats of cached keys and values, what they do to a model, and which to choose."""

from howsmooth.rounding.formats import FORMATS, Format, parse_format, parse_formats

__all__ = ["FORMATS", "Format", "parse_format", "parse_formats"]
