"""Programs for several TPUs, whose compiler cannot call Python; lowered on a CPU."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import dot_general, recipes
from fbq_jax.sharding import layer_names, partitioning
from tests.collectives import collectives
from tests.fbq_jax.core.test_dot_general import MATMUL, product
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

pytestmark = needs_devices
SPECS = P(("data", "fsdp")), P("fsdp"), P(("data", "fsdp"))
OPERANDS = heavy((1024, 512)), heavy((512, 256), 1), heavy((1024, 256), 2)
IN_BLOCKS = ["fallback", "block", "fallback_rowwise_bwd", "row_block", "row_block_lhs"]
IN_XLA = ["rowwise", "per_tensor", "switchback", "switchback_m", "switchback_q"]


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses kernels as on a TPU."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(layer_names, "_warned", {})
    yield
    jax.clear_caches()


def step(recipe):
    return functools.partial(product, recipe=recipe, theta=2.0, key=jax.random.key(0))


def rowwise_with(reduce):
    """``rowwise`` with such sums of dW."""
    drhs = dataclasses.replace(recipes.rowwise.drhs, reduce=reduce)
    return dataclasses.replace(recipes.rowwise, drhs=drhs)


def lowered(function, *specs):
    """The text of a program for eight TPUs, or for one without specs."""
    mesh = mesh_of(data=2, fsdp=4)
    shardings = [NamedSharding(mesh, spec) for spec in specs] or [None] * len(OPERANDS)
    arguments = [
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding)
        for x, sharding in zip(OPERANDS, shardings, strict=True)
    ]
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("name", with_first_fast(IN_XLA))
def test_xla_partitions_recipes_without_blocks(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = lowered(step(recipes.NAMED[name]), *SPECS)
    assert "CustomSPMDPartitioning" not in text
    assert "tpu_custom_call" not in text
    (warning,) = caught
    assert "quantize runs as jax.numpy code" in str(warning.message)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.filterwarnings("ignore:quantize.* runs? as jax.numpy code")
@pytest.mark.parametrize("name", with_first_fast(IN_BLOCKS))
def test_kernels_of_blocks_are_an_error_that_says_what_to_do(name):
    match = r"TPUs cannot partition the kernels .* jax.shard_map, or use recipes.roww"
    with pytest.raises(NotImplementedError, match=match):
        lowered(step(recipes.NAMED[name]), *SPECS)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.filterwarnings("ignore:quantize runs as jax.numpy code")
def test_only_sums_in_int32_are_left_to_xla():
    with pytest.raises(NotImplementedError, match=r"^matmul: .* nor Gemm.reduce"):
        lowered(step(rowwise_with("float32")), *SPECS)
    lowered(step(rowwise_with("int32")), *SPECS)


@pytest.mark.usefixtures("on_tpu")
def test_one_tpu_runs_kernels():
    assert "tpu_custom_call" in lowered(step(recipes.rowwise))


@pytest.mark.usefixtures("on_tpu")
def test_kernels_run_in_shard_map():
    """Lowering those of blocks needs a TPU's compiler: tests/kernels/tpu has them."""

    def layer(x, w, _):
        return dot_general(x, w, MATMUL, recipe=recipes.rowwise)[0]

    mapped = jax.shard_map(
        layer,
        mesh=mesh_of(data=8),
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    assert "tpu_custom_call" in lowered(mapped)


class LeftToXla:
    """Takes the place of ``custom_partitioning``, as in a program for TPUs."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *operands):
        return self.function(*operands)

    def def_partition(self, *_, **__):
        pass


@pytest.mark.parametrize("reduce", with_first_fast(["int32", None]))
def test_what_xla_partitions_has_the_bits_of_one_device_and_exchanges_codes(
    reduce, monkeypatch
):
    """XLA sums codes in int32, asked for or not."""
    # No other test has traced ops of these shapes.
    operands = heavy((1040, 520)), heavy((520, 264), 1), heavy((1040, 264), 2)
    mesh = mesh_of(data=2, fsdp=4)
    arguments = [place(mesh, x, *s) for x, s in zip(operands, SPECS, strict=True)]
    x, w, dy = (argument.sharding for argument in arguments)
    monkeypatch.setattr(partitioning, "custom_partitioning", LeftToXla)
    recipe = rowwise_with(reduce)
    run = jax.jit(step(recipe), out_shardings=(dy, x, w))
    run = run.lower(*arguments).compile()
    want = step(recipe)(*operands)
    jax.tree.map(np.testing.assert_array_equal, run(*arguments), want)
    codes = [found.size for found in collectives(run) if found.dtype == "s8"]
    assert codes == [520 * 264] * 2
