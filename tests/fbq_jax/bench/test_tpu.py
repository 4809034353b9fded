"""Layers compiled for TPUs, and the estimates from them."""

import importlib.util
import json

import jax
import jax.numpy as jnp

from fbq_jax.bench import tpu
from fbq_jax.bench.__main__ import main
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.tpu import gemm, quantize, quantize_vectors

DUMP = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.vmem [shape: s32[1]] }
   0x1   :  { %17 = sst [smem:[#allocation65_spill]] %s1 }
   0x2 LB: > { %s2 = sphi %s1, %s3 }
   0x3   : >> { %v1 = vld [vmem:[%s1]] }
   0x4   : >> { %v2 = vld [vmem:[%s1]] } /* End region 1 */
   0x5 PF: > { %s3 = smov.u32 0 }
"""
HLO = (
    "  %fbq_matmul.3 = bf16[1,8192,4096]{2,1,0:T(8,128)} custom-call(%a.1, %b, %c), x\n"
    "  %fbq_find_amax.1 = (f32[1,1,8]{3,2}, f32[1,1,4]{2,1}) custom-call(%x), y\n"
)


def test_cycles_are_bundles_times_iterations(tmp_path):
    (tmp_path / "17-fbq_matmul.3-72-final_bundles.txt").write_text(DUMP)
    (tmp_path / "17-fbq_matmul.3-70-schedule-analysis_final_bundles.txt").write_text("")
    call = tpu.Call("fbq_matmul", 3, (1, 8192, 4096), (10, 200))
    calls = {"fbq_matmul.3": call, "fbq_matmul.5": call}  # compiled once
    expected = dict.fromkeys(calls, 2 + 2 * 10 + 2 * 200)
    assert tpu._cycles_of_kernels(tmp_path, calls) == expected


def test_kernels_are_found_by_name_operands_and_output():
    matmul = tpu.Call("fbq_matmul", 3, (1, 8192, 4096), (1,))
    others = [
        tpu.Call("fbq_matmul", 4, (1, 8192, 4096), (2,)),
        tpu.Call("fbq_matmul", 3, (1, 4096, 4096), (3,)),
    ]
    amax = tpu.Call("fbq_find_amax", 1, (1, 1, 8), (4,))
    found = dict(tpu._compiled_calls(HLO, [*others, amax, matmul]))
    assert found == {"fbq_matmul.3": matmul, "fbq_find_amax.1": amax}


def test_calls_are_recorded_with_their_iterations():
    calls = []
    codes = Quantized(
        jax.ShapeDtypeStruct((1, 2048, 1024), jnp.int8),
        jax.ShapeDtypeStruct((1, 16, 8), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((1, 2048, 1024), jnp.bfloat16)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    modes = {"rowwise": "nearest", "colwise": "nearest"}
    with tpu._recorded(calls):
        jax.eval_shape(
            lambda x, r, w: gemm.matmul(
                x, r, w, block_shape=(128, 128, 128), dtype=jnp.bfloat16
            ),
            *(codes, codes, codes),
        )
        jax.eval_shape(
            lambda x, s: quantize.quantize(x, s, block=(128, 128), **modes), x, seeds
        )
        jax.eval_shape(
            lambda x, s: quantize_vectors.quantize_vectors(x, s, **modes), x, seeds
        )
    # Of 8 blocks of K, 1.6 fall back: 10 steps in 3 groups.
    assert [(call.name, call.iterations) for call in calls] == [
        ("fbq_matmul", (2, 16, 48)),
        ("fbq_quantize", (16, 16 * 8)),
        ("fbq_find_amax", (8, 8 * 8)),
        ("fbq_quantize_vectors", (8, 8 * 8)),
    ]


def test_the_tables_compare_with_bf16_and_list_collectives(tmp_path, capsys):
    rows = [
        {"what": "bf16", "xla_cycles": 2000, "kernel_cycles": {}},
        {"what": "block", "xla_cycles": 500, "kernel_cycles": {"fbq_matmul.1": 1100.0}},
    ]
    sent = [
        {"kind": "all-gather", "dtype": "s8", "bytes": 2**24, "count": 2},
        {"kind": "all-gather", "dtype": "f32", "bytes": 2**17, "count": 4},
    ]
    common = {"generation": "v5e", "shape": [8, 4, 4]}
    content = {
        "date": "2026-01-01",
        "versions": {"jax": "1"},
        "tpu_layers": [common | row for row in rows],
        "tpu_meshes": [
            common | {"mesh": {"fsdp": 4}, "what": "block", "collectives": sent}
        ],
    }
    path = tmp_path / "tpu.json"
    path.write_text(json.dumps(content))
    assert main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| v5e | block | 8, 4, 4 | 500 | 1.1e+03 | 0.80 |" in out
    assert "Estimate, not a measurement" in out
    assert "| v5e | fsdp=4 | block | 2 x all-gather s8 16 | 0.5 |" in out


def test_without_libtpu_the_error_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["compile-tpu", "--out", str(tmp_path / "tpu.json")]) == 2
    assert "pip install libtpu" in capsys.readouterr().err
