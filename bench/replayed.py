"""What automatic drafting makes of recorded drafts if its cost table is wrong.

    OMP_NUM_THREADS=1 python bench/replayed.py --dtype float32
    OMP_NUM_THREADS=1 python bench/replayed.py --rows 8 --prompts prompts.jsonl

A draft from every place of each text, its tokens' confidences and how many of them are right, is
recorded once (``runs/drafts.jsonl``). Then requests are decoded on paper, in batches of ``--rows``:
passes take what one table says (the truth), the controller believes another, in which drafts, and
passes that verify them, are too dear or too cheap by a factor; and every round is measured with the
noise and the drift of a machine that does other things, too. Figures are tokens a second over those
of the fixed number that is best for the text: no clock and no machine plays a part. "short" is the
same of streams of 12 requests, each by a controller that has seen nothing: their mean, and the
worst. The last column is the calibration error of the chances that were told when each text came
once, and what right ones would show of so many tokens by chance.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paired import circumstances, quiet, sampling_at, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import examples_from, spread

import layerskip.attempt
from layerskip import SelfSpeculativeLM
from layerskip.bare_passes import TWICE_AS_MANY
from layerskip.compare import repeated_share
from layerskip.control.asks import Ask
from layerskip.control.stopping import Choice, Stopper
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.files import write_text
from layerskip.plan import PlanFile

FILE = Path("runs/drafts.jsonl")
DEPTH, AT_ONCE = 10, 8
CHOICE = 32  # prompts for each that is taken: many are long
MAX_REPEATED = 0.2  # of greedy texts: those that loop flatter every drafter
FIXED = (1, 2, 3, 4, 5, 7)
WRONG = ((1.0, 1.0), (1.5, 1.0), (0.75, 1.0), (1.0, 1.25), (1.0, 0.87), (1.4, 1.2), (0.75, 0.87))
NOISE, DRIFT, MEMORY = 0.08, 0.02, 0.97  # of a round, of the pace from round to round
# The built-in checkpoint in bfloat16, one thread, without context: 20 s of `layerskip profile`.
ROWS, SECONDS = (1, 2, 4, 8, 16, 32, 64), (1.0, 1.02, 1.07, 1.15, 1.55, 2.4, 4.1)
DRAFTS = (1.0, 1.05, 1.08, 1.18, 1.6, 2.45, 4.2)
COARSE = (1, 4, 8, 32)  # what a quick table measures; it guesses what twice as many take
REQUESTS, STREAMS = 12, 24  # short ones, each by a controller that has seen nothing


@dataclass(frozen=True)
class Recorded:
    """A text, and what would be drafted from each place of it.

    Attributes:
        prompt: tokens of the prompt.
        repeated: share of its 8-grams.
        drafts: by place, how many drafted tokens are right, and the confidence of each.
    """

    prompt: int
    temperature: float
    repeated: float
    drafts: list[tuple[int, list[float]]]

    @property
    def kind(self) -> str:
        """Of requests that learn from each other."""
        return "coupled" if self.temperature else "greedy"


def record(lm: SelfSpeculativeLM, ids: list[int], temperature: float, tokens: int) -> Recorded:
    """Drafts from every place, a batch of places at a time: the same text continues each."""
    sampling = sampling_at(temperature)
    text = lm.generate(ids, max_new_tokens=tokens, num_draft_tokens=0, sampling=sampling).token_ids
    drafts = []
    for start in range(0, len(text) - 1, AT_ONCE):
        batch = lm.open_batch(
            max_new_tokens=DEPTH + 2, num_draft_tokens=DEPTH, sampling=sampling, ignore_eos=True
        )
        places = range(start, min(start + AT_ONCE, len(text) - 1))
        rows = [batch.add([*ids, *text[:place]]) for place in places]
        batch.step()  # prefills
        with told() as confidences:
            rounds = {r.row: r for r in batch.step()}
        drafts += [(rounds[row].num_accepted_tokens, confidences[i]) for i, row in enumerate(rows)]
    return Recorded(len(ids), temperature, repeated_share([text]), drafts)


class told:  # noqa: N801
    """Confidences of drafted tokens by cache row, of drafts with a fixed number, too."""

    def __enter__(self) -> dict[int, list[float]]:
        confidences: dict[int, list[float]] = {}
        self._kept = request = layerskip.attempt._request

        def telling(row: Any, *rest: Any) -> Any:
            found = confidences.setdefault(row.slot_row, [])
            return replace(request(row, *rest), goes_on=lambda c, *_: not found.append(c))

        layerskip.attempt._request = telling
        return confidences

    def __exit__(self, *_: object) -> None:
        layerskip.attempt._request = self._kept


def truth(c: float) -> CostTable:
    """Passes of a processor that waits for memory: rows are cheap up to 8, and not beyond."""
    draft, head = (scaled(DRAFTS, share * c) for share in (0.75, 0.25))
    return CostTable(draft, head, scaled(SECONDS, 1.0), 1e-3, 8, {}, (1, 2, 4), pass_rows=64)


def scaled(seconds: Sequence[float], by: float) -> Curve:
    return Curve(ROWS, (0,), (tuple(by * s for s in seconds),))


def believed(cost: CostTable, drafts: float, verify: float) -> CostTable:
    """As a quick measurement leaves it: few sizes, and these factors off."""

    def seen(curve: Curve, by: float, alone: float) -> Curve:
        contexts = tuple(sorted({curve.contexts[0], curve.contexts[-1]}))
        lines = [[curve.at(rows, context) for rows in COARSE] for context in contexts]
        known = [[alone * first, *(by * s for s in more)] for first, *more in lines]
        seconds = tuple((*line, TWICE_AS_MANY * line[-1]) for line in known)
        return Curve((*COARSE, 2 * COARSE[-1]), contexts, seconds)

    return replace(
        cost,
        draft_layers=seen(cost.draft_layers, drafts, drafts),
        draft_head=seen(cost.draft_head, drafts, drafts),
        verify=seen(cost.verify, verify, 1.0),
        tiles=(1, 4),
    )


@dataclass
class Row:
    """A request on its way."""

    text: Recorded
    emitted: int = 1
    state: Any = None
    choice: Choice | None = None
    stopper: Stopper | None = None
    drafted: int = 0

    @property
    def room(self) -> int:
        return len(self.text.drafts) - self.emitted

    @property
    def context(self) -> int:
        return self.text.prompt + self.emitted - 1

    @property
    def draft(self) -> tuple[int, list[float]]:
        return self.text.drafts[self.emitted - 1]


@dataclass
class Decoder:
    """Decodes on paper.

    Attributes:
        cost: what passes take.
        controller: None drafts ``fixed`` tokens a round.
    """

    cost: CostTable
    controller: Controller | None = None
    fixed: int = 0
    noise: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    pace: float = 0.0

    def run(self, texts: Sequence[Recorded], rows: int) -> float:
        """Seconds of all requests."""
        waiting, going = list(texts)[::-1], []
        while waiting or going:
            while waiting and len(going) < rows:
                going.append(Row(waiting.pop()))
            self._round(going)
            going = [row for row in going if row.emitted <= len(row.text.drafts)]
        return self.seconds

    def _round(self, going: Sequence[Row]) -> None:
        self._choose(going)
        context = sum(row.context for row in going) // len(going)
        draft, told_draft = self._grow(going, context)
        size = sum(row.drafted + 1 for row in going), len(going)
        verify = self.cost.verify_pass(size[0], context, sequences=size[1])
        if self.controller is not None:
            times = self.controller.times
            self.pace = MEMORY * self.pace + self.noise.gauss(0.0, DRIFT)
            if times.due(drafted=draft > 0.0):
                told = times.verify(size[0], context, rows=size[1])
                took = draft * self._measured(), verify * self._measured()
                times.observe_phases(*took, told_draft, told, *size)
        self.seconds += draft + verify
        for row in going:
            self._judge(row)

    def _measured(self) -> float:
        return math.exp(self.pace + self.noise.gauss(0.0, NOISE))

    def _choose(self, going: Sequence[Row]) -> None:
        if self.controller is None:
            for row in going:
                row.choice = Choice("early_exit", min(self.fixed, row.room))
        else:
            for row in going:
                row.state = row.state or self.controller.row(
                    row.text.kind, len(row.text.drafts) + 1
                )
            asks = [
                Ask(row.state, row.context, min(row.room, DEPTH), left=row.room + 1)
                for row in going
            ]
            for row, choice in zip(going, self.controller.choose(asks, drafts=True), strict=True):
                row.choice = choice
                row.stopper = Stopper(row.state, choice, alone=len(going) == 1)
        for row in going:
            row.drafted = 0

    def _grow(self, going: Sequence[Row], context: int) -> tuple[float, float]:
        """Seconds of the drafts, and what the controller thinks of these passes."""
        asking = [row for row in going if row.choice.num_draft_tokens]
        seconds = self.cost.draft_start if asking else 0.0
        told = self.controller.times.draft_start() if asking and self.controller else 0.0
        while asking:
            if self.controller is not None and asking[0].drafted > 0:
                kept = self.controller.going_on(
                    [row.stopper for row in asking],
                    context,
                    rows=len(going),
                    verified=sum(row.drafted + 1 for row in going),
                )
                asking = [row for row, goes in zip(asking, kept, strict=True) if goes]
                if not asking:
                    break
            seconds += self.cost.draft_pass(len(asking), context, sequences=len(asking), late=True)
            if self.controller is not None:
                told += self.controller.times.draft(len(asking), context)
            asking = [row for row in asking if self._drafts_another(row)]
        return seconds, told

    def _drafts_another(self, row: Row) -> bool:
        """Draft a token; whether the next one is wanted."""
        confidence = row.draft[1][row.drafted]
        row.drafted += 1
        goes_on = self.controller is None or row.stopper.goes_on(confidence)
        return goes_on and row.drafted < row.choice.num_draft_tokens

    def _judge(self, row: Row) -> None:
        right, drafted = min(row.draft[0], row.drafted), row.drafted
        if self.controller is not None and drafted:
            accepted = [True] * right + [False] * (right < drafted)
            observed = accepted, row.draft[1][:drafted]
            self.controller.observe_draft(
                row.state, row.choice, row.context, *observed, num_passes=drafted
            )
        elif self.controller is not None:
            self.controller.observe_plain(row.state, row.choice, row.context)
        row.emitted += right + 1


def judged(
    texts: Sequence[Recorded], cost: CostTable, known: PlanFile, rows: int
) -> dict[str, Any]:
    """The best fixed number, its speed-up, and what automatic drafting reaches of it by table; the
    calibration error of a controller that sees each text once, and what it would be by chance."""
    order = random.Random(1)
    stream = [text for _ in range(3) for text in order.sample(texts, len(texts))]
    plain = Decoder(cost).run(stream, rows)
    fixed = {k: Decoder(cost, fixed=k).run(stream, rows) for k in FIXED}
    best = min(fixed, key=lambda k: fixed[k])
    reached = {}
    for wrong in WRONG:
        controller = Controller(believed(cost, *wrong), known.acceptance, known.calibration)
        seconds = Decoder(cost, controller).run(stream, rows)
        reached["{:g}/{:g}".format(*wrong)] = fixed[best] / seconds
    once = Controller(believed(cost, *WRONG[0]), known.acceptance, known.calibration)
    Decoder(cost, once).run(stream[: len(texts)], rows)
    told = once.told(texts[0].kind)
    short = [beginning(texts, cost, known, rows, seed) for seed in range(STREAMS)]
    return {
        "texts": len(texts),
        "best": best,
        "speedup": plain / fixed[best],
        "automatic_to_best_fixed": reached,
        "short_streams": {"mean": statistics.fmean(short), "worst": min(short)},
        "calibration_error": told.error,
        "calibration_error_by_chance": told.error_by_chance,
    }


def beginning(
    texts: Sequence[Recorded], cost: CostTable, known: PlanFile, rows: int, seed: int
) -> float:
    """Automatic drafting over the fixed number that is best for a short stream."""
    stream = random.Random(seed).choices(texts, k=REQUESTS)
    best = min(Decoder(cost, fixed=k).run(stream, rows) for k in FIXED)
    controller = Controller(believed(cost, *WRONG[0]), known.acceptance, known.calibration)
    return best / Decoder(cost, controller, noise=random.Random(seed)).run(stream, rows)


def record_all(lm: SelfSpeculativeLM, options: argparse.Namespace) -> None:
    """Write the file of drafts."""
    examples = examples_from(options.prompts, CHOICE * options.limit)
    prompts = [lm.tokenizer(e.prompt)["input_ids"] for e in spread(examples, options.limit)]
    short = [ids for ids in prompts if len(ids) <= options.longest][: options.limit]
    jobs = [(ids, temperature) for ids in short for temperature in (0.0, 0.8)]
    lines = [
        json.dumps(vars(record(lm, ids, temperature, options.tokens))) + "\n"
        for ids, temperature in track(jobs, "drafting from every place")
    ]
    options.drafts.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.drafts, "".join(lines))


def read(path: Path) -> Iterator[Recorded]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield Recorded(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--limit", type=int, default=8, help="prompts (8)")
    parser.add_argument("--tokens", type=int, default=48, help="of each text (48)")
    parser.add_argument("--longest", type=int, default=160, help="tokens of a prompt (160)")
    parser.add_argument("--rows", type=int, default=1, help="decoded together (1)")
    parser.add_argument("-c", type=float, default=0.165, help="a draft, in plain passes (0.165)")
    parser.add_argument("--cost", type=Path, help="table of `layerskip profile`, in -c's place")
    parser.add_argument("--drafts", type=Path, default=FILE, help=f"recorded ones ({FILE})")
    parser.add_argument("--out", type=Path, help="JSON of the figures")
    options = parser.parse_args()
    quiet()
    parts = SelfSpeculativeLM.load_parts(options.model, dtype=options.dtype)
    recorded = not options.drafts.is_file()
    if recorded:
        loaded = SelfSpeculativeLM(*parts[:3], num_draft_tokens=DEPTH, lookup=False)
        record_all(loaded, options)
    else:
        print(f"drafts of {options.drafts}: no option of the recording counts now", file=sys.stderr)
    texts = [t for t in read(options.drafts) if t.temperature or t.repeated <= MAX_REPEATED]
    known = parts[2]
    cost = truth(options.c) if options.cost is None else CostTable.load(options.cost)
    by_temperature = {
        f"{temperature:g}": judged(
            [text for text in texts if text.temperature == temperature],
            cost,
            known,
            options.rows,
        )
        for temperature in sorted({text.temperature for text in texts})
    }
    show(by_temperature, options.rows)
    if options.out is not None:
        c = options.c if options.cost is None else None
        asked = {"rows": options.rows, "c": c} | ({"tokens": options.tokens} if recorded else {})
        write(options.out, {**circumstances(), **asked, "temperatures": by_temperature})


def show(by_temperature: dict[str, dict[str, Any]], rows: int) -> None:
    """As people read it."""
    factors = ["{:g}/{:g}".format(*wrong) for wrong in WRONG]
    title = f"automatic over the best fixed, {rows} rows, by factors of draft/verify"
    table = Table(title=title, box=None, title_justify="left")
    for column in ("T", "texts", "best", "speed", *factors, "short", "error / by chance"):
        table.add_column(column, justify="right")
    for temperature, found in by_temperature.items():
        shown = [temperature, str(found["texts"]), str(found["best"]), f"{found['speedup']:.2f}"]
        shares = [f"{found['automatic_to_best_fixed'][name]:.3f}" for name in factors]
        errors = f"{found['calibration_error']:.3f} / {found['calibration_error_by_chance']:.3f}"
        short = "{mean:.3f} ({worst:.3f})".format(**found["short_streams"])
        table.add_row(*shown, *shares, short, errors)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
