"""MaxText's trainer with quantized layers: ``pip install -e '.[maxtext]'``.

Eight CPU devices train tiny models on MaxText's synthetic batch, which is always the
same, so that the loss falls quickly.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from fbq_jax import Recipe, recipes
from tests.collectives import collectives

pytest.importorskip("maxtext", reason="needs the extra maxtext, and so Python 3.12")

from maxtext.layers import linears, quantizations
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils

import fbq_jax.maxtext

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code

ROOT = Path(__file__).parents[3]
RECIPE = Recipe(block=32)  # smaller than what a device has of any operand
RULES = {".*logits_dense": None, ".*": RECIPE}
STEPS, LAYERS, EMBED, MLP, BATCH, LENGTH = 4, 2, 64, 128, 8, 32
SETTINGS = {
    "run_name": "test",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "log_config": False,
    "steps": STEPS,
    "learning_rate": 0.03,
    "attention": "dot_product",
    "per_device_batch_size": 1,
    "max_target_length": LENGTH,
    "vocab_size": 128,
    "base_emb_dim": EMBED,
    "base_mlp_dim": MLP,
    "base_moe_mlp_dim": MLP,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_num_decoder_layers": LAYERS,
}
TENSOR = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}


class Run(NamedTuple):
    """What a training left behind; ``layers`` has the states of ops, by layer."""

    losses: list[float]
    layers: dict[str, dict[str, Any]]
    variables: dict[str, Any]


@pytest.fixture(autouse=True)
def _usual_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", name="run")
def make_run(tmp_path_factory):
    def run(rules=RULES, **settings):
        folder = tmp_path_factory.mktemp("run")
        settings = {"base_output_directory": folder, **settings}
        config, recorder = configure(metrics_file=folder / "metrics", **settings)
        quantized = contextlib.nullcontext()
        if rules is not None:
            quantized = fbq_jax.maxtext.quantize_models(rules)
        with quantized:
            state = train.train_loop(config, recorder)
        metrics = map(json.loads, (folder / "metrics").read_text().splitlines())
        losses = [m["learning/loss"] for m in metrics if "learning/loss" in m]
        variables = jax.tree.map(as_numpy, nnx.to_pure_dict(state))
        return Run(losses, states_of(variables), variables)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield run


def as_numpy(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def configure(**settings):
    """MaxText's configuration, from ``key=value`` arguments."""
    base = Path(linears.__file__).parents[1] / "configs" / "base.yml"
    arguments = [f"{key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    return train.initialize(["train", str(base), *arguments])


def model_maker(**settings):
    """A function that makes MaxText's model."""
    config, _ = configure(**settings)
    mesh = maxtext_utils.get_mesh_from_config(config)

    def create():
        rngs = nnx.Rngs(params=0, dropout=1)
        return model_creation_utils.create_model(config, mesh, rngs=rngs)

    return create


def quantize(rules=RULES, ignore_precision=False, **settings):
    """The report on a model of MaxText, and the states of its ops."""
    reports = []

    def create():
        model = model_maker(**settings)()
        report = fbq_jax.maxtext.quantize(
            model, rules, rngs=nnx.Rngs(0), ignore_precision=ignore_precision
        )
        reports.append(report)
        return model

    model = nnx.eval_shape(create)
    return reports[0], states_of(nnx.to_pure_dict(nnx.state(model)))


def states_of(variables):
    """Finds the states of ops in nested dictionaries, by the path of their layer."""
    found = {}

    def visit(tree, path):
        for key, value in tree.items():
            if key == "dot_general":
                found["/".join(path)] = value
            elif isinstance(value, dict):
                visit(value, (*path, str(key)))

    visit(variables.get("model", variables), ())
    return found


def assert_trained(run, reference, layers, calls=STEPS):
    """The loss falls as in float, and each op counts its calls."""
    if reference is not None:
        np.testing.assert_allclose(run.losses, reference.losses, atol=0.1)
        assert run.losses != reference.losses
    assert run.losses[-1] < run.losses[0] - 2.0
    assert len(run.layers) == layers
    for path, state in run.layers.items():
        np.testing.assert_array_equal(state["count"], calls, path)
        assert np.all(state["theta"] > 0.0), path
    seeds = np.concatenate([np.ravel(s["seed"]) for s in run.layers.values()])
    assert len(set(seeds.tolist())) == seeds.size


@pytest.fixture(scope="module")
def in_float(run):
    return run(rules=None)


@pytest.fixture(scope="module")
def quantized(run):
    return run()


def test_scanned_layers_train(in_float, quantized):
    """Each of the scanned layers has its own state."""
    assert_trained(quantized, in_float, layers=7)
    layer = quantized.layers["decoder/layers/mlp/wo"]
    assert layer["theta"].shape == layer["seed"].shape == (LAYERS,)
    assert layer["theta"][0] != layer["theta"][1]


def test_unrolled_layers_have_rules_of_their_own(run, in_float):
    settings = {"scan_layers": False, "remat_policy": "minimal"}
    rules = {"decoder/layers_0/mlp/wo": None, **RULES}
    trained = run(rules, **settings)
    assert_trained(trained, in_float, layers=2 * 7 - 1)
    assert "decoder/layers_0/mlp/wo" not in trained.layers
    assert trained.layers["decoder/layers_1/mlp/wo"]["theta"].shape == ()


@pytest.mark.parametrize("shard_mode", ["auto", "explicit"])
def test_fsdp_and_tensor_parallelism(run, in_float, shard_mode, monkeypatch):
    """Kernels and activations travel as codes."""
    programs = []

    def keep(config, step, arguments):
        del config
        programs.append(step.lower(*arguments).compile())

    monkeypatch.setattr(maxtext_utils, "maybe_dump_jaxpr", keep)
    trained = run(shard_mode=shard_mode, **TENSOR)
    assert_trained(trained, in_float, layers=7)
    gathered = [c for c in collectives(programs[0]) if c.kind == "all-gather"]
    codes = {c.size for c in gathered if c.dtype == "s8"}
    kernels = {EMBED * EMBED // 2, EMBED * MLP // 2}
    assert kernels <= codes
    assert max(codes) < BATCH * LENGTH * EMBED  # no device has the whole batch


def test_each_microbatch_moves_the_thresholds(run):
    """Of another decoder."""
    trained = run(gradient_accumulation_steps=2, decoder_block="qwen3")
    assert_trained(trained, None, layers=7, calls=2 * STEPS)


def test_a_resumed_training_continues_bit_for_bit(run, quantized, tmp_path):
    """Evaluation between the steps leaves the state as it is."""
    settings = {
        "base_output_directory": tmp_path,
        "enable_checkpointing": True,
        "async_checkpointing": False,
        "learning_rate_schedule_steps": STEPS,
    }
    run(steps=STEPS // 2, **settings)
    resumed = run(eval_interval=1, eval_steps=1, **settings)
    assert quantized.losses[0] not in resumed.losses
    assert quantized.losses[-1] in resumed.losses
    jax.tree.map(np.testing.assert_array_equal, resumed.variables, quantized.variables)


def test_experts_stay_in_float(run):
    settings = {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sparse_matmul": False,
    }
    assert_trained(run(**settings), None, layers=4)
    report, _ = quantize(**settings)
    assert {p.layer.split("/")[-2] for p in report.products} == {"self_attention"}
    floats = {p.parameter.rpartition("/")[2] for p in report.float_parameters}
    assert floats > {"wi_0", "wi_1", "wo"}


def test_the_report_names_what_rules_reached():
    report, states = quantize({".*/mlp/wo": None, "head": None, ".*": recipes.block})
    assert set(states) == {p.layer for p in report.products}
    assert report.layers["decoder/layers/mlp/wo"] == ".*/mlp/wo"
    assert report.unused_rules == ("head",)
    kernel = r"decoder/layers/mlp/wi_0/kernel +64 x 128 +\.\* +block"
    assert re.search(kernel, str(report))


@pytest.mark.parametrize("axis", [0, 1])
def test_stacks_of_stacks(axis):
    """Gemma 4 scans blocks of a global layer and five local ones, which it scans."""
    settings = {"decoder_block": "gemma4", "sliding_window_size": 8}
    _, states = quantize(base_num_decoder_layers=12, param_scan_axis=axis, **settings)
    assert {s["theta"].shape for s in states.values()} == {(2, 5), (2,)}


def test_sliced_kernels_are_quantized():
    """MaxText slices kernels of multi-head latent attention that have no ``quant``."""
    of_attention = {"attention_type": "mla", "use_sliced_mla_proj": True}
    of_attention |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
    of_attention |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1}
    of_layers = {"first_num_dense_layers": 1, "mtp_num_layers": 1}
    settings = of_attention | of_experts | of_layers
    report, _ = quantize(decoder_block="deepseek", **settings)
    layers = {layer.rpartition("/")[2] for layer in report.layers}
    assert layers >= {"wq_a", "wq_b", "wkv_a", "wkv_b"}
    assert {p.layer for p in report.products} == report.layers.keys() - {
        "decoder/logits_dense"
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 1}
            | {"per_device_batch_size": 2},
            "pipelines.* got ici_pipeline_parallelism=2 and .* must be 1",
        ),
        ({"quantization": "int8"}, "with quantization=.*int8.*: leave that empty"),
        ({"num_vocab_tiling": 2}, "num_vocab_tiling=2 .* 'decoder/logits_dense': None"),
        ({"weight_dtype": "float8_e4m3fn"}, "layer 'decoder.*' has weights in 8 bits"),
        ({"matmul_precision": "highest"}, "precision=HIGHEST cannot be met"),
    ],
)
def test_what_is_not_supported_is_refused(run, settings, message):
    with pytest.raises(ValueError, match=message):
        run({".*": RECIPE}, **settings)


