"""The CUDA driver's cache of compiled PTX.

XLA keeps the PTX of a custom call.  Where a program first runs, the driver compiles its
kernels, one after the other.  The driver also keeps what it compiles in a cache on
disk, which another thread can fill while JAX and XLA compile the rest of the program.
"""

import ctypes

_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS


def fill(ptx: str, name: str, ordinal: int) -> None:
    """Has the driver compile a kernel.

    An error changes nothing: the program reports it where it loads the kernel.

    Args:
      ptx: the PTX of the kernel.
      name: the name of the kernel.
      ordinal: the number of the GPU, as the driver counts.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return
    # XLA uses the primary context, too.
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return
    driver.cuCtxPushCurrent_v2(context)
    if not driver.cuModuleLoadData(ctypes.byref(module), ptx.encode()):
        driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        # Where modules are loaded lazily, this one is now.
        driver.cuFuncGetAttribute(ctypes.byref(ctypes.c_int()), _REGISTERS, function)
        driver.cuModuleUnload(module)
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(device)
