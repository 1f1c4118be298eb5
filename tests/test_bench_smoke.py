"""The benchmarks run, at a tiny size, and write what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[1]
MODES = [("test_plain", {})]
MODES += [
    ("test_self_speculative", {"exit_layer": e, "num_draft_tokens": k})
    for e in (1, 2, 3)
    for k in (2, 4, 6)
]
MODES += [("test_transformers", {"mode": m}) for m in ("hf", "hf-early-exit", "hf-prompt-lookup")]
MODES += [
    (f"test_{name}_batch", {"batch_size": n})
    for name in ("plain", "self_speculative")
    for n in (1, 4, 8)
]
KEYS = {
    "acceptance_rate",
    "mean_accepted_length",
    "c",
    "v",
    "theory_speedup",
    "identical_to_plain",
    "repeated_8gram_share",
    "prompts",
    "tokens",
    "tokens_per_second",
    "threads",
    "dtype",
    "device",
    "versions",
}


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """``pytest bench --smoke``, as it writes its JSON."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    command = [sys.executable, "-m", "pytest", "bench", "--smoke", "--benchmark-only", "-q"]
    done = subprocess.run(
        [*command, f"--benchmark-json={path}", "-p", "no:cacheprovider", "--device", "cpu"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text(encoding="utf-8"))["benchmarks"]


def test_every_way_of_decoding_is_benchmarked(benchmarks: list[dict[str, Any]]) -> None:
    found = [(b["name"].split("[")[0], b["params"] or {}) for b in benchmarks]
    assert sorted(found, key=str) == sorted(MODES, key=str)


def test_every_time_stands_beside_its_figures(benchmarks: list[dict[str, Any]]) -> None:
    for b in benchmarks:
        info = b["extra_info"]
        assert set(info) == KEYS
        assert 0 < info["tokens"] <= 16
        assert info["tokens_per_second"] == pytest.approx(info["tokens"] / b["stats"]["median"])
        assert {"layerskip", "python", "torch", "transformers"} == set(info["versions"])
        if not b["name"].startswith("test_transformers"):
            assert info["identical_to_plain"] == 1.0


def test_drafting_modes_carry_acceptance_and_prediction(benchmarks: list[dict[str, Any]]) -> None:
    for b in benchmarks:
        info = b["extra_info"]
        drafts = b["name"].startswith("test_self_speculative")
        assert (info["acceptance_rate"] is not None) == drafts
        if drafts:
            assert 0.0 <= info["acceptance_rate"] <= 1.0
            assert info["mean_accepted_length"] >= 1.0
        if b["name"].startswith("test_self_speculative["):
            assert 0.0 < info["c"] < 1.0
            assert info["theory_speedup"] > 0.0 < info["v"]
