"""The emulator itself: it computes what a GPU would, and reports what a GPU would not."""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import (
    EmulatorError,
    EmulatorLauncher,
    Toolchain,
    begin,
    begin_runtime,
    poisoned,
    run_with,
)
from needs import need, need_compiler

HERE = Path(__file__).parent
CASES = (HERE / "cases.cu").read_text(encoding="utf-8")
SEEDS = [0, 1, 2, 3]
TEMPLATES = ["mma<true>", "mma<false>", "copies<0>", "copies<1>", "copies<3>"]
NAMES = [*re.findall(r"^__global__ void (\w+)", CASES, flags=re.MULTILINE), *TEMPLATES]
NAMES = [name for name in NAMES if name not in {"mma", "copies"}]
CASE_KERNELS = [(name, "cases.cu") for name in NAMES]
TOOLCHAINS = {
    "g++": Toolchain(),
    "ucontext": Toolchain(ucontext=True),
    "clang++": Toolchain("clang++"),
}


def compile_ahead(fixtures: set[str]) -> None:
    """While other tests run; see conftest.py."""
    if "emulator" not in fixtures or Toolchain.default().sanitize:
        return
    for toolchain in TOOLCHAINS.values():
        if toolchain.path is not None:
            begin(CASE_KERNELS, folder=HERE, toolchain=toolchain)
    if Toolchain().path is not None:
        begin_runtime(Toolchain(sanitize=True))


@functools.cache
def launcher(toolchain: Toolchain) -> EmulatorLauncher:
    need_compiler(toolchain)
    return EmulatorLauncher(CASE_KERNELS, folder=HERE, toolchain=toolchain)


@pytest.fixture(params=TOOLCHAINS.values(), ids=TOOLCHAINS)
def emulator(request) -> EmulatorLauncher:
    """Under every toolchain; in a sanitized process, under that one alone."""
    toolchain = Toolchain.default() if Toolchain.default().sanitize else request.param
    emulator = launcher(toolchain)
    emulator.seed = 0
    return emulator


@pytest.fixture(params=SEEDS)
def ordered(emulator, request) -> EmulatorLauncher:
    """In several orders of threads."""
    emulator.seed = request.param
    return emulator


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def run(emulator, kernel, threads, *args, blocks=1, smem=0, cooperative=False):
    """A grid and blocks of one dimension."""
    grid, block = (blocks, 1, 1), (threads, 1, 1)
    emulator.launch(kernel, grid, block, smem, args, cooperative=cooperative)


def counting(n, dtype=torch.int32):
    return torch.arange(n, dtype=dtype)


def test_indices(ordered):
    out = poisoned(24, 30, dtype=torch.int32)
    ordered.launch("indices", (2, 3, 4), (5, 3, 2), 0, [out])
    assert torch.equal(out, counting(24)[:, None] * 1000 + counting(30)[None])


def test_parameters_of_every_type(emulator):
    out = poisoned(1, dtype=torch.int32)
    wide = [ctypes.c_int64(-(2**40)), ctypes.c_uint64(2**63), ctypes.c_uint32(2**32 - 1)]
    run(emulator, "parameters", 1, out, -3, 0.5, *wide, True, None)
    assert out.tolist() == [1]


def test_barrier(ordered):
    out = poisoned(96, dtype=torch.int32)
    run(ordered, "reverse", 96, counting(96), out, smem=4 * 96)
    assert torch.equal(out, counting(96).flip(0))


def reads_before_writes(emulator, kernel, expected):
    out = poisoned(64, dtype=torch.int32)
    run(emulator, kernel, 64, counting(64), out, smem=4 * 64)
    return not torch.equal(out, expected)


def test_a_missing_barrier_shows(ordered):
    assert reads_before_writes(ordered, "reverse_without_barrier", counting(64).flip(0))


def test_a_race_that_is_right_in_order_shows_in_another(emulator):
    expected = (counting(64) - 1).clamp(min=0)
    found = []
    for seed in SEEDS:
        emulator.seed = seed
        found.append(reads_before_writes(emulator, "shift_without_barrier", expected))
    assert found == [False, True, True, True]


def test_a_race_with_a_warp_that_is_far_ahead_shows(emulator):
    expected = 300 + 2 * ((counting(64) + 32) % 64)
    found = []
    for seed in SEEDS:
        emulator.seed = seed
        out = poisoned(64, dtype=torch.int32)
        run(emulator, "rotate_without_second_barrier", 64, out, smem=4 * 64)
        found.append(not torch.equal(out, expected))
    assert found == [False, False, False, True]


def test_shared_memory_is_poisoned(emulator):
    out = torch.zeros(32)
    run(emulator, "uninitialised", 32, out, smem=4 * 32)
    assert out.isnan().all()


