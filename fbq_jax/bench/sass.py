"""The instructions of a compiled kernel's inner loop."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?(.*?) ;")
_BRANCH = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")
_WARP, _WARP_GROUP = 32, 4  # threads, warps


class Loop(NamedTuple):
    """What one warp executes in one iteration of a loop.

    Attributes:
      instructions: all of them.
      tensor: those that multiply matrices.
      macs: multiply-adds of the tensor instructions.
      float32: float32 arithmetic.
      conversions: of integers to floats.
      shared_bytes: bytes that move between shared memory and registers, the tensor
        cores or the L2 cache.
      spills: loads and stores of spilled registers.
    """

    instructions: int
    tensor: int
    macs: int
    float32: int
    conversions: int
    shared_bytes: int
    spills: int


def product_loop(cubin: bytes) -> Loop:
    """Counts the instructions of the loop with the most tensor instructions.

    Raises:
      ValueError: if no loop has one.
    """
    loops = [_count(body) for body in _loops(_disassemble(cubin))]
    if not any(loop.tensor for loop in loops):
        raise ValueError("no loop multiplies matrices")
    most = max(loop.tensor for loop in loops)
    # The innermost of the loops that contain these instructions.
    return min(
        (loop for loop in loops if loop.tensor == most),
        key=lambda loop: loop.instructions,
    )


def _disassemble(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout


def _loops(text: str) -> list[Sequence[str]]:
    """The bodies of all loops, each from its label to the branch back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[Sequence[str]] = []
    for line in map(str.strip, text.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            predicate, operation = instruction.groups()
            # An instruction that is never executed only takes an issue slot.
            instructions.append("NOP" if predicate == "!PT" else operation)
            branch = _BRANCH.match(operation)
            if branch and branch[1] in labels:
                loops.append(instructions[labels[branch[1]] :])
    return loops


def _count(body: Sequence[str]) -> Loop:
    names = [instruction.split()[0] for instruction in body]
    kinds = [name.split(".")[0] for name in names]

    def number(*wanted: str) -> int:
        return sum(kind in wanted for kind in kinds)

    products = [_product(name) for name in names]
    return Loop(
        instructions=len(body),
        tensor=number("IMMA", "IGMMA"),
        macs=sum(macs for macs, _ in products),
        float32=number("FADD", "FMUL", "FFMA"),
        conversions=number("I2F", "I2FP"),
        shared_bytes=sum(shared for _, shared in products)
        + sum(map(_copied_bytes, names)),
        spills=number("LDL", "STL"),
    )


def _product(name: str) -> tuple[int, int]:
    """A warp's multiply-adds and bytes from shared memory in a tensor instruction."""
    if match := re.match(r"IMMA\.(\d\d)(\d)(\d\d)", name):
        m, n, k = map(int, match.groups())
        return m * n * k, 0
    if match := re.match(r"IGMMA\.(\d+)x(\d+)x(\d+)", name):
        # Four warps execute it together.
        m, n, k = map(int, match.groups())
        return m * n * k // _WARP_GROUP, (m + n) * k // _WARP_GROUP
    return 0, 0


def _copied_bytes(name: str) -> int:
    """Bytes that a warp's instruction moves from or to shared memory."""
    if match := re.match(r"LDSM\..*M88(?:\.(\d))?", name):
        return 128 * int(match[1] or 1)  # 8 x 8 elements of 16 bits, each
    if re.match(r"(LDGSTS|LDS|STS)\b", name):
        bits = re.search(r"\.(8|U8|16|U16|64|128)\b", name)
        return _WARP * int(bits[1].strip("U") if bits else 32) // 8
    return 0
