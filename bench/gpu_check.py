"""Everything that only a GPU can tell about the kernels, most important first.

On a machine with a GPU, in a Python that has torch (CUDA build) and with it cuda-bindings:

    python3 bench/gpu_check.py

Nothing is installed. After each section, and after each measurement, the record so far is written
to bench/results/gpu/<date>-<gpu>.json. The exit status is 0 if no check failed; a measurement
cannot fail. Without a GPU, `--backend emulator --toy` tries the checks themselves.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu.backends import BACKENDS, ROOT, Backend
from gpu.bits import column_invariance, early_bits, row_bits
from gpu.cases import cases, check
from gpu.frame import Run
from gpu.shapes import FULL, TOY, Sizes
from gpu.speed import speeds

SANITIZER_SECONDS = 90
KILLED_SECONDS = 10  # to die in: a process that waits for a GPU's driver may never
HUNG_SECONDS = 540  # of one section; below what a lent machine allows a command
SANITIZER_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
SANITIZER_LINES = 40  # of its report, that are kept
TOOLS = ("memcheck", "racecheck")
FOUND = 9  # its exit status where it finds a mistake
CHECKED_ROWS = 5


class Check(Run):
    """One run: its options, its backend, and the record that grows."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.sizes: Sizes = TOY if args.toy else FULL
        self.deadline = time.monotonic() + args.limit
        self.backend: Backend = BACKENDS[args.backend]()
        super().__init__(
            args.out,
            self.backend.facts(),
            commit=args.commit,
            sizes="toy" if args.toy else "full",
            suffix="",
        )


def check_operations(run: Check, found: dict[str, Any]) -> None:
    """Every operation against its definition, at each model's sizes.

    Numbers of toy size are made on the CPU: a sanitizer then sees hardly any kernel but ours.
    """
    device = run.backend.device
    for model in run.sizes.models:
        made_on = "cpu" if run.args.toy else device
        for case in cases(model, CHECKED_ROWS, run.sizes, made_on):
            name = f"{model.name} {case.op} {case.shape}".strip()
            found[name] = check(case.to(device), run.backend)
    found["ok"] = all(r["ok"] for r in found.values() if isinstance(r, dict))


def sanitize(run: Check, found: dict[str, Any]) -> None:
    """The operations at toy sizes under compute-sanitizer. A refusal is recorded, no failure."""
    found["ok"] = True
    places = (None, *SANITIZER_PLACES)
    program = next(filter(None, (shutil.which("compute-sanitizer", path=p) for p in places)), None)
    if program is None:
        found["refused"] = "there is no compute-sanitizer here"
        return
    first = next(cases(run.sizes.models[0], 1, run.sizes, run.backend.device))
    check(first, run.backend)  # compiles every kernel now, not under a tool and its time limit
    for tool in TOOLS:
        status, said = under(program, tool, run.args)
        if status == 0:
            found[tool] = "ok"
        elif status == FOUND or "operations: FAILED" in said:
            found |= {tool: said, "ok": False}
        else:
            found[tool] = f"refused: {said}"


def under(program: str, tool: str, args: argparse.Namespace) -> tuple[int | None, str]:
    """Exit status, or None after a time, and what compute-sanitizer said that tells most."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command += [sys.executable, str(Path(__file__).resolve()), "--toy", "--sections", "operations"]
    command += ["--backend", args.backend, "--out", str(args.out / tool)]
    # With memory of its own for each tensor: a mistake within torch's large blocks is not seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return None, str(error)
    try:
        said, _ = child.communicate(timeout=SANITIZER_SECONDS)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)  # the program, too, that it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=KILLED_SECONDS)
        return None, str(error)
    reported = [line for line in said.splitlines() if line.startswith("=========")]
    first = "\n".join(reported[:SANITIZER_LINES]) if child.returncode == FOUND else ""
    return child.returncode, first or said[-2000:]


def measure_speeds(run: Check, found: dict[str, Any]) -> None:
    """GB/s of every operation."""
    speeds(run.backend, run.sizes, run.deadline, found, run.write)


SECTIONS: dict[str, Callable[[Check, dict[str, Any]], None]] = {
    "columns": lambda run, found: found.update(column_invariance(run.backend, run.sizes)),
    "rows": lambda run, found: found.update(row_bits(run.backend, run.sizes)),
    "operations": check_operations,
    "early-starts": lambda run, found: found.update(early_bits(run.backend)),
    "sanitizer": sanitize,
    "speed": measure_speeds,
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
    parser.add_argument("--commit", help="of these sources, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu")
    args = parser.parse_args(argv)
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 0 if no check failed."""
    args = parse(argv)
    try:
        run = Check(args)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    passed = [
        run.section(name, lambda found, name=name: SECTIONS[name](run, found), hung=HUNG_SECONDS)
        for name in args.sections
    ]
    print(f"written to {run.file}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
