"""What a process sets for all of torch, and a decoder does not follow."""

from types import TracebackType

import torch

AUTOCAST = ("cpu", "cuda")


class Decoding(torch.inference_mode):
    """Inference mode without ``torch.autocast``: passes round as the probe of bits found them to,
    inside a caller's autocast as outside. A context, and a decorator: ``@Decoding()``."""

    def __enter__(self) -> None:
        super().__enter__()
        on = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
        self._off = [torch.autocast(kind, enabled=False) for kind in on]
        for context in self._off:
            context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for context in reversed(self._off):
            context.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)
