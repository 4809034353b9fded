"""Exported checkpoints: the codes of training, in the shapes that engines load."""

import dataclasses
import functools
import itertools
import json
import math
import shutil
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fbq_jax
from examples.llama import generate, hf, run_folder, train
from examples.llama.build import last_state
from examples.llama.build import load as load_trained
from examples.llama.hf import files, quantized
from examples.llama.hf.config_json import to_json
from examples.llama.hf.families import FAMILIES
from examples.llama.model import Llama
from fbq_jax.export import ExportError
from tests.examples.small import small_config
from tests.fbq_jax.linen.test_freezing import as_trained
from tests.marks import rows_with_first_fast

DOT = fbq_jax.FallbackDot(fbq_jax.Recipe(block=32))
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 2,
}
EXPORT = ["--export", "blockwise_int8"]
TOKENS = jnp.zeros((1, 2), jnp.int32)


EXPERTS = {"num_experts": 4, "intermediate_size": 128}


def trained(**changes):
    model = Llama(small_config(**(SIZES | changes)), DOT)
    return model, as_trained(model, TOKENS)


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


def projections(config):
    """The sizes of the linear layers of SGLang's Llama, by name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_inputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    sizes = {f"self_attn.{name}": (size, hidden) for name, size in of_inputs.items()}
    sizes |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, mlp)}
    return sizes | dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (mlp, hidden))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"saved_bits": 10}, 32),
        # Too narrow for gate and up to take turns.
        ({"saved_bits": 10, "intermediate_size": 96}, 32),
        # Blocks of 32 hold columns of q, k and v of 16 each.
        ({"saved_bits": 10, "head_dim": 16, "tie_embeddings": True}, 16),
        # Norms and projections are not fused: up follows gate.
        ({"qkv_bias": True, "saved_bits": None}, 32),
    ],
)
def test_blockwise_int8_has_the_codes_of_training(tmp_path, changes, rows):
    model, variables = trained(**changes)
    config = model.config
    hf.export(tmp_path / "int8", "blockwise_int8", model, variables)
    stored, tensors = read(tmp_path / "int8")
    hf.save(tmp_path / "float", config, variables["params"])
    _, floats = read(tmp_path / "float")
    assert stored["quantization_config"] == {
        "quant_method": "blockwise_int8",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, 32],
    }
    assert stored["torch_dtype"] == "bfloat16"
    assert stored["tie_word_embeddings"] == config.tie_embeddings

    names = set()
    layers = itertools.product(range(config.num_layers), projections(config).items())
    for layer, (name, shape) in layers:
        weight = f"model.layers.{layer}.{name}.weight"
        codes, scales = tensors[weight], tensors[f"{weight}_scale_inv"]
        names |= {weight, f"{weight}_scale_inv"}
        assert (codes.dtype, codes.shape) == (np.int8, shape)
        # SGLang joins q, k and v, and gate and up, each in whole blocks.
        assert scales.dtype == np.float32
        assert scales.shape == (shape[0] / rows, math.ceil(shape[1] / 32))
        # The codes are those of this weight: rounded to nearest.
        every = scales.repeat(rows, 0).repeat(32, 1)
        value = floats[weight].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.all(np.abs(codes * every - value) <= 0.501 * every)
    # Every other tensor is the one of the model, in its dtype.
    assert tensors.keys() - names == floats.keys() - names
    for name in tensors.keys() - names:
        assert tensors[name].dtype == ml_dtypes.bfloat16
        expected = floats[name].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(tensors[name], expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "head_dim", "kv_heads", "rows"),
    [
        # Blocks of 128 columns hold K and V of a head of 64.
        ("llama", 64, 2, 64),
        ("llama", 128, 2, 128),
        ("phi3", 64, 1, 64),
        ("phi3", 128, 1, 128),
    ],
)
def test_blocks_of_128_lie_in_whole_heads(tmp_path, family, head_dim, kv_heads, rows):
    sizes = {"hidden_size": 256, "num_kv_heads": kv_heads, "head_dim": head_dim}
    config = small_config(**(SIZES | sizes | {"saved_bits": 10}))
    model = Llama(config, fbq_jax.fallback_dot)
    variables = as_trained(model, TOKENS)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    (tmp_path / "like").mkdir()
    stored = to_json(config, FAMILIES[family])
    (tmp_path / "like" / "config.json").write_text(json.dumps(stored))
    loaded = {}
    for name in "blockwise_int8", "compressed-tensors":
        hf.export(tmp_path / name, name, model, frozen, like=tmp_path / "like")
        loaded[name] = hf.load(tmp_path / name)[1]["layers"]
    stored, _ = read(tmp_path / "blockwise_int8")
    assert stored["model_type"] == family
    assert stored["quantization_config"]["weight_block_size"] == [rows, 128]
    # Half a step of a block is at most 1/254 of its largest weight.
    kernels = variables["params"]["layers"]
    for path in (("attention", "qkv", "dense"), ("attention", "out"), ("mlp", "down")):
        kernel = functools.reduce(dict.__getitem__, path, kernels)["kernel"]
        for layers in loaded.values():
            found = functools.reduce(dict.__getitem__, path, layers)["kernel"]
            assert np.abs(found - kernel).max() < np.abs(kernel).max() / 100


def float_params(frozen, params):
    """The parameters, with the values of the codes in place of frozen kernels."""
    flat = flax.traverse_util.flatten_dict(params)
    for path, kernel in flat.items():
        if path[0] == "layers" and path[-1] == "kernel" and "router" not in path:
            state = functools.reduce(dict.__getitem__, path[:-1], frozen["fallback"])
            values = [x.mT.dequantize() for x in unstack(state["dot_general"])]
            flat[path] = jnp.stack(values).reshape(kernel.shape)
    return flax.traverse_util.unflatten_dict(flat)


def unstack(state):
    codes = state["weight"].codes
    layers = len(codes.main.codes)
    return [jax.tree.map(lambda x, i=i: x[i], codes) for i in range(layers)]


EVERY_MLP = [{}, EXPERTS, EXPERTS | {"qk_norm": True}]


@pytest.mark.parametrize(
    ("name", "dtype", "experts"),
    rows_with_first_fast(
        itertools.chain(
            [("blockwise_int8", jnp.float32, experts) for experts in EVERY_MLP],
            [("compressed-tensors", jnp.bfloat16, experts) for experts in EVERY_MLP],
        )
    ),
)
def test_an_export_is_loaded_to_train_on(tmp_path, name, dtype, experts):
    """It has the codes and scales of freeze."""
    model, variables = trained(dtype=dtype, saved_bits=None, **experts)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    hf.export(tmp_path / "int8", name, model, frozen)
    assert hf.quantization(tmp_path / "int8") == name
    config, params = hf.load(tmp_path / "int8")
    assert config == dataclasses.replace(model.config, dtype=config.dtype)
    expected = float_params(frozen, variables["params"])
    # Scales of compressed-tensors and other parameters are in the model's dtype.
    rounding = {"rtol": 0 if dtype == jnp.float32 else 2**-8}
    close = functools.partial(np.testing.assert_allclose, **rounding)
    jax.tree.map(close, params, expected)
    # Quantized again, they have the same codes. Two roundings to bfloat16 move few.
    again = {"params": jax.tree.map(jnp.asarray, params)}
    again |= {"fallback": variables["fallback"]}
    hf.export(tmp_path / "again", name, model, again, like=tmp_path / "int8")
    first, second = (read(tmp_path / folder)[1] for folder in ("int8", "again"))
    for tensor, codes in first.items():
        if np.issubdtype(codes.dtype, np.integer):
            moved = np.mean(second[tensor] != codes)
            assert moved <= (0 if dtype == jnp.float32 else 0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "block", "names"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_engines_find_the_experts_and_the_router(tmp_path, family, block, names):
    changes = EXPERTS | {"qk_norm": family == "qwen3_moe", "saved_bits": 10}
    model, variables = trained(**changes)
    for name in "blockwise_int8", "compressed-tensors":
        hf.export(tmp_path / name, name, model, variables)
    stored, tensors = read(tmp_path / "blockwise_int8")
    assert stored["model_type"] == family
    module, shapes = f"model.layers.1.{block}", [(128, 64), (128, 64), (64, 128)]
    for expert in range(4):
        for name, shape in zip(names, shapes, strict=True):
            codes = tensors[f"{module}.experts.{expert}.{name}.weight"]
            assert (codes.dtype, codes.shape) == (np.int8, shape)
    # The router stays in the model's dtype, and engines must know.
    router = tensors[f"{module}.gate.weight"]
    assert (router.dtype, router.shape) == (ml_dtypes.bfloat16, (4, 64))
    entry = read(tmp_path / "compressed-tensors")[0]["quantization_config"]
    assert entry["ignore"][0] == "lm_head"
    assert entry["ignore"][2:] == [f"{module}.gate"]


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("blockwise_int8", "_scale_inv", lambda x: x[:, :1], "takes scales .*, got"),
        ("blockwise_int8", "", lambda x: x.astype("f4"), "is F32, supported are I8"),
        ("compressed-tensors", "_packed", lambda x: x[:, :1], "takes codes .*, got"),
        ("compressed-tensors", "_scale", None, "lacks .*_scale"),
    ],
)
def test_damaged_exports_are_named(tmp_path, name, part, change, message):
    weight = fbq_jax.export.BlockWeight(
        np.ones((32, 64), np.int8), np.ones((32, 2), "f4"), 32
    )
    module = "model.layers.0.self_attn.o_proj.weight"
    tensors, quantization = fbq_jax.export.FORMATS[name](
        {module: weight}, np.dtype(ml_dtypes.bfloat16)
    )
    damaged = tensors.pop(f"{module}{part}")
    if change is not None:
        tensors[f"{module}{part}"] = np.ascontiguousarray(change(damaged))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    scheme = quantized.scheme_of({"quantization_config": quantization}, file)
    assert scheme is not None
    found = files.open_tensors(tmp_path)
    assert list(scheme.find(found)) == [module]
    with pytest.raises(hf.CheckpointError, match=message):
        scheme.read(found, module)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "blockwise_int8", "weight_block_size": [128]},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "fp8"},
        "int8",
    ],
)
def test_other_quantizations_are_named(entry):
    with pytest.raises(hf.CheckpointError, match="supported are the entries that"):
        quantized.scheme_of({"quantization_config": entry}, Path("config.json"))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("experts", EVERY_MLP)
def test_transformers_computes_with_the_codes_of_compressed_tensors(tmp_path, experts):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    transformers = pytest.importorskip("transformers", reason="compares with it")
    pytest.importorskip("compressed_tensors", reason="reads the format")
    # Not fused: the columns of gate_up are gate, then up.
    model, variables = trained(dtype=jnp.float32, saved_bits=None, **experts)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    hf.export(tmp_path / "packed", "compressed-tensors", model, frozen)
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    tokens = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = reread.eval()(torch.from_numpy(tokens)).logits.numpy()
    params = float_params(frozen, variables["params"])
    unquantized = Llama(model.config)
    expected = jax.jit(unquantized.apply)({"params": params}, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    # A frozen model also quantizes activations.
    served = jax.jit(model.apply)(frozen, jnp.asarray(tokens))
    assert np.linalg.norm(served - logits) < 0.1 * np.linalg.norm(logits)


@pytest.mark.exhaustive
def test_a_frozen_gemma_is_exported(tmp_path):
    model, variables = trained(
        saved_bits=10,
        activation="gelu_tanh",
        unit_offset_norms=True,
        post_norms=True,
        embed_scale=8.0,
        query_pre_attn_scalar=32,
        sliding_window=1,
        sliding_layers=(0,),
    )
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    expected = model.apply(variables, TOKENS, mutable=["fallback"])[0]
    np.testing.assert_array_equal(model.apply(frozen, TOKENS), expected)
    hf.export(tmp_path / "int8", "blockwise_int8", model, frozen)
    stored, tensors = read(tmp_path / "int8")
    assert stored["model_type"] == "gemma2"
    assert "model.layers.1.post_feedforward_layernorm.weight" in tensors


@pytest.mark.exhaustive
def test_an_export_has_shards_and_the_files_of_generation(tmp_path, monkeypatch):
    model, variables = trained(saved_bits=10)
    hf.save(tmp_path / "source", model.config, variables["params"])
    (tmp_path / "source" / "tokenizer_config.json").write_text("{}")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["eos_token_id"] = 7
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(files, "_SHARD_BYTES", 40_000)
    out, source = tmp_path / "int8", tmp_path / "source"
    hf.export(out, "blockwise_int8", model, variables, like=source)
    stored, tensors = read(out)
    assert stored["eos_token_id"] == 7
    assert (out / "tokenizer_config.json").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(out / file, "numpy") as opened:
            assert name in opened.keys()  # noqa: SIM118 (it is no dict)
    # Models that are not quantized have shards, too, and load from them.
    hf.save(tmp_path / "float", model.config, variables["params"])
    assert (tmp_path / "float" / "model.safetensors.index.json").exists()
    assert hf.load(tmp_path / "float")[0].num_layers == 2


@pytest.mark.parametrize(
    ("changes", "dot_general", "message"),
    rows_with_first_fast(
        [
            ({}, None, "takes a model with an INT8 recipe"),
            ({"hidden_size": 80}, DOT, "inputs are multiples of 32; .* has 80"),
            ({"head_dim": 8}, DOT, "at least 16 outputs; .*_proj.weight cannot be"),
            (
                EXPERTS | {"intermediate_size": 80},
                DOT,
                r"inputs are multiples of 32; .*experts.0.w2.weight has 80",
            ),
            (
                {},
                fbq_jax.FallbackDot(fbq_jax.recipes.rowwise),
                "no scales per block: train with a recipe",
            ),
        ]
    ),
)
def test_what_cannot_be_exported_is_named_before_anything_is_written(
    tmp_path, changes, dot_general, message
):
    model = Llama(small_config(**(SIZES | {"saved_bits": 10} | changes)), dot_general)
    with pytest.raises(ExportError, match=message):
        hf.export(tmp_path / "out", "blockwise_int8", model, {"params": {}})
    assert list(tmp_path.iterdir()) == []


def test_what_keeps_a_model_from_being_exported_is_named(tmp_path):
    model = Llama(small_config(**SIZES), DOT)
    with pytest.raises(ExportError, match=r"export takes one of .*, gguf, hf, got"):
        hf.check_exportable("onnx", model)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="takes a new folder"):
        hf.export(tmp_path, "blockwise_int8", model, {})
    other = Llama(dataclasses.replace(model.config, post_norms=True), DOT)
    with pytest.raises(hf.CheckpointError, match="none of the families has all"):
        hf.check_exportable("blockwise_int8", other)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_train_exports_at_the_end_and_of_a_run_that_has_ended(tmp_path, text, capsys):
    run = tmp_path / "run"
    sizes = "--hidden 64 --ffn 128 --layers 1 --heads 2 --kv-heads 1 --seq 32 --batch 2"
    argv = f"--recipe block --data {text} --out {run} --steps 2 {sizes}".split()
    assert train.main([*argv[2:], "--compare=bf16,block", *EXPORT]) == 1
    assert train.main([*argv[2:], "--recipe=bf16", *EXPORT]) == 1
    # A hidden width of 64 is half a block.
    assert train.main([*argv, *EXPORT]) == 1
    errors = capsys.readouterr().err
    assert "--export takes one run" in errors
    assert "takes a model with an INT8 recipe" in errors
    assert "inputs are multiples of 128" in errors
    assert not run.exists()

    argv += ["--hidden=128"]
    with jax.numpy_dtype_promotion("standard"):
        assert train.main([*argv, *EXPORT]) == 0
        stored, tensors = read(run / "blockwise_int8")
        assert stored["quantization_config"]["weight_block_size"] == [64, 128]
        # It reads text, which for this run is bytes.
        codec = load_trained(run / "blockwise_int8").codec
        assert codec.encode("né") == list("né".encode())
        assert codec.stops == {0}
        (run / "blockwise_int8").rename(tmp_path / "first")
        assert train.main([*argv, "--resume", *EXPORT]) == 0
        again = read(run / "blockwise_int8")
        assert again[0] == stored
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, again[1][name])
        assert train.main([*argv, "--resume", *EXPORT]) == 0
    assert "exists and stays as it is" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("more", [[], ["--experts=4"]])
def test_a_run_from_scratch_leaves_a_folder_of_transformers(
    tmp_path, text, capsys, more
):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    transformers = pytest.importorskip("transformers", reason="compares with it")
    run = tmp_path / "run"
    sizes = "--hidden 32 --ffn 64 --layers 2 --heads 2 --kv-heads 1 --seq 16 --batch 2"
    argv = f"--data {text} --out {run} --steps 2 {sizes} --export hf".split()
    assert train.main([*argv, *more]) == 0
    assert f"exported: {run / 'hf'}" in capsys.readouterr().out
    config, params = hf.load(run / "hf")
    state = last_state(run_folder.read_config(run), run)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    tokens = np.frombuffer(text.read_bytes(), np.uint8)[:24].astype(np.int32)[None]
    model = Llama(dataclasses.replace(config, dtype=jnp.float32))
    expected = jax.jit(model.apply)({"params": params}, tokens[:, :16])
    reread = transformers.AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    with torch.no_grad():
        logits = reread(torch.from_numpy(tokens[:, :16].astype(np.int64))).logits
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    assert tokenizer.encode("né\n") == list("né\n".encode())
    asked = ["--prompt=1 and ", "--tokens=4", "--temperature=0"]
    assert generate.main([str(run / "hf"), *asked]) == 0
    assert capsys.readouterr().out.startswith("1 and ")
    # A run that has ended keeps it; one that has not is refused before it trains.
    assert train.main([f"--out={run}", "--resume", "--export=hf"]) == 0
    assert "hf exists and stays as it is" in capsys.readouterr().out
    for checkpoint in (run / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    (run / "metrics.jsonl").unlink()
    assert train.main([f"--out={run}", "--resume", "--export=hf"]) == 1
    assert "hf exists, and the run will write its model" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--export=gguf --recipe=bf16", "gguf stores INT8 codes: export takes a model"),
        ("--export=gguf --recipe=rowwise", "has no scales per block: train with a"),
        ("--export=hf --experts=4 --top-k=1", "none of the families has all settings"),
        ("--export=hf", "run/hf exists, and the run will write its model there"),
    ],
)
def test_a_run_that_could_not_export_does_not_start(
    tmp_path, text, capsys, argv, message
):
    run = tmp_path / "run"
    (run / "hf").mkdir(parents=True)
    sizes = "--hidden 32 --ffn 64 --layers 1 --heads 2 --kv-heads 1 --seq 16"
    assert train.main([*argv.split(), *sizes.split(), f"--data={text}", f"--out={run}"])
    assert message in capsys.readouterr().err
    assert list(run.iterdir()) == [run / "hf"]
