"""Starting a kernel: one call with the shape of ``cuLaunchKernel``, and the driver behind it.

The other thing behind it is the CPU emulator of the tests (``tests/kernels/emulator.py``): the
same sources, the same grid arithmetic and the same arguments, without a GPU.
"""

import ctypes
import functools
import importlib
import operator
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from layerskip.ops.build import Cubin, KernelBuildError, arch_for, compile_kernel

Dim3 = tuple[int, int, int]
Argument = (
    Tensor | int | float | ctypes.c_int64 | ctypes.c_uint64 | ctypes.c_uint32 | ctypes.c_bool | None
)
"""What a kernel takes: a tensor or None for a pointer, an int for ``int``, a float for ``float``,
and a ctypes scalar for any other type."""

_SCALARS = {ctypes.c_int64: "q", ctypes.c_uint64: "Q", ctypes.c_uint32: "I", ctypes.c_bool: "?"}
DEFAULT_SMEM = 48 * 1024  # bytes that any kernel may use
OVERLAP_CAPABILITY = (9, 0)
OVERLAP_DRIVER = 12030  # CUDA 12.3: edges of a graph say when what follows may start
# Every argument has a cell of 8 bytes of its own.
_CELLS = {"P": "Q", "i": "i4x", "f": "f4x", "q": "q", "Q": "Q", "I": "I4x", "?": "?7x"}
MOST_ARGUMENTS = 64  # of a launch by the driver
KEPT_LAYOUTS = 256  # of argument types; every kernel has one
KEPT_CONFIGS = 1024  # of launches: grids change with rows and slots


