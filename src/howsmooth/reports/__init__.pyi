from . import figures, growth
from .findings import headline
from .page import report
from .scan_figures import write_figures
from .scan_groups import Group, groups
from .text_summary import summary

__all__ = ["Group", "figures", "groups", "growth", "headline", "report", "summary", "write_figures"]
