"""Build the wheel and the sdist, and test what they install, in clean environments.

    make test-matrix                                   # the whole suite in each cell: an hour
    make test-matrix ARGS="--transformers 5.17 --tests tests/test_api.py"

Both are built as for a release and must hold what git tracks, byte for byte, and nothing else. A
cell is a Python and a transformers: the oldest that pyproject.toml allows and the one that
constraints.txt pins with the Python that runs this, the latter with others. Of each cell the wheel
alone, in an empty environment, must tell its version, and describe and run its checkpoint; then the
tests of the unpacked sdist run against the installed wheel. A Python that is not here is left out,
and that is said. Only the record stays.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).parents[1]
RECORD = REPO / "bench" / "results" / "installs.json"
# transformers decides on the versions of these, so that pins hold beside the pinned release alone.
OF_TRANSFORMERS = ("hf-xet", "huggingface_hub", "tokenizers", "transformers")
OF_THE_BUILD = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
# Beside the code: git may lose one of these, and a wheel without it would still be what git has.
PROMISED = (
    "layerskip/checkpoints/small/config.json",
    "layerskip/checkpoints/small/tokenizer.json",
    "layerskip/kernels/linear.cu",
    "layerskip/py.typed",
    "layerskip/telemetry/templates/page.html",
)


@dataclass(frozen=True)
class Outcome:
    """What the tests of one cell said; ``seconds`` are theirs."""

    date: str
    python: str
    transformers: str
    torch: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def call(*command: object, cwd: Path, keep: bool = False, **variables: str) -> tuple[int, str, str]:
    """Exit status of a command, and its two outputs if they are kept; no process of it is left."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | variables,
        stdout=subprocess.PIPE if keep else None,
        stderr=subprocess.PIPE if keep else None,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate()
        return process.returncode, out or "", err or ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def must(*command: object, cwd: Path, keep: bool = False, **variables: str) -> str:
    """What a command printed, which has to succeed."""
    code, out, err = call(*command, cwd=cwd, keep=keep, **variables)
    if code:
        shown = " ".join(map(str, command))
        raise SystemExit(f"installs: exit status {code} of {shown}\n{out}{err}")
    return out


def pins(release: str | None = None) -> list[str]:
    """Lines of constraints.txt; of a transformers release, those that hold beside it."""
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    if release is None or f"transformers=={release}" in lines:
        return lines
    return [line for line in lines if line.split("==")[0] not in OF_TRANSFORMERS]


def releases() -> tuple[str, str]:
    """The oldest transformers that pyproject.toml allows, and the pinned one."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = " ".join(project["dependencies"])
    (oldest,) = re.findall(r"\btransformers>=([\d.]+)", allowed)
    (pinned,) = re.findall(r"\btransformers==([\d.]+)", " ".join(pins()))
    return oldest, pinned


def requirement(release: str) -> str:
    """``5.17`` is any of its patches, ``5.17.0`` itself."""
    return f"transformers=={release}" + ("" if release.count(".") > 1 else ".*")


def interpreter(version: str) -> Path | None:
    """A Python of this version ("3.12") that runs: on the path, or among those of pyenv."""
    name, running = f"python{version}", f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [Path(sys.executable)] if version == running else []
    found += [Path(path)] if (path := shutil.which(name)) else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found += sorted(pyenv.glob(f"versions/*/bin/{name}"))
    for path in found:  # a shim of pyenv is there and does not run
        probe = [str(path), "-c", "import ensurepip, venv"]
        if not subprocess.run(probe, capture_output=True, check=False).returncode:
            return path
    return None


def tracked() -> dict[str, bytes]:
    """Every file of the checkout that git tracks, by path."""
    listed = must("git", "ls-files", "-z", cwd=REPO, keep=True)
    return {name: (REPO / name).read_bytes() for name in listed.split("\0") if name}


def wheel_files(files: Mapping[str, bytes], stem: str) -> dict[str, bytes | None]:
    """What a wheel holds: the package with the kernels in it; None stands for any content."""
    info = f"{stem}.dist-info"
    held: dict[str, bytes | None] = {
        name if name.startswith("layerskip/") else f"layerskip/{name}": content
        for name, content in files.items()
        if name.startswith(("layerskip/", "kernels/"))
    }
    held[f"{info}/licenses/LICENSE"] = files["LICENSE"]
    return held | dict.fromkeys((f"{info}/{name}" for name in OF_THE_BUILD), None)


def sdist_files(files: Mapping[str, bytes], stem: str) -> dict[str, bytes | None]:
    """What an sdist holds: all that is needed to build the wheel and to run the tests."""
    project = tomllib.loads(files["pyproject.toml"].decode())
    rooms = [name[1:] for name in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]
    rooms += [".gitignore", "LICENSE", "README.md", "pyproject.toml"]
    held: dict[str, bytes | None] = {
        f"{stem}/{name}": content
        for name, content in files.items()
        if name in rooms or name.split("/")[0] in rooms
    }
    return held | {f"{stem}/PKG-INFO": None}


def contents(archive: Path) -> dict[str, bytes]:
    """Every file of a wheel or an sdist, by path."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [m for m in sdist.getmembers() if not m.isdir()]
        return {m.name: f.read() for m in members if (f := sdist.extractfile(m)) is not None}