class Launcher(Protocol):
    """Something that runs kernels of the catalog, in the order in which they are given."""

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        smem: int,
        args: Sequence[Argument],
    ) -> None:
        """Start one kernel.

        Args:
            kernel: its name in the catalog, such as ``"decode_attention<Bf16,64,1>"``.
            grid: blocks in x, y and z.
            block: threads of a block in x, y and z.
            smem: bytes of dynamic shared memory.
            args: one per parameter of the kernel, in order. Tensors must be contiguous, or the
                kernel must be given their strides; they are kept alive by the caller.
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
        KernelBuildError: there are no kernels for this device, no bindings of the driver, or the
            driver cannot load what was compiled.
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
        self._capability = torch.cuda.get_device_capability(self._index)
        arch = arch_for(self._capability)
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
                self._functions[name] = self._loaded(cubin)
        self._smem: dict[str, int] = {}
        self._asking = threading.Lock()
        self._overlap = self.why_no_overlap is None
        self._free_cells = _FreeCells()
        self._stream = _stream_of(self._index)
        # The driver only reads one, and only while it starts a kernel: threads may share them.
        self._config = functools.lru_cache(KEPT_CONFIGS)(
            functools.partial(early_config, self._driver)
        )

    def _loaded(self, cubin: Cubin) -> Any:
        try:
            (module,) = self._call("cuModuleLoadData", cubin.image)
            (function,) = self._call("cuModuleGetFunction", module, cubin.symbol.encode())
        except RuntimeError as error:  # as of a driver that is older than the compiler
            raise KernelBuildError(f"the kernels cannot be loaded: {error}") from error
        return function

    @property
    def why_no_overlap(self) -> str | None:
        """What ``overlapping`` lacks here, one sentence; None where it can be had."""
        if self._capability < OVERLAP_CAPABILITY:
            major, minor = self._capability
            return f"a kernel can start early from sm_90 on, and this GPU is sm_{major}{minor}"
        (version,) = self._call("cuDriverGetVersion")
        if version < OVERLAP_DRIVER:
            found = f"{version // 1000}.{version % 1000 // 10}"
            return f"graphs keep early starts from CUDA 12.3 on, and this driver is for {found}"
        return None

    @contextmanager
    def overlapping(self, allowed: bool) -> Iterator[None]:
        """Whether a kernel launched inside may start while the one before it still runs.

        It may wherever it can, unless this says otherwise: a token of Llama-3.2-1B's shape takes
        4 to 8 % less so on an H200, and no bit differs (bench/LOG.md, 2026-11-26).

        That is programmatic dependent launch (CUDA Programming Guide 4.5; ``griddepcontrol`` in the
        PTX ISA). Every kernel launched so has to begin with ``take_turn()`` of
        ``kernels/common.cuh``, as all of the catalog do; no result depends on it.

        Only the place between two of our kernels that follow each other is loosened. One of
        torch's before ours lets nobody in early: ours starts when it ends; a library's that does
        is waited for all the same. One of torch's after ours is launched the usual way: it starts
        when ours has ended, and by then all before it have. So do copies, fills and events.
        A CUDA graph keeps its loose edges (``CUgraphEdgeData`` in the driver's reference) in every
        replay; one that is captured without gets none.

        It is the launcher's, for all threads.

        Raises:
            ValueError: this GPU or its driver cannot; ``why_no_overlap`` says why.
        """
        if allowed and (reason := self.why_no_overlap) is not None:
            raise ValueError(f"kernels cannot overlap here: {reason}")
        before, self._overlap = self._overlap, allowed
        try:
            yield
        finally:
            self._overlap = before

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        smem: int,
        args: Sequence[Argument],
    ) -> None:
        """Start one kernel; see ``Launcher``."""
        if torch.cuda.current_device() == self._index:
            self._start(kernel, grid, block, smem, args)
        else:
            with torch.cuda.device(self._index):
                self._start(kernel, grid, block, smem, args)

    def _start(
        self, kernel: str, grid: Dim3, block: Dim3, smem: int, args: Sequence[Argument]
    ) -> None:
        """Start one kernel; the device is the current one."""
        free = self._free_cells.of_thread
        cells = free.pop() if free else _Cells()  # a signal's handler may launch before we do
        place = cells.fill(args)
        function = self._functions[kernel]
        # A thread in which torch has not called CUDA yet has no context.
        self._call("cuCtxSetCurrent", self._context)
        if smem > DEFAULT_SMEM:
            self._allow_smem(kernel, smem)
        stream = self._stream()
        if self._overlap:
            config = self._config(grid, block, smem, stream)
            self._call("cuLaunchKernelEx", config, function, place, 0)
        else:
            self._call("cuLaunchKernel", function, *grid, *block, smem, stream, place, 0)
        free.append(cells)

    def _allow_smem(self, kernel: str, smem: int) -> None:
        """More dynamic shared memory than 48 KB has to be asked for."""
        if smem <= self._smem.get(kernel, 0):
            return
        with self._asking:  # another thread may have asked for more, which must not be undone
            if smem <= self._smem.get(kernel, 0):
                return
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


def early_config(driver: Any, grid: Dim3, block: Dim3, smem: int, stream: int) -> Any:
    """The ``CUlaunchConfig`` of a kernel that may start before the one in front of it has ended.

    Args:
        driver: the module ``cuda.bindings.driver``.
        grid, block, smem: as for ``Launcher.launch``.
        stream: its handle.
    """
    early = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = smem, stream
    config.attrs, config.numAttrs = [early], 1
    return config


def _stream_of(index: int) -> Callable[[], int]:
    """What tells the handle of torch's current stream on a device."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    if raw is not None:  # what Triton asks, too: by the public way it takes half of a launch
        return functools.partial(raw, index)
    return lambda: torch.cuda.current_stream().cuda_stream


@functools.lru_cache(KEPT_LAYOUTS)
def _layout(*types: type) -> tuple[Callable[..., None], list[tuple[int, Callable[[Any], int]]]]:
    """How arguments of some types get into their cells: ``pack(buffer, offset, *values)``, and the
    places of those that are no values themselves, with what gives these."""
    packer = struct.Struct("=" + "".join(_CELLS[_code(kind)] for kind in types))
    readings = enumerate(map(_reading, types))
    return packer.pack_into, [(i, read) for i, read in readings if read]


def _code(kind: type) -> str:
    """P pointer, i int, f float; q, Q, I, ? the ctypes scalars."""
    if issubclass(kind, Tensor | None):
        return "P"
    if issubclass(kind, bool):
        return "?"
    if issubclass(kind, int):
        return "i"
    if issubclass(kind, float):
        return "f"
    if kind in _SCALARS:
        return _SCALARS[kind]
    raise TypeError(
        f"a kernel takes tensors, None, int, float and ctypes scalars, not {kind.__name__}"
    )


def _reading(kind: type) -> Callable[[Any], int] | None:
    if issubclass(kind, Tensor):
        return Tensor.data_ptr
    if kind is type(None):
        return lambda _: 0
    return None if issubclass(kind, int | float) else operator.attrgetter("value")


def _write_arguments(cells: Any, args: Sequence[Argument]) -> None:
    """Each argument into its cell.

    Raises:
        TypeError: an argument is of no type that a kernel can take.
        ValueError: an integer does not fit its parameter.
    """
    pack, reads = _layout(*map(type, args))
    values: list[Any] = [*args]
    for place, read in reads:
        values[place] = read(values[place])
    try:
        pack(cells, 0, *values)
    except struct.error as error:
        raise ValueError(
            f"a kernel's argument does not fit its parameter ({error}): "
            "give integers of 64 bits as ctypes.c_int64"
        ) from None


def _pointers_to(cells: Any, count: int) -> Any:
    """A ctypes array of the addresses of the first cells, which it keeps alive."""
    base = ctypes.addressof(cells)
    pointers = _pointer_array(count)(*range(base, base + 8 * count, 8))
    pointers.cells = cells
    return pointers


class _FreeCells(threading.local):
    """Each thread's places for the arguments of its launches.

    The driver has copied them when it has started a kernel, so that the next one's can lie there.
    """

    def __init__(self) -> None:
        self.of_thread: list[_Cells] = []


class _Cells:
    """A place for the arguments of one launch."""

    def __init__(self) -> None:
        self._cells = ctypes.create_string_buffer(8 * MOST_ARGUMENTS)
        self._pointers = _pointers_to(self._cells, MOST_ARGUMENTS)
        self._place = ctypes.addressof(self._pointers)

    def fill(self, args: Sequence[Argument]) -> int:
        """Write a launch's arguments; returns the address of the pointers to them.

        Raises:
            TypeError, ValueError: as of ``_write_arguments``; or there are too many.
        """
        if len(args) > MOST_ARGUMENTS:
            raise ValueError(f"a kernel takes {MOST_ARGUMENTS} arguments at most, got {len(args)}")
        _write_arguments(self._cells, args)
        return self._place


@functools.cache
def _pointer_array(length: int) -> Any:
    """A ctypes array type that, unlike the plain one, can hold a reference."""
    return type("Pointers", (ctypes.c_void_p * length,), {})
