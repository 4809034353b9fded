"""The Triton kernels compiled for GPUs that are not here, and an estimate from them.

``python -m fbq_jax.bench compile`` writes the file. It needs Triton, but no GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fbq_jax.bench import compiler, estimate, kernel_cases, report, results, sass
from fbq_jax.bench.cards import CARDS, Architecture, Card
from fbq_jax.bench.estimate import CompiledProduct, Range

DEFAULT_PATH = Path("bench-compiled.json")
# (M, K, N) of the layers whose time is estimated.
LAYERS = ((8192, 4096, 4096), (8192, 4096, 14336))
_PARTS = ("kernels", "products", "layers")

_Cells = tuple[list[str], list[list[str]]]  # the head and the rows of a table


def run(path: Path) -> None:
    """Compiles all kernels, estimates layers, and writes the file.

    Raises:
      ModuleNotFoundError: if Triton is not installed.
      ResultsError: if the file cannot be written, or holds something else.
    """
    if not compiler.is_installed():
        raise ModuleNotFoundError("compiling needs Triton: pip install 'triton==3.6.*'")
    results.check_own(path, load)
    content: dict[str, Any] = {
        "date": results.today(),
        "versions": results.versions(),
        **{part: [] for part in _PARTS},
    }
    for card in CARDS:
        print(f"compiling for {card.name}, {card.architecture.name}", flush=True)
        content["kernels"] += _kernel_rows(card.architecture)
        for shape in LAYERS:
            products = compiled_products(shape, card.architecture)
            content["products"] += [_product_row(x, card) for x in products]
            content["layers"].append(_layer_row(shape, products, card))
    results.write(path, content)


def load(path: Path) -> dict[str, Any] | None:
    """The content of a file that ``run`` wrote; None if it holds something else."""
    content = results.read_mapping(path)
    is_compiled = content is not None and set(_PARTS) <= content.keys()
    return content if is_compiled else None


def compiled_products(
    shape: tuple[int, int, int], architecture: Architecture
) -> list[CompiledProduct]:
    """The products of a layer ``(M, K, N)``: Y with fallback, dX and dW without."""
    M, K, N = shape
    rate = estimate.FALLBACK_RATE
    return [
        _compiled_product("Y", (M, N, K), architecture, rate),
        _compiled_product("dX", (M, K, N), architecture, 0.0),
        _compiled_product("dW", (K, N, M), architecture, 0.0),
    ]


def _compiled_product(
    what: str, sizes: tuple[int, int, int], architecture: Architecture, rate: float
) -> CompiledProduct:
    from fbq_jax.kernels.triton import gemm_config

    capability, block_shape = architecture.capability, kernel_cases.BLOCK_SHAPE
    config = gemm_config.default_config(sizes, block_shape, capability)
    *_, kernel = kernel_cases.compile_gemm(
        sizes, block_shape, capability=capability, fallback=rate > 0.0
    )
    return CompiledProduct(
        what=what,
        sizes=sizes,
        tile=(config.BM, config.BN, block_shape[1]),
        programs=_programs(kernel, architecture),
        num_warps=kernel.num_warps,
        loop=sass.product_loop(kernel.cubin),
        extra_steps=rate,
    )


def _programs(kernel: compiler.CompiledKernel, architecture: Architecture) -> int:
    return architecture.resident_programs(
        registers=kernel.registers, num_warps=kernel.num_warps, shared=kernel.shared
    )


def _kernel_rows(architecture: Architecture) -> Iterable[dict[str, Any]]:
    for case in kernel_cases.cases():
        for kernel in case.compiled(capability=architecture.capability):
            yield {
                "what": case.what,
                "kernel": kernel.name,
                "architecture": architecture.name,
                "num_warps": kernel.num_warps,
                "registers": kernel.registers,
                "spills": kernel.spills,
                "shared": kernel.shared,
                "programs": _programs(kernel, architecture),
            }


def _product_row(product: CompiledProduct, card: Card) -> dict[str, Any]:
    cycles = estimate.step_cycles(product, card)
    return {
        "card": card.name,
        "architecture": card.architecture.name,
        **product._asdict(),
        "loop": product.loop._asdict(),
        "cycles": {**cycles._asdict(), "step": cycles.step._asdict()},
    }


def _layer_row(
    shape: tuple[int, int, int], products: Sequence[CompiledProduct], card: Card
) -> dict[str, Any]:
    time = estimate.layer_time(shape, products, card)
    return {
        "card": card.name,
        "shape": shape,
        "published": {
            "bf16": card.bf16,
            "int8": card.int8,
            "bandwidth": card.bandwidth,
            "multiprocessors": card.multiprocessors,
            "clock": card.clock,
            "source": card.source,
        },
        "bf16_ms": time.bf16,
        "products_ms": time.products,
        "quantization_ms": time.quantization,
        "speedup": time.speedup,
    }


def markdown(content: Mapping[str, Any]) -> str:
    """All tables of a file, in Markdown."""
    return "\n\n".join(tables(content).values())


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a file in Markdown, by the names of its parts."""
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    compiled = f"compiled on {content['date']} with {versions}"
    texts = {
        "kernels": "**Triton kernels**, "
        f"{compiled}. Cells are the registers of a thread, KiB of shared memory of a "
        "program, and programs that share a multiprocessor; and spilled bytes, where a "
        "thread spills registers.",
        "products": "**Inner loop of the Triton GEMM**, "
        f"{compiled}. Instructions are those of one warp in a step over 128 of K. "
        "Cycles are those of a multiprocessor while each of its programs does one "
        "step: derived from the instructions and from published rates, not measured.",
        "layers": "**Estimate, not a measurement: a linear layer by the Triton "
        f"kernels**, {compiled}. The layer's three products, with fallback of a fifth "
        "of X's blocks, and the quantization of X, W and dY. Ranges begin with the "
        "worst case, in which the tensor cores wait while other instructions are "
        "issued, and quantization reaches half of the memory's bandwidth. In the best "
        "case all work overlaps. bf16 is taken at its published peak. "
        f"{_published(content['layers'])}",
    }
    cells = {
        "kernels": _kernel_cells,
        "products": _product_cells,
        "layers": _layer_cells,
    }
    return {
        part: f"{texts[part]}\n\n{report.table(*cells[part](content[part]))}"
        for part in _PARTS
    }


