"""From a scan to something to show: an HTML report, a one-page summary, figures for papers.

>>> cell = {"model": "tiny", "what": "head", "layer": 0, "window": 0, "lower": 1.9, "upper": 2.1, "confidence": 0.99}
>>> rows = [cell | {"head": head, "length": 8, "value": 2.0 + head} for head in (0, 1)]
>>> (group,) = groups(rows)
>>> headline(group)
'Layer 0, head 1 of tiny is the roughest of 2 heads: at n = 8 tokens, a small change ε of its input can change its
output by 3 ε, 1.2 times the median head.'
"""

from typing import TYPE_CHECKING

from howsmooth.reporting.findings import headline
from howsmooth.reporting.page import write_report
from howsmooth.reporting.source import Group, groups
from howsmooth.reporting.summary import summary
from howsmooth.small import on_demand

if TYPE_CHECKING:
    from howsmooth.reporting.figures import write_figures

__getattr__, __dir__ = on_demand(__name__, {"figures": ["write_figures"]})  # matplotlib comes with an extra

__all__ = ["Group", "groups", "headline", "summary", "write_figures", "write_report"]