def differences(got: Mapping[str, bytes], wanted: Mapping[str, bytes | None]) -> list[str]:
    """One sentence for each file that is missing, too many, or not as in the checkout."""
    said = [f"{name} is missing" for name in wanted if name not in got]
    said += [f"{name} does not belong in it" for name in got.keys() - wanted]
    said += [
        f"{name} is not as in the checkout"
        for name in got.keys() & wanted
        if wanted[name] is not None and got[name] != wanted[name]
    ]
    return sorted(said)


def build(room: Path) -> tuple[Path, Path]:
    """The wheel and the sdist it is built from, looked into."""
    must(sys.executable, "-m", "venv", room / "tools", cwd=room)
    python, out = room / "tools" / "bin" / "python", room / "dist"
    must(python, "-m", "pip", "-qq", "install", "build", cwd=room)
    must(python, "-m", "build", "--outdir", out, REPO, cwd=room, keep=True, PIP_QUIET="2")
    shutil.rmtree(room / "tools")
    (wheel,), (sdist,), files = out.glob("*.whl"), out.glob("*.tar.gz"), tracked()
    stem = sdist.name.removesuffix(".tar.gz")
    said = [
        f"not tracked by git: {name}" for name in PROMISED if name not in wheel_files(files, stem)
    ]
    for archive, wanted in ((wheel, wheel_files(files, stem)), (sdist, sdist_files(files, stem))):
        got = contents(archive)
        said += [f"{archive.name}: {line}" for line in differences(got, wanted)]
        print(f"{archive.name}: {len(got)} files, {archive.stat().st_size / 1e6:.1f} MB")
    if said:
        raise SystemExit("\n".join(said))
    return wheel, sdist


def try_alone(wheel: Path, python: Path, release: str, room: Path) -> None:
    """The wheel without extras, far from the checkout: its version, description and demo."""
    torch = next(line for line in pins(release) if line.startswith("torch=="))
    install = (python, "-m", "pip", "-qq", "install")
    must(*install, torch, cwd=room)  # by itself, so that nothing else decides which build is taken
    must(*install, wheel, requirement(release), cwd=room)
    command = python.parent / "layerskip"
    version = must(command, "--version", cwd=room, keep=True).strip()
    info, demo = (
        json.loads(must(command, *part, "--json", cwd=room, keep=True).splitlines()[-1])
        for part in (("info",), ("demo", "--limit", "1", "--max-new-tokens", "32"))
    )
    same = demo["modes"]["layerskip"]["identical_to_plain"]
    if not info["supported"] or same != 1.0:
        raise SystemExit(f"installs: the wheel alone does not decode exactly: {info}, {demo}")
    print(f"{version}, the wheel alone: the built-in checkpoint drafts and changes no token")


