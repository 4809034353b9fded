"""What NVIDIA publishes about GPUs: the limits of programs, and peak rates.

Limits and rates of a multiprocessor are those of the CUDA C++ Programming Guide, in its
tables of technical specifications and of arithmetic instructions by compute capability.
"""

from typing import NamedTuple

PARTITIONS = 4  # of a multiprocessor, each with a scheduler and a tensor core
REGISTERS = 2**16  # of a multiprocessor
_REGISTERS_TOGETHER = 8  # A thread's registers are allocated by as many.
SHARED_PER_CYCLE = 128  # bytes, of a multiprocessor
_RESERVED_SHARED = 1024  # bytes of a program that the system takes


class Architecture(NamedTuple):
    """The limits of a multiprocessor.

    Attributes:
      capability: the compute capability times ten.
      shared: bytes of shared memory of a multiprocessor.
      program_shared: the most bytes of shared memory that a program may have.
      warps: the most resident warps.
      programs: the most resident programs.
      float32: float32 operations per cycle.
      conversions: conversions of 32-bit integers to floats per cycle.
    """

    capability: int
    shared: int
    program_shared: int
    warps: int
    programs: int
    float32: int
    conversions: int

    @property
    def name(self) -> str:
        """The compiler's name, such as ``sm_86``."""
        return f"sm_{self.capability}"

    def resident_programs(self, *, registers: int, num_warps: int, shared: int) -> int:
        """How many programs of a kernel share a multiprocessor."""
        allocated = -(-registers // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
        return min(
            REGISTERS // (32 * num_warps * allocated),
            self.shared // (shared + _RESERVED_SHARED),
            self.warps // num_warps,
            self.programs,
        )


class Card(NamedTuple):
    """The published figures of a GPU.

    Attributes:
      name: of the GPU.
      architecture: of its multiprocessors.
      multiprocessors: their number.
      clock: 1e9 cycles per second, at which the peak rates are stated.
      bf16: 1e12 operations per second of dense bf16 products with float32 sums.
      int8: 1e12 operations per second of dense INT8 products.
      bandwidth: 1e12 bytes per second, of the GPU's memory.
      source: the document of NVIDIA with these figures.
    """

    name: str
    architecture: Architecture
    multiprocessors: int
    clock: float
    bf16: float
    int8: float
    bandwidth: float
    source: str

    @property
    def int8_macs(self) -> float:
        """INT8 multiply-adds of a multiprocessor per cycle, from the peak rate."""
        return self.int8 * 1e12 / (2 * self.multiprocessors * self.clock * 1e9)


_KIB = 1024
AMPERE = Architecture(80, 164 * _KIB, 163 * _KIB, 64, 32, 64, 64)
AMPERE_GEFORCE = Architecture(86, 100 * _KIB, 99 * _KIB, 48, 16, 128, 64)
ADA = Architecture(89, 100 * _KIB, 99 * _KIB, 48, 24, 128, 64)
HOPPER = Architecture(90, 228 * _KIB, 227 * _KIB, 64, 32, 128, 64)

CARDS = (
    Card(
        "A100 80GB SXM",
        AMPERE,
        multiprocessors=108,
        clock=1.41,
        bf16=312.0,
        int8=624.0,
        bandwidth=2.039,
        source="NVIDIA A100 Tensor Core GPU datasheet, and for multiprocessors and "
        "clock the whitepaper NVIDIA A100 Tensor Core GPU Architecture",
    ),
    Card(
        "RTX 3090",
        AMPERE_GEFORCE,
        multiprocessors=82,
        clock=1.695,
        bf16=71.0,
        int8=284.0,
        bandwidth=0.936,
        source="whitepaper NVIDIA Ampere GA102 GPU Architecture, appendix A",
    ),
    Card(
        "RTX 4090",
        ADA,
        multiprocessors=128,
        clock=2.52,
        bf16=165.2,
        int8=660.6,
        bandwidth=1.008,
        source="whitepaper NVIDIA Ada GPU Architecture, appendix A",
    ),
    Card(
        "H200 SXM",
        HOPPER,
        multiprocessors=132,
        clock=1.83,
        bf16=989.5,
        int8=1979.0,
        bandwidth=4.8,
        source="NVIDIA H200 Tensor Core GPU datasheet, and for multiprocessors and "
        "clock the whitepaper NVIDIA H100 Tensor Core GPU Architecture",
    ),
)
