"""Triton kernels compile for GPUs that are not here: what their code must have."""

import functools
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
import triton
from triton.backends.nvidia.compiler import get_ptxas

from fbq_jax.kernels import packing
from fbq_jax.kernels.layer_sources import Gate, GateGrad, Norm
from fbq_jax.kernels.quantized import Unquantized
from fbq_jax.kernels.rounding import MatrixSeeds
from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.triton import (
    few_rows_gemm,
    few_rows_quantize_gemm,
    gemm,
    grouped_gemm,
    threshold,
)
from fbq_jax.kernels.triton.quantize import quantize
from tests.compile_tools import SHARED_MEMORY, compile_kernels
from tests.kernels.gemm_cases import shapes
from tests.kernels.quantize_cases import FLOAT8, near, noisy
from tests.marks import rows_with_first_fast, with_first_fast

LAYER = (4096, 4096, 4096)  # M, K, N
CODES = ("int8", "float8_e4m3fn")
SQUARE = (128, 128, 128)
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
SIXTEEN_BYTES = r"cp\.async\.cg\.shared\.global"
CAPABILITIES = sorted(SHARED_MEMORY, reverse=True)
capabilities = pytest.mark.parametrize("capability", with_first_fast(CAPABILITIES))


def in_turn(usual, *others):
    """The usual case for every generation, and each of the others for two of them."""
    pairs = [(usual, CAPABILITIES)]
    pairs += [(case, CAPABILITIES[i % 2 :: 2]) for i, case in enumerate(others)]
    return [(*case, capability) for case, of in pairs for capability in of]


def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compiled(op, *args, capability, patterns=(), **options):
    """The kernels of an op; none spills, and the last one has these patterns.

    By Triton 3.7 and 3.9, three kernels spill up to 84 bytes of a thread.
    """
    kernels = compile_kernels(op, *args, capability=capability, **options)
    for kernel in kernels:
        assert kernel.spills <= (0 if TRITON < (3, 7) else 84), kernel.name
        assert kernel.shared <= SHARED_MEMORY[capability], kernel.name
    for pattern in patterns:
        assert re.search(pattern, kernels[-1].ptx), pattern
    return kernels


def product(codes, capability=None):
    """What multiplies codes on the tensor cores, of any generation or of this one."""
    if capability is None:
        return r"mma\S*" + {"int8": r"s32\.s8", "float8_e4m3fn": r"e4m3"}[codes]
    operands = {"int8": r"s32\.s8", "float8_e4m3fn": r"f32\.e4m3\.e4m3"}[codes]
    return (r"wgmma\.mma_async\S*" if capability == 90 else r"mma\.sync\S*") + operands


# GEMMs.


@functools.cache
def compiled_gemm(sizes, blocks, capability, fallback=False, codes="int8"):
    (M, K, N), (m, k, n) = sizes, blocks
    generation = capability if M >= 64 else None  # Hopper's products have 64 rows.
    return compiled(
        gemm.matmul,
        shapes((2, M, K), (m, k), codes, fallback=fallback),
        shapes((2, N, K), (n, k), codes),
        capability=capability,
        patterns=(product(codes, generation), SIXTEEN_BYTES),
        sm=capability,
        dtype=jnp.bfloat16,
    )[-1]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    ("sizes", "blocks", "capability"),
    rows_with_first_fast(
        in_turn(
            (LAYER, SQUARE),
            (LAYER, (32, 32, 32)),
            (LAYER, (64, 64, 64)),
            (LAYER, (256, 256, 256)),
            (LAYER, (1, 128, 128)),
            (LAYER, (1, 128, 1)),
            ((1000, 1000, 1000), (32, 64, 32)),
            ((1000, 1000, 1000), (128, 256, 128)),
            ((1, 4096, 4096), (256, 128, 256)),
            ((1, 4096, 4096), (32, 128, 128)),
            ((1, 4096, 4096), (128, 128, 32)),
        )
    ),
)
def test_gemms(sizes, blocks, fallback, capability):
    kernel = compiled_gemm(sizes, blocks, capability, fallback)
    assert ("cvt.rn.f32.s32" in kernel.ptx) == (capability >= 89)
    assert capability == 80 or "cvt.rn.bf16x2.f32" in kernel.ptx
    if capability == 90 and blocks == SQUARE:  # Two programs share a multiprocessor.
        assert 2 * 32 * kernel.num_warps * kernel.registers <= 2**16
        assert 2 * (kernel.shared + 1024) <= 228 * 1024


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("blocks", [(1, 32, 32), (1, 128, 128), (1, 128, 1)])
def test_float8_gemms(blocks, capability):
    compiled_gemm(LAYER, blocks, capability, codes="float8_e4m3fn")


