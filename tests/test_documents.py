"""The documents name every public function; their links and commands work."""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import re
import shlex
import tomllib
import unittest.mock
from pathlib import Path

import pytest

from fbq_jax import recipes
from fbq_jax.recipes import presets

ROOT = Path(__file__).parents[1]
API = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.rst"))
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if "_build" not in path.parts
)


def public_names(package):
    """The names that a package exports, by ``from x import name as name``."""
    tree = ast.parse((ROOT / "fbq_jax" / package / "__init__.py").read_text())
    return [
        ".".join(filter(None, ("fbq_jax", package, alias.name)))
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


@pytest.mark.parametrize("package", ["", "nnx"])
def test_the_api_reference_has_every_public_name(package):
    def is_there(name):
        short = name.rpartition(".")[2]
        # Instances such as fallback_dot are named in the text of their page.
        pattern = rf":: ({re.escape(name)}|fbq_jax\.{short})$|``{short}``"
        return re.search(pattern, API, re.MULTILINE)

    missing = {name for name in public_names(package) if not is_there(name)}
    # These packages have sections.
    assert missing <= {"fbq_jax.linen", "fbq_jax.nnx", "fbq_jax.recipes"}


def test_the_api_reference_has_what_pages_call():
    text = "\n".join(page.read_text() for page in PAGES)
    modules = "dispatch|maxtext|nonlinear|optim|smooth_swiglu"
    called = set(re.findall(rf"fbq_jax\.(?:{modules})\.[a-z]\w+", text))
    assert called
    assert not [name for name in called if f":: {name}\n" not in API + "\n"]


@pytest.mark.parametrize("name", recipes.NAMED)
def test_the_api_reference_describes_every_recipe(name):
    """It has the comments in front of them."""
    assert ":: fbq_jax.recipes.presets\n   :members:" in API
    source = Path(presets.__file__).read_text()
    assert re.search(rf"^#: .*\n{name} = ", source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_readme_is_an_introduction():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def blocks(page):
    """The language and the text of every block of code on a page."""
    return re.findall(
        r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )


BLOCKS = [
    pytest.param(language, text, page, id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, (language, text) in enumerate(blocks(page))
    if language != "{toctree}"
]
# A session in Python is a doctest; MaxText's tests run the script of its page.
LANGUAGES = {"pycon", "sh", "text", "bibtex"}
SCRIPTS = [ROOT / "docs/integrations/maxtext.md"]
INCLUDE = "{literalinclude} "


@pytest.mark.parametrize(("language", "text", "page"), BLOCKS)
def test_every_block_of_code_runs_somewhere(language, text, page):
    if language.startswith(INCLUDE):
        file = (page.parent / language.removeprefix(INCLUDE)).resolve()
        package = file.parent.relative_to(ROOT / "examples")
        assert file.is_file()
        assert (ROOT / f"tests/examples/test_{package}.py").is_file()
        return
    assert language in LANGUAGES or (language == "python" and page in SCRIPTS)
    assert (">>>" in text) == (language == "pycon")
    # Without an empty line the fence would be taken for output.
    assert language != "pycon" or text.endswith("\n\n")


class ParsedError(Exception):
    """A command line is valid."""


def parse(module, arguments):
    """Reads the arguments of ``python -m module`` as it does, and runs nothing."""
    if importlib.util.find_spec(module).submodule_search_locations is not None:
        module += ".__main__"  # a package
    program = importlib.import_module(module)
    if hasattr(program, "_parser"):
        program._parser().parse_args(arguments)
        return
    parse_args = argparse.ArgumentParser.parse_args

    def only_parse(self, *args):
        parse_args(self, *args)
        raise ParsedError

    with (
        unittest.mock.patch("argparse.ArgumentParser.parse_args", only_parse),
        pytest.raises(ParsedError),
    ):
        program.main(arguments)


def commands(text):
    """The words of every command of a block, as a shell reads them."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"\$\(.*? && echo (.*?)\)", r"\1", text)
    lines = (shlex.split(line, comments=True) for line in text.splitlines())
    return [words for words in lines if words]


COMMANDS = [
    pytest.param(words, id=f"{page.values[2].relative_to(ROOT)}: {shlex.join(words)}")
    for page in BLOCKS
    if page.values[0] == "sh"
    for words in commands(page.values[1])
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_take_their_options(words, monkeypatch, capsys):
    """Programs read the options; nothing is trained or measured."""
    monkeypatch.chdir(ROOT)
    match words:
        case ["python", "-m", "docs.figures"]:
            assert callable(importlib.import_module("docs.figures").main)
        case ["python", "-m", "fbq_jax.bench", "table", _]:
            assert (
                importlib.import_module("fbq_jax.bench.__main__").main(words[3:]) == 0
            )
            assert "| fallback | mosaic |" in capsys.readouterr().out
        case ["python", "-m", module, *arguments]:
            parse(module, arguments)
        case ["python", "-c", program]:
            exec(program, {})
        case ["python3", "-m", "venv", _]:
            pass
        case ["source", script]:
            assert script.endswith("venv/bin/activate")
        case ["make", ".venv/examples" | ".venv/cuda"]:
            makefile = (ROOT / "Makefile").read_text()
            assert "\nVENV ?= .venv\n" in makefile
            assert "\n$(VENV)/%: " in makefile
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
            assert target == "train" or not variables
            for arguments in (text.removeprefix("ARGS=").split() for text in variables):
                check_help = pytest.raises(SystemExit, match=r"^0$")
                with check_help if "--help" in arguments else contextlib.nullcontext():
                    parse("examples.llama.train", arguments)
        case ["pip", "install", what, *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = project["optional-dependencies"]
            extra = re.fullmatch(r"\.(?:\[([\w-]+)\])?", what)[1]
            assert extra is None or extra in extras
            models = {re.match(r"[\w-]+", need)[0] for need in extras["models"]}
            assert models.issuperset(packages)
        case _:
            pytest.fail(f"no test reads {shlex.join(words)}")
