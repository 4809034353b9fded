"""Kernels compiled for GPUs that are not here, and estimates from them."""

import math

import pytest

from fbq_jax.bench import (
    cards,
    compiled,
    compiler,
    estimate,
    kernel_cases,
    results,
    sass,
)
from fbq_jax.bench.__main__ import main
from fbq_jax.bench.cards import CARDS
from fbq_jax.bench.estimate import CompiledProduct
from tests.marks import rows_with_first_fast

needs_triton = pytest.mark.skipif(
    not compiler.is_installed(), reason="needs triton, which compiles kernels"
)
# Without the H200, whose GEMM is another one.
OTHERS = [card for card in CARDS if card.architecture != cards.HOPPER]
AMPERE, ADA = CARDS[0], CARDS[2]
# Bytes that a thread spills, by what and compute capability.
SPILLS = {("quantize in row blocks, with factors of columns", 80): 20}
REPRESENTATIVE = (
    "GEMM, blocks of 128, fallback",
    "quantize with fallback, blocks of 128",
)


def check_case(what, architecture):
    (case,) = [case for case in kernel_cases.cases() if case.what == what]
    for kernel in case.compiled(capability=architecture.capability):
        spilled = SPILLS.get((what, architecture.capability), 0)
        assert kernel.spills == spilled, kernel.name
        assert kernel.shared <= architecture.program_shared, kernel.name


def every_case():
    if not compiler.is_installed():
        return []
    return [case.what for case in kernel_cases.cases()]


@needs_triton
@pytest.mark.parametrize(
    ("what", "card"),
    rows_with_first_fast(zip(REPRESENTATIVE, (AMPERE, ADA), strict=True)),
    ids=lambda value: getattr(value, "name", value),
)
def test_kernels_fit_without_spills(what, card):
    check_case(what, card.architecture)


@pytest.mark.exhaustive
@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.name)
@pytest.mark.parametrize("what", every_case())
def test_every_kernel_fits_without_spills(what, card):
    check_case(what, card.architecture)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.name)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    "block_shape",
    [(32, 128, 128), (128, 128, 32), (64, 64, 64), (128, 256, 128), (256, 128, 256)],
)
def test_default_configurations_fit_without_spills(block_shape, fallback, card):
    for sizes in ((4096, 4096, 4096), (1000, 1000, 1000), (1, 4096, 4096)):
        for kernel in kernel_cases.compile_gemm(
            sizes,
            block_shape,
            capability=card.architecture.capability,
            fallback=fallback,
        ):
            assert kernel.spills == 0, sizes
            assert kernel.shared <= card.architecture.program_shared, sizes


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_inner_loop_is_counted(card):
    """The counted products are those of a tile, and its operands are copied once."""
    (product, _, _) = compiled.compiled_products((256, 512, 1024), card.architecture)
    rows, columns, depth = product.tile
    loop = product.loop
    assert loop.macs * product.num_warps == rows * columns * depth
    assert loop.shared_bytes * product.num_warps > 2 * (rows + columns) * depth
    # A product is converted, scaled and added: two instructions for each element.
    elements = rows * columns // (32 * product.num_warps)
    assert 0 <= loop.float32 + loop.conversions - 2 * elements < 8
    assert loop.instructions > loop.tensor + loop.float32 + loop.conversions
    if card.architecture != cards.HOPPER:
        assert loop.spills == 0


def test_a_kernel_without_products_has_no_loop_of_them(monkeypatch):
    text = ".L_x_0:\n/*0000*/  FADD R1, R2, R3 ;\n/*0010*/  @P0 BRA `(.L_x_0) ;\n"
    monkeypatch.setattr(sass, "_disassemble", lambda _: text)
    with pytest.raises(ValueError, match="no loop multiplies matrices"):
        sass.product_loop(b"")


