"""What bench/installs.py holds wheel and sdist to, on archives made here; it installs nothing."""

import io
import json
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benching import REPO, bench_modules

STEM = "layerskip-0.1.0"
FILES = {
    ".gitignore": b"/dist/",
    "LICENSE": b"free",
    "README.md": b"# x",
    "bench/LOG.md": b"log",
    "kernels/norm.cu": b"device",
    "layerskip/cli.py": b"code",
    "layerskip/py.typed": b"",
    "notes/private.md": b"no",
    "pyproject.toml": (REPO / "pyproject.toml").read_bytes(),
    "tests/test_x.py": b"test",
}


@pytest.fixture(scope="module")
def installs() -> Iterator[ModuleType]:
    with bench_modules("installs") as modules:
        yield modules.installs


def made_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / f"{STEM}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def made_sdist(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / f"{STEM}.tar.gz"
    with tarfile.open(path, "w:gz") as sdist:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            sdist.addfile(member, io.BytesIO(content))
    return path


def filled(wanted: dict[str, bytes | None]) -> dict[str, bytes]:
    return {name: b"any" if content is None else content for name, content in wanted.items()}


def test_a_wheel_is_the_package_with_its_kernels(installs: ModuleType, tmp_path: Path) -> None:
    wanted = installs.wheel_files(FILES, STEM)
    made = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    package = {"layerskip/cli.py", "layerskip/py.typed", "layerskip/kernels/norm.cu"}
    assert set(wanted) == package | {f"{STEM}.dist-info/{name}" for name in made}
    assert installs.contents(made_wheel(tmp_path, filled(wanted))) == filled(wanted)


def test_an_sdist_is_what_builds_and_tests_it(installs: ModuleType, tmp_path: Path) -> None:
    wanted = installs.sdist_files(FILES, STEM)
    assert set(wanted) == {f"{STEM}/{n}" for n in [*FILES, "PKG-INFO"] if n != "notes/private.md"}
    assert installs.contents(made_sdist(tmp_path, filled(wanted))) == filled(wanted)


def test_what_differs_is_named(installs: ModuleType) -> None:
    wanted = installs.wheel_files(FILES, STEM)
    got = filled(wanted)
    assert installs.differences(got, wanted) == []
    del got["layerskip/kernels/norm.cu"]
    got["layerskip/cli.py"] = b"other code"
    got["layerskip/__pycache__/cli.cpython-311.pyc"] = b"cache"
    assert installs.differences(got, wanted) == [
        "layerskip/__pycache__/cli.cpython-311.pyc does not belong in it",
        "layerskip/cli.py is not as in the checkout",
        "layerskip/kernels/norm.cu is missing",
    ]


def test_what_is_promised_is_in_the_checkout(installs: ModuleType) -> None:
    for name in installs.PROMISED:
        here = name.replace("layerskip/kernels/", "kernels/")
        assert (REPO / here).is_file()


def test_pins_hold_beside_the_pinned_transformers_alone(installs: ModuleType) -> None:
    oldest, pinned = installs.releases()
    assert [int(part) for part in oldest.split(".")] < [int(part) for part in pinned.split(".")]
    assert installs.pins(pinned) == installs.pins()
    left_out = set(installs.pins()) - set(installs.pins(oldest))
    assert {line.split("==")[0] for line in left_out} == set(installs.OF_TRANSFORMERS)
    assert installs.requirement("5.17") == "transformers==5.17.*"
    assert installs.requirement("5.17.0") == "transformers==5.17.0"


def test_no_pin_is_of_one_build_of_torch(installs: ModuleType) -> None:
    # torch's CUDA build names its triton to the patch: a pin of another one keeps it out.
    names = {line.split("==")[0] for line in installs.pins()}
    assert not names & {"triton", "cuda-toolkit", "nvidia-cublas"}
    assert all("+" not in line for line in installs.pins())


def test_a_python_that_is_not_here_is_said(
    installs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert installs.cells([running, "3.0"], ["5.17", "5.23.0"]) == [
        (Path(sys.executable), "5.17"),
        (Path(sys.executable), "5.23.0"),
    ]
    assert capsys.readouterr().out == "python 3.0: not here\n"


def test_a_python_that_does_not_run_is_not_here(
    installs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "bin" / "python3.0"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert installs.interpreter("3.0") is None
    real = tmp_path / "pyenv" / "versions" / "3.0.1" / "bin" / "python3.0"
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    assert installs.interpreter("3.0") == real


@pytest.mark.parametrize("interrupt", [False, True])
def test_no_process_is_left(
    installs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: bool
) -> None:
    def interrupted(process: object) -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    script = "sleep 60 & echo $! > partial && mv partial pid; "
    if interrupt:
        monkeypatch.setattr(installs.subprocess.Popen, "communicate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            installs.call("sh", "-c", script + "exec sleep 60", cwd=tmp_path)
    else:
        assert installs.call("sh", "-c", script + "exit 3", cwd=tmp_path) == (3, "", "")
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while running(left):
        assert time.monotonic() < deadline, "the process in the background still runs"
        time.sleep(0.01)


def running(process: int) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not (status.is_file() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_command_that_fails_is_named(installs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit status 4 of sh -c exit 4"):
        installs.must("sh", "-c", "exit 4", cwd=tmp_path)
    assert installs.must("sh", "-c", "echo $A", cwd=tmp_path, keep=True, A="seen") == "seen\n"


def test_a_record_keeps_the_other_versions(
    installs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installs, "RECORD", tmp_path / "installs.json")
    for transformers, passed in (("5.23.0", 1), ("5.17.0", 2), ("5.23.0", 3)):
        outcome = installs.Outcome(
            "2026-11-21", "3.11.7", transformers, "2.13.0", passed, 0, 0, 1.0
        )
        installs.record(outcome, {"wheel_bytes": 5})
    content = json.loads(installs.RECORD.read_text(encoding="utf-8"))
    assert content["wheel_bytes"] == 5
    assert [(c["transformers"], c["passed"]) for c in content["cells"]] == [
        ("5.17.0", 2),
        ("5.23.0", 3),
    ]


def test_an_interrupted_record_leaves_the_old_one(
    installs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installs, "RECORD", tmp_path / "installs.json")
    outcome = installs.Outcome("2026-11-21", "3.11.7", "5.23.0", "2.13.0", 1, 0, 0, 1.0)
    installs.record(outcome, {"wheel_bytes": 5})
    old = installs.RECORD.read_text(encoding="utf-8")

    def interrupted(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        installs.record(outcome, {"wheel_bytes": 6})
    assert installs.RECORD.read_text(encoding="utf-8") == old


def test_tests_are_counted_from_the_report(installs: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    assert installs.counts(report) == (3, 3, 3)
