"""Kernels from source to cubin: NVRTC when one is first needed, and a cache on disk.

Everything is in what ``pip install torch`` (its CUDA build) brings; there is no nvcc and no host
compiler. Without NVRTC, cubins that ``python -m layerskip.ops build`` made elsewhere still load.
"""

import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

# Multiplications and additions are not contracted, so that a result depends on the source alone;
# kernels write fmaf where they mean it.
OPTIONS = ("-std=c++17", "--fmad=false", "--ptxas-options=-v")
OLDEST_ARCH = 80
LOG_LINES = 12  # of a compiler's log, in an error


class KernelBuildError(RuntimeError):
    """A kernel cannot be had on this machine; one sentence says why."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What ptxas says about a kernel: registers a thread; bytes a thread; bytes a block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One kernel compiled for one architecture.

    Attributes:
        image: the file that the driver loads.
        symbol: the kernel's name in it.
        log: what the compiler said.
    """

    image: bytes
    symbol: str
    log: str

    @property
    def usage(self) -> Usage:
        """What the kernel needs of a device."""
        # A source's kernels that are no templates are compiled along with each of the others.
        own = self.log.partition(f"entry function '{self.symbol}'")[2]
        own = own.partition("entry function")[0]
        numbers = {
            what: sum(int(n) for n in re.findall(pattern, own))
            for what, pattern in {
                "registers": r"Used (\d+) registers",
                "spill_bytes": r"(\d+) bytes spill",
                "stack_bytes": r"(\d+) bytes stack frame",
                "static_smem_bytes": r"(\d+) bytes smem",
            }.items()
        }
        return Usage(**numbers)


@functools.cache
def kernels_folder() -> Path:
    """Where the sources are: in the package of a wheel, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if next(folder.glob("*.cu"), None) is not None:
            return folder
    raise KernelBuildError(f"no kernel sources in {package / 'kernels'}: reinstall layerskip")


def compile_kernel(
    name: str, source: str, arch: str, *, folder: Path | None = None, cache: Path | None = None
) -> Cubin:
    """One kernel, from the cache if nothing changed.

    Args:
        name: name expression, such as ``"decode_attention<Bf16,64,1>"``.
        source: file in the folder, such as ``"attention.cu"``.
        arch: such as ``"sm_90"``.
        folder: of the sources; ours if None.
        cache: where cubins are kept; ``cache_folders()`` if None.

    Raises:
        KernelBuildError: no NVRTC and no cubin, an architecture that it does not know, or an
            error in the source.
    """
    folder = folder or kernels_folder()
    places = [cache] if cache else list(cache_folders())
    file = f"{_slug(name)}-{arch}-{_key(folder, name, source, arch)}"
    try:
        nvrtc, version = _nvrtc()
    except KernelBuildError:
        # Its version only guards against a change of compiler; here there is nothing to change to.
        if (cubin := _find(places, f"{file}-*.cubin")) is not None:
            return cubin
        raise
    file += f"-nvrtc{version}.cubin"
    if (cubin := _find(places, file)) is not None:
        return cubin
    _check_arch(nvrtc, version, arch)
    cubin = _compile(nvrtc, folder, name, source, arch)
    _write(places, file, cubin)
    return cubin


def arch_for(capability: tuple[int, int]) -> str:
    """The architecture whose cubins a device runs best: its own, or an older of its generation.

    Raises:
        KernelBuildError: the device is too old, or too new for this NVRTC.
    """
    major, minor = capability
    if major * 10 + minor < OLDEST_ARCH:
        raise KernelBuildError(
            f"layerskip's kernels need a GPU of sm_{OLDEST_ARCH} or later, got sm_{major}{minor}"
        )
    try:
        nvrtc, version = _nvrtc()
    except KernelBuildError:
        return f"sm_{major}{minor}"
    (known,) = _checked("list architectures", nvrtc.nvrtcGetSupportedArchs())
    fitting = [a for a in known if a // 10 == major and a % 10 <= minor]
    if not fitting:
        raise KernelBuildError(f"NVRTC {version} is too old for a GPU of sm_{major}{minor}")
    return f"sm_{max(fitting)}"


def description(capability: tuple[int, int] | None) -> str:
    """One sentence for ``info``: for which GPU kernels are compiled, and by what.

    Args:
        capability: of the GPU; None if there is none.
    """
    try:
        device = "no CUDA device" if capability is None else f"for {arch_for(capability)}"
        return f"{device}; NVRTC {_nvrtc()[1]} compiles them at first use"
    except KernelBuildError as error:
        return f"cannot be compiled: {error}"


def cache_folders() -> Iterator[Path]:
    """Where cubins may be kept, best first; not all need be writable, or exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        yield (Path(home) if home else Path.home() / ".cache") / "layerskip" / "kernels"
    except RuntimeError:  # this user has no home
        logger.debug("no home folder, so no cache in it")
    shared = Path(tempfile.gettempdir()) / f"layerskip-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        own = shared.stat().st_uid == os.getuid() and not shared.is_symlink()
    except OSError:
        own = False
    if own:  # code that another user put there is not to be loaded
        yield shared / "kernels"


