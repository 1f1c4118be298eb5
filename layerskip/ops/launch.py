"""Starting a kernel: one call with the shape of ``cuLaunchKernel``, and the driver behind it.

The other thing behind it is the CPU emulator of the tests (``tests/kernels/emulator.py``): the
same sources, the same grid arithmetic and the same arguments, without a GPU.
"""

import ctypes
import functools
import importlib
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from layerskip.ops.build import KernelBuildError, arch_for, compile_kernel

Dim3 = tuple[int, int, int]
Argument = (
    Tensor | int | float | ctypes.c_int64 | ctypes.c_uint64 | ctypes.c_uint32 | ctypes.c_bool | None
)
"""What a kernel takes: a tensor or None for a pointer, an int for ``int``, a float for ``float``,
and a ctypes scalar for any other type."""

_SCALARS = {ctypes.c_int64: "q", ctypes.c_uint64: "Q", ctypes.c_uint32: "I", ctypes.c_bool: "?"}
DEFAULT_SMEM = 48 * 1024  # bytes that any kernel may use
# Every argument has a cell of 8 bytes of its own.
_CELLS = {"P": "Q", "i": "i4x", "f": "f4x", "q": "q", "Q": "Q", "I": "I4x", "?": "?7x"}


class Launcher(Protocol):
    """Something that runs kernels of the catalog, in the order in which they are given."""

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        smem: int,
        args: Sequence[Argument],
        *,
        cooperative: bool = False,
    ) -> None:
        """Start one kernel.

        Args:
            kernel: its name in the catalog, such as ``"decode_attention<Bf16,64,1>"``.
            grid: blocks in x, y and z.
            block: threads of a block in x, y and z.
            smem: bytes of dynamic shared memory.
            args: one per parameter of the kernel, in order. Tensors must be contiguous, or the
                kernel must be given their strides; they are kept alive by the caller.
            cooperative: all blocks are resident at once, so that they can wait for each other.
        """
        ...


class DriverLauncher:
    """Runs kernels on a GPU, on torch's current stream; so a CUDA graph can capture them.

    All kernels are compiled, or read from the cache, and loaded at once: nothing is left to do
    while a graph is captured.

    Args:
        device: a CUDA device.
        kernels: ``(name expression, source file)`` of each kernel that may be launched.
        folder: of the sources; ours if None.

    Raises:
        KernelBuildError: there are no kernels for this device, or no bindings of the driver.
        RuntimeError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        device: torch.device,
        kernels: Iterable[tuple[str, str]],
        *,
        folder: Path | None = None,
    ):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "kernels cannot be loaded while a CUDA graph is captured: "
                "call an operation of layerskip.ops once before"
            )
        self._index = torch.cuda.current_device() if device.index is None else device.index
        arch = arch_for(torch.cuda.get_device_capability(self._index))
        names, sources = zip(*kernels, strict=True)
        with ThreadPoolExecutor() as pool:  # NVRTC runs without Python's lock
            compiling = [
                pool.submit(compile_kernel, name, source, arch, folder=folder)
                for name, source in zip(names, sources, strict=True)
            ]
        cubins = [future.result() for future in compiling]
        self._driver = _driver()
        self._functions: dict[str, Any] = {}
        with torch.cuda.device(self._index):
            torch.zeros(1, device="cuda")  # makes torch's context the current one
            (self._context,) = self._call("cuCtxGetCurrent")
            for name, cubin in zip(names, cubins, strict=True):
                (module,) = self._call("cuModuleLoadData", cubin.image)
                found = self._call("cuModuleGetFunction", module, cubin.symbol.encode())
                self._functions[name] = found[0]
        self._smem: dict[str, int] = {}

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        smem: int,
        args: Sequence[Argument],
        *,
        cooperative: bool = False,
    ) -> None:
        """Start one kernel; see ``Launcher``."""
        params = pack_arguments(args)
        function = self._functions[kernel]
        start = "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel"
        with torch.cuda.device(self._index):
            # A thread in which torch has not called CUDA yet has no context.
            self._call("cuCtxSetCurrent", self._context)
            self._allow_smem(kernel, smem)
            stream = torch.cuda.current_stream().cuda_stream
            rest = () if cooperative else (0,)
            self._call(
                start, function, *grid, *block, smem, stream, ctypes.addressof(params), *rest
            )

    def _allow_smem(self, kernel: str, smem: int) -> None:
        """More dynamic shared memory than 48 KB has to be asked for."""
        if smem > max(DEFAULT_SMEM, self._smem.get(kernel, 0)):
            attribute = self._driver.CUfunction_attribute
            self._call(
                "cuFuncSetAttribute",
                self._functions[kernel],
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                smem,
            )
            self._smem[kernel] = smem

    def _call(self, function: str, *args: Any) -> tuple[Any, ...]:
        """What a driver's function returned besides its status."""
        status, *rest = getattr(self._driver, function)(*args)
        if int(status) != 0:
            raise RuntimeError(f"the CUDA driver's {function} failed: {status!r}")
        return tuple(rest)


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelBuildError(
            "cuda-bindings is missing: torch 2.11 and later bring it with their CUDA builds, "
            f"or install it ({error})"
        ) from error


def argument_codes(args: Sequence[Argument]) -> str:
    """One letter for each argument: P pointer, i int, f float; q, Q, I, ? the ctypes scalars.

    Raises:
        TypeError: an argument is of no type that a kernel can take.
    """
    return "".join(map(_code, args))


def pack_arguments(args: Sequence[Argument]) -> Any:
    """The ``void **`` that a launch takes: a ctypes array, which also owns what it points to.

    Raises:
        TypeError: an argument is of no type that a kernel can take.
        ValueError: an integer does not fit its parameter.
    """
    cells = ctypes.create_string_buffer(8 * len(args) + 8)
    layout = "=" + "".join(_CELLS[code] for code in argument_codes(args))
    try:
        struct.pack_into(layout, cells, 0, *map(_value, args))
    except struct.error as error:
        raise ValueError(
            f"a kernel's argument does not fit its parameter ({error}): "
            "give integers of 64 bits as ctypes.c_int64"
        ) from None
    base = ctypes.addressof(cells)
    pointers = _pointer_array(len(args))(*range(base, base + 8 * len(args), 8))
    pointers.cells = cells
    return pointers


def _code(arg: Argument) -> str:
    if arg is None or isinstance(arg, Tensor):
        return "P"
    if isinstance(arg, bool):
        return "?"
    if isinstance(arg, int):
        return "i"
    if isinstance(arg, float):
        return "f"
    if type(arg) in _SCALARS:
        return _SCALARS[type(arg)]
    raise TypeError(
        f"a kernel takes tensors, None, int, float and ctypes scalars, not {type(arg).__name__}"
    )


def _value(arg: Argument) -> Any:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    return 0 if arg is None else getattr(arg, "value", arg)


@functools.cache
def _pointer_array(length: int) -> Any:
    """A ctypes array type that, unlike the plain one, can hold a reference."""
    return type("Pointers", (ctypes.c_void_p * length,), {})
