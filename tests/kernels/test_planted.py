"""The tests find mistakes: each is planted into a source, and the test that must fail is run.

| planted | what finds it |
|---|---|
| linear: no barrier between the warps' sums and their addition | test_linear: float64 |
| linear: no barrier before the next tile's sums | test_linear: float64 |
| attention: a position sees the next one (wrong mask) | test_attention: float64, ends of blocks |
| attention: values overwritten before all have read them | test_attention: float64, orders |
| linear: a warp's shuffle without one of its lanes in the mask | the emulator: lane and line |
| linear: a lane adds the warps in an order of its own | test_linear: a row's bits in any place |
| linear: a write past the last column (out of bounds) | AddressSanitizer, with the line |

The emulator's own, in cases.cu and test_emulator.py: barriers that are missing, met by some threads
only or at different lines; races that only another order of threads shows; shared memory read
before it is written, or past its end; masks that overlap; copies that are not waited for; waiting
without end. bench/gpu_check.py's, in test_gpu_check.py: bits that depend on the number of rows or
on a column; wrong results; NaN; an argument changed that must not be.
"""

import dataclasses
import re
import shutil
from pathlib import Path

import measure
import pytest
import test_attention
import test_linear
import torch
from emulator import KERNELS, EmulatorError, EmulatorLauncher, Toolchain, run_with
from needs import need_compiler

import layerskip.ops.kernels
from layerskip.ops import definitions
from layerskip.ops.kernels import KernelOps

LINEAR = [("linear<Bf16,1>", "linear.cu")]
ATTENTION = [
    ("decode_attention<Bf16,64,4>", "attention.cu"),
    ("combine_splits<Bf16>", "attention.cu"),
]
WIDE = [("decode_attention<Bf16,80,4>", "attention.cu"), ATTENTION[-1]]


def planted(folder: Path, source: str, right: str, wrong: str) -> Path:
    """A copy of the sources with one mistake in it."""
    shutil.copytree(KERNELS, folder)
    text = (folder / source).read_text(encoding="utf-8")
    assert right in text, f"{source} holds no {right!r} to put a mistake in"
    (folder / source).write_text(text.replace(right, wrong), encoding="utf-8")
    return folder


def check_linear(backend):
    test_linear.test_linear_is_within_its_roundings(backend, torch.bfloat16, 3, 1, 65)


