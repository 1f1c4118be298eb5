"""Kernels that may start early: what stands in their machine code before they wait for their turn.

Nothing else could tell without a GPU: the emulator ends each kernel before it starts the next.
"""

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
from cubins import ARCHS, IN_FULL, compiled, compiling, selected
from needs import need
from test_build import has_nvrtc, tools

from layerskip.ops.build import Cubin, compile_kernel, kernels_folder
from layerskip.ops.catalog import CATALOG

WAIT = 0x782E  # ACQBULK, without a condition: griddepcontrol.wait
LET_NEXT = 0x782D  # PREEXIT: griddepcontrol.launch_dependents
EARLY_ARCHS = [arch for arch in ARCHS if int(arch[3:]) >= 90]
INSTRUCTION = 16  # bytes
# Memory, but for constants and prefetching; and all ways out.
FORBIDDEN = re.compile(r"U?LD(?!C|CU)|ST|ATOM|RED|SU|TEX|UBLKCP|UTMA|EXIT|RET|CALL|BRX|JM")
# What no kernel writes while rounds are decoded.
CONSTANT = {"weight", "bias", "norm_weight", "gate", "up", "cosine", "sine", "sinks"}
CONSTANT |= {"vocab_ids", "eos_ids"}


def compile_ahead(fixtures: set[str]) -> None:
    """While other tests run; see conftest.py."""
    compiling()


@pytest.fixture(autouse=True, scope="module")
def nvrtc() -> None:
    need(has_nvrtc(), "NVRTC (pip install 'layerskip[kernels]')")


def instructions(cubin: Cubin) -> list[bytes]:
    """A kernel's machine code: the section of a 64-bit ELF file that is named after it."""
    image = cubin.image
    (headers,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    found = [struct.unpack_from("<II4Q", image, headers + i * size) for i in range(count)]
    texts = found[names][4]
    wanted = f".text.{cubin.symbol}\0".encode()
    for name, _, _, _, offset, length in found:
        if image.startswith(wanted, texts + name):
            code = image[offset : offset + length]
            return [code[i : i + INSTRUCTION] for i in range(0, length, INSTRUCTION)]
    raise AssertionError(f"no machine code of {cubin.symbol}")


def places(code: list[bytes], word: int) -> list[int]:
    """Where an instruction stands that is told by its first eight bytes."""
    return [i for i, own in enumerate(code) if own.startswith(word.to_bytes(8, "little"))]


@dataclass(frozen=True)
class Line:
    """An instruction as nvdisasm writes it, and its place in the kernel."""

    place: int
    text: str


def before_the_turn(cubins: dict[str, Cubin], arch: str, tmp_path: Path) -> dict[str, list[Line]]:
    """What each kernel does until all its threads have waited, the wait itself last."""
    starts = {}
    for name, cubin in cubins.items():
        code = instructions(cubin)
        waits = places(code, WAIT)
        assert len(waits) == 1, f"{name} waits at {len(waits)} places"
        (lets,) = places(code, LET_NEXT)
        assert waits[0] < lets, f"{name} lets the next one start first"
        starts[name] = code[: waits[0] + 1]
    text = iter(disassembled(b"".join(map(b"".join, starts.values())), arch, tmp_path))
    return {
        name: [Line(i, next(text)) for i in range(len(start))] for name, start in starts.items()
    }


def disassembled(code: bytes, arch: str, tmp_path: Path) -> list[str]:
    """One line for each instruction."""
    folder = tools()
    need(folder, "nvdisasm (pip install 'layerskip[kernels]')")
    file = tmp_path / "code"
    file.write_bytes(code)
    command = [folder / "nvdisasm", "--binary", arch.replace("sm_", "SM"), file]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", done.stdout, re.MULTILINE)
    assert [int(at, 16) for at, _ in lines] == list(range(0, len(code), INSTRUCTION))
    return [text for _, text in lines]


def check_turns(cubins: dict[str, Cubin], arch: str, tmp_path: Path) -> None:
    """Every thread waits, and has neither read nor written memory before."""
    starts = before_the_turn(cubins, arch, tmp_path)
    firsts = [0, *accumulate(len(lines) for lines in starts.values())]
    for first, (name, lines) in zip(firsts, starts.items(), strict=False):
        assert lines[-1].text == "ACQBULK", name
        for line in lines:
            told = f"{name} for {arch}: {line.text} before its turn"
            assert not FORBIDDEN.match(re.sub(r"^@!?U?P\w+\s+", "", line.text)), told
            if target := re.search(r"\bBRA\S* .*?(0x[0-9a-f]+)", line.text):
                to = int(target[1], 16) // INSTRUCTION - first
                assert line.place < to <= lines[-1].place, told


@pytest.mark.parametrize("arch", EARLY_ARCHS)
def test_every_kernel_waits_before_it_touches_memory(arch, tmp_path):
    check_turns(compiled(selected(arch), arch), arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", EARLY_ARCHS)
def test_all_kernels_wait_before_they_touch_memory(arch, tmp_path):
    check_turns(compiled(list(CATALOG), arch), arch, tmp_path)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in EARLY_ARCHS])
def test_older_gpus_know_no_turns(arch):
    for cubin in compiled(selected(arch), arch).values():
        code = instructions(cubin)
        assert not places(code, WAIT) + places(code, LET_NEXT)


PLANTS = {
    "no wait": ("  take_turn();\n", "", "waits at 0 places"),
    "a load before the wait": (
        "  take_turn();\n",
        "  slots += cache_seqlens[0];\n  take_turn();\n",
        "LDG.* before its turn",
    ),
    "a block that returns without waiting": (
        "  take_turn();\n",
        "  if (blockIdx.x >= slots) return;\n  take_turn();\n",
        "EXIT before its turn",
    ),
    "a block that waits only if it has work": (
        "  take_turn();\n",
        "  if (blockIdx.x < slots) take_turn();\n",
        "before its turn|waits at",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found(plant, tmp_path):
    right, wrong, message = PLANTS[plant]
    folder = tmp_path / "kernels"
    shutil.copytree(kernels_folder(), folder)
    text = (folder / "rope.cu").read_text(encoding="utf-8")
    assert right in text
    (folder / "rope.cu").write_text(text.replace(right, wrong), encoding="utf-8")
    name = "rope_append_kv<Bf16>"
    cubin = compile_kernel(name, "rope.cu", IN_FULL, folder=folder, cache=tmp_path)
    with pytest.raises(AssertionError, match=message):
        check_turns({name: cubin}, IN_FULL, tmp_path)


def test_only_constants_are_promised_not_to_change():
    """Of __restrict__ a compiler may make a load that sees no other kernel's writes."""
    for source in {kernel.source for kernel in CATALOG.values()}:
        text = (kernels_folder() / source).read_text(encoding="utf-8")
        assert set(re.findall(r"__restrict__\s+(\w+)", text)) <= CONSTANT, source