def test_a_precision_can_be_ignored():
    report, _ = quantize(matmul_precision="highest", ignore_precision=True)
    assert str(report).count("precision ignored") == len(report.products)


def test_models_outside_the_context_stay_as_they_are():
    original = quantizations.maybe_quantize_model
    with (
        pytest.warns(UserWarning, match="quantized nothing: MaxText made no model"),
        fbq_jax.maxtext.quantize_models(RULES),
    ):
        assert quantizations.maybe_quantize_model is not original
    assert quantizations.maybe_quantize_model is original


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((recipes.fallback,), TypeError, "rules are a mapping"),
        (({"mlp(": recipes.fallback},), ValueError, "not a regular expression"),
        ((RULES, "tritn"), ValueError, "implementation='tritn' is not"),
        # Of another version of MaxText.
        (
            *((RULES,), RuntimeError),
            r"does not know maxtext .*quantizations\.maybe_quantize_model; it knows",
        ),
    ],
)
def test_wrong_arguments_are_errors(given, error, message, monkeypatch):
    if error is RuntimeError:
        monkeypatch.delattr(quantizations, "maybe_quantize_model")
    with pytest.raises(error, match=message):
        fbq_jax.maxtext.quantize_models(*given).__enter__()


def test_the_script_of_the_page(tmp_path):
    """The launch script of its page, as it stands there."""
    text = (ROOT / "docs/integrations/maxtext.md").read_text()
    script = re.search(r"```python\n(# train_int8\.py.*?)```", text, re.DOTALL)
    (tmp_path / "train_int8.py").write_text(script[1])
    base = Path(linears.__file__).parents[1] / "configs" / "base.yml"
    settings = {**SETTINGS, "steps": 2, "base_output_directory": tmp_path}
    command = [sys.executable, "train_int8.py", str(base)]
    result = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert re.search(r"decoder/layers/mlp/wo/kernel +128 x 64 +\S+ +fallback", output)
    assert "completed step: 1" in output


def test_the_speed_of_two_programs(tmp_path):
    settings = {**SETTINGS, "steps": 7, "model_name": "default"}
    command = [sys.executable, "-m", "examples.maxtext.speed"]
    command += ["--out", str(tmp_path / "speed.json"), "--programs", "bf16", "block"]
    command += ["--", *(f"{key}={value}" for key, value in settings.items())]
    subprocess.run(command, cwd=ROOT, check=True)
    found = json.loads((tmp_path / "speed.json").read_text())
    assert list(found) == ["bf16", "block"]
    for program in found.values():
        assert program["ms"] > 0.0
        assert len(program["losses"]) == 7
