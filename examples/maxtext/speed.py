"""``python -m examples.maxtext.speed``: MaxText's step time, quantized and not.

A Llama 3 8B of as many layers as fit trains on MaxText's synthetic data.  Each program
has a process of its own, and so the whole memory of the device.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.llama import atomic

#: What each program sets: MaxText's ``quantization``, or the recipe of all layers but
#: the head, which MaxText does not quantize either.
PROGRAMS = {
    "bf16": {"quantization": ""},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "block": {"recipe": "block"},
    "fallback": {"recipe": "fallback"},
}
SETTINGS = {
    "run_name": "speed",
    "model_name": "llama3-8b",
    "override_model_config": True,
    "base_num_decoder_layers": 12,  # what fits into 141 GB, with AdamW in float32
    "max_target_length": 4096,
    "per_device_batch_size": 2,
    "steps": 20,
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "hardware": "gpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "log_config": False,
}
_FIRST_STEPS = 5  # compile, and bring thresholds and scales into their range


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the programs and writes what it found after each.

    Programs that the file has already stay, also if they fail when measured again.
    """
    options = _parser().parse_args(arguments)
    if options.run is not None:
        print(json.dumps(_run(options.run, options.settings)))
        return
    out: Path = options.out
    found: dict[str, Any] = json.loads(out.read_bytes()) if out.exists() else {}
    has_failed = False
    for name in options.programs:
        command = [sys.executable, "-m", "examples.maxtext.speed", "--run", name]
        result = subprocess.run(
            [*command, *options.settings], stdout=subprocess.PIPE, text=True
        )
        if result.returncode:
            has_failed = True
            print(name, f"failed with status {result.returncode}", flush=True)
            continue
        found[name] = json.loads(result.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
        atomic.write(out, json.dumps(found, indent=1) + "\n")
    if has_failed:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.maxtext.speed", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("maxtext.json"))
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS)
    )
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of MaxText, such as base_num_decoder_layers=16",
    )
    return parser


def _run(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains one program in this process."""
    import jax
    import maxtext
    from maxtext.trainers.pre_train import train

    from fbq_jax.maxtext import quantize_models
    from fbq_jax.recipes import NAMED

    program = dict(PROGRAMS[name])
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if (recipe := program.pop("recipe", None)) is not None:
        context = quantize_models({".*/logits_dense": None, ".*": NAMED[recipe]})
    settings = [f"{k}={v}" for k, v in {**SETTINGS, **program}.items()]
    base = Path(maxtext.__path__[0]) / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder, context:
        metrics = Path(folder) / "metrics"
        outputs = [f"base_output_directory={folder}", f"metrics_file={metrics}"]
        arguments = ["train", str(base), *settings, *overrides, *outputs]
        config, recorder = train.initialize(arguments)
        train.train_loop(config, recorder)
        steps = [
            json.loads(line)
            for line in metrics.read_text(encoding="utf-8").splitlines()
        ]
    times = [step["perf/step_time_seconds"] for step in steps[_FIRST_STEPS:]]
    tokens = config.global_batch_size_to_train_on * config.max_target_length
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "ms": round(1e3 * statistics.median(times), 3),
        "tokens_s": round(tokens / statistics.median(times), 1),
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "losses": [step["learning/loss"] for step in steps],
        "layers": config.num_decoder_layers,
        "tokens": tokens,
        "device": jax.devices()[0].device_kind,
        "versions": {name: version(name) for name in ("jax", "flax", "maxtext")},
    }


if __name__ == "__main__":
    main()
