"""Rounding: number formats for cached keys and values, their effect on a model, and the best choice within a budget.

Read in this order: `number_formats` (the formats), `kv_cache` (keys and values), `output_error` (the
proved effect on one attention block), `rounded_model` (the effect on the model, run and predicted), `allocation` (a
format for every cache), `quantisation` (`quantise`, all of it together), `engine_exports` (the choice for an inference
engine); `activation_noise` is about low precision of activations.

>>> from howsmooth.rounding import quantise
>>> quantisation = quantise("random:llama[layers=2,width=32]", formats="int8,int4", length=12, windows=1)
>>> all(row["actual"] <= row["proved"] for row in quantisation.rows())
True
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
