"""Compiling for GPUs that are not here: every architecture, what ptxas says, what is in the SASS.

``test_launch.py`` has the driver's side.
"""

import importlib
import importlib.metadata
import json
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cubins import ARCHS, IN_FULL, REPO, compiled, compiling, selected
from needs import need

from layerskip.ops import __main__, build
from layerskip.ops.build import Cubin, KernelBuildError, arch_for, cache_folders, compile_kernel
from layerskip.ops.catalog import CATALOG, KernelInstance

MAX_STATIC_SMEM = 0  # shared memory is dynamic, so that the emulator can guard it
SIMPLE = "__global__ void simple(int *out) { *out = VALUE; }\n"


def compile_ahead(fixtures: set[str]) -> None:
    """While other tests run; see conftest.py."""
    if "cubins" in fixtures:
        compiling()


def has_nvrtc() -> bool:
    try:
        build._nvrtc()
    except KernelBuildError:
        return False
    return True


@pytest.fixture(scope="session")
def nvrtc() -> None:
    need(has_nvrtc(), "NVRTC (pip install 'layerskip[kernels]')")


@pytest.fixture(scope="session")
def cubins(nvrtc) -> Callable[[list[str], str], dict[str, Cubin]]:
    """``cubins(names, arch)``: those kernels, compiled."""
    return compiled


def check_usage(cubins: dict[str, Cubin]) -> None:
    for name, cubin in cubins.items():
        usage = cubin.usage
        assert usage.spill_bytes == 0, f"{name} spills"
        assert usage.stack_bytes == 0, f"{name} keeps an array in local memory"
        assert usage.static_smem_bytes <= MAX_STATIC_SMEM, f"{name} has static shared memory"
        assert 0 < usage.registers <= 255


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills(cubins, arch):
    check_usage(cubins(selected(arch), arch))


def test_the_usage_is_of_the_kernel_alone(cubins):
    """Not of those that are compiled along with it."""
    with_finish, finish = cubins(["lm_head<Bf16,1>", "lm_head_finish"], IN_FULL).values()
    assert "lm_head_finish" in with_finish.log
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", with_finish.log)]
    assert len(registers) == 2
    assert {with_finish.usage.registers, finish.usage.registers} == set(registers)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_all_kernels_compile_without_spills(cubins, arch):
    check_usage(cubins(list(CATALOG), arch))


def tools() -> Path | None:
    """The folder with cuobjdump and nvdisasm, of NVIDIA's wheels."""
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
        importlib.metadata.files("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(f.locate()).parent for f in files if f.name == "cuobjdump"), None)


def sass(cubin: Cubin, tmp_path: Path) -> str:
    """The machine code of a cubin, as text."""
    folder = tools()
    need(folder, "cuobjdump and nvdisasm (pip install 'layerskip[kernels]')")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin.image)
    done = subprocess.run(
        [folder / "cuobjdump", "-sass", file],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )
    return done.stdout


# What moves most of the bytes: 16 bytes a load, and tensor cores for the products.
STREAMING = ["linear<Bf16,1>", "linear<Fp16,2>", "swiglu<Bf16,1>", "lm_head<Bf16,1>"]
STREAMING += ["decode_attention<Bf16,64,1>", "decode_attention<Bf16,128,4>"]
EVERYWHERE = ["linear<Bf16,8>", "decode_attention<Bf16,256,4>"]
LOOKED_INTO = [(name, IN_FULL) for name in STREAMING]
LOOKED_INTO += [(name, arch) for arch in ARCHS if arch != IN_FULL for name in EVERYWHERE]


@pytest.mark.parametrize(("name", "arch"), LOOKED_INTO)
def test_machine_code_streams(cubins, name, arch, tmp_path):
    code = sass(cubins([name], arch)[name], tmp_path)
    assert re.search(r"\bLDG\.E\.128", code), "no load of 16 bytes"
    assert re.search(r"\bHMMA\.16816\.F32", code), "no tensor core"
    assert not re.search(r"\b(LDL|STL)\b", code), "local memory"


# ---- the cache ---------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with one small kernel."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "value.cuh").write_text("#define VALUE 1\n")
    (folder / "simple.cu").write_text('#include "value.cuh"\n' + SIMPLE)
    return folder


def simple(folder: Path, cache: Path | None, arch: str = "sm_90") -> Cubin:
    return compile_kernel("simple", "simple.cu", arch, folder=folder, cache=cache)


