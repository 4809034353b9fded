"""Mixtures of experts in the Llama: their losses, metrics, meshes and runs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.llama import flops, generate, hf, mesh, step, train
from examples.llama.build import build
from examples.llama.config import Config
from examples.llama.model import Llama
from fbq_jax import FallbackDot, Recipe
from tests.examples.small import random_params, small_config
from tests.examples.test_train import records_of, stop_after

pytestmark = pytest.mark.usefixtures("standard_promotion")

EXPERTS = {"num_experts": 5, "top_k": 2}
DOT = FallbackDot(Recipe(block=32))


def test_the_loss_is_the_cross_entropy_and_the_losses_of_routers():
    config = small_config(dtype=jnp.float32, router_aux_loss_coef=0.03, **EXPERTS)
    model = Llama(config)
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, config.vocab_size)
    params = random_params(config)
    compute = jax.jit(functools.partial(step._loss, model))
    loss, (_, found) = compute({"params": params}, {}, tokens)
    expected = step._val_loss(model, {"params": params}, tokens)
    assert float(found["loss"]) == pytest.approx(float(expected), rel=1e-6)
    added = 0.03 * 2 * found["load_balance"] + 0.001 * found["router_z"]
    assert float(loss - found["loss"]) == pytest.approx(float(added), rel=1e-3)
    # The probabilities of a random router are nearly equal.
    assert 0.9 < found["load_balance"] < 1.5
    assert found["router_z"] == pytest.approx(np.log(5) ** 2, rel=0.5)
    assert found["expert_load"].shape == (3, 5)
    np.testing.assert_array_equal(
        found["expert_load"].sum(axis=1), np.full(3, 4 * 8 * 2)
    )
    assert found["expert_rates"] == {}


def test_a_step_measures_the_load_and_the_rates_of_experts():
    model = Llama(small_config(**EXPERTS, remat="codes", saved_bits=10), DOT)
    optimizer = optax.sgd(1.0)
    train_step = step.make_train_step(model, optimizer, lambda _: jnp.float32(1.0))
    state = jax.eval_shape(
        step.make_initializer(model, optimizer), jax.random.key(0), None
    )
    tokens = jax.ShapeDtypeStruct((2, 2, 9), jnp.int32)
    new, measured = jax.eval_shape(train_step, state, tokens)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert set(new.fallback["layers"]["mlp"]["experts"]) == {"gate_up", "down"}
    for name in "loss", "load_balance", "router_z":
        assert measured[name].shape == ()
    load = measured["expert_load"]
    assert (load.shape, load.dtype) == ((3, 5), jnp.int32)
    with_rates = {n for n, layer in measured["fallback"].items() if len(layer) == 3}
    assert with_rates == {"layers/mlp/experts/gate_up", "layers/mlp/experts/down"}
    for name in with_rates:
        assert measured["fallback"][name]["expert_rates"].shape == (3, 5)


def test_experts_of_a_token_have_the_width_of_the_mlp(text):
    sizes = {"hidden": 16, "ffn": 48, "layers": 2, "heads": 2, "seq": 16}
    wanted = Config(**sizes, data=str(text), experts=5)
    assert wanted.top_k == 2
    config = build(wanted)[0].config
    found = config.num_experts, config.top_k, config.intermediate_size
    assert found == (5, 2, 24)
    assert config.renormalize
    one = build(dataclasses.replace(wanted, top_k=1))[0].config
    assert (one.intermediate_size, one.renormalize) == (48, False)
    dense = build(Config(**sizes, data=str(text)))[0].config
    router = 6 * config.num_layers * config.hidden_size * 5
    for seq_len in 0, 10:
        extra = flops.per_token(config, seq_len) - flops.per_token(dense, seq_len)
        assert extra == router


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ["data=4", "data=2,fsdp=2", "fsdp=2,tensor=2"])
def test_several_devices_train_as_one(axes):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config = small_config(dtype=jnp.float32, num_experts=4, **sizes)
    optimizer = optax.adam(1e-3)
    tokens = jax.random.randint(jax.random.key(0), (2, 4, 33), 0, config.vocab_size)
    runs = []
    for over in "", axes:
        model = Llama(config, FallbackDot(Recipe(block=32, criterion=None)))
        step.make_train_step.cache_clear()
        step.make_initializer.cache_clear()
        train_step = step.make_train_step(model, optimizer, lambda _: jnp.float32(1))
        with mesh.use(mesh.make(over)):
            state = step.init_state(model, optimizer, None, 0)
            losses = []
            for _ in range(3):
                batch = mesh.distribute(np.asarray(tokens), None, "batch", None)
                state, measured = train_step(state, batch)
                losses.append(float(measured["loss"]))
            load = np.asarray(measured["expert_load"])
            kernel = state.params["layers"]["mlp"]["experts"]["down"]["kernel"]
        assert kernel.sharding.is_fully_replicated == ("fsdp" not in over)
        runs.append((losses, load))
    (one, one_load), (many, many_load) = runs
    np.testing.assert_allclose(many, one, rtol=1e-4)
    assert many_load.sum() == one_load.sum() == 3 * 2 * 4 * 32 * 2
    assert np.abs(many_load - one_load).max() <= 4  # ties of nearly equal scores


@pytest.mark.exhaustive
def test_a_run_resumes_bit_for_bit_and_its_model_is_used(
    text, tmp_path, monkeypatch, capsys
):
    argv = (
        "--experts=4 --top-k=2 --hidden=128 --ffn=256 --layers=2 --heads=2 "
        "--kv-heads=1 --seq=32 --batch=4 --accumulate=2 --remat=codes --unroll "
        f"--steps=5 --eval-every=2 --save-every=2 --data={text}"
    ).split()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    export = "--export=compressed-tensors"
    assert train.main([*argv, f"--out={whole}", export]) == 0
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert train.main([*argv, f"--out={cut}"]) == 130
    assert train.main([f"--out={cut}", "--resume"]) == 0
    assert records_of(cut) == records_of(whole)
    for record in records_of(whole):
        assert np.shape(record["expert_load"]) == (2, 4)
        assert np.sum(record["expert_load"]) == 2 * 4 * 32 * 2
        down = record["fallback"]["layers/mlp/experts/down"]
        assert np.shape(down["expert_rates"]) == (2, 4)
    assert (whole / "curves.png").exists()
    stored = json.loads((whole / "config.json").read_text())
    assert (stored["experts"], stored["top_k"]) == (4, 2)

    config, _ = hf.load(whole / "compressed-tensors")
    found = config.num_experts, config.top_k, config.intermediate_size
    assert found == (4, 2, 128)
    for weights in "codes", "floats":
        capsys.readouterr()
        asked = ["--prompt=and ", "--tokens=4", f"--weights={weights}"]
        assert generate.main([str(whole), *asked]) == 0
        assert capsys.readouterr().out.startswith("and ")


@pytest.mark.exhaustive
def test_a_mixture_of_hugging_face_is_tuned(text, tmp_path):
    sizes = small_config(
        vocab_size=256, max_seq_len=16, **EXPERTS, router_aux_loss_coef=0.02
    )
    hf.save(tmp_path / "hf", sizes, random_params(sizes))
    ids = tmp_path / "ids.bin"
    np.frombuffer(text.read_bytes() + b"\xff", np.uint8).astype(np.uint16).tofile(ids)
    argv = [f"--data={ids}", f"--from-hf={tmp_path / 'hf'}", "--seq=16", "--batch=4"]
    argv += ["--steps=2", "--recipe=block", f"--out={tmp_path / 'run'}"]
    assert train.main(argv) == 0
    saved, trained = hf.load(tmp_path / "run" / "hf")
    assert saved == sizes
    stored = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert stored["model_type"] == "mixtral"
    before = hf.load(tmp_path / "hf")[1]["layers"]["mlp"]["experts"]
    after = trained["layers"]["mlp"]["experts"]
    for path in "gate_up", "down", "router":
        assert np.any(after[path]["kernel"] != before[path]["kernel"])
