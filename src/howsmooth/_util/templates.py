"""HTML from the templates in ``reports/assets``: values are escaped, and hidden characters in them are written out.

Only `Markup` enters a page as it is: drawings whose texts were escaped, and styles and scripts of the package.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

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