@pytest.mark.parametrize("codes", with_first_fast(CODES))
def test_each_scale_of_a_row_is_loaded_once(codes):
    """Without care, the compiler loads it for every column."""
    kernel = compiled_gemm(LAYER, (1, 128, 128), 90, codes=codes)
    rows_of_a_thread = 2
    assert kernel.ptx.count("ld.global") == rows_of_a_thread + 1
    assert kernel.ptx.count("mul.rn.f32") == rows_of_a_thread


@capabilities
@pytest.mark.parametrize(
    ("rows", "block"),
    rows_with_first_fast([(64, 128), (1, 128), (128, 128), (128, 256)]),
)
def test_gemms_of_few_rows(rows, block, capability):
    compiled(
        few_rows_gemm.matmul,
        shapes((1, rows, 512), (block, block), fallback=True),
        shapes((1, 256, 512), (block, block)),
        capability=capability,
        patterns=("mma",),
        sm=capability,
        dtype=jnp.bfloat16,
    )


@pytest.mark.parametrize("rows", with_first_fast([1, 8, 32, 128]))
def test_ordered_sums_of_float8_have_one_instruction(rows):
    """Of the instructions that multiply FP8 codes, each rounds sums in its own way."""
    compiled(
        few_rows_gemm.matmul,
        shapes((1, rows, 2200), (1, 128), "float8_e4m3fn"),
        shapes((1, 304, 2200), (128, 128), "float8_e4m3fn"),
        capability=90,
        patterns=(product("float8_e4m3fn", 90),),
        sm=90,
        dtype=jnp.bfloat16,
        ordered=True,
    )


@capabilities
@pytest.mark.parametrize(
    ("rows", "blocks", "dtype"),
    rows_with_first_fast(
        [
            (8, SQUARE, "bfloat16"),
            (32, (256, 256, 256), "float32"),
            (16, (1, 128, 128), "bfloat16"),
            (8, (32, 32, 32), "float16"),
        ]
    ),
)
def test_gemms_that_quantize_few_rows(rows, blocks, dtype, capability):
    m, k, n = blocks
    x, theta = array((1, rows, 512), dtype), array((1,), "float32")
    compiled(
        few_rows_quantize_gemm.matmul,
        Unquantized(x, theta, (m, k), None if m == 1 else "absmax"),
        shapes((1, 256, 512), (n, k)),
        capability=capability,
        patterns=("mma", r"cp\.async"),  # of rhs, while other blocks are multiplied
        sm=capability,
        dtype=jnp.bfloat16,
    )


