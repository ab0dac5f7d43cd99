from .findings import headline
from .page import write_report
from .scan_figures import write_figures
from .scan_groups import Group, groups
from .summary import summary

__all__ = ["Group", "groups", "headline", "summary", "write_figures", "write_report"]
