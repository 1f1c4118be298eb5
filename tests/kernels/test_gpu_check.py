"""`make gpu-check` without a GPU: its control flow, over the emulator at toy sizes."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from emulator import Toolchain
from needs import need

REPO = Path(__file__).parents[2]
LIBRARIES = [p for p in sys.path if p.endswith("site-packages")]
sys.path.insert(0, str(REPO / "bench"))

import gpu_check  # noqa: E402
from gpu import backends, bits, cases, shapes, speed  # noqa: E402

from layerskip.ops import definitions  # noqa: E402

TOY = ["--backend", "emulator", "--toy"]


@pytest.fixture(scope="module")
def backend():
    """One for all tests: it builds every kernel."""
    need(Toolchain().path, "g++, which builds the emulator")
    return backends.EmulatorBackend()


@pytest.fixture(autouse=True)
def same_backend(backend, monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "emulator", lambda: backend)


def run(folder, *options):
    """Exit status and record."""
    status = gpu_check.main([*TOY, "--out", str(folder), *options])
    (file,) = folder.glob("*.json")
    return status, json.loads(file.read_text(encoding="utf-8"))


def test_all_sections_pass_and_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *args, **kwargs: None)
    status, record = run(tmp_path)
    assert status == 0
    assert list(record["sections"]) == list(gpu_check.SECTIONS)
    assert set(record["machine"]) >= {"gpu", "commit", "torch", "python", "sizes"}
    rows = record["sections"]["rows"]
    assert rows["toy qkv"] == {"counts": 0, "alone": 0, "order": 0}
    assert "before it starts the next" in record["sections"]["early-starts"]["left_out"]
    operations = record["sections"]["operations"]
    measured = record["sections"]["speed"]
    for op in (
        "linear qkv",
        "swiglu",
        "lm_head_argmax sampled",
        "decode_attention",
        "accept_block",
    ):
        assert any(op in name for name in operations)
        assert any(op in name for name in measured)
    assert measured["toy linear qkv rows=5"]["torch_us"] > 0
    assert measured["toy linear qkv rows=5"]["share_of_copy"] > 0
    assert "speed: ok" in capsys.readouterr().out


def test_every_operation_with_a_kernel_is_checked():
    from layerskip.ops.registry import OPERATORS

    covered = {case.op for case in cases.cases(shapes.TOYS[0], 2, shapes.TOY, "cpu")}
    assert covered == set(OPERATORS)


def test_a_bit_that_depends_on_the_rows_fails(tmp_path, backend, monkeypatch, capsys):
    real = backend.ops.linear
    monkeypatch.setattr(backend.ops, "linear", lambda x, w: real(x, w) + (len(x) == 3) * 1e-3)
    status, record = run(tmp_path, "--sections", "rows")
    assert status == 1
    assert record["sections"]["rows"]["toy qkv"] == {"counts": 1, "alone": 0, "order": 0}
    assert "rows: FAILED" in capsys.readouterr().out


def test_a_wrong_column_fails(tmp_path, backend, monkeypatch):
    real = bits.with_own_sources

    def wrong(*args):
        launcher = real(*args)
        launch = launcher.launch

        def then_change(kernel, grid, block, smem, params):
            launch(kernel, grid, block, smem, params)
            params[2][:, :, 5] *= 1 + 2.0**-23

        monkeypatch.setattr(launcher, "launch", then_change)
        return launcher

    monkeypatch.setattr(bits, "with_own_sources", wrong)
    status, record = run(tmp_path, "--sections", "columns")
    assert status == 1
    assert record["sections"]["columns"]["mma_probe<Bf16>"]["columns_equal"][5] is False


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("linear", lambda out: out * 1.02),
        ("accept_tokens", lambda out: (out[0], out[1] + 1, out[2])),
        ("lm_head_argmax", lambda out: (out[0] ^ 1, *out[1:])),
        ("rms_norm", lambda out: torch.full_like(out, float("nan"))),
        ("gumbel_from_bits", lambda out: out * (1 + 2.0**-23)),
    ],
)
def test_a_wrong_result_fails(tmp_path, backend, monkeypatch, op, change):
    real = getattr(backend.ops, op)
    monkeypatch.setattr(backend.ops, op, lambda *args, **kwargs: change(real(*args, **kwargs)))
    status, record = run(tmp_path, "--sections", "operations")
    assert status == 1
    failed = {name for name, r in record["sections"]["operations"].items() if "bound" in str(r)}
    failed = {name for name in failed if not record["sections"]["operations"][name]["ok"]}
    assert failed
    assert all(f" {op} " in f"{name} " for name in failed)


@pytest.fixture
def early(backend, monkeypatch):
    """As if kernels could start early here: whether they may is in the list."""
    may = [False]

    @contextlib.contextmanager
    def overlapping(allowed):
        may[0] = allowed
        yield
        may[0] = False

    monkeypatch.setattr(backend, "why_no_overlap", lambda: None)
    monkeypatch.setattr(backend, "overlapping", overlapping)
    return may


@pytest.mark.usefixtures("early")
def test_early_starts_that_change_nothing_pass(tmp_path):
    status, record = run(tmp_path, "--sections", "early-starts")
    assert status == 0
    found = record["sections"]["early-starts"]
    assert set(found.values()) == {0, True, found["seconds"]}
    assert {"linear qkv", "rope_append_kv", "accept_block"} <= set(found)


@pytest.mark.parametrize("where", ["a result", "an argument"])
def test_a_bit_that_an_early_start_changes_fails(tmp_path, backend, early, monkeypatch, where):
    real = backend.ops.rope_append_kv if where == "an argument" else backend.ops.swiglu

    def late(*args, **kwargs):
        out = real(*args, **kwargs)
        changed = args[3] if where == "an argument" else out
        if early[0]:
            changed.view(torch.int16).view(-1)[-1] ^= 1
        return out

    monkeypatch.setattr(backend.ops, real.__name__, late)
    status, record = run(tmp_path, "--sections", "early-starts")
    assert status == 1
    found = record["sections"]["early-starts"]
    assert {name.split()[0] for name in found if found[name] == bits.EARLY_TURNS} == {real.__name__}


def test_an_error_ends_its_section_alone(tmp_path, backend, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(backend.ops, "swiglu", broken)
    status, record = run(tmp_path, "--sections", "operations,columns")
    assert status == 1
    assert "an illegal address" in record["sections"]["operations"]["error"]
    assert record["sections"]["columns"]["ok"]


def test_measurements_stop_at_the_limit(tmp_path):
    status, record = run(tmp_path, "--sections", "speed", "--limit", "0")
    assert status == 0
    assert set(record["sections"]["speed"]) == {"copy_gb_per_s", "complete", "ok", "seconds"}
    assert record["sections"]["speed"]["complete"] is False


def test_measurements_are_kept_where_a_later_one_fails(tmp_path, backend, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(backend.ops, "decode_attention", broken)
    status, record = run(tmp_path, "--sections", "speed")
    assert status == 1
    measured = record["sections"]["speed"]
    assert measured["toy linear qkv rows=1"]["us"] > 0
    assert "an illegal address" in measured["error"]


def test_torch_may_have_no_kernel_of_a_size(backend):
    (case,) = [c for c in cases.cases(shapes.TOYS[0], 1, shapes.TOY, "cpu") if c.shape == "qkv"]

    def refused(*args):
        raise RuntimeError("no such kernel")

    measured = speed.measure(dataclasses.replace(case, rival=refused), backend, 1, 1.0)
    assert measured["us"] > 0
    assert measured["torch_error"] == "no such kernel"


@pytest.mark.parametrize("rows", [1, 5])
def test_torch_s_attention_is_the_same(rows):
    """What ours is measured beside computes what ours does."""
    case = cases.attention(shapes.TOYS[0], 2, rows, 70, backends.Noise("cpu"))
    want = definitions.decode_attention(*case.args).transpose(1, 2)
    assert (case.rival(*case.args) - want).norm() < 2.0**-7 * want.norm()


def test_an_argument_that_must_not_change_is_looked_at(backend, monkeypatch):
    (case,) = [c for c in cases.cases(shapes.TOYS[0], 1, shapes.TOY, "cpu") if c.shape == "qkv"]
    real = backend.ops.linear
    assert cases.check(case, backend)["ok"]
    monkeypatch.setattr(backend.ops, "linear", lambda x, w: (real(x, w), w.zero_())[0])
    found = cases.check(case, backend)
    assert (found["ok"], found["changed"]) == (False, "weight")


def test_the_commit_may_be_given(tmp_path):
    _, record = run(tmp_path, "--sections", "columns", "--commit", "abc")
    assert record["machine"]["commit"] == "abc"


@pytest.mark.slow
def test_nothing_needs_to_be_installed(tmp_path):
    """From any folder, without the package on the path. Slow: torch is imported again."""
    done = subprocess.run(
        # Without `site` there are no .pth files, by which an editable installation is found.
        [sys.executable, "-S", str(REPO / "bench" / "gpu_check.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ":".join(LIBRARIES)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--sections" in done.stdout


def test_weights_are_rotated_past_the_cache(backend, monkeypatch):
    (case,) = [c for c in cases.cases(shapes.TOYS[0], 1, shapes.TOY, "cpu") if c.shape == "qkv"]
    seen = []

    def seconds(calls):
        for call in calls:
            call()
        return 1.0

    monkeypatch.setattr(backend, "seconds", seconds)
    monkeypatch.setattr(backend.ops, "linear", lambda x, w: seen.append(w.data_ptr()))
    speed.measure(case, backend, 5 * case.args[1].nbytes, 1.0)
    assert len(set(seen)) == 5


SANITIZER = """#!/bin/sh
echo "$@" ${{PYTORCH_NO_CUDA_MEMORY_CACHING:+caching off}} >> {log}
echo "{said}"
exit {status}
"""


@pytest.mark.parametrize(
    ("status", "said", "passed", "recorded"),
    [
        (0, "", True, "ok"),
        (9, "========= Invalid __global__ write", False, "========= Invalid __global__ write"),
        (1, "operations: FAILED", False, "operations: FAILED"),
        (255, "Device not supported", True, "refused: Device not supported"),
    ],
)
def test_the_sanitizer_s_answers(tmp_path, monkeypatch, status, said, passed, recorded):
    program, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    program.write_text(SANITIZER.format(log=log, said=said, status=status))
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *args, **kwargs: str(program))
    got, record = run(tmp_path / "out", "--sections", "sanitizer")
    assert got == (0 if passed else 1)
    assert record["sections"]["sanitizer"]["memcheck"].startswith(recorded)
    first, second = log.read_text().splitlines()
    assert "caching off" in first
    assert "--tool memcheck" in first
    assert "--tool racecheck" in second
    assert "--sections operations" in second


def test_a_sanitizer_that_does_not_end_is_stopped_with_its_program(tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\nsleep 60 & echo $! > " + str(tmp_path / "pid") + "\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check, "SANITIZER_SECONDS", 1.0)
    monkeypatch.setattr(gpu_check, "TOOLS", ("memcheck",))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *args, **kwargs: str(program))
    status, record = run(tmp_path / "out", "--sections", "sanitizer")
    assert status == 0
    assert "refused: " in record["sections"]["sanitizer"]["memcheck"]
    sleeping = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    deadline = time.monotonic() + 20
    while sleeping.exists() and "zombie" not in sleeping.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_mistakes_end_in_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--sections", "rows,speeed"])
    assert "no section is called speeed" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert gpu_check.main(["--out", str(tmp_path)]) == 1
        assert "--backend emulator --toy" in capsys.readouterr().err