@pytest.mark.exhaustive
def test_the_assembler_keeps_the_products_of_all_steps(tmp_path):
    """It loses some of them in an unrolled loop of 16 rows."""
    operands = (shapes((1, size, 1024), (128, 128)) for size in (16, 4096))
    options = {"capability": 90, "sm": 90, "dtype": jnp.bfloat16}
    (kernel,) = compiled(
        few_rows_gemm.matmul, *operands, patterns=("wgmma",), **options
    )
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(kernel.ptx)
    assemble = [get_ptxas(90).path, "-arch", "sm_90a", ptx, "-o", cubin]
    subprocess.run(assemble, check=True)
    disassemble = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin]
    done = subprocess.run(disassemble, check=True, capture_output=True, text=True)
    assert "GMMA" in done.stdout
    assert "gdesc[URZ]" not in done.stdout  # what is left of a lost product


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ["matmul", "matmul with fallback", "contract"])
@pytest.mark.parametrize(
    ("side", "rows", "codes", "capability"),
    [
        *in_turn((128, 128, "int8"), (32, 32, "int8"), (128, 1, "int8")),
        *[(128, 1, "float8_e4m3fn", capability) for capability in (90, 89)],
    ],
)
def test_gemms_of_groups(side, rows, codes, capability, op):
    tiles, groups, size = 72, 8, 4096
    options = {"dtype": jnp.bfloat16, "sm": capability}
    if op == "contract":
        blocks, options = ((rows, side), (side, side)), options | {"size": groups}
        operands = (shapes((tiles, size, side), block, codes) for block in blocks)
    else:
        fallback = op != "matmul" and codes == "int8"
        operands = (
            shapes((tiles, side, size), (rows, side), codes, fallback=fallback),
            shapes((groups, size, size), (side, side), codes),
        )
    compiled(
        getattr(grouped_gemm, op.partition(" ")[0]),
        *operands,
        array((tiles,), "int32"),
        capability=capability,
        patterns=(product(codes), SIXTEEN_BYTES),
        **options,
    )


# Quantization.

SHAPE, TILES = (1, 4096, 4096), (40, 128, 4096)


def norm(dtype, bits=10):
    return Norm(array(SHAPE, dtype), array((1, SHAPE[2]), "float32"), 1e-5, bits)


def gate(dtype, bits=10, *, grouped=False):
    """A gate; in groups, gate and up are not interleaved."""
    batch, rows, columns = TILES if grouped else SHAPE
    counts = array((batch,), "int32") if grouped else None
    values = array((batch, rows, 2 * columns), dtype)
    return Gate(values, counts, bits, not grouped)


def gate_grad(dtype, bits=10, *, grouped=False):
    batch, *rest = shape = TILES if grouped else SHAPE
    factors = jax.ShapeDtypeStruct((batch, 2, *rest), jnp.float32)
    pack = lambda x: packing.as_words(packing.quantize(x, bits))  # noqa: E731
    packed = jax.eval_shape(pack, factors)
    counts = array((batch,), "int32") if grouped else None
    return GateGrad(array(shape, dtype), packed, counts, bits, not grouped)


def compiled_quantize(source, *layouts, capability, **options):
    batch = (source.shape[0],)
    options |= dict(zip(("rowwise", "colwise"), layouts, strict=True))
    return compiled(
        quantize,
        source,
        MatrixSeeds(*[array(batch, "uint32")] * 3),
        array(batch, "float32") if options.get("criterion") else None,
        capability=capability,
        **options,
    )


def check_width(kernels):
    """Loads and stores take 16 bytes at once."""
    for kernel in kernels:
        assert "ld.global.v4" in kernel.ptx
        assert "st.global.v4" in kernel.ptx or kernel.name == "_find_maxima"


def matrix(dtype):
    return Matrix(array(SHAPE, dtype))


def layouts_of_rows(r, c):
    """Scales of rows, beside scales of columns and of blocks."""
    return (noisy(1, c), noisy(r, 1)), (noisy(1, c), noisy(r, c, sums=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "layouts", "options"),
    [
        # The usual block in two types, the smallest, the narrowest and the largest.
        *(
            (capability, dtype, layouts, options)
            for capability, dtype, block, criterion in [
                (90, "bfloat16", (128, 128), "absmax"),
                (89, "bfloat16", (128, 128), "absmax"),
                (86, "bfloat16", (128, 128), "absmax"),
                (80, "float32", (128, 128), "l1_rel"),
                (90, "bfloat16", (32, 32), "l1"),
                (89, "float32", (256, 32), "absmax"),
                (80, "float32", (256, 256), "l1_rel"),
            ]
            for layouts, options in [
                ((noisy(*block), near(*block)), {}),
                ((near(*block), noisy(*block)), {"criterion": criterion}),
            ]
        ),
        (90, "bfloat16", (noisy(1, None), noisy(None, 1)), {"bound": 127.5}),
        (90, "bfloat16", (None, noisy(None, 1)), {}),
        (89, "float16", (noisy(1, None), None), {}),
        (80, "float32", (near(1, None), near(None, 1)), {}),
        *(
            (capability, dtype, layouts, {})
            for capability, dtype in [(90, "bfloat16"), (86, "float32")]
            for block in [(128, 128), (32, 32), (256, 128)]
            for layouts in layouts_of_rows(*block)
        ),
    ],
)
def test_quantization(capability, dtype, layouts, options):
    options = options | {"capability": capability}
    kernels = compiled_quantize(matrix(dtype), *layouts, **options)
    check_width(kernels)
    of_vectors = any(layout and None in layout.block for layout in layouts)
    assert len(kernels) == 2 or not of_vectors


