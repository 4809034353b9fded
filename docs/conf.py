"""Sphinx configuration: ``make docs`` builds the site into ``docs/_build/html``."""

import inspect
import re
from typing import Any

import fbq_jax

project = "fbq_jax"
author = "the fbq_jax authors"
copyright = author  # noqa: A001 (Sphinx's name)
version = release = fbq_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# What one copies of a doctest is its code.
copybutton_prompt_text = r">>> |\.\.\.(?: |$)"
copybutton_prompt_is_regexp = True

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


def shorten_signature(*event: Any) -> tuple[str | None, str | None]:
    """Names the default values in a signature, and leaves out Flax's own arguments."""
    _, what, _, obj, _, text, returns = event
    if what == "class" and text == "(*args, **kwargs)":  # NNX's metaclass has __call__
        _, *arguments = inspect.signature(obj.__init__).parameters.values()
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in arguments]
        text = str(inspect.Signature(bare))
    if text is not None:
        for value, name in NAMED.items():
            text = text.replace(value, name)
        text = re.sub(r", parent=<[^>]*>, name=None", "", text)
        text = re.sub(r"<function (?:\w+\.<locals>\.)?(\w+)[^>]*>", r"\1", text)
        text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    return text, returns


def is_field(*event: Any) -> bool | None:
    """Leaves out the fields of named tuples, which their class describes."""
    _, _, _, obj, _, _ = event
    return True if type(obj) is type(fbq_jax.Stats.rate) else None


def setup(app: Any) -> None:
    """Registers the hooks that shorten signatures and lists of members."""
    app.connect("autodoc-skip-member", is_field)
    app.connect("autodoc-process-signature", shorten_signature)
