"""Layers compiled for TPUs, and what their compiled programs say of their time.

``python -m fbq_jax.bench compile-tpu`` writes the file. It needs libtpu, but no TPU.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax import recipes
from fbq_jax.bench import matmuls, report, results, tpu_cycles, tpu_meshes
from fbq_jax.recipes.schema import Recipe

DEFAULT_PATH = Path("bench-compiled-tpu.json")
LAYERS = ((8192, 4096, 4096),)  # (M, K, N)
_TABLES = {"tpu_layers", "tpu_steps", "tpu_meshes"}
_HEAD = ["TPU", "recipe", "M, K, N", "XLA, cycles", "kernels, cycles", "over bf16"]


def named_recipes() -> dict[str, Recipe | None]:
    """The recipes to compile; None is bf16."""
    coarse = {"fallback, blocks of 256": Recipe(block=256)}
    return {"bf16": None, **recipes.NAMED, **coarse}


def run(path: Path) -> None:
    """Compiles all layers for all generations, and writes the file.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
      ResultsError: if the file cannot be written, or holds something else.
    """
    check_compiler()
    results.check_own(path, load)
    rows = []
    for generation in tpu_cycles.TOPOLOGIES:
        for shape in LAYERS:
            for name in named_recipes():
                print(f"compiling {name} for {generation}", flush=True)
                rows.append(_row(generation, name, shape))
    meshes = []
    for generation, sizes, name in tpu_meshes.cases():
        print(f"compiling {name} for eight {generation}, {sizes}", flush=True)
        with tpu_cycles.backend_of("tpu"):
            meshes.append(tpu_meshes.row(generation, sizes, name))
    write(path, tpu_layers=rows, tpu_meshes=meshes)


def check_compiler() -> None:
    """Raises ModuleNotFoundError if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("compiling for TPUs needs libtpu: pip install libtpu")


def write(path: Path, **tables: Any) -> None:
    """Writes the rows of tables; other tables in the file stay.

    A file has one date and the versions of the last tables that were written: write
    all of them with the same ones.
    """
    content = {
        "date": results.today(),
        "versions": results.versions()
        | {"libtpu": importlib.metadata.version("libtpu")},
    }
    content = (load(path) or {}) | content | tables
    results.write(path, content)


def _row(generation: str, name: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    source = tpu_cycles.Source(__name__, layer.__name__, (name, shape))
    return {
        "generation": generation,
        "what": name,
        "shape": shape,
        **tpu_cycles.estimate(generation, source)._asdict(),
    }


def layer(name: str, shape: tuple[int, int, int]) -> tuple[Any, tuple[Any, ...]]:
    """A jitted linear layer, forward and backward, and its arguments.

    The weight is float32.

    Args:
      name: a key of ``named_recipes``.
      shape: M, K and N.
    """
    M, K, N = shape
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((K, N), jnp.float32)
    dy = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
    return jax.jit(matmuls.all_products(named_recipes()[name])), (x, w, dy)


def load(path: Path) -> dict[str, Any] | None:
    """The content of a file that ``write`` wrote; None if it holds something else."""
    content = results.read_mapping(path)
    is_ours = content is not None and not _TABLES.isdisjoint(content)
    return content if is_ours else None


def markdown(content: Mapping[str, Any]) -> str:
    """The tables of a file, in Markdown."""
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    compiler = f"compiled on {content['date']} with {versions}"
    parts = []
    if rows := content.get("tpu_layers"):
        text = (
            "**Estimate, not a measurement: a linear layer on TPUs, forward and "
            f"backward**, {compiler}. No TPU has run it. Cycles of XLA's operations "
            "are its own estimates, which it has of all but a small sort. Those of "
            "kernels are the instruction bundles that they issue, without waits, "
            "divided by the cores of a device. A fifth of X's blocks fall back. In "
            "bf16, XLA casts the weight in both products that read it."
        )
        parts.append(
            f"{text}\n\n{report.table(_HEAD, starmap(_cells, _with_bf16(rows)))}"
        )
    if rows := content.get("tpu_steps"):
        text = (
            "**Estimate, not a measurement: an optimizer step of a Llama on one TPU**, "
            f"{compiler}. No TPU has run it. The shape is width, MLP, layers, and "
            "sequences of 2048 tokens. Cycles are added up as above; those of a loop "
            "over layers count once for each layer. The last column compares the "
            "loops alone, without the embedding, the head and the optimizer."
        )
        head = [*_HEAD[:2], "shape", *_HEAD[3:], "layers over bf16"]
        steps = (
            [*_cells(row, exact), f"{row['loop_cycles'] / exact['loop_cycles']:.2f}"]
            for row, exact in _with_bf16(rows)
        )
        parts.append(f"{text}\n\n{report.table(head, steps)}")
    if rows := content.get("tpu_meshes"):
        parts.append(tpu_meshes.markdown(rows))
    return "\n\n".join(parts)


def _with_bf16(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each row with that of bf16, which is the first of its shape and generation."""
    bf16: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        yield row, bf16.setdefault((row["generation"], tuple(row["shape"])), row)


def _total(row: Mapping[str, Any]) -> float:
    total: float = row["xla_cycles"] + sum(row["kernel_cycles"].values())
    return total


def _cells(row: Mapping[str, Any], bf16: Mapping[str, Any]) -> list[str]:
    return [
        row["generation"],
        row["what"],
        ", ".join(map(str, row["shape"])),
        f"{row['xla_cycles']:.3g}",
        f"{sum(row['kernel_cycles'].values()):.3g}",
        f"{_total(row) / _total(bf16):.2f}",
    ]
