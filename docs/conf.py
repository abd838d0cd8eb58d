"""How Sphinx builds the site; ``python -m tools.site`` runs it."""

import datetime

import gleanrl

project = "GleanRL"
author = "The GleanRL authors"
copyright = f"{datetime.date.today().year}, {author}"
version = release = gleanrl.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Pages that are not written yet may be named and linked to: these two go when all are there.
suppress_warnings = ["toc.not_readable", "myst.xref_missing"]

autodoc_typehints = "signature"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"GleanRL {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path: list[str] = []
html_show_sphinx = False
