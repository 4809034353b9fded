"""Public models quantized by this library and by Qwix, and the losses of both.

A row of the file holds the versions of the packages that it was made with, because
packages of some models exclude each other.
"""

import importlib
import importlib.metadata
import importlib.util
import platform
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.extend.core import Jaxpr

from fbq_jax.bench import report, results
from fbq_jax.core.weight_products import jaxprs_inside

DEFAULT_PATH = Path("bench-models.json")


def run(path: Path) -> None:
    """Trains all models whose packages are installed, and writes the file.

    Rows of models that are not installed stay as they are.

    Raises:
      ModuleNotFoundError: if Qwix or all packages with models are missing.
      ResultsError: if the file cannot be written, or holds something else.
    """
    if importlib.util.find_spec("qwix") is None:
        raise ModuleNotFoundError("models needs Qwix: pip install 'fbq-jax[models]'")
    results.check_own(path, load)
    module = importlib.import_module("fbq_jax.bench.public_models")
    public = module.MODELS
    if not any(model.is_installed() for model in public.values()):
        raise ModuleNotFoundError(
            "no package with models is installed: pip install 'fbq-jax[models]'"
        )
    rows = (load(path) or {"models": {}})["models"]
    for name, model in public.items():
        if model.is_installed():
            print(f"training {name} of {model.package}", flush=True)
            with module.one_device():
                rows[name] = _row(model)
        else:
            print(f"{name}: {model.package} is not installed, or has no such model")
    results.write(path, {"models": rows})


def _row(public: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        expected, _ = public.train(public.build())
        model, report = public.quantize(public.build())
        losses, _ = public.train(model)
        by_qwix = _by_qwix(public)
    return {
        "date": results.today(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "versions": _versions(public.package),
        "package": public.package,
        "api": "Linen" if isinstance(model, nn.Module) else "NNX",
        "function": public.function,
        "products": len(report.products),
        "in_float": [parameter._asdict() for parameter in report.float_parameters],
        "losses_in_float": expected,
        "losses": losses,
        "qwix": by_qwix,
    }


def _versions(package: str) -> dict[str, str]:
    found = results.versions() | {
        name: importlib.metadata.version(name) for name in ("qwix", package)
    }
    found.pop("triton", None)
    return found


def _by_qwix(public: Any) -> dict[str, Any]:
    """What Qwix's own quantized training makes of a model, in INT8."""
    import qwix

    model = public.build()
    rule = qwix.QtRule(
        module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"
    )
    inputs = {} if isinstance(model, nn.Module) else public.kwargs
    args = () if isinstance(model, nn.Module) else public.args
    try:
        model = qwix.quantize_model(model, qwix.QtProvider([rule]), *args, **inputs)
        products = _products(public, model)
        losses, _ = public.train(model)
    except Exception as error:  # whatever it is, the table shows it
        first = str(error).strip().partition("\n")[0]
        return {"error": f"{type(error).__name__}: {first}"}
    return {
        "products": products["int8"],
        "products_in_float": products.total() - products["int8"],
        "losses": losses,
    }


def _products(public: Any, model: Any) -> Counter[str]:
    """Counts the products in a forward pass by the dtype of both operands."""
    args, kwargs = public.args, public.kwargs
    if isinstance(model, nn.Module):
        key = jax.random.key(0)
        state = jax.eval_shape(lambda: model.init(key, *args, **kwargs))
    else:
        graphdef, state = nnx.split(model)

    def forward(state: Any) -> Any:
        if isinstance(model, nn.Module):
            return model.apply(state, *args, **kwargs)
        return nnx.merge(graphdef, state)(*args, **kwargs)

    closed = jax.make_jaxpr(forward)(state)
    return Counter(
        str(jnp.promote_types(*(x.aval.dtype for x in eqn.invars[:2])))
        for eqn in _equations(closed.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    )


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a jaxpr, and of the jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_inside(eqn):
            yield from _equations(inner)


def load(path: Path) -> dict[str, Any] | None:
    """The content of a file that ``run`` wrote; None if it holds something else."""
    content = results.read_mapping(path)
    return content if content is not None and "models" in content else None


def markdown(content: Mapping[str, Any]) -> str:
    """The table of a file, in Markdown."""
    rows = content["models"]
    head = [
        "model",
        "package",
        "API",
        "call",
        "parameters in INT8",
        "in float",
        "losses in float",
        "losses",
        "Qwix: losses",
        "Qwix: products in INT8",
    ]
    machines = "\n".join(f"- {line}" for line in _machines(rows))
    return f"{report.table(head, _cells(rows))}\n\nMade with:\n\n{machines}"


def _cells(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for name, row in rows.items():
        package = row["package"]
        in_float = Counter(
            parameter["reason"].removeprefix("no product reads it ")
            for parameter in row["in_float"]
        )
        yield [
            name,
            f"{package} {row['versions'][package]}",
            row["api"],
            f"`{row['function']}`",
            str(row["products"]),
            ", ".join(f"{count} {reason}" for reason, count in in_float.items()),
            _losses(row["losses_in_float"]),
            _losses(row["losses"]),
            *_qwix_cells(row["qwix"]),
        ]


def _qwix_cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [f"`{textwrap.shorten(row['error'], 100, placeholder=' ...')}`", ""]
    count = row["products"]
    return [_losses(row["losses"]), f"{count} of {count + row['products_in_float']}"]


def _losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def _machines(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What rows were made with, and which."""
    names: dict[str, list[str]] = {}
    for row in rows.values():
        versions = dict(row["versions"])
        package = row["package"]
        del versions[package]
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        text = f"a {row['device']} ({row['machine']}), {row['date']}, {text}"
        names.setdefault(text, []).append(package)
    for text, packages in names.items():
        yield f"{', '.join(dict.fromkeys(packages))}: {text}"