def _published(rows: Sequence[Mapping[str, Any]]) -> str:
    """The published figures of each card, with their source."""
    figure = (
        "{card}: bf16 {bf16} and INT8 {int8} TOP/s, {bandwidth} TB/s, "
        "{multiprocessors} multiprocessors at {clock} GHz ({source})"
    )
    cards = {row["card"]: row["published"] for row in rows}
    figures = [figure.format(card=card, **cards[card]) for card in cards]
    return f"Published figures: {'; '.join(figures)}."


def _kernel_cells(rows: Sequence[Mapping[str, Any]]) -> _Cells:
    """One row for each kernel, with a column for each architecture."""
    architectures = list(dict.fromkeys(row["architecture"] for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = row["what"], row["kernel"]
        cells.setdefault(key, {})[row["architecture"]] = _resources(row)
    return ["op", "kernel", *architectures], [
        [what, f"`{kernel}`", *(of.get(name, "") for name in architectures)]
        for (what, kernel), of in cells.items()
    ]


def _resources(row: Mapping[str, Any]) -> str:
    spills = f", spills {row['spills']} bytes" if row["spills"] else ""
    kib = row["shared"] / 1024
    return f"{row['registers']}, {kib:.3g}, {row['programs']}{spills}"


def _product_cells(rows: Sequence[Mapping[str, Any]]) -> _Cells:
    head = ["GPU", "product", "M, N, K", "instructions", "of them INT8 tensor"]
    head += ["float32 and conversions", "shared memory, KiB", "tensor cores, cycles"]
    head += ["issue", "float32 units", "shared memory"]
    return head, [_product_row_cells(row) for row in rows if _is_shown(row)]


def _is_shown(row: Mapping[str, Any]) -> bool:
    """Whether a product is one of the first layer, whose dX is like its dW."""
    M, K, N = LAYERS[0]
    sizes = tuple(row["sizes"])
    return (row["what"], sizes) in {("Y", (M, N, K)), ("dX", (M, K, N))}


def _product_row_cells(row: Mapping[str, Any]) -> list[str]:
    loop, cycles = row["loop"], row["cycles"]
    share = loop["tensor"] / loop["instructions"]
    return [
        f"{row['card']}, {row['architecture']}",
        row["what"] + (", fallback" if row["extra_steps"] else ""),
        ", ".join(map(str, row["sizes"])),
        str(loop["instructions"]),
        f"{loop['tensor']} ({share:.0%})",
        str(loop["float32"] + loop["conversions"]),
        f"{loop['shared_bytes'] / 1024:.3g}",
        *(f"{cycles[unit]:.0f}" for unit in ("tensor", "issue", "float32", "shared")),
    ]


def _layer_cells(rows: Sequence[Mapping[str, Any]]) -> _Cells:
    head = ["GPU", "M, K, N", "bf16, ms", "products, ms", "quantization, ms"]
    return [*head, "estimated speedup vs bf16"], [
        [
            row["card"],
            ", ".join(map(str, row["shape"])),
            f"{row['bf16_ms']:.2f}",
            _range(row["products_ms"]),
            _range(row["quantization_ms"]),
            _range(row["speedup"]),
        ]
        for row in rows
    ]


def _range(values: Sequence[float]) -> str:
    best, worst = Range(*values)
    return f"{worst:.2f} to {best:.2f}"
