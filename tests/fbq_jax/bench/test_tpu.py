"""Layers compiled for TPUs, and the estimates from them."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.bench import tpu_cycles
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
KERNEL = (
    "  %fbq_matmul.3 = bf16[2,8192,4096]{2,1,0:T(8,128)} custom-call(%a.1, %b, %c), "
    'custom_call_target="tpu_custom_call", x\n'
)
HLO = f"""HloModule jit_step

%fused (p: f32[8]) -> f32[8] {{
  ROOT %add = f32[8] add(%p, %p)
}}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x = f32[8] fusion(%p), backend_config={{"estimated_cycles":"100"}}
{KERNEL}}}

%condition (t: (s32[], f32[8])) -> pred[] {{
  %last = s32[]{{:T(128)}} constant(7), metadata={{}}
  ROOT %less = pred[] compare(%i, %last), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %y = f32[8] sort(%p), backend_config={{"estimated_cycles":"9223372036854775807"}}
  %z = f32[8] fusion(%p), backend_config={{"estimated_cycles":"30"}}
  %loop = (s32[], f32[8]) while(%tuple), condition=%condition, body=%body, x
}}
"""
MATMUL = tpu_cycles.Issued("fbq_matmul", 3, (1, 8192, 4096), 1000)


def test_bundles_count_once_an_iteration():
    assert tpu_cycles.count_bundles(DUMP, (10, 200)) == 2 + 2 * 10 + 2 * 200


def test_loops_count_as_often_as_they_run():
    issued = [
        MATMUL._replace(operands=4, bundles=1),
        MATMUL._replace(out=(1, 4096, 4096), bundles=1),
        MATMUL,
    ]
    # The leading axis of the output is that of jax.vmap.
    issued = [x._replace(out=x.out[1:]) for x in issued]
    cycles = tpu_cycles.add_up(HLO, issued, cores=2)
    in_kernel = 7 * 2 * 1000 / 2
    assert cycles == (30 + 7 * 100, {"fbq_matmul.3": in_kernel}, 700 + in_kernel)


def test_what_is_not_understood_is_an_error():
    with pytest.raises(RuntimeError, match="not traced: fbq_matmul"):
        tpu_cycles.add_up(HLO, [], cores=1)
    called = HLO.replace(" while(", " call(")
    with pytest.raises(RuntimeError, match="how often body runs"):
        tpu_cycles.add_up(called, [MATMUL], cores=1)


def test_calls_are_recorded_with_their_iterations():
    calls = []
    codes = Quantized(
        jax.ShapeDtypeStruct((1, 2048, 1024), jnp.int8),
        jax.ShapeDtypeStruct((1, 16, 8), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((1, 2048, 1024), jnp.bfloat16)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    modes = {"rowwise": "nearest", "colwise": "nearest"}
    with tpu_cycles._recorded(calls):
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
    steps = [
        common | row | {"loop_cycles": cycles}
        for row, cycles in zip(rows, (1000, 900), strict=True)
    ]
    content = {
        "date": "2026-01-01",
        "versions": {"jax": "1"},
        "tpu_layers": [common | row for row in rows],
        "tpu_steps": steps,
        "tpu_meshes": [
            common | {"mesh": {"fsdp": 4}, "what": "block", "collectives": sent}
        ],
    }
    path = tmp_path / "tpu.json"
    path.write_text(json.dumps(content))
    assert main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| v5e | block | 8, 4, 4 | 500 | 1.1e+03 | 0.80 |" in out
    assert "| v5e | block | 8, 4, 4 | 500 | 1.1e+03 | 0.80 | 0.90 |" in out
    assert "Estimate, not a measurement" in out
    assert "| v5e | fsdp=4 | block | 2 x all-gather s8 16 | 0.5 |" in out


def test_without_libtpu_the_error_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["compile-tpu", "--out", str(tmp_path / "tpu.json")]) == 2
    assert "pip install libtpu" in capsys.readouterr().err
