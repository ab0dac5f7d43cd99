"""Every page also answers at the address of a folder, `theory/errata/`: what reports link to."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

_FORWARD = '<!DOCTYPE html><meta charset="utf-8"><title>{name}</title><meta http-equiv="refresh" content="0; url={to}">'
_FORWARD += '<link rel="canonical" href="{to}"><a href="{to}">{name}</a>\n'


def forward(app: Sphinx, error: Exception | None) -> None:
    """Write `page/index.html` beside each `page.html`."""
    if error is not None or app.builder.name != "html":
        return
    for name in app.env.found_docs:
        if Path(name).name != "index":
            folder = Path(app.outdir, name)
            folder.mkdir(parents=True, exist_ok=True)
            stem = Path(name).name
            (folder / "index.html").write_text(_FORWARD.format(name=stem, to=f"../{stem}.html"), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", forward)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
