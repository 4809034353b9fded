"""Speed and memory of a short pretraining by recipe, each in a process of its own.

    python -m experiments.bench.pretraining --out FILE

The model and its batches are those of the runs with several seeds, whose speeds are
from the versions that trained them.  The tokens are random.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama.config import Config
from experiments import result_files, runs
from experiments.settings import SEEDS

RECIPES = tuple(dict.fromkeys(recipe for recipe, _ in SEEDS.parity))
PACKED = 10  # bits that norms and gates save of a value, by default not in bf16
VARIANTS: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    f"bf16, {PACKED} bits": {"recipe": "bf16", "saved_bits": PACKED},
}
_STEPS = {"steps": 80, "log_every": 16, "eval_every": 80}
_KEPT = "options", "machine", "steps", "tokens_per_s", "peak_bytes"


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Trains a variant and returns its figures."""
    rng = np.random.default_rng(0)
    data = folder / "data"
    data.mkdir()
    for part, count in (("train", 1 << 22), ("val", 1 << 18)):
        tokens = rng.integers(SEEDS.vocab_size, size=count, dtype=np.uint16)
        tokens.tofile(data / f"{part}.bin")
    options = SEEDS.pretrain | _STEPS | VARIANTS[name]
    result = runs.figures(Config(data=str(data), **options))
    return {"what": name} | {key: result[key] for key in _KEPT}


def rows() -> Iterator[dict[str, Any]]:
    """The figures of each variant."""
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", __spec__.name, "--one", name, folder]
            subprocess.run(command, check=True)
            yield json.loads(Path(folder, "figures").read_bytes())


def main() -> None:
    """Measures all, or in a process of its own, one."""
    parser = argparse.ArgumentParser(prog="experiments.bench.pretraining")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "FOLDER"))
    options = parser.parse_args()
    if options.one:
        name, folder = options.one
        figures = json.dumps(measure(name, Path(folder)))
        Path(folder, "figures").write_text(figures, encoding="utf-8")
        return
    found = []
    for row in rows():
        print({key: row[key] for key in ("what", *_KEPT[2:])}, flush=True)
        found.append(row)
        if options.out:
            result_files.save({"rows": found}, options.out)


if __name__ == "__main__":
    main()
