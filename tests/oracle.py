"""Quantization in NumPy, block by block, written independently of the library.

Codes are computed in float32, as the definition asks; products and sums in float64.
"""

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint64)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) % np.uint64(2**32)
    return x ^ (x >> np.uint64(16))


def fold(seed: np.ndarray | int, data: np.ndarray | int) -> np.ndarray:
    step = np.asarray(data, np.uint64) * np.uint64(0x9E3779B9)
    return mix((mix(np.asarray(seed, np.uint64)) + step) % np.uint64(2**32))


def noise(seed: int, shape: tuple[int, int]) -> np.ndarray:
    row = fold(seed, np.arange(shape[0]) // 2) | np.uint64(1)
    column = fold(np.uint64(seed) ^ np.uint64(0x5851F42D), np.arange(shape[1]))
    product = row[:, None] * (column[None, :] | np.uint64(1))
    high = (product >> np.uint64(32)) * np.uint64(0x9E3779B9)
    words = (product % np.uint64(2**32) + high).astype(np.uint32)
    words[1::2] >>= 16
    bits = (words & 0xFFFF | 1).astype(np.float64)
    return (bits / 2**16 - 0.5).astype(np.float32)


def blocks(shape: tuple[int, int], block: tuple[int, int]):
    """Yields the index and the slices of each block, row by row."""
    for i in range(-(-shape[0] // block[0])):
        for j in range(-(-shape[1] // block[1])):
            rows = slice(i * block[0], (i + 1) * block[0])
            columns = slice(j * block[1], (j + 1) * block[1])
            yield (i, j), (rows, columns)


def quantize(x, block, noise=None, bound=127.0):
    """Returns codes, scales and dequantized float64 values of one matrix."""
    x = np.asarray(x).astype(np.float32)
    codes = np.zeros(x.shape, np.int8)
    scales = np.zeros([-(-n // b) for n, b in zip(x.shape, block, strict=True)])
    scales = scales.astype(np.float32)
    for index, where in blocks(x.shape, block):
        amax = np.abs(x[where]).max()
        if not np.isfinite(amax):
            scales[index] = np.nan
            continue
        if amax < 2.0**-118:
            continue
        scales[index] = amax / np.float32(bound)
        v = np.clip(x[where] * (np.float32(bound) / amax), -127, 127)
        codes[where] = np.rint(v if noise is None else v + noise[where])
    return codes, scales, dequantize(codes, scales, block)


def float8_magnitudes() -> np.ndarray:
    """The finite magnitudes of E4M3 in the order of their codes, in float64."""
    exponent, fraction = np.divmod(np.arange(127), 8)
    return np.where(
        exponent, 2.0 ** (exponent - 7) * (1 + fraction / 8), 2.0**-9 * fraction
    )


def round_float8(v: np.ndarray) -> np.ndarray:
    """The bits of the nearest finite values of E4M3, the even one of two, uint8."""
    grid, v = float8_magnitudes(), np.asarray(v, np.float64)
    above = np.minimum(np.searchsorted(grid, np.abs(v)), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    up, down = grid[above] - np.abs(v), np.abs(v) - grid[below]
    is_up = (up < down) | ((up == down) & (above % 2 == 0))
    bits = np.where(is_up, above, below) | np.signbit(v) << 7
    return bits.astype(np.uint8)


def quantize_float8(x, block):
    """Returns the bits of E4M3 codes, scales and dequantized float64 values."""
    x = np.asarray(x).astype(np.float32)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros([-(-n // b) for n, b in zip(x.shape, block, strict=True)])
    scales = scales.astype(np.float32)
    for index, where in blocks(x.shape, block):
        amax = np.abs(x[where]).max()
        if not np.isfinite(amax):
            scales[index] = np.nan
        if not np.isfinite(amax) or amax < 2.0**-117:  # zeros with the signs of values
            finite = np.nan_to_num(x[where], posinf=0.0, neginf=0.0)
            codes[where] = round_float8(0.0 * finite)
        else:
            scales[index] = amax / np.float32(448)
            codes[where] = round_float8(x[where] * (np.float32(448) / amax))
    magnitudes = np.append(float8_magnitudes(), np.nan)[codes & 127]
    values = np.where(codes >> 7, -magnitudes, magnitudes)
    return codes, scales, dequantize(values, scales, block)


def dequantize(codes, scales, block):
    values = codes.astype(np.float64)
    for index, where in blocks(codes.shape, block):
        values[where] *= np.float64(scales[index])
    return values


def dequantize_stack(term, block):
    """The values of a ``Term`` in float64."""
    pairs = zip(*map(np.asarray, term[:2]), strict=True)
    return np.stack([dequantize(*pair, block) for pair in pairs])


def quantize_fallback(x, theta, block, criterion="absmax"):
    """Returns main and residual (codes, scales), their float64 sum, and the metric.

    A threshold that is negative or NaN counts as 0.
    """
    x = np.asarray(x).astype(np.float32)
    theta = theta if theta > 0.0 else 0.0
    codes, scales, values = quantize(x, block)
    error = np.zeros_like(x)
    metric = np.zeros_like(scales)
    for index, where in blocks(x.shape, block):
        scale = np.float64(scales[index])
        if scale * 127 <= np.finfo(np.float32).max:
            error[where] = x[where] - scales[index] * codes[where].astype(np.float32)
        l1 = np.abs(error[where]).sum(dtype=np.float64)
        total = np.abs(x[where]).sum(dtype=np.float64)
        metric[index] = {
            "absmax": np.abs(x[where]).max(),
            "l1": min(l1, float(np.finfo(np.float32).max)),
            "l1_rel": l1 / total if total else 0.0,
        }[criterion]
        if not np.isfinite(scale):
            metric[index] = np.nan
        if not metric[index] > theta:
            error[where] = 0
    residual_codes, residual_scales, residual = quantize(error, block)
    return (
        (codes, scales),
        (residual_codes, residual_scales),
        values + residual,
        metric,
    )


def relative(actual, exact) -> float:
    """Relative Frobenius error, in float64."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))
