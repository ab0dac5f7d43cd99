"""Pictures of the gallery: figures of this package are plain `matplotlib.figure.Figure` objects, without pyplot."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any], **_: Any) -> str:
    """Save every figure that a block of an example has made, and give the text that shows it."""
    shown = block_vars.setdefault("shown", set())
    paths = []
    for thing in list(block_vars["example_globals"].values()):
        if isinstance(thing, Figure) and id(thing) not in shown:
            shown.add(id(thing))
            path = next(block_vars["image_path_iterator"])
            thing.savefig(path, dpi=160, facecolor="white", bbox_inches="tight")
            paths.append(path)
    return figure_rst(paths, gallery_conf["src_dir"]) if paths else ""