@pytest.fixture
def compilations(monkeypatch, nvrtc) -> list[str]:
    """The names of the kernels that NVRTC has compiled."""
    names: list[str] = []
    real = build._compile

    def counting(*args):
        names.append(args[2])
        return real(*args)

    monkeypatch.setattr(build, "_compile", counting)
    return names


def test_a_kernel_is_compiled_once(source, tmp_path, compilations):
    first = simple(source, tmp_path / "cache")
    assert simple(source, tmp_path / "cache") == first
    assert compilations == ["simple"]
    assert first.image[:4] == b"\x7fELF"
    assert first.symbol.encode() in first.image


@pytest.mark.parametrize("what", ["header", "source", "arch", "options"])
def test_the_key_holds_everything(source, tmp_path, compilations, monkeypatch, what):
    cache = tmp_path / "cache"
    simple(source, cache)
    if what == "header":
        (source / "value.cuh").write_text("#define VALUE 2\n")
    if what == "source":
        (source / "simple.cu").write_text((source / "simple.cu").read_text() + "// changed\n")
    if what == "options":
        monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "--use_fast_math"))
    simple(source, cache, "sm_80" if what == "arch" else "sm_90")
    assert len(compilations) == 2
    assert len(list(cache.iterdir())) == 2


def test_another_nvrtc_compiles_again(source, tmp_path, compilations, monkeypatch):
    simple(source, tmp_path)
    nvrtc, _ = build._nvrtc()
    monkeypatch.setattr(build, "_nvrtc", lambda: (nvrtc, "99.0"))
    simple(source, tmp_path)
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no header", "other header"])
def test_a_damaged_file_is_compiled_again(source, tmp_path, compilations, caplog, damage):
    cache = tmp_path / "cache"
    good = simple(source, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(
        {
            "cut": whole[:-100],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "empty": b"",
            "no header": whole.partition(b"\n")[2],
            "other header": json.dumps([]).encode() + b"\n",
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert simple(source, cache) == good
    assert "is damaged" in caplog.text
    assert len(compilations) == 2
    assert file.read_bytes() == whole


def test_a_write_that_fails_leaves_nothing(source, tmp_path, compilations, monkeypatch):
    cache = tmp_path / "cache"

    def full(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    simple(source, cache)
    assert list(cache.iterdir()) == []


def unwritable(path: Path) -> Path:
    """A place below which no folder can be made, for root neither."""
    path.write_text("a file, no folder")
    return path


def test_a_read_only_home_uses_the_temporary_folder(source, tmp_path, compilations, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable(tmp_path / "home")))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    simple(source, None)
    simple(source, None)
    assert compilations == ["simple"]
    _, temporary = cache_folders()
    assert temporary.parent.parent == tmp_path
    assert temporary.parent.stat().st_mode & 0o777 == 0o700
    assert len(list(temporary.iterdir())) == 1


def test_without_any_place_kernels_still_compile(
    source, tmp_path, compilations, monkeypatch, caplog
):
    nowhere = unwritable(tmp_path / "home")
    monkeypatch.setattr(build, "cache_folders", lambda: iter([nowhere]))
    with caplog.at_level(logging.WARNING):
        simple(source, None)
        simple(source, None)
    assert len(compilations) == 2
    assert "no folder to keep kernels in" in caplog.text


def test_a_temporary_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert len(list(cache_folders())) == 2
    (own,) = tmp_path.iterdir()
    uid = own.stat().st_uid
    monkeypatch.setattr(build.os, "getuid", lambda: uid + 1)
    own.rename(tmp_path / f"layerskip-{uid + 1}")
    assert len(list(cache_folders())) == 1


# ---- the command -----------------------------------------------------------------------------


def catalog_of(*names: str) -> dict[str, KernelInstance]:
    """A small catalog of our own."""
    return {name: KernelInstance(name, "simple.cu", lambda *, m: 8000 * m) for name in names}


@pytest.fixture
def small_catalog(source, monkeypatch) -> None:
    monkeypatch.setattr(__main__, "CATALOG", catalog_of("simple"))
    monkeypatch.setattr(build, "kernels_folder", lambda: source)


@pytest.mark.usefixtures("nvrtc", "small_catalog")
def test_build_prints_a_table_and_fills_the_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert __main__.main(["build", "--arch", "sm_80,sm_90", "--out", str(out)]) == 0
    assert re.search(r"simple +8 +8 +0 +0 +0\.040 ", capsys.readouterr().out)
    assert {p.name.split("-")[1] for p in out.iterdir()} == {"sm_80", "sm_90"}


@pytest.mark.usefixtures("nvrtc", "small_catalog")
def test_build_fails_when_a_kernel_uses_local_memory(source, tmp_path, capsys):
    (source / "simple.cu").write_text(
        "__global__ void simple(int *out) {\n"
        "  int local[64];\n"
        "  for (int i = 0; i < 64; i++) local[out[i]] = i;\n"
        "  out[0] = local[out[1]];\n"
        "}\n"
    )
    assert __main__.main(["build", "--arch", "sm_90", "--out", str(tmp_path / "out")]) == 1
    assert re.search(r"simple +\d+ +256 ", capsys.readouterr().out)


@pytest.mark.usefixtures("nvrtc", "small_catalog")
def test_build_ends_in_one_sentence(tmp_path, capsys):
    assert __main__.main(["build", "--arch", "sm_70", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: layerskip's kernels need sm_80 or later")


def test_the_sizes_suit_every_kernel():
    assert all(__main__.bytes_moved(kernel) > 0 for kernel in CATALOG.values())


# ---- errors ------------------------------------------------------------------------------------


def no_nvrtc(name: str):
    raise ModuleNotFoundError(f"No module named {name!r}")


def test_without_nvrtc_a_prebuilt_cubin_loads(source, tmp_path, compilations, monkeypatch):
    made = simple(source, tmp_path / "cache")
    monkeypatch.setattr(importlib, "import_module", no_nvrtc)
    assert simple(source, tmp_path / "cache") == made
    with pytest.raises(KernelBuildError, match="NVRTC is missing: install a CUDA build of torch"):
        simple(source, tmp_path / "elsewhere")


def test_an_error_in_the_source_shows_the_log(source, tmp_path, compilations):
    (source / "simple.cu").write_text("__global__ void simple(int *out) { nonsense(); }\n")
    message = r"(?s)NVRTC refuses simple of simple.cu for sm_90:.*simple.cu\(1\).*nonsense"
    with pytest.raises(KernelBuildError, match=message):
        simple(source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("sm_75", "need sm_80 or later, got sm_75"),
        ("sm_999", "does not know sm_999"),
        ("90", "written like sm_90, got '90'"),
    ],
)
def test_a_wrong_architecture_is_refused(source, tmp_path, arch, message):
    with pytest.raises(KernelBuildError, match=message):
        simple(source, tmp_path, arch)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((9, 7), "sm_90")],
)
def test_devices_run_their_own_or_an_older_architecture(capability, arch):
    assert arch_for(capability) == arch


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("capability", "message"),
    [((7, 5), "sm_80 or later, got sm_75"), ((99, 0), "too old for a GPU of sm_990")],
)
def test_devices_without_kernels_are_refused(capability, message):
    with pytest.raises(KernelBuildError, match=message):
        arch_for(capability)


def test_sources_of_a_checkout_are_found():
    assert {path.name for path in build.kernels_folder().glob("*.cu")} >= {
        kernel.source for kernel in CATALOG.values()
    }


def test_sources_of_a_wheel_are_found(tmp_path, monkeypatch):
    package = tmp_path / "layerskip"
    monkeypatch.setattr(build, "__file__", str(package / "ops" / "build.py"))
    with pytest.raises(KernelBuildError, match="no kernel sources"):
        build.kernels_folder.__wrapped__()
    (package / "kernels").mkdir(parents=True)
    (package / "kernels" / "simple.cu").write_text(SIMPLE)
    assert build.kernels_folder.__wrapped__() == package / "kernels"


def test_a_wheel_takes_the_sources_along():
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "kernels": "layerskip/kernels"
    }


def test_importing_the_package_needs_no_cuda():
    script = (
        "import sys; sys.modules['cuda'] = None\n"
        "import layerskip.ops.build, layerskip.ops.launch, layerskip.ops.__main__"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO, timeout=60)


def test_the_description_says_what_compiles_for_what(monkeypatch):
    def missing():
        raise build.KernelBuildError("NVRTC is missing: install it")

    monkeypatch.setattr(build, "_nvrtc", missing)
    assert build.description(None) == "cannot be compiled: NVRTC is missing: install it"
    assert "sm_80 or later, got sm_75" in build.description((7, 5))


def test_the_description_names_the_compiler(nvrtc):
    version = build._nvrtc()[1]
    assert build.description(None) == f"no CUDA device; NVRTC {version} compiles them at first use"
    assert build.description((9, 0)).startswith("for sm_90; NVRTC")
