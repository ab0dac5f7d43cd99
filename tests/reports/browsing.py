"""A real browser without a screen, for tests of pages; nothing else in the tests starts one.

What it draws depends on the page alone: nothing moves (a page is asked for reduced motion, so that a jump is over when
the next line of a test runs), and one font is there on every machine, a wide one that comes with matplotlib.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120_000
"""Milliseconds that a busy machine is given for a click or a page."""
FONT = "DejaVuSansMono.ttf"
ONE_FONT = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{0}</dir><cachedir>{0}/cache</cachedir></fontconfig>
"""


@dataclass
class Visit:
    """An open page, and what it complained about or asked of the network."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def shown(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser of HOWSMOOTH_CHROMIUM or of the system; skips without it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = os.environ.get("HOWSMOOTH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or set HOWSMOOTH_CHROMIUM to a browser's path")
    with tempfile.TemporaryDirectory(prefix="howsmooth-") as folder, playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=found,
            args=list(FLAGS),
            chromium_sandbox=False,
            timeout=PATIENCE,
            env={**os.environ, "FONTCONFIG_FILE": str(one_font(Path(folder)))},
        )
        yield browser
        browser.close()


def one_font(folder: Path) -> Path:
    """A configuration of fontconfig for a single font, which is copied into the folder."""
    import matplotlib

    shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONT, folder)
    path = folder / "fonts.conf"
    path.write_text(ONE_FONT.format(folder), encoding="utf-8")
    return path


@contextmanager
def visit(browser: Any, path: Path, width: int = 1280, **options: Any) -> Iterator[Visit]:
    """The page in a window of its own, without a network and without motion."""
    still = {"viewport": {"width": width, "height": 900}, "offline": True, "reduced_motion": "reduce"}
    context = browser.new_context(**still | options)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    found = Visit(page)
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(path.as_uri())
    yield found
    context.close()
