"""How the documentation site is built: `make docs`."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_extensions"), str(ROOT / "src"), str(ROOT)]

from pictures import scrape  # noqa: E402

import howsmooth  # noqa: E402

project = "howsmooth"
author = "The howsmooth authors"
copyright = author
release = howsmooth.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "addresses",
    "docstrings",
    "mathml",
    "reference_pages",
]
exclude_patterns = ["_extensions", "_static"]
suppress_warnings = ["config.cache"]  # the picture scraper is a function, which no cache can hold
default_role = "py:obj"

# Pages: Markdown, with formulas between dollars and links to every heading.
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# Reference: from docstrings.
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_param = False  # one line may describe several arguments: "query, key, value: weights"
napoleon_custom_sections = [("Attributes", "params_style")]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

# Gallery: every example is executed, and an error in one ends the build.
sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "image_scrapers": (scrape,),
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
}

# Look: everything from disk, nothing from another host.
html_theme = "furo"
html_title = "howsmooth"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # summaries are fetched, which no browser does from disk
templates_path: list[str] = []

warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
logging.getLogger("transformers").setLevel(logging.ERROR)
