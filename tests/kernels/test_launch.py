"""The driver's side of a launch, with a driver that only remembers what it was asked."""

import ctypes
import functools
import importlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulator import argument_codes, pack_arguments
from needs import need

from layerskip import packed
from layerskip.ops import launch
from layerskip.ops.build import Cubin, KernelBuildError
from layerskip.ops.launch import DriverLauncher

STREAM = 77
CONTEXT = "context"
KERNELS = [("scale<4>", "scale.cu"), ("sum", "sum.cu")]


def read_ints(params, count=2):
    """The first parameters of a launch, if they are of type int."""
    pointers = (ctypes.c_void_p * count).from_address(params)
    return [ctypes.c_int.from_address(pointer).value for pointer in pointers]


class FakeDriver:
    """cuda.bindings.driver, as far as it is used; ``failing`` names a function that fails."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self):
        self.calls = []
        self.read = []
        self.failing = None
        self.version = 12020  # too old for early starts

    def __getattr__(self, name):
        return functools.partial(self._answer, name)

    def _answer(self, name, *args):
        self.calls.append((name, *args))
        if name == "cuLaunchKernel":  # the driver reads them before it returns
            self.read.append(read_ints(args[-2]))
        if name == self.failing:
            return (701,)
        answers = {
            "cuCtxGetCurrent": CONTEXT,
            "cuModuleLoadData": f"module of {args[:1]}",
            "cuModuleGetFunction": f"function {args[-1:]}",
            "cuDriverGetVersion": self.version,
        }
        return (0, answers[name]) if name in answers else (0,)

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    """Stands in for a GPU of sm_90, its driver, and the compiler."""
    fake = FakeDriver()
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    monkeypatch.setattr(
        launch,
        "compile_kernel",
        lambda name, source, arch, folder: Cubin(f"{name} {arch}".encode(), name.upper(), ""),
    )
    monkeypatch.setattr(launch, "arch_for", lambda capability: "sm_{}{}".format(*capability))
    stream = SimpleNamespace(cuda_stream=STREAM)
    # A build of torch for CUDA has it, and asks a driver that is not there.
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())
    monkeypatch.setattr(launch.torch, "zeros", lambda *args, **kwargs: None)
    return fake


@pytest.fixture
def launcher(driver) -> DriverLauncher:
    return DriverLauncher(torch.device("cuda"), KERNELS)


@pytest.fixture
def raw_stream(driver, monkeypatch):
    """A build of torch for CUDA, which tells a stream's handle; returns what it says."""
    streams = {0: STREAM, 1: 78}

    def never():
        raise AssertionError("the slow way")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", never)
    return streams


def test_the_stream_is_asked_for_at_every_launch(driver, raw_stream):
    launcher = DriverLauncher(torch.device("cuda", 1), KERNELS)
    for stream in (78, 99):  # torch has another one while a graph is captured
        raw_stream[1] = stream
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1])
    assert [args[8] for args in driver.named("cuLaunchKernel")] == [78, 99]


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, [1])])
def test_a_launch_makes_its_device_the_current_one(driver, monkeypatch, index, entered):
    launcher = DriverLauncher(torch.device("cuda", index), KERNELS)
    seen = []

    def device(to):
        seen.append(to)
        return threading.Lock()

    monkeypatch.setattr(torch.cuda, "device", device)
    launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1])
    assert seen == entered


def test_a_launch_has_its_own_arguments(driver, launcher):
    for args in ([1, 2], [3, 4], [5, -6, 7], [8, 9]):
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, args)
    assert driver.read == [[1, 2], [3, 4], [5, -6], [8, 9]]


def test_threads_share_no_arguments(driver, launcher, monkeypatch):
    """Each reads its own when the other has written: the driver takes no lock of Python's."""
    both, answer = threading.Barrier(2, timeout=20), driver._answer

    def wait(name, *args):
        if name == "cuLaunchKernel":
            both.wait()
        return answer(name, *args)

    monkeypatch.setattr(driver, "_answer", wait)
    threads = [
        threading.Thread(
            target=launcher.launch, args=("sum", (1, 1, 1), (32, 1, 1), 0, [number, number])
        )
        for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(driver.read) == [[1, 1], [2, 2]]


def test_a_launch_takes_no_more_arguments_than_have_a_place(driver, launcher):
    many = launch.MOST_ARGUMENTS
    launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1] * many)
    with pytest.raises(ValueError, match=f"{many} arguments at most, got {many + 1}"):
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1] * (many + 1))
    assert len(driver.named("cuLaunchKernel")) == 1


@pytest.mark.parametrize(
    ("args", "error", "told"),
    [([1, "3"], TypeError, "a kernel takes tensors"), ([1, 2**31], ValueError, "64 bits")],
)
def test_bad_arguments_are_refused_every_time(driver, launcher, args, error, told):
    launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1, 2])
    for _ in range(2):
        with pytest.raises(error, match=told):
            launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, args)
    assert len(driver.named("cuLaunchKernel")) == 1