def test_overrun_of_shared_memory(emulator):
    out = poisoned(32, dtype=torch.int32)
    run(emulator, "overrun", 32, out, smem=4 * 33)
    assert out.tolist() == [7] * 32
    if Toolchain.default().sanitize:
        return  # ends the process: test_the_sanitizer_names_the_line
    with pytest.raises(EmulatorError, match=r"block \(0,0,0\) wrote past its 128 bytes"):
        run(emulator, "overrun", 32, out, smem=4 * 32)


def test_threads_that_returned_do_not_count_at_a_barrier(ordered):
    out = poisoned(32, dtype=torch.int32)
    run(ordered, "early_exit", 64, out, smem=4 * 32)
    assert torch.equal(out, counting(32).flip(0))


def lines_of(kernel: str, call: str) -> list[int]:
    """Where a call stands in a kernel of cases.cu."""
    start = CASES.index(f" {kernel}(")
    text = CASES[start : CASES.index("\n}\n", start)]
    first = CASES[:start].count("\n") + 1
    return [first + text[: m.start()].count("\n") for m in re.finditer(re.escape(call), text)]


def test_divergent_barriers_are_reported_with_both_lines(emulator):
    low, high = lines_of("divergent", "__syncthreads()")
    report = rf"thread 32 of block \(0,0,0\) meets .* cases.cu:{high}, they at .*cases.cu:{low}$"
    with pytest.raises(EmulatorError, match=report.replace(" .* ", ".*")):
        run(emulator, "divergent", 64)


def test_a_deadlock_is_reported_with_threads_and_line(emulator):
    (line,) = lines_of("absent_lanes", "__shfl_xor_sync")
    out = poisoned(32, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="deadlock") as caught:
        run(emulator, "absent_lanes", 32, out)
    text = str(caught.value)
    assert re.search(rf"thread 0 of block \(0,0,0\) waits for .*cases.cu:{line}\n", text)
    assert "and 8 more" in text


def test_a_loop_without_end_is_reported(emulator):
    (line,) = lines_of("spins", "load_acquire")
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=rf"deadlock:\n  thread 0 .* spins at .*:{line}"):
        run(emulator, "spins", 1, flag)


def test_the_emulator_goes_on_after_an_error(emulator):
    with pytest.raises(EmulatorError):
        run(emulator, "divergent", 64)
    test_barrier(emulator)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_shuffles(ordered, width):
    value = torch.randperm(32, dtype=torch.int32)
    out = poisoned(4, 32, dtype=torch.int32)
    run(ordered, "shuffles", 32, value, out, width)
    lane = torch.arange(32)
    first, place = lane - lane % width, lane % width
    down = torch.where(place + 2 < width, lane + 2, lane)
    up = torch.where(place >= 2, lane - 2, lane)
    expected = torch.stack([value[first + 5 % width], value[lane ^ 3], value[down], value[up]])
    assert torch.equal(out, expected)


def bits_set(flags) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def test_halves_of_a_warp_vote_apart(ordered):
    value = torch.randint(4, (32,), dtype=torch.int32)
    out = poisoned(3, 32, dtype=torch.int32)
    run(ordered, "half_warps", 32, value, out)
    for round_, got in enumerate(out.numpy().view(np.uint32).tolist()):
        votes = bits_set((value > round_).tolist())
        assert got == [votes & 0xFFFF] * 16 + [votes & 0xFFFF0000] * 16


def test_votes(emulator):
    out = poisoned(32, dtype=torch.int32)
    for value, expected in [(torch.zeros(32), 0), (torch.ones(32), 3), (counting(32), 2)]:
        run(emulator, "votes", 32, value.int(), out)
        assert out.tolist() == [expected] * 32


@pytest.mark.parametrize(
    ("low", "high", "report"),
    [
        (0x1FFFF, 0xFFFF8000, "another mask"),  # lane 15 waits for 16, which waits for 15
        (0xFFFF, 0xFFFF, "lacks its lane"),
        (0xFFFFFF, 0xFFFF0000, "deadlock"),  # lanes 16 to 23 never come to the first half
    ],
)
def test_wrong_masks_are_reported(emulator, low, high, report):
    out = poisoned(32, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=report):
        run(emulator, "given_masks", 32, ctypes.c_uint32(low), ctypes.c_uint32(high), out)