def check_outputs(backend):
    """Five tiles of outputs in one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerskip.ops.kernels, "FEW_TILES", 0)
        patch.setattr(layerskip.ops.kernels, "MANY_BLOCKS", 1)
        backend.launcher.seed = 3  # a warp runs as far ahead as barriers allow
        test_linear.test_linear_is_within_its_roundings(backend, torch.bfloat16, 3, 65, 65)


def check_rows(backend):
    """A row has the same bits in any place, where the sum is nothing but its own rounding."""
    cancelling = torch.tensor([1, 3, -5, 7, -9, 11, -13, 5]).repeat_interleave(32)
    weight = (torch.randint(-8, 8, (16, 32)).repeat(1, 8) * cancelling).bfloat16()
    x = (torch.randn(8, 32) * 2.0 ** torch.randint(16, (8, 32))).bfloat16().repeat(1, 8)
    together = backend.ops.linear(x, weight)
    for i in range(8):
        assert torch.equal(backend.ops.linear(x[i : i + 1], weight)[0], together[i])


def check_wide_heads(backend):
    """16 positions of heads whose values are summed in two parts."""
    case = test_attention.make_case(
        backend, torch.bfloat16, lengths=[250], seqlen=16, heads=2, heads_k=1, dim=80
    )
    want = measure.exactly(definitions.decode_attention, *case)
    backend.launcher.seed = 3  # a warp runs as far ahead as barriers allow
    assert measure.error(backend.ops.decode_attention(*case), want) < 2.0**-8


def check_attention(backend):
    test_attention.test_attention_at_the_borders_of_blocks(backend, torch.bfloat16, 4, 5)


PLANTS = {
    "missing barrier": (
        LINEAR,
        "linear.cu",
        "store_warp_sums<TILES>(sums, warp_sums);\n    __syncthreads();",
        "store_warp_sums<TILES>(sums, warp_sums);",
        check_linear,
    ),
    "sums overwritten before all have been added": (
        LINEAR,
        "linear.cu",
        "      y[at * n + column] = out;\n    }\n    __syncthreads();",
        "      y[at * n + column] = out;\n    }",
        check_outputs,
    ),
    "a position sees the next one": (
        ATTENTION,
        "attention.cu",
        "return min(position + 1, slots);",
        "return min(position + 2, slots);",
        check_attention,
    ),
    "values overwritten before all have read them": (
        WIDE,
        "attention.cu",
        "if (first_dim > 0) __syncthreads();",
        "",
        check_wide_heads,
    ),
    "a lane is not in its mask": (
        LINEAR,
        "common.cuh",
        "kFullWarp = 0xffffffffu",
        "kFullWarp = 0x7fffffffu",
        lambda backend: backend.ops.linear(
            *(backend.noise(8, 64, dtype=torch.bfloat16) for _ in range(2)),
            norm_weight=backend.noise(64, dtype=torch.bfloat16),
        ),
    ),
    "a warp adds in its own order": (
        LINEAR,
        "product.cuh",
        "for (int w = 0; w < kWarps; w++) sum += warp_sums[(w * TILES",
        "for (int w = 0; w < kWarps; w++) sum += warp_sums[((w ^ (threadIdx.x & 1)) * TILES",
        check_rows,
    ),
}


@pytest.mark.parametrize("kernels", ["emulator"], indirect=True)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found(kernels, plant, tmp_path, monkeypatch):
    monkeypatch.setattr(layerskip.ops.kernels, "FEW_BLOCKS", 0)  # attention's tiles are together
    instances, source, right, wrong, check = PLANTS[plant]
    folder = planted(tmp_path / "kernels", source, right, wrong)
    launcher = EmulatorLauncher(instances, folder=folder, cache=tmp_path)
    check(kernels)
    with pytest.raises((AssertionError, EmulatorError)):
        check(dataclasses.replace(kernels, ops=KernelOps(launcher), launcher=launcher))


OUT_OF_BOUNDS = """
import sys, torch
from pathlib import Path
from emulator import EmulatorLauncher
from layerskip.ops.kernels import KernelOps
folder = Path(sys.argv[1])
launcher = EmulatorLauncher([("linear<Bf16,1>", "linear.cu")], folder=folder, cache=folder.parent)
x, weight = torch.randn(1, 64).bfloat16(), torch.randn(17, 64).bfloat16()
KernelOps(launcher).linear(x, weight)
"""


COMPILERS = ["g++", pytest.param("clang++", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_write_out_of_bounds_is_found(tmp_path, compiler):
    need_compiler(sanitized := Toolchain(compiler, sanitize=True))
    right = "if (token >= tokens.count || column >= n) continue;"
    folder = planted(
        tmp_path / "kernels", "linear.cu", right, "if (token >= tokens.count) continue;"
    )
    done = run_with(sanitized, "-c", OUT_OF_BOUNDS, str(folder))
    assert done.returncode != 0
    found = re.search(r"heap-buffer-overflow.*\nWRITE of size 2 .*\n((?: +#.*\n)*)", done.stderr)
    assert found, done.stderr[-2000:]
    if not sanitized.is_clang:  # whose symbolizer is left out
        assert "linear<" in found[1]
        assert "linear.cu:" in found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "toolchain",
    [Toolchain("g++", sanitize=True), Toolchain("clang++", sanitize=True), Toolchain("clang++")],
    ids=["g++ sanitized", "clang++ sanitized", "clang++"],
)
def test_every_kernel_by_another_toolchain(toolchain):
    """The tests that launch kernels, again; under AddressSanitizer and UBSan by either compiler."""
    need_compiler(toolchain)
    names = ("build", "gpu_check", "launch", "planted", "turns")
    apart = {f"test_{name}.py" for name in names}
    tests = [str(p) for p in Path(__file__).parent.glob("test_*.py") if p.name not in apart]
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    done = run_with(toolchain, "-m", "pytest", *options, *tests, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
