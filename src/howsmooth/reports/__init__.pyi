from . import figures, growth
from .findings import group_headline
from .page import report
from .scan_figures import write_figures
from .scan_groups import groups
from .text_summary import summary

__all__ = ["figures", "group_headline", "groups", "growth", "report", "summary", "write_figures"]
