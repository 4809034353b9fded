"""A run on several devices and processes equals a run on one device."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

from examples.llama import checkpoint, loss, mesh, metrics, step, train
from examples.llama.build import build
from examples.llama.config import Config
from examples.llama.model import Llama
from examples.llama.train import parse_command
from fbq_jax import fallback_dot, quantize_weights_once
from fbq_jax.fp8.scaled_tensor import ScaledTensor
from tests.collectives import collectives
from tests.examples.small import small_config

SIZES = ["--hidden=256", "--ffn=256", "--layers=1", "--heads=2", "--seq=128"]
RUN = ["--batch=4", "--steps=2", "--lr=1e-4", "--eval-every=2", "--save-every=2"]
# The recipe that compiles fastest; tests/fbq_jax/sharding tests thresholds and rates.
RECIPE = ["--recipe=block", "--saved-bits=0", "--reduce=float32"]
ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start_process(index, port, argv):
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    hosts = f"--hosts=localhost:{port},2,{index}"
    return subprocess.Popen(
        [sys.executable, "-m", "examples.llama.train", hosts, *argv],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_two_processes_with_eight_devices_train_as_one_device(text, tmp_path):
    options = [*SIZES, *RUN, *RECIPE, f"--data={text}"]
    over = "--mesh=data=2,fsdp=2,tensor=2"
    port = free_port()
    processes = [
        start_process(i, port, [*options, over, f"--out={tmp_path / 'many'}"])
        for i in range(2)
    ]
    try:
        assert train.main([*options, f"--out={tmp_path / 'one'}"]) == 0
        for process in processes:
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    runs = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("one", "many")]
    for one, many in zip(*runs, strict=True):
        # The bfloat16 product of the head, by XLA, depends on its sharding.
        tolerance = 1e-6 if one["step"] == 1 else 1e-4
        assert many["loss"] == pytest.approx(one["loss"], rel=tolerance)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)

    # A checkpoint of eight devices opens on four, with other shards, and on one.
    command = parse_command(options)
    config = train.configure(command, None)
    model, optimizer = build(config)[0], step.make_optimizer(config)[0]
    like = step.init_state(model, optimizer, None, 1)
    restored = []
    for devices in ("", "fsdp=4"):
        with mesh.use(mesh.make(devices)):
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                like,
                mesh.shardings(like),
            )
            state = checkpoint.restore(tmp_path / "many" / "checkpoints", like)
        assert int(state.step) == 2
        restored.append(jax.device_get(state))
        kernel = state.opt_state[1][0].mu["layers"]["mlp"]["down"]["kernel"]
        assert len(kernel.sharding.device_set) == (4 if devices else 1)
        assert kernel.sharding.is_fully_replicated == (not devices)
    jax.tree.map(np.testing.assert_array_equal, *restored)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error")
def test_a_state_over_several_devices_is_made_without_a_warning():
    config = train.configure(parse_command([*SIZES, *RUN]), None)
    model, optimizer = build(config)[0], step.make_optimizer(config)[0]
    with mesh.use(mesh.make("data=2,fsdp=2")):
        state = step.init_state(model, optimizer, None, 0)
    kernel = state.params["layers"]["mlp"]["down"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    assert len(kernel.sharding.device_set) == 4


def test_every_matrix_is_sharded():
    def specs_of(**changes):
        model = Llama(small_config(**changes), fallback_dot)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))
        with jax.set_mesh(mesh.make("fsdp=2,tensor=4")):
            return flatten_dict(mesh.specs(shapes)["params"], sep="/")

    specs = specs_of(qkv_bias=True)
    assert specs["embed/embedding"] == P(("tensor",), ("fsdp",))
    qkv = "layers/attention/qkv/dense"
    assert specs[f"{qkv}/kernel"] == P(None, ("fsdp",), ("tensor",))
    assert specs[f"{qkv}/bias"] == P(None, ("tensor",))
    assert specs["layers/attention/out/kernel"] == P(None, ("tensor",), ("fsdp",))
    assert specs["layers/mlp/gate_up/kernel"] == P(None, ("fsdp",), None, ("tensor",))
    assert specs["layers/mlp/down/kernel"] == P(None, ("tensor",), ("fsdp",))
    assert specs["lm_head/kernel"] == P(("fsdp",), ("tensor",))
    assert specs["norm/scale"] == P(None)
    specs, experts = specs_of(num_experts=4), "layers/mlp/experts"
    assert specs[f"{experts}/gate_up/kernel"] == P(None, ("tensor",), ("fsdp",), None)
    assert specs[f"{experts}/down/kernel"] == P(None, ("tensor",), None, ("fsdp",))
    assert specs[f"{experts}/router/kernel"] == P(None, None, None)


def test_moments_are_sharded_as_their_weights():
    def moments_of(config):
        optimizer = step.make_optimizer(config)[0]
        init = step.make_initializer(Llama(small_config()), optimizer)
        with jax.set_mesh(mesh.make("fsdp=2,tensor=4")):
            state = mesh.specs(jax.eval_shape(init, jax.random.key(0), None))
        return state.params, state.opt_state[1][0]

    params, adam = moments_of(Config())
    assert adam.mu == adam.nu == params
    params, adam = moments_of(Config(moments="fp8"))
    for moments in (adam.mu, adam.nu):
        values = jax.tree.map(
            lambda x: x.values, moments, is_leaf=lambda x: isinstance(x, ScaledTensor)
        )
        assert values == params
        assert moments["lm_head"]["kernel"].scale == P()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_fsdp_gathers_codes_and_the_head(monkeypatch):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 640}
    config = small_config(num_layers=2, saved_bits=10, **sizes)
    model = Llama(config, fallback_dot)
    optimizer, schedule = step.make_optimizer(Config(moments="fp8"))
    init = step.make_initializer(model, optimizer)
    monkeypatch.setattr(loss, "_MOST_LOGITS", 128 * config.vocab_size)
    with mesh.use(mesh.make("fsdp=2")):
        shapes = jax.eval_shape(init, jax.random.key(0), None)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            *(shapes, mesh.shardings(shapes)),
        )
        tokens = mesh.distribute(np.zeros((1, 2, 129), np.int32), None, "batch", None)
        train_step = step.make_train_step(model, optimizer, schedule)
        found = collectives(train_step.lower(state, tokens).compile())
    smallest = config.hidden_size**2  # weights of a layer, and the table, have more
    gathers = [c for c in found if c.kind == "all-gather" and c.size >= smallest]
    head = config.hidden_size * config.vocab_size
    assert {c.size for c in gathers if c.dtype != "s8"} == {head}
    assert sum(c.size == head for c in gathers) <= 2  # forward and backward
    assert sum(c.dtype == "s8" for c in gathers) >= 2 * 4  # projections


def test_codes_are_sharded_as_their_weights():
    def specs_of(**changes):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "saved_bits": 10}
        config = small_config(**sizes, **changes)
        model, tokens = Llama(config, fallback_dot), jnp.zeros((1, 1), int)

        def make():
            variables = model.init(jax.random.key(0), tokens)
            return quantize_weights_once(model, variables, tokens)["fallback_codes"]

        with jax.set_mesh(mesh.make("fsdp=2,tensor=2")):
            codes = mesh.specs({"fallback_codes": jax.eval_shape(make)})
        mlp = codes["fallback_codes"]["layers"]["mlp"]
        found = mlp.get("experts", mlp)["gate_up"]["dot_general"].codes
        return found.rowwise.codes, found.colwise.codes

    fsdp, tensor = ("fsdp",), ("tensor",)
    assert specs_of() == (P(None, None, fsdp, tensor), P(None, None, tensor, fsdp))
    of_experts = P(None, tensor, fsdp, None), P(None, tensor, None, fsdp)
    assert specs_of(num_experts=4) == of_experts


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("more", [[], ["--experts=4"]], ids=str)
def test_an_optimizer_writes_codes_on_several_devices(more, text, tmp_path):
    options = [*SIZES, *RUN, "--mesh=fsdp=2,tensor=2", *more]
    runs = []
    for codes in ["--no-optimizer-codes"], ["--optimizer-codes"]:
        out = tmp_path / codes[0]
        assert train.main([*options, *codes, f"--data={text}", f"--out={out}"]) == 0
        runs.append([record["loss"] for record in metrics.read(out / "metrics.jsonl")])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh=data=2,rows=2", "mesh takes sizes for data, fsdp, tensor, .*rows=2"),
        ("--mesh=data=2,data=2", "mesh takes sizes"),
        ("--mesh=data", "mesh takes sizes"),
        ("--mesh=data=16", "needs 16 devices, got 8; .* XLA_FLAGS=.*_count=16"),
        ("--mesh=data=8", "into 8 shards, which does not divide the 4 sequences"),
        ("--hosts=here", "hosts takes host:port, .*; got 'here'"),
    ],
)
def test_impossible_meshes_are_named(argv, message, tmp_path, capsys):
    assert train.main([*SIZES, *RUN, argv, f"--out={tmp_path / 'run'}"]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_machine_in_no_cluster_is_named(monkeypatch, capsys):
    # JAX looks for no cluster once a process has used its devices, as this one has.
    def initialize():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    assert train.main(["--hosts"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: hosts takes host:port, ")
    assert "or no value on a cluster that JAX detects; got ''" in error
