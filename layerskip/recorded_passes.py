"""A decoder's passes as rounds that the device runs by itself have them: recorded, in a queue.

Passes that the host starts take as long as it needs for that: on a GPU a drafted token seemed to
cost 0.49 of a plain pass, and made a recorded round 0.34 longer (bench/LOG.md, 2026-11-26).
"""

from collections.abc import Callable

import torch

from layerskip.bare_passes import KINDS, Passes, Point, Timing
from layerskip.cost import NUM_SEQUENCES
from layerskip.draft_head import DraftHead
from layerskip.graphs import Function, Recorder, RecordingError, Recordings
from layerskip.packed import PackedStack
from layerskip.plan import DraftPlan
from layerskip.seats import rounded_up

LED_IN = 2  # passes of the same kind, which keep the device busy while the timed one is started


class RecordedPasses(Passes):
    """As ``Passes``, of a stack that chooses tokens on its device: the likeliest, as part of each
    pass. Sampling takes nothing beside; what the noise of sampled rounds takes is not in it.

    Args:
        stack, plan, head, largest: as for ``Passes``; a trimmed head has its own ids alone.
        recorder: makes recordings.
    """

    stack: PackedStack

    def __init__(
        self,
        stack: PackedStack,
        plan: DraftPlan | None,
        head: DraftHead | None,
        largest: tuple[int, int],
        recorder: Recorder,
    ) -> None:
        super().__init__(stack, plan, head, largest)
        device = stack.device
        self._recordings = Recordings(recorder)
        self._vocab_ids = None if head is None else head.ids.int()
        self._tokens = torch.tensor(self.ids, device=device)
        self._hidden = stack.embed_ids(self._tokens)
        self._at = torch.zeros(NUM_SEQUENCES, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if on_gpu else 0)]

    def timing(self, point: Point) -> Timing:
        """One timing of one pass, behind others of its kind, so that the device is not idle before.

        Raises:
            RecordingError: the pass can't be recorded.
        """
        kind, rows, context = point
        kind, _, of = kind.partition(" ")
        if kind in KINDS:
            return 0.0, 0.0
        if of == "behind":  # a recorded pass reads its weights from memory, whatever ran before
            return self.last_draft
        sequences = NUM_SEQUENCES if of == "sequences" else 1
        cache = self.cache if sequences == 1 else self.many
        slots = rounded_up(context + rows // sequences, cache.num_slots)
        self._at.fill_(context)
        run = self._prepared((kind, sequences, rows // sequences, slots))
        for _ in range(LED_IN):
            run()
        found = self._timed(run)
        if kind == "draft":
            self.last_draft = found
        return found

    def _prepared(self, shape: tuple[str, int, int, int]) -> Function:
        """A recorded pass over so many tokens of so many sequences, which attends to so many slots
        at most, at the contexts that the device knows."""
        kind, sequences, each, slots = shape
        rows, at = sequences * each, self._at[:sequences]
        cache = self.cache if sequences == 1 else self.many
        layers = range(self.stack.num_layers) if kind == "verify" else self.draft_layers
        vocab_ids = None if kind == "verify" else self._vocab_ids

        def function() -> None:
            hidden = self._hidden[:rows]
            if kind != "head":
                hidden = self.stack.embed_ids(self._tokens[:rows])
                hidden = self.stack.run_rows(hidden, layers, cache, at, each, num_slots=slots)
            self.stack.choose(hidden, None, vocab_ids)

        if shape not in self._recordings:
            self._recordings.prepare(shape, function)
            if self._recordings.reason:
                raise RecordingError(self._recordings.reason)
        return lambda: self._recordings.run(shape, function)

    def _timed(self, run: Callable[[], object], times: int = 1) -> Timing:
        """By the device's clock, if it has one."""
        if not self._events:
            return super()._timed(run, times)
        begun, ended = self._events
        stream = torch.cuda.current_stream(self.stack.device)  # which need not be the current one
        begun.record(stream)
        for _ in range(times):
            run()
        ended.record(stream)
        ended.synchronize()
        seconds = begun.elapsed_time(ended) / 1000 / times
        return seconds, seconds
