"""Hugging Face models: their attention as maps, the inputs it really sees, named models and texts.

>>> from howsmooth.models import capture, open_model
>>> opened = open_model("random:bert[layers=2,width=32]")
>>> [window] = opened.windows("Down the rabbit hole", length=12)
>>> [site.name for site in capture(opened.model, opened.inputs(window))]
['encoder.layer.0.attention', 'encoder.layer.1.attention']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
