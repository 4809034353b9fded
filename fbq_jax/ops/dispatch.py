"""Chooses the backend of an op, and gives the reason for the choice.

``choose_layer`` tells whether a layer is quantized, by the measured map of this GPU.

A call of an op makes a ``Request``.  The first backend that supports it is used, in the
order in which ``fbq_jax.ops.backends`` adds them to ``BACKENDS``.  The argument
``implementation``, or else the environment variable ``FBQ_IMPLEMENTATION`` (read when a
function is traced), overrides this.  If the requested backend does not support the
call, an error says why.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from fbq_jax.kernels.quantized import CodeDtype, Quantized, Unquantized
from fbq_jax.recipes.schema import MAPPED_BLOCK, Recipe
from fbq_jax.sharding.layer_names import current_layer, warn_first

ENVIRONMENT_VARIABLE = "FBQ_IMPLEMENTATION"


class Request(NamedTuple):
    """What a call asks of a backend.

    Attributes:
      op: the name of the op.
      sides: the sides of the blocks that share a scale; 1 for scales of single rows,
        and empty for one scale per row or per matrix.
      codes: the dtype of the codes.
      grouped: whether the rows are in groups, such as one for each expert.
      packs: the length of the rows that the source of ``quantize`` packs for its
        backward pass, and the most rows of a block that one kernel then holds; None for
        a matrix, which packs nothing.
    """

    op: str
    sides: tuple[int, ...]
    codes: CodeDtype = "int8"
    grouped: bool = False
    packs: tuple[int, int] | None = None

    @staticmethod
    def sides_of(*blocks: tuple[int | None, ...]) -> tuple[int, ...]:
        """The ``sides`` of a call whose operands or layouts have these blocks."""
        sides = [side for block in blocks for side in block]
        known = tuple(side for side in sides if side is not None)
        return known if len(known) == len(sides) else ()

    @property
    def is_gemm(self) -> bool:
        """Whether the op multiplies."""
        return self.op in ("matmul", "contract")


class Backend:
    """A backend: the calls that it supports, and a method for each op.

    Attributes:
      name: the name that ``implementation=`` takes.
      platform: the platform of JAX that it is for; None for all.
      max_part_depth: the longest part of a contraction that its ``matmul`` takes as a
        block with a scale of its own, in one product with other parts; None if each
        part is a product.
    """

    name: str
    platform: str | None = None
    max_part_depth: int | None = None

    def refusal(self, request: Request) -> str | None:
        """The reason why it does not support a call here, or None if it does."""
        del request
        return None

    def caveat(self, request: Request) -> str:
        """What is slow about a call; nothing if it is as fast as others."""
        del request
        return ""

    def kernel(self, request: Request) -> str:
        """What computes a call: the backend's name, or ``"xla"``."""
        del request
        return self.name

    def warn(self, request: Request) -> None:
        """Warns, once, of settings that suit other devices better."""

    def find_speed_map(self) -> Any:
        """The ``SpeedMap`` of the machine's device; None if there is none."""
        return None

    def reads_sums(self, codes: CodeDtype, *dtypes: Any) -> bool:
        """Whether a GEMM with one of these output dtypes reads ``Quantized.sums``."""
        del codes, dtypes
        return False

    def quantizes_lhs(self, rows: int, lhs: Unquantized, rhs: Quantized) -> bool:
        """Whether ``matmul`` had best quantize an lhs of so many rows itself."""
        del rows, lhs, rhs
        return False

    def multiply_codes(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The int32 product ``[B, M, N]`` of codes ``[B, M, K]`` and ``[B, N, K]``."""
        raise NotImplementedError

    def scale_product(
        self, product: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """A float32 product of codes times its scales, rounded once to ``dtype``."""
        raise NotImplementedError


#: All backends by name, the fastest first; the last one runs everywhere.
BACKENDS: dict[str, Backend] = {}
#: Their names.
IMPLEMENTATIONS = BACKENDS.keys()
#: The records of all ops (``fbq_jax.ops.op.Op``) by name.
OPS: dict[str, Any] = {}


class Choice(NamedTuple):
    """The implementation chosen for an op.

    Attributes:
      op: the op's name.
      implementation: the name of the implementation.
      reason: the reason for the choice, as text.
      backend: what computes the op in this implementation: ``"mosaic"``, ``"triton"``,
        ``"tpu"``, ``"xla"`` or ``"reference"``.
    """

    op: str
    implementation: str
    reason: str
    backend: str


class LayerChoice(NamedTuple):
    """Whether a layer is quantized.

    Attributes:
      quantized: whether its GEMMs run as its recipe says; otherwise all three run
        unquantized.
      speedup: the predicted speedup of the recipe over bf16 in a training step; None
        where no map applies.
      reason: the reason, as text.
      batch_invariant: whether a token's output depends on that token and the weight
        alone (``Recipe.batch_invariant``).
    """

    quantized: bool
    speedup: float | None
    reason: str
    batch_invariant: bool = False  # no recipe with a map is


def choose(
    op: str,
    block_shape: Sequence[int],
    *,
    width: int | None = None,
    codes: CodeDtype = "int8",
    implementation: str | None = None,
) -> Choice:
    """Chooses the implementation of an op for JAX's default backend.

    Args:
      op: the name of a function in ``fbq_jax.ops``.
      block_shape: the shape of a block, ``(rows, columns)``, or ``(m, k, n)`` for a
        GEMM; empty if each row or column has one scale.
      width: the length of the rows that a norm or a gate in front of ``quantize`` packs
        for its backward pass; None for a matrix.
      codes: the dtype of the codes that the op makes or multiplies.
      implementation: the implementation to use.  By default the one that
        ``FBQ_IMPLEMENTATION`` names, or else the first that supports the call.

    Returns:
      The ``Choice``.

    Raises:
      ValueError: if no op or no implementation has that name, or if the implementation
        does not support the call.

    >>> choose("matmul", (128, 128, 128), implementation="reference").reason
    'implementation= asks for it'
    """
    if op not in OPS:
        raise ValueError(f"{op!r} is not an op; there are: {', '.join(OPS)}")
    packs = None if width is None else (width, MOST_ROWS)
    request = Request(op, tuple(block_shape), codes, packs=packs)
    return choose_for(request, implementation)


# The most rows of a block that the kernels of norms and gates hold.
MOST_ROWS = 256


def choose_for(request: Request, implementation: str | None) -> Choice:
    """``choose`` for a call of an op."""
    source = "implementation"
    name = implementation
    if name is None and (asked := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, name = ENVIRONMENT_VARIABLE, asked
    if name is None:
        return _first_choice(request)
    check_name(name, source)
    if reason := BACKENDS[name].refusal(request):
        raise ValueError(f"{source}={name} cannot do {request.op}: {reason}")
    return _choice(BACKENDS[name], request, f"{source}= asks for it")


def check_name(implementation: str | None, source: str = "implementation") -> None:
    """Raises ValueError unless an implementation has this name, or it is None."""
    if implementation is not None and implementation not in BACKENDS:
        raise ValueError(
            f"{source}={implementation!r} is not an implementation; "
            f"there are: {', '.join(BACKENDS)}"
        )


def _first_choice(request: Request) -> Choice:
    """The first backend that supports a call."""
    refusals = []
    accelerator = jax.default_backend()
    for backend in BACKENDS.values():
        # No reason mentions the backends of other accelerators.
        is_elsewhere = accelerator != "cpu" and backend.platform not in (
            None,
            accelerator,
        )
        if is_elsewhere:
            continue
        reason = backend.refusal(request)
        if reason is None:
            break
        refusals.append(f"not {backend.name}: {reason}")
    reason = "; ".join(refusals) or "the first choice on this device"
    return _choice(backend, request, reason)


def _choice(backend: Backend, request: Request, reason: str) -> Choice:
    """A choice, whose reason includes the backend's caveat."""
    if caveat := backend.caveat(request):
        reason = f"{reason}; {caveat}"
    return Choice(request.op, backend.name, reason, backend.kernel(request))


def is_reference_by_default(choice: Choice, implementation: str | None) -> bool:
    """Whether a choice is the reference, which nobody asked for."""
    return choice.backend == "reference" and not _is_asked_for(implementation)


def _is_asked_for(implementation: str | None) -> bool:
    """Whether an argument or the environment names the implementation of a call."""
    return bool(implementation or os.environ.get(ENVIRONMENT_VARIABLE))


def _of_layer() -> str:
    """How a warning names the layer that is being traced; empty outside any."""
    layer = current_layer()
    return f"{layer}: " if layer else ""


def warn_of_choice(
    choice: Choice, request: Request, implementation: str | None
) -> None:
    """Warns about what is slow about a choice, unless it was asked for.

    Each cause is reported once, with the first layer that it concerns.

    Args:
      choice: the result of ``choose_for``.
      request: what was asked of it.
      implementation: as in ``choose``.
    """
    if is_reference_by_default(choice, implementation):
        _warn_of_reference(choice, request)
    backend = BACKENDS[choice.implementation]
    if (caveat := backend.caveat(request)) and not _is_asked_for(implementation):
        warn_first(caveat, f"{_of_layer()}{choice.op} takes more time; {caveat}")
    backend.warn(request)
    if request.packs is not None:
        warn_of_packing()


def _warn_of_reference(choice: Choice, request: Request) -> None:
    """Warns if an accelerator runs the slow reference.

    The warning names every op that the reason applies to.
    """
    platform = jax.default_backend()
    if platform == "cpu":
        return
    affected = (
        op
        for op in OPS
        if _first_choice(request._replace(op=op)).reason == choice.reason
    )
    warn_first(
        choice.reason,
        f"{_of_layer()}{', '.join(affected)} run as jax.numpy code, "
        f"many times slower on this {platform.upper()} than a kernel: {choice.reason}",
    )


def warn_of_packing() -> None:
    """Warns, once, that norms and gates pack saved values on a TPU, by XLA."""
    if jax.default_backend() == "tpu":
        warn_first(
            "packing",
            "norms and gates pack what their backward pass reads, without a kernel: on "
            "a TPU that is estimated to take longer than the products of a layer. "
            "Flax's norms and jax.nn's gates save floats, as does --saved-bits 0 of "
            "the Llama example. See docs/performance/results.md",
        )


def choose_layer(
    recipe: Recipe,
    sizes: tuple[int, int, int],
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> LayerChoice:
    """Predicts a layer's speed on this machine, and decides whether to quantize it.

    The prediction interpolates the map of the GPU
    (``fbq_jax.kernels.speed_map``), which
    ``python -m fbq_jax.bench map`` measures with the recipes ``block`` and
    ``fallback``.  It applies to any recipe with 128x128 blocks in all three GEMMs, with
    or without fallback.  Without a map, a layer is quantized.

    Args:
      recipe: the recipe of the layer.
      sizes: M, K and N of ``Y [M, N] = X [M, K] . W [K, N]``; M is the tokens of a
        step on one device.
      dtype: the dtype of X and W.
      implementation: as in ``choose``.

    Returns:
      The ``LayerChoice``.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``.
      ValueError: no implementation has that name, there are not three sizes of at least
        1; or there is a map, and a size is symbolic.

    >>> choose_layer(Recipe(criterion=None), (512, 512, 512)).quantized
    True
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            "choose_layer takes a Recipe, such as fbq_jax.recipes.fallback; got "
            f"{recipe!r}"
        )
    if len(sizes) != 3 or any(size < 1 for size in sizes):
        raise ValueError(
            f"choose_layer takes three sizes (M, K, N) of at least 1; got {sizes}"
        )
    found = _map_for(recipe, dtype, implementation)
    if isinstance(found, str):
        return LayerChoice(True, None, found, recipe.batch_invariant)
    if symbolic := [size for size in sizes if export.is_symbolic_dim(size)]:
        raise ValueError(
            f"the size {symbolic[0]} of a layer is symbolic, and its speed depends on "
            "a number: export one function for each size, or with "
            "where_slower='quantize'"
        )
    speedup = found.predict(_mapped_name(recipe), sizes)
    reason = f"the map of {found.device} predicts {speedup:.2f} times bf16's speed"
    if speedup >= 1.0:
        return LayerChoice(True, speedup, reason)
    if recipe.where_slower == "float":
        return LayerChoice(False, speedup, f"{reason}, and where_slower='float'")
    hint = "Recipe(where_slower='float') would leave the layer in float"
    return LayerChoice(True, speedup, f"{reason}; {hint}")


def _map_for(
    recipe: Recipe, dtype: jax.typing.DTypeLike, implementation: str | None
) -> Any:
    """The map that applies to a layer, or the reason, as text, why none does."""
    if not recipe.in_blocks or recipe.block_shape != MAPPED_BLOCK:
        return "maps are of recipes with scales per 128x128 block in all GEMMs"
    if jnp.dtype(dtype).itemsize != 2:
        return f"maps are of layers in 16 bits, not in {jnp.dtype(dtype).name}"
    device = jax.devices()[0].device_kind
    if jax.default_backend() != "gpu":
        return f"there is no map for {device}: maps are of GPUs"
    found = next(filter(None, (b.find_speed_map() for b in BACKENDS.values())), None)
    if found is None:
        return f"there is no map for {device}: run python -m fbq_jax.bench map"
    choice = choose("matmul", recipe.block_shape, implementation=implementation)
    if choice.backend != found.backend:
        return f"the map of {device} is of {found.backend}, not of {choice.backend}"
    return found


def _mapped_name(recipe: Recipe) -> str:
    """The measured recipe that stands for a recipe."""
    return "block" if recipe.criterion is None else "fallback"


def warn_where_slower(
    choice: LayerChoice, recipe: Recipe, sizes: tuple[int, int, int]
) -> None:
    """Warns about what ``where_slower="float"`` does to the current layer.

    A layer that it leaves in float is reported once for each shape; the reason why no
    map applies, once.
    """
    if recipe.where_slower == "quantize":
        return
    if choice.quantized and choice.speedup is not None:
        return
    if choice.quantized:
        text = f"where_slower='float' quantizes every layer: {choice.reason}"
    else:
        text = (
            f"{_of_layer()}a layer of M, K, N = "
            f"{', '.join(map(str, sizes))} stays in float, not in INT8 by the recipe "
            f"{_mapped_name(recipe)!r}: {choice.reason}"
        )
    warn_first(text, text)