def test_all_kernels_are_loaded_at_once(driver, launcher):
    assert driver.named("cuModuleLoadData") == [(b"scale<4> sm_90",), (b"sum sm_90",)]
    assert [args[1] for args in driver.named("cuModuleGetFunction")] == [b"SCALE<4>", b"SUM"]


def test_nothing_is_loaded_while_a_graph_is_captured(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="once before"):
        DriverLauncher(torch.device("cuda"), KERNELS)
    assert driver.calls == []


def test_a_launch_is_culaunchkernel_on_the_current_stream(driver, launcher):
    launcher.launch("sum", (3, 2, 1), (64, 1, 1), 256, [1])
    ((function, *sizes, smem, stream, params, extra),) = driver.named("cuLaunchKernel")
    assert function == "function (b'SUM',)"
    assert sizes == [3, 2, 1, 64, 1, 1]
    assert (smem, stream, extra) == (256, STREAM, 0)
    assert isinstance(params, int)
    assert driver.calls.index(("cuCtxSetCurrent", CONTEXT)) == len(driver.calls) - 2


@pytest.fixture
def early(driver) -> FakeDriver:
    """The same driver with the real structures of a launch."""
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        bindings = None
    need(bindings, "cuda-bindings (pip install 'layerskip[kernels]')")
    for name in ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig"):
        setattr(driver, name, getattr(bindings, name))
    driver.version = 12030
    return driver


def start(launcher):
    launcher.launch("sum", (3, 2, 1), (64, 4, 1), 256, [1])


@pytest.fixture
def overlapping(early) -> DriverLauncher:
    """A launcher that lets kernels start early."""
    return DriverLauncher(torch.device("cuda"), KERNELS)


def test_a_launch_within_a_launch_leaves_its_arguments_alone(driver, launcher, monkeypatch):
    """As by a signal's handler, which runs between any two lines."""
    answer = driver._answer

    def interrupted(name, *args):
        if name == "cuCtxSetCurrent":
            monkeypatch.setattr(driver, "_answer", answer)
            launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [100, 200])
        return answer(name, *args)

    for _ in range(2):  # also where a place is free
        driver.read.clear()
        monkeypatch.setattr(driver, "_answer", interrupted)
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [1, 2])
        assert driver.read == [[100, 200], [1, 2]]


def test_kernels_start_early_unless_asked_not_to(early, overlapping):
    start(overlapping)
    with overlapping.overlapping(False):
        start(overlapping)
        with overlapping.overlapping(True):
            start(overlapping)
        start(overlapping)
    start(overlapping)
    assert [call[0] for call in early.calls if call[0].startswith("cuLaunch")] == [
        "cuLaunchKernelEx",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
    ]


def test_an_early_start_is_an_attribute_of_the_launch(early, overlapping):
    start(overlapping)
    ((config, function, params, extra),) = early.named("cuLaunchKernelEx")
    assert function == "function (b'SUM',)"
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 4, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (256, STREAM)
    (attribute,) = config.attrs
    kinds = early.CUlaunchAttributeID
    assert config.numAttrs == 1
    assert attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert isinstance(params, int)
    assert extra == 0


def test_no_launch_has_the_configuration_of_another(early, overlapping, monkeypatch):
    launches = [
        ((3, 2, 1), (64, 4, 1), 256, STREAM),
        ((2, 3, 1), (64, 4, 1), 256, STREAM),
        ((3, 2, 1), (4, 64, 1), 256, STREAM),
        ((3, 2, 1), (64, 4, 1), 512, STREAM),
        ((3, 2, 1), (64, 4, 1), 256, 78),
        ((3, 2, 1), (64, 4, 1), 256, STREAM),
    ]
    for *sizes, stream in launches:
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda stream=stream: SimpleNamespace(cuda_stream=stream)
        )
        overlapping.launch("sum", *sizes, [1])
    configs = [args[0] for args in early.named("cuLaunchKernelEx")]
    assert [
        (
            (c.gridDimX, c.gridDimY, c.gridDimZ),
            (c.blockDimX, c.blockDimY, c.blockDimZ),
            c.sharedMemBytes,
            int(c.hStream),
        )
        for c in configs
    ] == launches
    assert configs[0] is configs[-1]  # made once


