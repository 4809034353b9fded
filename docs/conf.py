"""Sphinx configuration: ``make docs`` builds the site into ``docs/_build/html``."""

import re

from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

import fbq_jax

project = "fbq_jax"
author = "the fbq_jax authors"
copyright = author  # noqa: A001 (Sphinx's name)
version = release = fbq_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["_build"]
# The tests run the examples.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# The blank line that ends a doctest's output is not shown.
highlight_options = {"pycon": {"stripnl": True}}

html_theme = "sphinx_book_theme"
html_title = "fbq_jax"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# The sidebar has a search field already.
html_theme_options = {"show_navbar_depth": 2, "navbar_persistent": []}

# Ops and recipes by their names, where a signature would spell out all their fields.
NAMED = {
    repr(value): name
    for module, names in (
        (fbq_jax, ["fallback_einsum", "fallback_dot"]),
        (fbq_jax.recipes, ["fallback", "block"]),
    )
    for name in names
    for value in [getattr(module, name)]
}


def shorten_defaults(app, what, name, obj, options, signature, return_annotation):
    """Names the default values in a signature, and leaves out Flax's own arguments."""
    if what == "class" and signature == "(*args, **kwargs)":  # a metaclass has __call__
        of_init = signature_of(obj.__init__, bound_method=True)
        signature = stringify_signature(of_init, show_annotation=False)
    if signature is not None:
        for value, short in NAMED.items():
            signature = signature.replace(value, short)
        signature = re.sub(r", parent=<[^>]*>, name=None", "", signature)
        signature = re.sub(r"<function (?:\w+\.<locals>\.)?(\w+)>", r"\1", signature)
        signature = re.sub(r"<class '([\w.]+)'>", r"\1", signature)
    return signature, return_annotation


def setup(app):
    """Registers the hook that shortens signatures."""
    app.connect("autodoc-process-signature", shorten_defaults)
