"""Sphinx configuration: ``make docs`` builds the site into ``docs/_build/html``."""

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
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "sphinx_book_theme"
html_title = "fbq_jax"
html_copy_source = False
html_theme_options = {"show_navbar_depth": 2}
