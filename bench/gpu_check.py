"""Everything that only a GPU can tell about the kernels, most important first.

On a machine with a GPU, in a Python that has torch (CUDA build) and with it cuda-bindings:

    PYTHONPATH=. python3 bench/gpu_check.py

Nothing is installed. After each section the record so far is written to
bench/results/gpu/<date>-<gpu>.json. The exit status is 0 if no check failed; a measurement cannot
fail. Without a GPU, `--backend emulator --toy` tries the checks themselves.
"""

import argparse
import datetime
import json
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.backends import BACKENDS, ROOT, Backend, output_of
from gpu.bits import column_invariance, row_bits
from gpu.cases import cases, check
from gpu.shapes import FULL, TOY, Sizes
from gpu.speed import speeds

SANITIZER_SECONDS = 90
SANITIZER_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
TOOLS = ("memcheck", "racecheck")
FOUND = 9  # its exit status where it finds a mistake
CHECKED_ROWS = 5


class Run:
    """One run: its options, its backend, and the record that grows."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.sizes: Sizes = TOY if args.toy else FULL
        self.deadline = time.monotonic() + args.limit
        self.backend: Backend = BACKENDS[args.backend]()
        self.record: dict[str, Any] = {"machine": self.machine(), "sections": {}}
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        gpu = "-".join(self.record["machine"]["gpu"].replace("/", " ").split())
        self.file: Path = args.out / f"{day}-{gpu}.json"

    def machine(self) -> dict[str, str]:
        """Where and with what."""
        commit = output_of(["git", "rev-parse", "HEAD"]) or "unknown"
        changed = "-changed" if output_of(["git", "status", "--porcelain", "-uno"]) else ""
        return {
            **self.backend.facts(),
            "commit": commit + changed,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sizes": "toy" if self.args.toy else "full",
        }

    def section(self, name: str) -> bool:
        """Run one section, print and write what it found; whether it passed."""
        start = time.monotonic()
        try:
            found = SECTIONS[name](self)
        except Exception:  # noqa: BLE001  the sections after it are worth their minutes
            found = {"ok": False, "error": traceback.format_exc(limit=-3)}
        found["seconds"] = round(time.monotonic() - start, 1)
        self.record["sections"][name] = found
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {'ok' if found['ok'] else 'FAILED'} ({found['seconds']} s)")
        for key, value in found.items():
            if key not in {"ok", "seconds"}:
                print(f"  {key}: {in_words(value)}")
        sys.stdout.flush()
        return found["ok"]


def in_words(value: Any) -> str:
    """A finding on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_operations(run: Run) -> dict[str, Any]:
    """Every operation against its definition, at each model's sizes."""
    result: dict[str, Any] = {
        f"{model.name} {case.op} {case.shape}".strip(): check(case, run.backend)
        for model in run.sizes.models
        for case in cases(model, CHECKED_ROWS, run.sizes.keys, run.backend.device)
    }
    result["ok"] = all(r["ok"] for r in result.values())
    return result


def sanitize(run: Run) -> dict[str, Any]:
    """The operations at toy sizes under compute-sanitizer. A refusal is recorded, no failure."""
    places = (None, *SANITIZER_PLACES)
    program = next(filter(None, (shutil.which("compute-sanitizer", path=p) for p in places)), None)
    if program is None:
        return {"ok": True, "refused": "there is no compute-sanitizer here"}
    result: dict[str, Any] = {"ok": True}
    for tool in TOOLS:
        status, said = under(program, tool, run.args)
        if status == 0:
            result[tool] = "ok"
        elif status == FOUND or "operations: FAILED" in said:
            result |= {tool: said, "ok": False}
        else:
            result[tool] = f"refused: {said}"
    return result


def under(program: str, tool: str, args: argparse.Namespace) -> tuple[int | None, str]:
    """Exit status, or None after a time, and the last that compute-sanitizer said."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command += [sys.executable, __file__, "--toy", "--sections", "operations"]
    command += ["--backend", args.backend, "--out", str(args.out / tool)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, (done.stdout + done.stderr)[-2000:]


SECTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "columns": lambda run: column_invariance(run.backend, run.sizes),
    "rows": lambda run: row_bits(run.backend, run.sizes),
    "operations": check_operations,
    "sanitizer": sanitize,
    "speed": lambda run: speeds(run.backend, run.sizes, run.deadline),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sections",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        help=f"which, in this order: {','.join(SECTIONS)}",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.add_argument("--toy", action="store_true", help="at sizes for the emulator")
    parser.add_argument("--limit", type=float, default=440, help="seconds; ends the measurements")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu")
    args = parser.parse_args(argv)
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 0 if no check failed."""
    args = parse(argv)
    try:
        run = Run(args)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    passed = [run.section(name) for name in run.args.sections]
    print(f"written to {run.file}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
