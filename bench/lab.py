"""One checkpoint with everything that the cells are measured with, loaded once."""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from cells import Cell
from modes import FIXED, Theirs, Way
from paired import changes, commit, cost_now, quiet, sampling_at, wrapped
from tasks import TASKS, Asked, asked, examples_of, spread
from transformers import AutoModelForCausalLM

from layerskip import SelfSpeculativeLM
from layerskip.checkpoint import BUILTIN, builtin_folder, load_config
from layerskip.compare import EarlyExitSettings
from layerskip.cost import CostTable
from layerskip.fingerprint import cost_key, fingerprint
from layerskip.params import MAX_AUTO_DRAFT_TOKENS
from layerskip.prompts import Example, read_prompts

REPO = Path(__file__).parents[1]
TUNING_TASKS, TUNING_TOKENS = ("code", "math", "chat"), 24
DRAFT_FOLDER = REPO / ".cache" / "bench" / "draft-model"


@dataclass(frozen=True)
class Options:
    """What is measured, and how long.

    Attributes:
        model: folder, hub id or "builtin".
        prompts: JSON lines in the place of our tasks; None: ours.
        draft_model: folder or hub id of an independent one with the same tokenizer; "auto" trains
            one for the built-in checkpoint; "none" leaves the mode out.
        exit_layer: of the draft, where the checkpoint has no plan of its own.
        limit: most prompts of a cell.
        seconds: that a cell's prompts take, once there are three; finding settings of
            transformers' modes, once for all cells, comes on top.
        tokens: most new tokens; None: the cell's own.
        max_repeated: prompts whose greedy text repeats more of its 8-grams are left out.
    """

    model: str = BUILTIN
    device: str = "auto"
    dtype: str | None = None
    prompts: Path | None = None
    draft_model: str = "auto"
    exit_layer: int | None = None
    limit: int = 12
    seconds: float = 46.0
    tokens: int | None = None
    max_repeated: float = 0.2


class Lab:
    """The checkpoint, its cost tables and its prompts."""

    def __init__(self, options: Options) -> None:
        quiet()
        self.options = options
        self.model, self.tokenizer, self.known, _ = SelfSpeculativeLM.load_parts(
            options.model,
            device=options.device,
            dtype=options.dtype,
            exit_layer=options.exit_layer,
        )
        if self.tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer, and the prompts are text")
        exiting = wrapped(self.model, self.tokenizer, self.known, self.known.cost, lookup=False)
        alone = wrapped(self.model, self.tokenizer, None, None, lookup=True)
        self.cost, self.alone = exiting.controller.cost, alone.controller.cost
        self._exiting = exiting
        self.max_positions = exiting.stack.max_positions
        self.examples = cache(self._examples)
        self.tuned = cache(self._tuned)

    def _examples(self, task: str) -> list[Example]:
        if self.options.prompts is not None:
            return read_prompts(self.options.prompts)
        return examples_of(task)

    @cached_property
    def draft_model(self) -> Any:
        """An independent small model with the same tokenizer, or None."""
        return draft_model_of(self.options.draft_model, self.options.model, self.model)

    def tokens(self, cell: Cell) -> int:
        """Most new tokens of a prompt."""
        return self.options.tokens or cell.tokens

    sampling = staticmethod(sampling_at)

    def prompts(self, cell: Cell) -> list[Asked]:
        """All that fit, each once, taken from all over the task."""
        room = self.max_positions - self.tokens(cell) - MAX_AUTO_DRAFT_TOKENS
        examples = self.examples(cell.task)
        if cell.context is not None:  # so that there is something to put in front of the first
            examples = [*examples, *examples]
        fit = asked(examples, self.tokenizer, context=cell.context, room=room)
        return spread(list(dict.fromkeys(fit)), self.options.limit * cell.batch)

    def lm(self, *, plan: bool = True, lookup: bool | None = False) -> SelfSpeculativeLM:
        """A decoder whose controller has seen nothing yet; None looks up where users' do."""
        known, cost = (self.known, self.cost) if plan else (None, self.alone)
        return wrapped(self.model, self.tokenizer, known, cost, lookup=lookup)

    def cost_now(self, seconds: float) -> CostTable:
        """The cost table, measured again for so long: the machine of a load may have been another.
        Predictions are made from it; decoders have the quick one that users have."""
        lm = self._exiting
        if lm.plan is None or seconds == 0.0:
            return self.cost
        return cost_now(lm, seconds)

    def ours(self) -> dict[str, Way]:
        """Our modes, each with a controller of its own."""
        exiting = self.lm()
        ways = {"autoregressive": Way(exiting, 0)}
        if self.known.plan is not None:
            ways["fixed"] = Way(exiting, FIXED)
        ways["automatic"] = Way(self.lm(lookup=None), "auto")
        ways["look-up"] = Way(self.lm(plan=False, lookup=True), "auto")
        return ways

    def theirs(self, temperature: float, lm: SelfSpeculativeLM) -> Theirs:
        return Theirs(self.model, lm, self.draft_model, sampling=self.sampling(temperature))

    @cached_property
    def spares(self) -> list[tuple[int, ...]]:
        """The last prompt of a few tasks: what settings of transformers' modes are tuned on."""
        tasks = TUNING_TASKS if self.options.prompts is None else ("prompts",)
        return [p.ids for task in tasks for p in self.prompts(Cell(task, "greedy"))[-1:]]

    def _tuned(self, mode: str, temperature: float) -> EarlyExitSettings:
        """The fastest settings of one of transformers' modes, found once."""
        tokens = min(TUNING_TOKENS, self.options.tokens or TUNING_TOKENS)
        return self.theirs(temperature, self.lm()).tune(mode, self.spares, tokens)

    def subject(self) -> dict[str, str | int | float]:
        """What a measurement is of, beside the cell: what a run that goes on has to share.

        Files are known by what they hold, for names stay when it changes.
        """
        options, lm, draft_model = self.options, self._exiting, self.options.draft_model
        tasks = TASKS if options.prompts is None else ("prompts",)
        if draft_model not in ("auto", "none"):
            draft_model = fingerprint(self.draft_model)
        return {
            "model": options.model,
            **cost_key(lm.stack, lm.plan, lm.plan_file.draft_vocabulary),
            "plan_file": _digest(self.known),
            "prompts": _digest([self.examples(task) for task in tasks]),
            "limit": options.limit,
            "seconds": options.seconds,
            "tokens": options.tokens or 0,
            "max_repeated": options.max_repeated,
            "exit_layer": options.exit_layer or 0,
            "draft_model": draft_model,
            "commit": commit(),
            "changes": changes(),
        }


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def draft_model_of(wanted: str, name: str, model: Any) -> Any:
    """What ``Options.draft_model`` asks for beside ``model``, the checkpoint ``name``, or None."""
    if wanted == "none" or (wanted == "auto" and name != BUILTIN):
        return None
    folder = trained_draft(DRAFT_FOLDER) if wanted == "auto" else wanted
    load_config(folder)  # which says in a sentence what is wrong
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    return loaded.to(model.device).eval()


def trained_draft(folder: Path) -> Path:
    """An independent small model with the built-in tokenizer: trained in two minutes, then kept."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(builtin_folder() / "tokenizer.json", folder / "tokenizer.json")
        recipe = REPO / "recipes" / "pretrain_small.py"
        config = Path(__file__).with_name("draft_model.yaml")
        command = [sys.executable, recipe, "--out", folder, "--config", config, "--device", "cpu"]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return checkpoint