def test_atomics_of_many_blocks(ordered):
    sums, largest, smallest, wrapped = (torch.zeros(1, dtype=torch.int32) for _ in range(4))
    total = torch.zeros(1)
    run(ordered, "atomics", 64, sums, total, largest, smallest, wrapped, blocks=8)
    assert (sums.item(), total.item()) == (511 * 512 // 2, 256.0)
    assert (largest.item(), smallest.item(), wrapped.item()) == (511, 0, 512 % 7)


def test_the_last_block_finishes(ordered):
    partial, out = poisoned(9, dtype=torch.int32), poisoned(1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    run(ordered, "last_block", 32, partial, count, out, blocks=9, smem=4)
    assert out.item() == 45


@pytest.mark.parametrize(
    ("name", "dtype"), [("mma<true>", torch.bfloat16), ("mma<false>", torch.float16)]
)
def test_mma(ordered, name, dtype):
    a, b = torch.randn(16, 48).to(dtype), torch.randn(8, 48).to(dtype)
    c = poisoned(16, 8)
    run(ordered, name, 32, a, b, c, 48)
    expected = np.zeros((16, 8), dtype=np.float32)
    for k in range(48):  # products are exact in fp64, so that this rounds once, as fma does
        product = np.outer(a[:, k].double(), b[:, k].double())
        expected = (expected.astype(np.float64) + product).astype(np.float32)
    assert torch.equal(c, torch.from_numpy(expected))


def test_mma_from_shared_memory(ordered):
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    c, direct = poisoned(16, 8), poisoned(16, 8)
    run(ordered, "mma_from_shared", 32, a, b, c, smem=2 * (256 + 128))
    run(ordered, "mma<true>", 32, a, b.T.contiguous(), direct, 16)
    assert torch.equal(c, direct)


def test_ldmatrix(ordered):
    tiles = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    out = poisoned(32, 2, 4, dtype=torch.int32)
    run(ordered, "ldmatrix_tiles", 32, tiles, out, smem=2 * 256)
    pairs = torch.from_numpy(out.numpy().view(np.int16)).view(32, 2, 4, 2)
    # Lane 4 r + c holds elements (r, 2 c) and (r, 2 c + 1) of each tile, or of its transpose.
    assert torch.equal(pairs[:, 0].transpose(0, 1).reshape(4, 8, 8), tiles)
    assert torch.equal(pairs[:, 1].transpose(0, 1).reshape(4, 8, 8), tiles.transpose(1, 2))


@pytest.mark.parametrize(("left", "arrived"), [(0, 3), (1, 2), (3, 0)])
def test_asynchronous_copies_arrive_when_waited_for(emulator, left, arrived):
    out = poisoned(3, 4, dtype=torch.int32)
    run(emulator, f"copies<{left}>", 1, counting(12), out, smem=48)
    expected = counting(12).view(3, 4)
    expected[1] = 0  # an invalid source writes zeros
    expected[arrived:] = -1  # what shared memory is filled with
    assert torch.equal(out, expected)


def test_a_misaligned_copy_is_reported(emulator):
    with pytest.raises(EmulatorError, match=r"multiples of 16 bytes, at .*cases.cu:\d+"):
        run(emulator, "misaligned_copy", 1, counting(4), smem=32)


def test_half_precision_is_torchs(emulator):
    halves = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.float16))
    noise = torch.randn(2**16)
    values = halves.float() * (1 + noise * 2.0**-12)  # between two halves, subnormal ones too
    bits = poisoned(2**16, dtype=torch.int16)
    back = poisoned(2**16)
    run(emulator, "conversions", 128, values, bits, back, blocks=512)
    torch.testing.assert_close(back, halves.float(), rtol=0, atol=0, equal_nan=True)
    got = torch.from_numpy(bits.numpy().view(np.float16))
    torch.testing.assert_close(got, values.half(), rtol=0, atol=0, equal_nan=True)


