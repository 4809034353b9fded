"""Tries the installed library, without or with an extra: ``python smoke.py [EXTRA]``.

It imports every module, trains in Linen and in NNX, freezes, and reads the data files.
"""

import contextlib
import importlib
import io
import pkgutil
import re
import sys
from importlib import metadata, resources
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax.bench.__main__ import main as bench
from fbq_jax.kernels import speed_map

CLONE = Path(__file__).resolve().parents[1]


def required(extra: str | None = None) -> set[str]:
    """The packages that the library requires: with an extra, or by any of them."""
    marker = "extra ==" if extra is None else f'extra == "{extra}"'
    lines = [line for line in metadata.requires("fbq-jax") or () if marker in line]
    return {re.split(r"[^\w-]", line)[0].lower() for line in lines}


def import_modules() -> None:
    """Imports the library's modules; some need a package of an extra."""
    optional = {name.replace("-", "_") for name in required()}
    for module in pkgutil.walk_packages(fbq_jax.__path__, "fbq_jax."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in optional:
                raise


def import_packages(extra: str) -> None:
    """Imports what the packages of an extra provide."""
    wanted = required(extra)
    assert wanted, f"the package has no extra {extra}"
    for module, packages in metadata.packages_distributions().items():
        if wanted & {name.lower() for name in packages} and module.isidentifier():
            importlib.import_module(module)


def train_linen() -> None:
    """One step of a Linen layer; the frozen layer gives the same output."""
    layer = nn.Dense(128, dot_general=fbq_jax.fallback_dot)
    x = jax.random.normal(jax.random.key(0), (256, 128))
    variables = layer.init(jax.random.key(1), x)
    params, state = variables["params"], {"fallback": variables["fallback"]}

    def loss(params: optax.Params) -> tuple[jax.Array, optax.Params]:
        y, new = layer.apply({"params": params, **state}, x, mutable=["fallback"])
        return jnp.mean(y**2), new

    before = fbq_jax.fallback_stats(state)
    grads, state = jax.grad(loss, has_aux=True)(params)
    fbq_jax.assert_live(before, fbq_jax.fallback_stats(state))
    assert jnp.isfinite(optax.tree.norm(grads))
    variables = {"params": params, **state}
    frozen = fbq_jax.freeze(layer, variables, x)
    assert jnp.array_equal(layer.apply(frozen, x), layer.apply(variables, x))


def train_nnx() -> None:
    """One step of an NNX layer."""
    rngs = nnx.Rngs(0)
    dot = fbq_jax.nnx.FallbackDot(rngs=rngs)
    layer = nnx.Linear(128, 128, dot_general=dot, rngs=rngs)
    grads = nnx.grad(lambda layer: jnp.mean(layer(jnp.ones((256, 128))) ** 2))(layer)
    assert jnp.isfinite(optax.tree.norm(nnx.state(grads)))
    assert dot.count[...] == 1


def read_data() -> None:
    """The files of the wheel that are no modules."""
    assert speed_map.load("NVIDIA H200") is not None
    results = resources.files("fbq_jax.bench") / "results" / "nvidia-h200.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert bench(["table", str(results)]) == 0


def main(extra: str | None = None) -> None:
    """Tries everything."""
    assert not Path(fbq_jax.__file__).is_relative_to(CLONE)
    assert metadata.version("fbq-jax") == fbq_jax.__version__
    import_modules()
    if extra is not None:
        import_packages(extra)
        return
    train_linen()
    train_nnx()
    read_data()


if __name__ == "__main__":
    main(*sys.argv[1:])