def _slug(name: str) -> str:
    """A name expression as part of a file's name."""
    return re.sub(r"\W+", "_", name).strip("_")


def _key(folder: Path, name: str, source: str, arch: str) -> str:
    """A hash of all that decides what a cubin holds, but for NVRTC's version."""
    digest = hashlib.sha256()
    files = [p for p in sorted(folder.iterdir()) if p.suffix in {".cu", ".cuh"}]
    parts = [name, source, arch, *OPTIONS, *(p.name for p in files)]
    for part in [*(text.encode() for text in parts), *(p.read_bytes() for p in files)]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _find(places: Iterable[Path], pattern: str) -> Cubin | None:
    """The first whole cubin that matches."""
    for place in places:
        try:
            paths = sorted(place.glob(pattern))
        except OSError as error:
            logger.debug("cannot look into %s: %s", place, error)
            continue
        for path in paths:
            if (cubin := _read(path)) is not None:
                return cubin
    return None


def _read(path: Path) -> Cubin | None:
    """The cubin in a file, None if the file is not whole."""
    try:
        header, _, image = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        if facts["sha256"] == hashlib.sha256(image).hexdigest():
            return Cubin(image, facts["symbol"], facts["log"])
        reason = "its content has another hash"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    logger.warning("%s is damaged (%s): compiling again", path, reason)
    return None


def _write(places: Iterable[Path], name: str, cubin: Cubin) -> None:
    """Keep a cubin in the first place that takes it; the file appears whole or not at all."""
    facts = {
        "sha256": hashlib.sha256(cubin.image).hexdigest(),
        "symbol": cubin.symbol,
        "log": cubin.log,
    }
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                made = Path(folder) / name
                made.write_bytes(json.dumps(facts).encode() + b"\n" + cubin.image)
                made.replace(place / name)
        except OSError as error:
            logger.info("cannot keep kernels in %s: %s", place, error)
        else:
            return
    logger.warning("no folder to keep kernels in: they are compiled again in every process")


def _nvrtc() -> tuple[ModuleType, str]:
    """NVRTC's bindings and version.

    Raises:
        KernelBuildError: the bindings or the library are not installed.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        major, minor = _checked("tell its version", nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # RuntimeError: bindings without the library
        if isinstance(error, KernelBuildError):
            raise
        raise KernelBuildError(
            "NVRTC is missing: install a CUDA build of torch, which brings it, "
            f"or cuda-bindings and nvidia-cuda-nvrtc ({str(error).splitlines()[0]})"
        ) from error
    return nvrtc, f"{major}.{minor}"


def _checked(what: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an NVRTC call returned besides its status."""
    if int(result[0]) != 0:
        raise KernelBuildError(f"NVRTC could not {what}: {result[0]!r}")
    return result[1:]


def _check_arch(nvrtc: ModuleType, version: str, arch: str) -> None:
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise KernelBuildError(f"an architecture is written like sm_90, got {arch!r}")
    if int(number[1]) < OLDEST_ARCH:
        raise KernelBuildError(f"layerskip's kernels need sm_{OLDEST_ARCH} or later, got {arch}")
    (known,) = _checked("list architectures", nvrtc.nvrtcGetSupportedArchs())
    if int(number[1]) not in known:
        raise KernelBuildError(f"NVRTC {version} does not know {arch}, only {sorted(known)}")


def _compile(nvrtc: ModuleType, folder: Path, name: str, source: str, arch: str) -> Cubin:
    # Headers go in by value and files by their bare names: a cubin holds no path of the machine.
    headers = sorted(folder.glob("*.cuh"))
    program = _checked(
        "create a program",
        nvrtc.nvrtcCreateProgram(
            (folder / source).read_bytes(),
            source.encode(),
            len(headers),
            [p.read_bytes() for p in headers],
            [p.name.encode() for p in headers],
        ),
    )[0]
    try:
        _checked(f"add {name}", nvrtc.nvrtcAddNameExpression(program, name.encode()))
        options = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        lines = log.rstrip(b"\0").decode(errors="replace").strip().splitlines()
        text = "\n".join(line for line in lines if "Compile time" not in line)
        if int(status) != 0:
            excerpt = "\n".join(text.splitlines()[:LOG_LINES])
            raise KernelBuildError(f"NVRTC refuses {name} of {source} for {arch}:\n{excerpt}")
        image = _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        (symbol,) = _checked("tell a symbol", nvrtc.nvrtcGetLoweredName(program, name.encode()))
        return Cubin(image, symbol.decode(), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _content(size: Any, fill: Any, program: Any) -> bytes:
    """What a pair of NVRTC's calls hands out: first its size, then itself."""
    buffer = bytearray(_checked("tell a size", size(program))[0])
    _checked("hand out a result", fill(program, buffer))
    return bytes(buffer)