def unpack(sdist: Path, python: Path, room: Path) -> tuple[Path, Path]:
    """The sdist's folder with the installed package in place of its own, and that package.

    Some tests start Python in this folder, which would then import what lies there.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(room, filter="data")
    where = "import layerskip; print(layerskip.__file__)"
    package = Path(must(python, "-c", where, cwd=room, keep=True).strip()).parent
    if package.parent.name != "site-packages":
        raise SystemExit(f"installs: layerskip was imported from {package}, not from the wheel")
    folder = room / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(folder / "layerskip")
    (folder / "layerskip").symlink_to(package)
    return folder, package


def run_cell(
    wheel: Path, sdist: Path, base: Path, release: str, tests: Sequence[str], room: Path
) -> Outcome:
    """Install into an environment of its own, and run the tests."""
    must(base, "-m", "venv", room / "venv", cwd=room)
    python = room / "venv" / "bin" / "python"
    try_alone(wheel, python, release, room)
    (room / "pins.txt").write_text("\n".join(pins(release)) + "\n", encoding="utf-8")
    extras = f"{wheel}[bench,test]"
    install = (python, "-m", "pip", "-qq", "install", "-c", room / "pins.txt")
    must(*install, extras, requirement(release), cwd=room)
    folder, package = unpack(sdist, python, room)
    script = (
        "import platform, torch, transformers\n"
        "print(platform.python_version(), transformers.__version__, torch.__version__)"
    )
    versions = must(python, "-c", script, cwd=folder, keep=True).split()
    print(f"python {versions[0]}, transformers {versions[1]}, torch {versions[2]}: {package}")
    (room / "tmp").mkdir()
    begin = time.perf_counter()
    # Not `python -m pytest`: that would put the folder first on the path.
    code, *_ = call(
        *(python.parent / "pytest", "-q", "-n", "auto", "--maxprocesses", "4"),
        *("--dist", "loadfile", f"--junitxml={room / 'report.xml'}", *tests),
        cwd=folder,
        OMP_NUM_THREADS="1",
        TMPDIR=str(room / "tmp"),
    )
    if code not in (0, 1):
        raise SystemExit(f"installs: pytest's exit status is {code}")
    today, seconds = datetime.datetime.now(datetime.UTC).date().isoformat(), time.perf_counter()
    return Outcome(today, *versions, *counts(room / "report.xml"), round(seconds - begin, 1))


def counts(report: Path) -> tuple[int, int, int]:
    """Tests passed, failed and skipped, of pytest's report."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    ran, skipped = int(suite.get("tests")), int(suite.get("skipped"))
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    return ran - failed - skipped, failed, skipped


def cells(pythons: Sequence[str], chosen: Sequence[str]) -> list[tuple[Path, str]]:
    """What to install into what; says which Python is not here."""
    found: list[tuple[Path, str]] = []
    for place, version in enumerate(pythons):
        base = interpreter(version)
        if base is None:
            print(f"python {version}: not here")
        else:
            found += [(base, release) for release in (chosen if not place else chosen[-1:])]
    return found


def record(outcome: Outcome, sizes: Mapping[str, int]) -> None:
    """Write the sizes, and the outcome in place of an older one of the same versions."""
    old = json.loads(RECORD.read_text(encoding="utf-8"))["cells"] if RECORD.is_file() else []
    cells = {(cell["python"], cell["transformers"]): cell for cell in [*old, asdict(outcome)]}
    content = {**sizes, "cells": [cells[versions] for versions in sorted(cells)]}
    # By hand: where wheels are built layerskip, whose files module does this, is not installed.
    beside = RECORD.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(RECORD)


def main() -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    versions = ",".join(dict.fromkeys((running, "3.12")))
    parser.add_argument("--python", default=versions, help=f"default {versions}")
    parser.add_argument("--transformers", default=",".join(releases()), help="oldest first")
    parser.add_argument("--tests", nargs="*", default=[], help="default: all but the slow ones")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up, too
    sys.stdout.reconfigure(line_buffering=True)  # in step with what the commands print
    failed = 0
    with tempfile.TemporaryDirectory(prefix="layerskip-installs-") as top:
        wheel, sdist = build(Path(top))
        sizes = {"wheel_bytes": wheel.stat().st_size, "sdist_bytes": sdist.stat().st_size}
        for base, release in cells(options.python.split(","), options.transformers.split(",")):
            with tempfile.TemporaryDirectory(dir=top) as room:
                outcome = run_cell(wheel, sdist, base, release, options.tests, Path(room))
            print(f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped")
            failed += outcome.failed
            if not options.tests:
                record(outcome, sizes)
    sys.exit(failed > 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
