"""From a scan to its presentation: an HTML report, a summary in the terminal, figures for papers.

Read `scan_groups` (rows by model and text), `findings` (sentences), `headline_answer` (the first sentence), `payload`
and `page` (the report); `sections` adds parts to a page; `drawings` makes SVG. The templates are in ``assets``.

>>> from howsmooth.reports import group_headline, groups
>>> cell = {"model": "tiny", "what": "head", "layer": 0, "window": 0, "lower": 1.9, "upper": 2.1, "confidence": 0.99}
>>> rows = [cell | {"head": head, "length": 8, "value": 2.0 + head} for head in (0, 1)]
>>> (group,) = groups(rows)
>>> group_headline(group)
'Layer 0, head 1 of tiny is the roughest of 2 heads: at n = 8 tokens, a small change ε of its input can change its
output by 3 ε, 1.2 times the median head.'
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # matplotlib comes with an extra
