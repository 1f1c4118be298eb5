"""How fast decoding is on a GPU: plain, speculative, and beside transformers.

On a machine with a GPU, in a Python that has torch (CUDA build), cuda-bindings and transformers:

    python3 bench/gpu_bench.py

Nothing is installed or fetched: the models have the shapes of real ones and random weights, and
how often their drafts are accepted is set by the script. Every such figure is synthetic.

Sections run in order of importance, each in less than four minutes; the first, which loads the
models, always runs. After each model of each, the record so far is written to
bench/results/gpu/<date>-<gpu>-decoding.json. The exit status is 0 if no check failed: a goal that
is missed is printed and recorded, and fails nothing. Without a GPU, `--device cpu --size toy`
tries the script.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu import decoding, lab, models, overlap, recorded, serving
from gpu.backends import ROOT, Backend, CpuBackend, CudaBackend
from gpu.frame import Found, Run
from gpu.tables import figures

SECTION_SECONDS = 220.0
MORE_SECONDS = 110.0  # then it counts as hung: what is begun in its last second has to end
DEVICES = ("cuda", "cpu")
SIZES = {"full": (models.FULL, lab.FULL), "toy": (models.TOY, lab.TOY)}
Section = Callable[[lab.Lab, Found, float], None]
FIRST = "models"
SECTIONS: dict[str, Section] = {
    FIRST: decoding.models,
    "plain": decoding.plain,
    "bits": decoding.bits,
    "rounds": decoding.rounds,
    "speedup": decoding.speedup,
    "transformers": serving.beside_transformers,
    "batches": serving.batches,
    "contexts": serving.contexts,
    "memory": serving.memory,
    "first-tokens": serving.first_tokens,
    "launches": overlap.launches,
    "recording": recorded.recording,
}


def summary(sections: Found) -> str:
    """Goals met and missed, one a line."""
    words = {True: "met", False: "MISSED", None: "not judged"}
    lines = [
        f"  {words[figure['met']]:<10} {where}: {figure['value']:.3g} (goal {figure['goal']})"
        for where, figure in figures(sections)
    ]
    return "\n".join(["goals:", *lines] if lines else ["goals: none was measured"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sections",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        help=f"which, in this order: {','.join(SECTIONS)}",
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), help="names; all if not given"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECTION_SECONDS, help="of a section; below 240"
    )
    parser.add_argument("--commit", help="of these sources, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu")
    args = parser.parse_args(argv)
    names = [model.name for model in SIZES[args.size][0]]
    args.models = names if args.models is None else args.models
    for what, given, known in (
        ("section", args.sections, SECTIONS),
        ("model of this size", args.models, names),
    ):
        if unknown := set(given) - set(known):
            parser.error(
                f"no {what} is called {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 0 if no check failed."""
    args = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    quiet()
    try:
        backend = backend_of(args.device)
        run = Run(
            args.out, backend.facts(), commit=args.commit, sizes=args.size, suffix="-decoding"
        )
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    every, extent = SIZES[args.size]
    here = lab.Lab(
        backend,
        [model for model in every if model.name in args.models],
        extent,
        judged=args.device == "cuda" and args.size == "full",
        write=run.write,
    )

    def section(name: str) -> bool:
        until = time.monotonic() + args.seconds
        return run.section(
            name,
            lambda found: SECTIONS[name](here, found, until),
            hung=args.seconds + MORE_SECONDS,
        )

    wanted = [FIRST, *(name for name in SECTIONS if name in args.sections and name != FIRST)]
    passed = [section(name) for name in wanted]
    print(summary({name: run.record["sections"][name] for name in wanted}))
    print(f"written to {run.file}")
    return 0 if all(passed) else 1


def backend_of(device: str) -> Backend:
    """What measures bandwidth and small kernels there."""
    if device == "cpu":
        return CpuBackend()
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU here; --device cpu --size toy tries the script")
    return CudaBackend()


def quiet() -> None:
    """Progress bars of transformers would fill the end of the output, which may be all there is."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