@pytest.mark.parametrize(
    ("capability", "dtype"), rows_with_first_fast([(90, "bfloat16"), (89, "float32")])
)
@pytest.mark.parametrize(
    "layouts",
    with_first_fast([(near(1, 128), near(128, 1)), (near(128, 128), near(128, 128))]),
)
def test_quantization_to_float8(layouts, capability, dtype):
    options = {"capability": capability} | FLOAT8
    kernels = compiled_quantize(matrix(dtype), *layouts, **options)
    check_width(kernels)
    # Rounded once, from float32.
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernels[0].ptx
    assert "e4m3x2.f16x2" not in kernels[0].ptx


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "bits", "block", "criterion"),
    [
        (90, "bfloat16", 10, (128, 128), "absmax"),
        (89, "float16", 12, (32, 128), None),
        (86, "bfloat16", 10, (128, 128), "absmax"),
        (80, "float32", 11, (256, 128), "l1_rel"),
    ],
)
def test_quantization_of_layers(capability, dtype, bits, block, criterion):
    r, c = block
    fallback, args = {"criterion": criterion}, (dtype, bits)
    forward, backward = (near(r, c), noisy(r, c)), (noisy(r, c), noisy(r, c))
    in_rows, summed = (near(1, c), noisy(r, 1)), (noisy(1, c), noisy(r, c, sums=True))
    calls = [
        (norm(*args), forward, fallback),
        (gate(*args), forward, fallback),
        (gate_grad(*args), backward, {}),
        (norm(*args), in_rows, {}),
        (gate_grad(*args), summed, {}),
    ]
    if capability == 90:
        calls += [
            (gate(*args, grouped=True), forward, fallback),
            (gate_grad(*args, grouped=True), backward, {}),
            (gate(*args), in_rows, {}),
            (gate(*args, grouped=True), in_rows, {}),
            (gate_grad(*args, grouped=True), summed, {}),
        ]
    kernels = [
        kernel
        for source, layouts, options in calls
        for kernel in compiled_quantize(
            source, *layouts, capability=capability, **options
        )
    ]
    # The gradients of blocks of 256 rows take two passes, and one of these two kernels.
    assert len(kernels) == len(calls) + (r == 256)
    for kernel in kernels:  # Loads of x take at least 8 bytes at once.
        assert re.search(r"ld\.global\.v[24]", kernel.ptx), kernel.name


@pytest.mark.exhaustive
@capabilities
@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        ((near(128, 128), noisy(128, 128)), {"criterion": "absmax"}),
        ((near(1, 128), noisy(128, 1)), {}),
        ((noisy(1, 128), noisy(128, 128, sums=True)), {}),
    ],
)
def test_quantization_of_groups(capability, layouts, options):
    index = array((40,), "int32")
    source = Matrix(array((4096, 4096), "bfloat16"), index, index, 128)
    (kernel,) = compiled_quantize(source, *layouts, capability=capability, **options)
    check_width([kernel])


@pytest.mark.parametrize("capability", with_first_fast([90, 80]))
def test_thresholds(capability):
    blocks, scalar = array((2, 7168), "float32"), array((2,), "int32")
    theta, count = array((2,), "float32"), array((2,), "uint32")
    compiled(
        threshold.move_threshold,
        *(blocks, blocks, theta, scalar, scalar, count),
        capability=capability,
        target_rate=(0.1, 0.3),
        alpha=1.3,
    )