def test_instructions_are_counted_by_kind(monkeypatch):
    lines = [
        ".L_x_0:",
        "/*0000*/  FADD R1, R2, R3 ;",  # an outer loop
        ".L_x_1:",
        "/*0010*/  LDSM.16.M88.4 R4, [R5] ;",
        "/*0020*/  IMMA.16832.S8.S8.SAT R4, R8.ROW, R9.COL, R4 ;",
        "/*0030*/  I2FP.F32.S32 R4, R4 ;",
        "/*0040*/  FFMA R1, R4, R5, R1 ;",
        "/*0050*/  @!P0 LDGSTS.E.BYPASS.128 [R9], [R4.64], !P0 ;",
        "/*0060*/  @!PT LDS RZ, [RZ] ;",
        "/*0070*/  STL [R1], R2 ;",
        "/*0080*/  @P1 BRA `(.L_x_1) ;",
        "/*0090*/  BRA `(.L_x_0) ;",
    ]
    monkeypatch.setattr(sass, "_disassemble", lambda _: "\n".join(lines))
    assert sass.product_loop(b"") == sass.Loop(
        instructions=8,
        tensor=1,
        macs=16 * 8 * 32,
        float32=1,
        conversions=1,
        shared_bytes=512 + 512,
        spills=1,
    )


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_published_figures_agree(card):
    """The peak is that of so many tensor cores at this clock, with 2**n MACs each."""
    exponent = math.log2(card.int8_macs)
    assert exponent == pytest.approx(round(exponent), abs=0.01)
    assert card.int8 / card.bf16 == pytest.approx(round(card.int8 / card.bf16), 0.01)
    assert card.architecture.program_shared < card.architecture.shared


def test_resident_programs_are_limited_by_each_resource():
    resident = cards.ADA.resident_programs
    assert resident(registers=128, num_warps=4, shared=0) == 4
    assert resident(registers=121, num_warps=4, shared=0) == 4
    assert resident(registers=16, num_warps=8, shared=0) == 6
    assert resident(registers=16, num_warps=1, shared=0) == 24
    assert resident(registers=16, num_warps=1, shared=49 * 1024) == 2


def a_product(**loop):
    counts = dict.fromkeys(sass.Loop._fields, 0) | loop
    return CompiledProduct(
        what="Y",
        sizes=(256, 256, 1024),
        tile=(128, 128, 128),
        programs=1,
        num_warps=8,
        loop=sass.Loop(**counts),
        extra_steps=0.25,
    )


def test_a_step_takes_as_long_as_its_busiest_unit():
    (card,) = [card for card in CARDS if card.name == "RTX 4090"]
    cycles = estimate.step_cycles(
        a_product(
            instructions=300,
            tensor=64,
            macs=2**18,
            float32=128,
            conversions=64,
            shared_bytes=2**14,
        ),
        card,
    )
    assert cycles.tensor == pytest.approx(2048, 0.01)
    assert (cycles.issue, cycles.float32, cycles.shared) == (600, 256 + 256, 1024)
    assert cycles.step.best == cycles.tensor
    assert cycles.step.worst == pytest.approx(cycles.tensor + 2 * (300 - 64))


def test_the_time_of_a_layer():
    (card,) = [card for card in CARDS if card.name == "RTX 3090"]
    product = a_product(instructions=4, macs=2**18, shared_bytes=2**17)
    time = estimate.layer_time((256, 1024, 256), [product, product], card)
    # One wave of 4 tiles, with 8 steps and a quarter more, each 8 * 2**17 / 128 cycles.
    assert time.products.best == pytest.approx(2 * 10 * 8192 / 1.695e6)
    assert time.bf16 == pytest.approx(6 * 256 * 1024 * 256 / 71e9)
    moved = 4 * (2 * 256 * 1024 + 256 * 256) + 0.2 * 256 * 1024
    assert time.quantization == pytest.approx((moved / 0.936e9, 2 * moved / 0.936e9))
    total = time.products.worst + time.quantization.worst
    assert time.speedup.worst == pytest.approx(time.bf16 / total)


@needs_triton
def test_compile_writes_a_file_that_table_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "CARDS", CARDS[1:2])
    monkeypatch.setattr(compiled, "LAYERS", ((256, 512, 1024),))
    monkeypatch.setattr(compiled, "_kernel_rows", lambda _: [])
    path = tmp_path / "compiled.json"
    assert main(["compile", "--out", str(path)]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    assert main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| RTX 3090, sm_86 | Y, fallback | 256, 1024, 512 |" in out
    assert "Estimate, not a measurement" in out


def test_compiling_needs_triton(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "is_installed", lambda: False)
    assert main(["compile", "--out", str(tmp_path / "compiled.json")]) == 2
    assert "pip install 'triton==3.6.*'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compile_refuses_a_missing_folder_before_compiling(tmp_path, capsys):
    assert main(["compile", "--out", str(tmp_path / "no" / "compiled.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_other_files_hold_no_compiled_kernels(tmp_path):
    path = tmp_path / "bench.json"
    assert compiled.load(path) is None
    path.write_text("{}")
    assert compiled.load(path) is None
    assert results.load(path) == {}
