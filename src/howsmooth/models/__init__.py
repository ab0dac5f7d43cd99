"""Hugging Face models: their attention as maps, the inputs it really sees, named models and texts.

Reading order: `open_source` opens a model, `module_names` lists where architectures keep their attention,
`attention_reader` reads one block, `captured_sites` captures all blocks at an input, `targets` the network around them.

>>> from howsmooth.models import capture, open_model
>>> opened = open_model("random:bert[layers=2,width=32]")
>>> [window] = opened.windows("Down the rabbit hole", length=12)
>>> [site.name for site in capture(opened.model, opened.inputs(window))]
['encoder.layer.0.attention', 'encoder.layer.1.attention']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
