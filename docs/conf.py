"""How Sphinx builds the site; ``python -m tools.site`` runs it."""

import datetime
from pathlib import Path

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from tools import reference

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
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autoclass_content = "both"
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # `complete` puts them where arguments are explained
default_role = "py:obj"
smartquotes_action = "De"  # dashes; headings with quotes are found as they are typed
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "plot_gallery": False,  # the suite runs the examples
    "download_all_examples": False,
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
}

html_theme = "furo"
html_title = f"GleanRL {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_search_scorer = str(Path(__file__).with_name("search.js"))
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Write the API reference's pages and have autodoc show types and links in our way."""
    reference.write(Path(app.srcdir, "reference"))
    app.connect("autodoc-process-docstring", _complete, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _shorten)
    app.connect("missing-reference", _find_by_name)
    app.connect("source-read", _add_curve)
    app.connect("env-check-consistency", _check_complete)


def _complete(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    reference.complete(what, value, lines)


def _add_curve(app: Sphinx, page: str, source: list[str]) -> None:
    """Show the curve of an example on its page of the gallery, above the code."""
    folder, _, name = page.rpartition("/")
    curve = Path(app.srcdir, "curves", f"{name}.png")
    if folder == "gallery" and curve.exists():
        code = ".. GENERATED FROM PYTHON SOURCE LINES"
        image = f".. image:: /curves/{name}.png\n   :alt: Return over frames\n   :width: 70%\n\n"
        before, mark, after = source[0].partition(code)
        source[0] = f"{before}{image}{mark}{after}"


def _check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    for name in reference.undocumented(env.domains.python_domain.objects):
        logging.getLogger(__name__).warning("the API reference lacks %s", name)


def _shorten(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    shown = reference.signature(value)
    return shown and (shown, "")


def _find_by_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """Find a public name that a docstring mentions alone, as it is in a program."""
    if node.get("refdomain") != "py":
        return None
    for module in reference.MODULES:
        target = f"{module}.{node['reftarget']}"
        if target in env.domains.python_domain.objects:
            builder, page = app.builder, node["refdoc"]
            return env.domains.python_domain.resolve_xref(
                env, page, builder, "obj", target, node, content
            )
    return None