def test_an_error_leaves_early_starts_as_they_were(early, overlapping):
    early.failing = "cuLaunchKernel"
    failed = pytest.raises(RuntimeError, match="cuLaunchKernel failed: 701")
    with failed, overlapping.overlapping(False):
        start(overlapping)
    start(overlapping)
    assert len(early.named("cuLaunchKernelEx")) == 1


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((8, 9), 13000, "from sm_90 on, and this GPU is sm_89"),
        ((9, 0), 12020, "from CUDA 12.3 on, and this driver is for 12.2"),
    ],
)
def test_early_starts_are_refused_where_there_are_none(
    driver, monkeypatch, capability, version, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    driver.version = version
    launcher = DriverLauncher(torch.device("cuda"), KERNELS)
    refused = pytest.raises(ValueError, match=f"kernels cannot overlap here: .*{reason}")
    with refused, launcher.overlapping(True):
        pass
    start(launcher)
    assert len(driver.named("cuLaunchKernel")) == 1


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_newer_gpus_can_overlap(driver, monkeypatch, capability):
    driver.version = 12030
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert DriverLauncher(torch.device("cuda"), KERNELS).why_no_overlap is None


def test_the_operations_of_a_gpu_share_the_switch(driver):
    from layerskip.ops import registry

    device = torch.device("cuda", 0)
    registry.cuda_ops.cache_clear()
    registry.cuda_launcher.cache_clear()
    try:
        assert registry.cuda_ops(device)._launch.__self__ is registry.cuda_launcher(device)
    finally:
        registry.cuda_ops.cache_clear()
        registry.cuda_launcher.cache_clear()


@pytest.fixture
def cuda_noise():
    """The registry's, which has met no GPU yet."""
    from layerskip.ops.registry import cuda_noise

    cuda_noise.cache_clear()
    yield cuda_noise
    cuda_noise.cache_clear()


def test_noise_loads_no_kernel_but_its_own(driver, cuda_noise):
    device = torch.device("cuda", 0)
    assert cuda_noise(device) is cuda_noise(device)
    assert driver.named("cuModuleLoadData") == [(b"gumbel_noise sm_90",)]


def test_where_no_kernel_can_be_had_the_host_draws(driver, cuda_noise, monkeypatch):
    asked = []

    def too_old(capability):
        asked.append(capability)
        raise KernelBuildError("too old")

    monkeypatch.setattr(launch, "arch_for", too_old)
    assert [cuda_noise(torch.device("cuda", 0)) for _ in range(3)] == [None] * 3
    assert asked == [(9, 0)]


def test_more_shared_memory_is_asked_for_once(driver, launcher):
    for smem in (48 * 1024, 60_000, 50_000, 60_000, 70_000):
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), smem, [])
    assert [args[-1] for args in driver.named("cuFuncSetAttribute")] == [60_000, 70_000]


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_kernels_that_the_driver_cannot_load_are_not_to_be_had(driver, monkeypatch, function):
    """So that a model on such a GPU gets the general stack, and is told why."""
    driver.failing = function
    monkeypatch.setattr(
        "layerskip.ops.registry.cuda_ops", lambda device: DriverLauncher(device, KERNELS)
    )
    reason = f"the kernels cannot be loaded: the CUDA driver's {function} failed: 701"
    assert packed._failure(torch.device("cuda", 0)) == reason


def test_a_failure_names_the_function(driver, launcher):
    driver.failing = "cuLaunchKernel"
    with pytest.raises(RuntimeError, match="the CUDA driver's cuLaunchKernel failed: 701"):
        launcher.launch("sum", (1, 1, 1), (32, 1, 1), 0, [])


def test_without_bindings_one_sentence_says_so(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(KernelBuildError, match="cuda-bindings is missing"):
        launch._driver()


def test_arguments_are_packed_as_c_would():
    tensor = torch.zeros(3)
    args = [tensor, None, -5, 0.25, True, ctypes.c_int64(-(2**40)), ctypes.c_uint64(2**64 - 1)]
    args.append(ctypes.c_uint32(2**32 - 1))
    packed = pack_arguments(args)
    assert argument_codes(args) == "PPif?qQI"
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_bool]
    types += [ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32]
    values = [kind.from_address(packed[i]).value for i, kind in enumerate(types)]
    wanted = [tensor.data_ptr(), None, -5, 0.25, True, -(2**40), 2**64 - 1, 2**32 - 1]
    assert values == wanted
    assert all(packed[i] % 8 == packed[0] % 8 for i in range(len(args)))


def test_packing_keeps_every_launch_apart():
    first, second = pack_arguments([1, 2]), pack_arguments([3, 4])
    assert [read_ints(ctypes.addressof(packed)) for packed in (first, second)] == [[1, 2], [3, 4]]


def test_subtypes_are_packed_as_their_types():
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert argument_codes([parameter, np.float64(0.5)]) == "Pf"
    packed = pack_arguments([parameter, np.float64(0.5)])
    assert ctypes.c_void_p.from_address(packed[0]).value == parameter.data_ptr()
    assert ctypes.c_float.from_address(packed[1]).value == 0.5


def test_no_arguments_pack_too():
    assert len(pack_arguments([])) == 0


@pytest.mark.parametrize("arg", ["3", [1], ctypes.c_double(1)])
def test_other_types_are_refused(arg):
    with pytest.raises(TypeError, match="a kernel takes tensors"):
        pack_arguments([arg])


@pytest.mark.parametrize("arg", [2**31, -(2**31) - 1])
def test_integers_of_more_than_32_bits_need_a_type(arg):
    with pytest.raises(ValueError, match="give integers of 64 bits"):
        pack_arguments([arg])
