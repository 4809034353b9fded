"""The backends: what each supports, why not, and how it runs the ops.

A backend has a method for each op that it has kernels for.  They are in the order of
their speed:

========= ==================================================================
mosaic    NVIDIA Hopper: the GEMM in Pallas Mosaic GPU, the rest as in triton;
          there the GEMM of up to 128 rows, too
triton    NVIDIA GPUs from Ampere on
tpu       TPUs: quantization and GEMMs in Pallas
reference any device: the definition in ``jax.numpy``
========= ==================================================================

A GEMM whose operands have one scale per row has no scale inside its contraction.  All
but ``reference`` use XLA's own INT8 GEMM for it.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from fbq_jax.kernels import (
    packing,
    reference,
    speed_map,
    threshold_reference,
    xla_gemm,
)
from fbq_jax.kernels.quantized import CodeDtype, Quantized, Unquantized, product_block
from fbq_jax.ops.dispatch import BACKENDS, Backend, Request
from fbq_jax.sharding.layer_names import warn_first

# The lowest version that the kernel is tested with; ``plgpu.kernel`` of 0.9 differs.
MOSAIC_JAX = (0, 10, 2)
_TRITON_SIDES = (32, 64, 128, 256)
_MOSAIC_SIDES = _TPU_SIDES = (128, 256)
# The most rows of lhs that GPUs multiply with the kernel for few rows.
_FEW_ROWS = 128
# TPUs (v6e) whose vector units are slow beside their matrix units.
_FAST_MATRIX_UNITS = frozenset({"TPU v6 lite", "TPU v6e"})


class Reference(Backend):
    """The definitions of the ops, which run on any device."""

    name = "reference"
    max_part_depth: int | None = reference.MAX_INT32_K
    quantize = staticmethod(reference.quantize)
    matmul = staticmethod(reference.matmul)
    contract = staticmethod(reference.contract)
    move_threshold = staticmethod(threshold_reference.move_threshold)

    def multiply_codes(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """XLA's product."""
        return xla_gemm.product_of_codes(lhs, rhs)

    def scale_product(
        self, product: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """As one device scales it."""
        return xla_gemm.scaled(product, scales, dtype)

    def quantizes_lhs(self, rows: int, lhs: Unquantized, rhs: Quantized) -> bool:
        """As GPUs do."""
        return _fits_few_rows(rows, lhs, rhs)


class Triton(Reference):
    """Triton kernels for NVIDIA GPUs."""

    name = "triton"
    platform = "gpu"
    max_part_depth = None
    sides: tuple[int, ...] = _TRITON_SIDES

    def refusal(self, request: Request) -> str | None:
        """Needs a GPU of the right generation, and block sides that kernels have."""
        if reason := _nvidia_refusal():
            return reason
        sides = [side for side in request.sides if side != 1]
        accepted = self.sides if request.is_gemm else _TRITON_SIDES
        if reason := _sides_refusal(sides, accepted):
            return reason
        if request.grouped and request.is_gemm and not request.sides:
            return "products of groups take scales per block, not per row"
        has_codes = request.op != "move_threshold"
        is_float8 = has_codes and request.codes == "float8_e4m3fn"
        if is_float8 and (_compute_capability() or 0) < 89:
            return "FP8 codes need a GPU of compute capability 8.9 or above"
        return None

    def caveat(self, request: Request) -> str:
        """A source that no kernel computes and quantizes in one pass."""
        if request.packs is None or not request.sides:
            return ""
        group, (width, most_rows) = packing.GROUP, request.packs
        rows, columns = max(request.sides[::2]), max(request.sides[1::2])
        if columns == group and rows <= most_rows and width % group == 0:
            return ""
        return (
            f"not in one pass, but as jax.numpy code and a kernel that quantizes: one "
            f"pass needs blocks {group} wide with up to {most_rows} rows, and rows "
            f"that are multiples of {group}, not blocks {columns} wide with {rows} "
            f"rows and rows of {width}"
        )

    def find_speed_map(self) -> speed_map.SpeedMap | None:
        """The map that ``fbq_jax.bench`` measured."""
        return speed_map.load(jax.devices()[0].device_kind)

    def kernel(self, request: Request) -> str:
        """XLA multiplies operands without a scale inside the contraction."""
        return "xla" if request.op == "matmul" and not request.sides else self.name

    def quantize(self, *args: Any, **options: Any) -> Any:
        """See ``reference.quantize``."""
        from fbq_jax.kernels.triton.quantize import quantize

        return quantize(*args, **options)

    def matmul(
        self,
        lhs: Quantized | Unquantized,
        rhs: Quantized,
        groups: jax.Array | None = None,
        *,
        dtype: Any,
        ordered: bool = False,
    ) -> jax.Array:
        """See ``reference.matmul``; the kernel for few rows reads rhs once."""
        if isinstance(lhs, Unquantized):
            from fbq_jax.kernels.triton import few_rows_quantize_gemm

            return few_rows_quantize_gemm.matmul(lhs, rhs, dtype=dtype, ordered=ordered)
        if groups is not None:
            return self._grouped_gemm().matmul(lhs, rhs, groups, dtype=dtype)
        if lhs.block[1] is None:
            return xla_gemm.matmul(lhs, rhs, dtype=dtype)
        if _has_few_rows(lhs.shape[1], lhs.block[0], _FEW_ROWS):
            from fbq_jax.kernels.triton import few_rows_gemm

            return few_rows_gemm.matmul(lhs, rhs, dtype=dtype, ordered=ordered)
        return self._gemm(lhs, rhs, dtype=dtype, ordered=ordered)

    def contract(self, *args: Any, **options: Any) -> jax.Array:
        """See ``reference.contract``."""
        return self._grouped_gemm().contract(*args, **options)

    def move_threshold(self, *args: Any, **options: Any) -> Any:
        """See ``threshold_reference.move_threshold``."""
        from fbq_jax.kernels.triton.threshold import move_threshold

        return move_threshold(*args, **options)

    def _gemm(
        self, lhs: Quantized, rhs: Quantized, *, dtype: Any, ordered: bool
    ) -> jax.Array:
        from fbq_jax.kernels.triton import gemm

        del ordered  # the kernel adds in order
        return gemm.matmul(lhs, rhs, dtype=dtype)

    def _grouped_gemm(self) -> Any:
        from fbq_jax.kernels.triton import grouped_gemm

        return grouped_gemm


class Mosaic(Triton):
    """Triton kernels, and the GEMMs in Mosaic, for Hopper."""

    name = "mosaic"
    sides = _MOSAIC_SIDES

    def refusal(self, request: Request) -> str | None:
        """Needs a Hopper GPU."""
        if reason := _nvidia_refusal():
            return reason
        if _compute_capability() != 90:
            return "it needs a Hopper GPU, of compute capability 9.0"
        if jax.__version_info__ < MOSAIC_JAX:
            return f"it needs jax {'.'.join(map(str, MOSAIC_JAX))} or later"
        return super().refusal(request)

    def kernel(self, request: Request) -> str:
        """Only GEMMs are written in Mosaic."""
        return super().kernel(request) if request.is_gemm else Triton.name

    def reads_sums(self, codes: CodeDtype, *dtypes: Any) -> bool:
        """Running sums of products of INT8 codes need a bound, for 16-bit outputs."""
        has_16_bits = any(jnp.dtype(dtype).itemsize == 2 for dtype in dtypes)
        return codes == "int8" and has_16_bits

    def _gemm(
        self, lhs: Quantized, rhs: Quantized, *, dtype: Any, ordered: bool
    ) -> jax.Array:
        from fbq_jax.kernels.mosaic import gemm

        return gemm.matmul(lhs, rhs, dtype=dtype, ordered=ordered)

    def _grouped_gemm(self) -> Any:
        from fbq_jax.kernels.mosaic import grouped_gemm

        return grouped_gemm


class Tpu(Reference):
    """Pallas kernels for TPUs."""

    name = "tpu"
    platform = "tpu"
    max_part_depth = None

    def refusal(self, request: Request) -> str | None:
        """Needs a TPU, INT8 codes, and blocks of 128 or 256."""
        platform = jax.default_backend()
        if platform != "tpu":
            return f"it needs a TPU, and JAX's default backend is {platform}"
        if request.codes != "int8":
            return "it has no kernel for FP8 codes"
        if 1 in request.sides:
            return "it has no kernel for scales of single rows of a block"
        return _sides_refusal(request.sides, _TPU_SIDES)

    def kernel(self, request: Request) -> str:
        """XLA multiplies vectors with one scale each, and moves thresholds."""
        is_xla = request.op == "move_threshold" or (
            request.op == "matmul" and not request.sides
        )
        return "xla" if is_xla else self.name

    def warn(self, request: Request) -> None:
        """Blocks may suit other generations."""
        if request.op != "matmul" or not request.sides or min(request.sides) > 128:
            return
        device = jax.devices()[0].device_kind
        if device in _FAST_MATRIX_UNITS:
            warn_first(
                ("small blocks", device),
                f"blocks of 128 on a {device}: its vector units take longer to scale "
                "the products than its matrix units to multiply. Blocks of 256, as in "
                "dataclasses.replace(recipe, block=256), halve that work, and the "
                "recipe rowwise has none of it. See docs/performance/results.md",
            )

    def quantizes_lhs(self, rows: int, lhs: Unquantized, rhs: Quantized) -> bool:
        """No kernel does."""
        del rows, lhs, rhs
        return False

    def quantize(self, *args: Any, **options: Any) -> Any:
        """See ``reference.quantize``."""
        from fbq_jax.kernels.tpu.quantize import quantize

        return quantize(*args, **options)

    def matmul(  # type: ignore[override]
        self,
        lhs: Quantized,
        rhs: Quantized,
        groups: jax.Array | None = None,
        *,
        dtype: Any,
        ordered: bool = False,
    ) -> jax.Array:
        """See ``reference.matmul``."""
        del ordered  # the kernel adds in order
        if lhs.block[1] is None:
            return xla_gemm.matmul(lhs, rhs, dtype=dtype)
        from fbq_jax.kernels.tpu import gemm

        return gemm.matmul(lhs, rhs, groups, dtype=dtype)

    def contract(self, *args: Any, **options: Any) -> jax.Array:
        """See ``reference.contract``."""
        from fbq_jax.kernels.tpu import grouped

        return grouped.contract(*args, **options)


for _backend in (Mosaic(), Triton(), Tpu(), Reference()):
    BACKENDS[_backend.name] = _backend


def _has_few_rows(rows: int, m: int | None, most: int) -> bool:
    """Whether lhs has few rows, all in one block or each with its own scales."""
    if m is None or export.is_symbolic_dim(rows):
        return False
    return rows <= (most if m == 1 else min(m, most))


# The most rows that the kernel for few rows also quantizes.  Each of its programs does,
# which takes too long for more rows.
_FEW_ROWS_TO_QUANTIZE = 8


def _fits_few_rows(rows: int, lhs: Unquantized, rhs: Quantized) -> bool:
    """Whether the kernel that quantizes and multiplies few rows takes these."""
    m, k, _ = product_block(lhs, rhs)
    return (
        k is not None
        and _has_few_rows(rows, m, _FEW_ROWS_TO_QUANTIZE)
        and rhs.codes.dtype == jnp.int8
        # The sums of the other criteria need a kernel of their own.
        and lhs.criterion in (None, "absmax")
    )


def _nvidia_refusal() -> str | None:
    """The reason why Triton kernels cannot run on this machine, or None if they can."""
    backend = jax.default_backend()
    if backend != "gpu":
        return f"it needs a GPU, and JAX's default backend is {backend}"
    capability = _compute_capability()
    if capability is None or capability < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is missing: pip install 'fbq-jax[cuda]'"
    return None


def _sides_refusal(sides: Sequence[int], accepted: tuple[int, ...]) -> str | None:
    # Naming only the sides that do not fit gives ops with the same cause one warning.
    others = sorted({side for side in sides if side not in accepted})
    if not others:
        return None
    named = " and ".join(map(str, others))
    takes = ", ".join(map(str, accepted[:-1]))
    return f"its blocks have sides of {takes} or {accepted[-1]}, not {named}"


def _compute_capability() -> int | None:
    """The first GPU's compute capability times ten; None for another vendor's GPU."""
    digits = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(digits) != 2 or not all(digit.isdecimal() for digit in digits):
        return None
    return 10 * int(digits[0]) + int(digits[1])
