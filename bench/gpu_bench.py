"""How fast decoding is on a GPU: plain, speculative, and beside transformers.

On a machine with a GPU, in a Python that has torch (CUDA build), cuda-bindings and transformers:

    python3 bench/gpu_bench.py

Nothing is installed or fetched: the models have the shapes of real ones and random weights, and
how often their drafts are accepted is set by the script. Every such figure is synthetic.

Sections run in order of importance, all within nine minutes: each has its share of what is left of
`--total` seconds, and its record says what it was cut short of. The first, which loads the models,
always runs. After each model of each, the record so far is written to
bench/results/gpu/<date>-<gpu>-decoding.json. The exit status is 0 if no check failed: a goal that
is missed is printed and recorded, and fails nothing. Without a GPU, `--device cpu --size toy`
tries the script.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import decoding, lab, models, overlap, recorded, serving
from gpu.backends import ROOT, Backend, CpuBackend, CudaBackend
from gpu.frame import Found, Run
from gpu.tables import figures
from gpu.timing import NO_TIME

TOTAL_SECONDS = 460.0
# Then a section counts as hung: what is begun in its last second has to end. The last one has less,
# so that with the imports all takes nine minutes at most.
MORE_SECONDS, LAST_SECONDS = 110.0, 60.0
DEVICES = ("cuda", "cpu")
SIZES = {"full": (models.FULL, lab.FULL), "toy": (models.TOY, lab.TOY)}
Section = Callable[[lab.Lab, Found, float], None]
FIRST = "models"
SECTIONS: dict[str, Section] = {
    FIRST: decoding.models,
    "plain": decoding.plain,
    "rounds": decoding.rounds,
    "recording": recorded.recording,
    "passes": recorded.passes,
    "speedup": decoding.speedup,
    "batches": serving.batches,
    "contexts": serving.contexts,
    "bits": decoding.bits,
    "transformers": serving.beside_transformers,
    "memory": serving.memory,
    "first-tokens": serving.first_tokens,
    "launches": overlap.launches,
}
PARTS = {  # of the time that is left, where a section does not count as one
    FIRST: 10,  # without a model no section says anything of it
    "rounds": 2,
    "recording": 3,
    "speedup": 3,
    "batches": 3,
    "contexts": 2,
    "bits": 2,
    "transformers": 2,
}


def summary(sections: Found) -> str:
    """Goals met and missed, one a line."""
    words = {True: "met", False: "MISSED", None: "not judged"}
    lines = [
        f"  {words[figure['met']]:<10} {where}: {figure['value']:.3g} (goal {figure['goal']})"
        for where, figure in figures(sections)
    ]
    return "\n".join(["goals:", *lines] if lines else ["goals: none was measured"])


def cut_short(value: Any, *path: str) -> Iterator[str]:
    """What of a section there was no time for, by its place."""
    if not isinstance(value, dict):
        return
    place = " / ".join(path) or "all"
    if NO_TIME in (value.get("left_out"), value.get("error")):
        yield f"{place}: {NO_TIME}"
    elif value.get("complete") is False:
        yield f"{place}: {value['turns']} of {value['wanted_turns']} turns"
    elif value.get("compared_tokens", 0) < value.get("wanted_tokens", 0):
        yield f"{place}: {value['compared_tokens']} of {value['wanted_tokens']} tokens"
    else:
        for name, inner in value.items():
            yield from cut_short(inner, *path, name)


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
        "--total",
        type=float,
        default=TOTAL_SECONDS,
        help=f"seconds of all sections; with what is begun at its end {LAST_SECONDS:.0f} more",
    )
    parser.add_argument(
        "--seconds", type=float, help="of each section, instead of its share of the total"
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
    end = time.monotonic() + args.total
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

    wanted = [FIRST, *(name for name in SECTIONS if name in args.sections and name != FIRST)]

    def section(i: int, name: str) -> bool:
        now = time.monotonic()
        parts = [PARTS.get(later, 1) for later in wanted[i:]]
        share = args.seconds or (end - now) * parts[0] / sum(parts)
        until = min(now + share, end)

        def measure(found: Found) -> None:
            found["allowed_seconds"] = round(max(until - now, 0.0), 1)
            if now < until:
                SECTIONS[name](here, found, until)
            else:
                found |= {"ok": True, "left_out": NO_TIME}
            found["cut_short"] = [*cut_short(found)]

        return run.section(
            name, measure, hung=max(1.0, min(until + MORE_SECONDS, end + LAST_SECONDS) - now)
        )

    passed = [section(i, name) for i, name in enumerate(wanted)]
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
