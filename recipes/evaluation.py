"""What a model's exits give: acceptance, likelihood, costs, and speed on held-out prompts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exits import ExitReport, evaluate_exits
from settings import RunSettings
from speed import SpeedReport, measure_speeds
from tokens import Sample

from layerskip import DraftPlan, PlanFile, SelfSpeculativeLM
from layerskip.cost import CostTable
from layerskip.model import DecoderStack
from layerskip.params import AUTO
from layerskip.prediction import draft_costs, predict
from layerskip.profiling import measure_cost


@dataclass(frozen=True)
class Measurement:
    """A model, before or after training.

    Attributes:
        exits: a report for each temperature.
        exit_layer: that was drafted from.
        c: time of a draft pass in units of a plain one, at the speeds' context.
        v: of a verify pass of ``k + 1`` rows, k the drafted tokens that are predicted best.
        speeds: a report for each temperature and number of draft tokens.
    """

    exits: tuple[ExitReport, ...]
    exit_layer: int
    c: float
    v: float
    speeds: tuple[SpeedReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "exit_layer": self.exit_layer,
            "c": self.c,
            "v": self.v,
            "exits": [report.to_dict() for report in self.exits],
            "speeds": [report.to_dict() for report in self.speeds],
        }


def best_exit(
    report: ExitReport, costs: Mapping[int, CostTable], context: float
) -> tuple[int, int, float]:
    """Exit layer, number of drafted tokens and speed-up that are predicted best.

    At least one token is drafted: where no exit pays, the speed-up is below 1.

    Args:
        report: acceptance of the exits.
        costs: of each exit; those without are left out.
        context: slots that passes attend to.
    """
    predicted = {
        layer: predict(table, report.lengths(layer), context, least=1)
        for layer, table in costs.items()
    }
    layer = max(predicted, key=lambda layer: predicted[layer][1])
    return layer, *predicted[layer]


def exit_costs(
    stack: DecoderStack, exits: Sequence[int], *, seconds: float = 6.0
) -> dict[int, CostTable]:
    """Cost tables of exits, between measured ones of the shallowest and of all layers.

    Args:
        seconds: for the measurements, about.
    """
    depth = stack.num_layers
    one, every = (DraftPlan(depth, tuple(range(n))) for n in (1, depth))
    shallow, deep = (measure_cost(stack, plan, seconds=seconds / 2) for plan in (one, every))
    return {layer: draft_costs(shallow, deep, layer, depth) for layer in exits}


def measure(
    settings: RunSettings,
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    exits: Sequence[int],
    *,
    cost_seconds: float = 6.0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Measurement:
    """All of a table's column for a plain model (without an exit adapter): exits teacher-forced,
    the best of them by prediction at the temperature, and its speed, greedy and at the temperature,
    with the number of draft tokens predicted best and with "auto", which drafts none where none
    pays.

    Args:
        settings: of the final measurement.
        model: a transformers causal LM, or one inside PEFT.
        samples, exits: as of ``evaluate_exits``.
        prompts: as of ``measure_speeds``.
        cost_seconds: as of ``exit_costs``.
        on_progress: called with what is done next.
    """
    bare = SelfSpeculativeLM(model, tokenizer, num_draft_tokens=0)
    temperatures, reports, speeds = (0.0, settings.temperature), [], []
    new, tokens = settings.max_new_tokens, settings.final_tokens
    for t in temperatures:
        on_progress(f"acceptance along held-out text, {named(t)}")
        reports.append(evaluate_exits(bare.stack, samples, exits, temperature=t, max_tokens=tokens))
    on_progress("costs of passes")
    context = statistics.fmean(map(len, prompts)) + new / 2
    costs = exit_costs(bare.stack, exits, seconds=cost_seconds)
    layer, k, _ = best_exit(reports[-1], costs, context)
    plan = DraftPlan.exiting(num_layers=bare.stack.num_layers, exit_layer=layer)
    table = measure_cost(bare.stack, plan, seconds=cost_seconds / 2)
    lm = SelfSpeculativeLM(model, tokenizer, PlanFile(plan, cost=table), lookup=False)
    for t in temperatures:
        on_progress(f"speed of exit {layer}, {named(t)}")
        speeds += measure_speeds(
            lm, prompts, (k, AUTO), max_new_tokens=new, temperature=t, seed=settings.seed
        )
    plain = table.verify_pass(1, context)
    c, v = table.draft_pass(1, context) / plain, table.verify_pass(k + 1, context) / plain
    return Measurement(tuple(reports), layer, c, v, tuple(speeds))


def named(temperature: float) -> str:
    """For people."""
    return f"temperature {temperature:g}" if temperature else "greedy"