def test_cooperative_blocks_wait_for_each_other(ordered):
    first, second = poisoned(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    run(ordered, "two_stages", 32, first, second, counter, blocks=4, cooperative=True)
    assert second.tolist() == [127 * 128 // 2] * 128


def test_a_cooperative_block_waits_for_a_flag(ordered):
    ready, value = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = poisoned(32, dtype=torch.int32)
    run(ordered, "flag", 32, ready, value, out, blocks=3, cooperative=True)
    assert out.tolist() == [42] * 32


@pytest.mark.parametrize(
    ("grid", "block", "smem", "report"),
    [
        ((1, 1, 1), (2048, 1, 1), 0, "no device starts"),
        ((0, 1, 1), (32, 1, 1), 0, "no device starts"),
        ((1, 70000, 1), (32, 1, 1), 0, "no device starts"),
        ((1, 1, 1), (32, 1, 1), 100 * 1024, "more than 101376"),
    ],
)
def test_what_no_device_starts_is_refused(emulator, grid, block, smem, report):
    with pytest.raises(EmulatorError, match=report):
        emulator.launch("divergent", grid, block, smem, [])


def test_wrong_arguments_are_refused(emulator):
    out = poisoned(32, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=r"types PPi, got PPf"):
        run(emulator, "shuffles", 32, out, out, 1.0)
    with pytest.raises(EmulatorError, match="types P, got PP"):
        run(emulator, "uninitialised", 32, out, out)
    with pytest.raises(ValueError, match="c_int64"):
        run(emulator, "shuffles", 32, out, out, 2**40)
    with pytest.raises(TypeError, match="not str"):
        run(emulator, "shuffles", 32, out, out, "8")


def test_only_a_second_compiler_may_be_missing_in_ci(monkeypatch):
    monkeypatch.setenv("LAYERSKIP_REQUIRE_ALL", "1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"clang\+\+ is not installed"):
        need_compiler(Toolchain("clang++"))
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+.* is missing"):
        need_compiler(Toolchain())


def test_a_source_with_an_error_is_refused(tmp_path):
    need(Toolchain().path, "g++")
    (tmp_path / "broken.cu").write_text("__global__ void broken() { nonsense(); }")
    with pytest.raises(EmulatorError, match=r"(?s)g\+\+ refuses broken.*nonsense"):
        EmulatorLauncher([("broken", "broken.cu")], folder=tmp_path, cache=tmp_path)


def test_static_shared_memory_is_refused(tmp_path):
    need(Toolchain().path, "g++")
    (tmp_path / "static.cu").write_text("__global__ void kernel() { __shared__ int x[4]; }")
    with pytest.raises(EmulatorError, match="take shared memory through DYNAMIC_SMEM"):
        EmulatorLauncher([("kernel", "static.cu")], folder=tmp_path, cache=tmp_path)


def test_a_library_is_built_again_when_a_header_changes(tmp_path):
    need(Toolchain().path, "g++")
    (tmp_path / "value.cu").write_text('#include "v.cuh"\n__global__ void k(int *o) { *o = V; }')
    out = poisoned(1, dtype=torch.int32)
    for value in (1, 2):
        (tmp_path / "v.cuh").write_text(f"#define V {value}")
        emulator = EmulatorLauncher([("k", "value.cu")], folder=tmp_path, cache=tmp_path)
        run(emulator, "k", 1, out)
        assert out.item() == value


@pytest.mark.slow  # that it sees a mistake is tested in test_planted.py, too
def test_the_sanitizer_names_the_line(tmp_path):
    """By g++: clang++ 14 names the line, too, but here LLVM's symbolizer then never ends."""
    need_compiler(sanitized := Toolchain(sanitize=True))
    text = CASES[CASES.index("__global__ void overrun") :]
    text = text[: text.index("\n}\n") + 3]
    (tmp_path / "overrun.cu").write_text(text)
    line = text[: text.index("= 7")].count("\n") + 1
    done = run_with(
        sanitized,
        "-c",
        "import sys; from emulator import *; folder = Path(sys.argv[1])\n"
        "e = EmulatorLauncher([('overrun', 'overrun.cu')], folder=folder, cache=folder)\n"
        "e.launch('overrun', (1, 1, 1), (32, 1, 1), 128, [poisoned(32, dtype=torch.int32)])\n",
        str(tmp_path),
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert f"overrun.cu:{line}" in done.stderr


def printed_by_selftest(compiler: str, folder: Path, *runner: str) -> list[str]:
    """What kernels compute in a program of its own, statically linked."""
    program, runtime = folder / f"selftest-{compiler}", HERE / "emulator"
    flags = ["-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"]
    flags += ["-static", "-Wno-unknown-pragmas", f"-I{runtime}"]
    sources = [HERE / "selftest.cpp", *runtime.glob("*.cpp")]
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True, timeout=600)
    done = subprocess.run(
        [*runner, program], check=True, capture_output=True, text=True, timeout=600
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_another_processor_computes_the_same_bits(tmp_path):
    """aarch64, where ucontext changes stacks, under qemu (Debian: g++-aarch64-linux-gnu and
    qemu-user-static)."""
    need(Toolchain().path, "g++")
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64-static"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: aarch64 is tried where it is")
    here = printed_by_selftest("g++", tmp_path)
    there = printed_by_selftest("aarch64-linux-gnu-g++", tmp_path, "qemu-aarch64-static")
    assert there == here
    assert sum("deadlock:" in line for line in here) == len(SEEDS)
    bits = {tuple(line.split()[::2][:2]) for line in here if re.match(r"\w+ \d [0-9a-f]{16}", line)}
    assert len(bits) == len({kernel for kernel, _ in bits}) == 11  # in every order of threads
