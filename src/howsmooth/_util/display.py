"""Results as HTML, from the templates in ``reports/assets``: tables and frames of notebooks, and progress bars.

Values are escaped, and hidden characters in them are written out. Only `Markup` enters a page as it is: drawings whose
texts were escaped, and styles and scripts of the package. Colours are those of the notebook.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from howsmooth._util.common import printable

if TYPE_CHECKING:  # loaded when the first page is made
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDER = "reports/assets"
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def render(template: str, **values: object) -> str:
    """The template of this name, filled with values.

    >>> render("card", title="σ < 2", facts=[("method", "dense")], notes=[])
    '<div><strong>σ &lt; 2</strong><table><tr>...
    """
    return _environment().get_template(f"{template}.html.jinja").render(values)


def visible(text: str) -> str:
    """Text with every control character and direction mark written out: none is hidden, none changes the order.

    The joiners of scripts and emoji stay: they change no order.

    >>> visible("a\u202eb")
    'a⟨U+202E⟩b'
    """
    return _HIDDEN.sub(lambda letter: written_out(letter[0]), text)


def written_out(letter: str) -> str:
    """A hidden character by its code point.

    >>> written_out(chr(9)), written_out(chr(27))
    ('⇥', '⟨U+001B⟩')
    """
    return "⇥" if letter == "\t" else f"⟨U+{ord(letter):04X}⟩"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("howsmooth", _FOLDER),
        autoescape=True,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(asset=_asset, sha256=_sha256)
    return environment


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _asset(name: str) -> Markup:
    """A style or a script of the package."""
    from markupsafe import Markup

    return Markup((files("howsmooth") / _FOLDER / name).read_text(encoding="utf-8"))


def _sha256(content: str) -> str:
    """The name of a style or a script in the security policy of a page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_SECONDS = 0.2
"""Time between two states of a bar."""
LARGEST_FRAME = 4_000_000
"""Characters of the largest page that is put into a notebook: the file of the notebook stores all of it."""


def card(title: str, facts: Iterable[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """A title, names with their values, and sentences below.

    >>> card("σ < 2", [("method", "dense")])[:32]
    '<div><strong>σ &lt; 2</strong><t'
    """
    return render("card", title=title, facts=facts, notes=notes)


def grid(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table with a header."""
    return render("card", title=title, names=names, facts=rows, notes=notes)


def frame(page: str, height: int = 720) -> str:
    """A whole page inside a notebook."""
    return render("frame", page=page, height=height)


def printed(table: Any, width: int = 140) -> str:
    """A table of rich as plain text without its margins."""
    from rich.console import Console

    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False, markup=False).print(table)
    return "\n".join(line[1:].rstrip() for line in page.getvalue().splitlines() if line.strip())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported for it.

    >>> in_notebook()
    False
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)  # Colab has a kind of its own


def bar() -> Callable[[float, str], None] | None:
    """A bar of rich under the running cell of a notebook: call it with the share that is done and a label."""
    if not in_notebook():
        return None
    from IPython.display import display
    from rich.progress import BarColumn, Progress, TextColumn

    drawn = Progress(BarColumn(), TextColumn("{task.description}", markup=False))
    task = drawn.add_task("", total=1.0)
    handle = display(drawn, display_id=True)  # rich's own way into a notebook would need ipywidgets
    last = -_SECONDS

    def show(share: float, label: str) -> None:
        nonlocal last
        now = time.monotonic()
        if handle is not None and (now - last >= _SECONDS or share >= 1):
            last = now
            drawn.update(task, completed=share, description=printable(label))
            handle.update(drawn)

    return show


def scan_bar() -> Callable[[Any], None] | None:
    """The progress of a scan: a bar in a notebook, None elsewhere."""
    show = bar()
    return show and (lambda now: show(now.work, f"{now.cells} of {now.total} cells · {now.label}"))


def search_bar() -> Callable[[int, int, float], None] | None:
    """The progress of a search, from its step, the number of steps and the best value so far."""
    show = bar()
    return show and (
        lambda step, steps, best: show(step / max(steps, 1), f"step {step} of {steps} · best so far {best:.4g}")
    )


def step_bar(total: int) -> Callable[[str], None] | None:
    """The progress of work in steps, from the label of each step that begins."""
    show, begun = bar(), itertools.count()
    return show and (lambda label: show(min(next(begun) / max(total, 1), 1.0), label))
