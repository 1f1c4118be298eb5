"""What an exit adapter is worth: its confidence, its acceptance along text, and its speed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from adapter_settings import Settings
from adapter_trainer import Trainer
from draft_training import Backbone, acceptance
from evaluation import Measurement, best_exit, named
from exits import evaluate_exits
from packing import Packed, document_mask
from speed import measure_speeds
from tokens import Sample
from torch import Tensor

from layerskip import DraftPlan, SelfSpeculativeLM
from layerskip.exit_adapter import ExitAdapter
from layerskip.fingerprint import fingerprint
from layerskip.params import AUTO
from layerskip.plan import PlanFile
from layerskip.profiling import measure_cost
from layerskip.training.confidence import calibration_error, fit_temperature

COST_SECONDS = 6.0


def decoding(adapter: ExitAdapter, model: Any) -> ExitAdapter:
    """A copy in the model's dtype, as decoding has it."""
    copy = ExitAdapter(adapter.shape, adapter.backbone)
    copy.load_state_dict(adapter.state_dict())
    copy.temperature = adapter.temperature
    return copy.to(device=model.device, dtype=model.dtype).eval()


def wrapped(
    model: Any, tokenizer: Any, adapter: ExitAdapter, file: PlanFile | None = None
) -> SelfSpeculativeLM:
    """The model drafting with the adapter, and without look-ups, which would help any exit."""
    depth, layer = model.config.num_hidden_layers, adapter.shape.exit_layer
    plan = DraftPlan.exiting(num_layers=depth, exit_layer=layer)
    return SelfSpeculativeLM(
        model, tokenizer, file or PlanFile(plan), exit_adapter=adapter, lookup=False
    )


class AdapterLogits:
    """Logits of an exit with its adapter, and of full depth, along one text; an ``ExitLogits``."""

    def __init__(self, model: Any, adapter: ExitAdapter) -> None:
        self.backbone, self.adapter = Backbone(model, adapter.shape.exit_layer), adapter

    def __call__(self, ids: Sequence[int], exits: Sequence[int]) -> Mapping[int, Tensor]:
        backbone, device = self.backbone, self.backbone.model.device
        tokens = torch.tensor([ids], device=device)
        positions = torch.arange(len(ids), device=device)[None]
        mask = document_mask(torch.zeros_like(tokens))
        at_exit, at_end = backbone.states(tokens, positions, mask)
        assert at_end is not None
        hidden = backbone.hidden(self.adapter, at_exit, positions, mask)[0]
        draft = self.adapter.logits(hidden, backbone.finish, backbone.head)
        known = {
            self.adapter.shape.exit_layer: draft.float(),
            backbone.stack.num_layers: backbone.finish(at_end[0]).float(),
        }
        return {layer: known[layer] for layer in exits}


def calibrate(trainer: Trainer, held_out: Packed) -> dict[str, Any]:
    """Set the adapter's temperature; what it does to other held-out text, where there is some."""
    adapter, wanted = trainer.adapter, trainer.settings.calibration_tokens
    rows = min(max(1, wanted // held_out.ids.shape[1]), held_out.num_rows // 2)

    def judged() -> tuple[float, float]:
        """Calibration error and acceptance on text that the temperature was not fitted on."""
        confidence, right, accepted = [], [], []
        for draft, target in trainer.pairs(held_out, rows, 2 * rows):  # one row's logits at a time
            surest = draft.softmax(-1).max(-1)
            confidence.append(surest.values)
            right.append(target.softmax(-1).gather(-1, surest.indices[:, None])[:, 0])
            accepted.append(acceptance(draft, target))
        error = calibration_error(torch.cat(confidence), torch.cat(right))
        return error, float(torch.cat(accepted).mean())

    adapter.temperature = 1.0
    before = judged() if rows else None
    adapter.temperature = fit_temperature(trainer.pairs(held_out, 0, max(1, rows)))
    temperature = {"temperature of the draft's logits": round(adapter.temperature, 4)}
    if before is None:
        return temperature
    after = judged()
    return temperature | {
        "expected calibration error before": round(before[0], 4),
        "expected calibration error after": round(after[0], 4),
        "acceptance before calibration": round(before[1], 4),
        "acceptance after calibration": round(after[1], 4),
    }


def predicted(
    settings: Settings,
    model: Any,
    adapter: ExitAdapter,
    samples: Sequence[Sample],
) -> float:
    """Speed-up of an exit with its adapter, by acceptance along held-out text and costs."""
    lm, layer = wrapped(model, None, adapter), adapter.shape.exit_layer
    report = evaluate_exits(
        lm.stack,
        samples,
        [layer],
        temperature=settings.temperature,
        max_tokens=settings.eval_tokens,
        max_sample_tokens=settings.seq_len,
        exit_logits=AdapterLogits(model, adapter),
    )
    cost = measure_cost(lm.stack, lm.plan, seconds=COST_SECONDS)
    return best_exit(report, {layer: cost}, settings.seq_len / 2)[2]


def measure_adapter(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    adapter: ExitAdapter,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    *,
    vocabulary: tuple[int, ...] | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> tuple[Measurement, PlanFile]:
    """As ``evaluation.measure``, of the exit with its adapter; and the plan to decode with.

    Args:
        vocabulary: that drafts are made over, in speeds and costs; None: all of it.
    """
    lm, layer = wrapped(model, tokenizer, adapter), adapter.shape.exit_layer
    temperatures, reports, speeds = (0.0, settings.temperature), [], []
    logits = AdapterLogits(model, adapter)
    for t in temperatures:
        on_progress(f"acceptance along held-out text, {named(t)}")
        tokens = settings.final_tokens
        reports.append(
            evaluate_exits(
                lm.stack, samples, [layer], temperature=t, max_tokens=tokens, exit_logits=logits
            )
        )
    on_progress("costs of passes")
    context = statistics.fmean(map(len, prompts)) + settings.max_new_tokens / 2
    lm = wrapped(model, tokenizer, adapter, PlanFile(lm.plan, draft_vocabulary=vocabulary))
    cost = measure_cost(
        lm.stack,
        lm.plan,
        draft_vocabulary=vocabulary,
        head=lm.draft_head,
        seconds=COST_SECONDS,
    )
    _, k, _ = best_exit(reports[-1], {layer: cost}, context)
    file = PlanFile(
        lm.plan,
        draft_vocabulary=vocabulary,
        cost=cost,
        fingerprint=fingerprint(lm.stack.twin),
        acceptance=reports[-1].exits[layer].by_position,
    )
    lm = wrapped(model, tokenizer, adapter, file)
    new, seed = settings.max_new_tokens, settings.seed
    for t in temperatures:
        on_progress(f"speed of exit {layer} with its adapter, {named(t)}")
        speeds += measure_speeds(
            lm, prompts, (k, AUTO), max_new_tokens=new, temperature=t, seed=seed
        )
    plain = cost.verify_pass(1, context)
    c, v = cost.draft_pass(1, context) / plain, cost.verify_pass(k + 1, context) / plain
    return Measurement(tuple(reports), layer, c, v, tuple(speeds)), file
