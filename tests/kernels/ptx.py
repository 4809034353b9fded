"""Runs the inline assembly of Triton kernels on NumPy arrays of 32-bit words."""

import re
from collections.abc import Callable, Sequence

import numpy as np


def run(
    assembly: str, operands: Sequence[np.ndarray], results: int = 1
) -> list[np.ndarray]:
    """The values of ``$0`` and so on, uint32; operands come after the results."""
    values = {f"${i}": np.uint32(x) for i, x in enumerate(operands, results)}
    for statement in re.split("[{};]", assembly):
        op, *arguments = statement.replace(",", " ").split() or [".reg"]
        if op != ".reg":
            result, *names = arguments
            inputs = [values[x] if x in values else np.uint32(int(x, 0)) for x in names]
            values[result] = _INSTRUCTIONS[op](*inputs)
    return [values[f"${i}"] for i in range(results)]


def _exp2(x: np.ndarray) -> np.ndarray:
    return np.exp2(x.view(np.float32)).view(np.uint32)


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return (np.float32(1) / np.sqrt(x.view(np.float32))).view(np.uint32)


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.view(np.float32) * b.view(np.float32)).view(np.uint32)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Each hexadecimal digit selects a byte; from 8 on, copies of that byte's sign."""
    result = np.zeros_like(a)
    for i in range(4):
        digit = int(selector) >> 4 * i & 15
        byte = (a, b)[digit >> 2 & 1] >> np.uint32(8 * (digit & 3)) & np.uint32(255)
        if digit & 8:
            byte = (byte >> np.uint32(7)) * np.uint32(255)
        result |= byte << np.uint32(8 * i)
    return result


def _dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The dot product of four signed bytes, plus c."""
    a, b = (np.ascontiguousarray(x)[..., None].view(np.int8) for x in (a, b))
    return np.sum(a * b.astype(np.int32), -1, np.int32).view(np.uint32) + c


def _max_bfloat16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The maxima of the low and the high halves, of positive floats and NaN."""
    halves = []
    for shift in (np.uint32(0), np.uint32(16)):
        larger = np.maximum(
            a >> shift & np.uint32(0xFFFF), b >> shift & np.uint32(0xFFFF)
        )
        assert np.all(larger <= 0x7FFF), "a negative float"
        halves.append(np.where(larger > 0x7F80, np.uint32(0x7FFF), larger))
    return halves[1] << np.uint32(16) | halves[0]


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "and.b32": np.bitwise_and,
    "dp4a.s32.s32": _dp4a,
    "ex2.approx.ftz.f32": _exp2,
    "max.NaN.bf16x2": _max_bfloat16x2,
    "mov.b32": np.copy,
    "mul.rn.f32": _multiply,
    "or.b32": np.bitwise_or,
    "prmt.b32": _prmt,
    "rsqrt.approx.ftz.f32": _rsqrt,
    "shr.b32": np.right_shift,
}
