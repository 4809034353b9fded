"""Imports point down: packages have an order, and no modules import each other."""

import ast
import functools
import graphlib
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import private_names

ROOT = Path(__file__).parents[1]

# From the bottom to the top.  Packages on one level do not import each other.
LEVELS = [
    {"kernels"},
    {"recipes"},
    {"sharding"},
    {"ops"},
    {"core"},
    {"choice", "experts", "fp8", "int8_flow"},
    {"flax_internals", "model_kind", "optim"},
    {"linen", "nnx"},
    {"contrib", "export", "testing"},
    {"maxtext"},
]
# The command-line tools use the whole library.
TOOLS = {"bench", "tune"}

# What the library uses of other libraries that is not public: one module for Flax, one
# for Qwix and one for MaxText.  Shorten it; what you add, check on import.
PRIVATE_NAMES = """
fbq_jax/bench/matmuls.py: 'qwix._src.core.dot_general_qt'
fbq_jax/contrib/maxtext.py: '_compute_dot_general_nnx'
fbq_jax/contrib/maxtext.py: layer._quant_dot_general_name
fbq_jax/contrib/qwix/internals.py: 'interception_manager._intercepted_threads'
fbq_jax/contrib/qwix/internals.py: 'interception_manager._interceptors'
fbq_jax/contrib/qwix/internals.py: 'qwix._src.interception'
fbq_jax/contrib/qwix/internals.py: 'qwix._src.utils.flax_util'
fbq_jax/flax_internals.py: '_context'
fbq_jax/flax_internals.py: '_module_fingerprint'
fbq_jax/flax_internals.py: '_split_in_out_axes'
fbq_jax/flax_internals.py: super()._call_wrapped_method
fbq_jax/model_kind.py: '_unquantized_type'
""".strip().splitlines()


def modules() -> dict[str, Path]:
    """Every module of the library, the examples and the experiments, by its name."""
    files = [
        (path, folder.name)
        for folder in (ROOT / "fbq_jax", ROOT / "examples", ROOT / "experiments")
        for path in folder.rglob("*.py")
    ]
    files += [(path, "fbq_jax") for path in (ROOT / "kernels").rglob("*.py")]
    found = {}
    for path, package in files:
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] != package:
            parts.insert(0, package)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """What a module imports, also inside functions: modules, and names in them."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_project(name: str) -> str:
    """The module of this project that a name is, or is in."""
    return name if name in MODULES else name.rpartition(".")[0]


@functools.cache
def imported_names() -> dict[str, set[str]]:
    """What each module imports; not read before a test asks for it."""
    return {module: set(imported(module)) for module in MODULES}


@functools.cache
def imported_modules() -> dict[str, set[str]]:
    """The modules of this project that each module imports."""
    return {
        module: set(map(of_project, names)) & MODULES.keys() - {module}
        for module, names in imported_names().items()
    }


def package_of(module: str) -> str:
    """The package directly below ``fbq_jax``; "" for ``fbq_jax`` itself.

    The operand, ``fbq_jax.quantized``, belongs to ``core``.
    """
    package = module.partition(".")[2].partition(".")[0]
    return "core" if package == "quantized" else package


LIBRARY = [module for module in MODULES if module.startswith("fbq_jax.")]


def test_every_package_has_a_level():
    packages = {package_of(module) for module in LIBRARY}
    assert packages == set.union(*LEVELS, TOOLS)


def test_packages_import_what_is_below_them():
    below: dict[str, set[str]] = {tool: set.union(*LEVELS, TOOLS) for tool in TOOLS}
    lower: set[str] = set()
    for level in LEVELS:
        below |= {package: lower | {package} for package in level}
        lower = lower | level
    upward = [
        f"{module} imports {name}"
        for module in LIBRARY
        for name in sorted(imported_modules()[module])
        if name.startswith("fbq_jax")
        and package_of(name) not in below[package_of(module)]
    ]
    assert not upward


def test_linen_and_nnx_are_unknown_up_to_core():
    """Below core, so is the rest of Flax."""
    allowed = {"core": {"flax.serialization", "flax.struct"}}
    below = set.union(*LEVELS[: LEVELS.index({"core"}) + 1])
    assert not [
        f"{module} imports {name}"
        for module in LIBRARY
        for name in sorted(imported_names()[module])
        if package_of(module) in below
        and name.partition(".")[0] == "flax"
        and name not in allowed.get(package_of(module), ())
    ]


@pytest.mark.parametrize(
    ("package", "unknown"),
    [("fbq_jax", ("examples", "experiments")), ("examples", ("experiments",))],
)
def test_what_others_copy_does_not_import_what_uses_it(package, unknown):
    assert not [
        f"{module} imports {name}"
        for module, names in imported_modules().items()
        for name in names
        if module.startswith(package) and name.startswith(unknown)
    ]


def test_no_modules_import_each_other():
    try:
        graphlib.TopologicalSorter(imported_modules()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_the_op_imports_nothing_of_what_one_device_does_not_need():
    """Who freezes, reports, partitions or runs an op imports the op, not it them."""
    seen: set[str] = set()
    todo = ["fbq_jax.linen.dot"]
    while todo:
        module = todo.pop()
        if module not in seen and MODULES[module].name != "__init__.py":
            seen.add(module)
            todo += imported_modules()[module]
    others = ("core.frozen_weight", "core.tracing", "linen.tracing", "linen.freezing")
    others += ("ops.backends", "ops.fused_sources", "sharding.partitioning")
    assert not seen & {f"fbq_jax.{name}" for name in others}
    assert not any(module.startswith("fbq_jax.experts") for module in seen)
    assert len(seen) <= 32


def test_no_function_hides_a_module_of_its_name():
    """What a package exports under a module's name is that module."""
    for module in LIBRARY:
        package, _, name = module.rpartition(".")
        exported = vars(importlib.import_module(package)).get(name)
        assert exported is None or isinstance(exported, types.ModuleType), module


def test_private_names_of_other_libraries_are_listed():
    assert private_names.private_names() == PRIVATE_NAMES
