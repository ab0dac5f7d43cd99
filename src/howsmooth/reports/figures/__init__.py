"""Pictures. Every function draws on the axes it is given, or on a new figure, and returns the figure.

`style` has the shared look and writes files; the other modules each draw one result. No pyplot, no global state.

>>> import torch
>>> from howsmooth.reports.figures import head_bars
>>> figure = head_bars(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 1.9]), torch.tensor([1.1, 2.1]))
>>> figure.axes[0].get_xlabel()
'head'
"""

import lazy_loader

from howsmooth._util.optional_deps import require

require(("matplotlib",), "a picture")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
