"""What a twin shares with its model: the weights, and how to see that the model has others."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from layerskip.blocks import Stamp, stamp
from layerskip.fingerprint import adapters_run

HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils")


class Place(NamedTuple):
    """A module of a model, and what it had itself when the model was wrapped.

    Attributes:
        above: number of the module that it is in, in the order of places; of the model itself 0.
        name: that it has in there; of the model itself "".
        weights: names and tensors, persistent buffers among them.
        path: dotted, from the model.
        module: as long as there is one.
    """

    above: int
    name: str
    weights: tuple[tuple[str, Tensor], ...]
    path: str
    module: "weakref.ref[nn.Module]"


class SharedWeights:
    """The tensors of a twin, and where its model has them.

    The model is not kept: whoever let it go cannot change it, and there is less to see.

    Args:
        owner: the model.
        twin: over the same tensors.
        may_move: whether decoding finds weights whose values lie elsewhere by now.
    """

    def __init__(self, owner: nn.Module, twin: nn.Module, *, may_move: bool) -> None:
        self._weights = list(_weights(twin))
        self._fixed = None if may_move else _addresses(self._weights)
        self._kinds = _kinds(self._weights)
        self._owner, self._places = weakref.ref(owner), _places(owner)
        # Not the hooks themselves, which may hold the model. Most are the twin's, too, and stay.
        modules = (*owner.modules(), *twin.modules())
        self._hooks = {id(hook) for module in modules for hook in hooks_of(module)}
        self._adapters = adapters_run(owner)

    def check(self) -> None:
        """Raise if the model's weights are not those that decoding reads, or not of their kind.

        Raises:
            ValueError: a weight was cast, moved or resized in its place, or another tensor is where
                one was. Weights whose module is gone are no concern: new modules are not seen.
        """
        moved = self._fixed is not None and _addresses(self._weights) != self._fixed
        if moved or _kinds(self._weights) != self._kinds:
            raise ValueError(
                "the model was moved, cast or resized after it was wrapped; wrap it again"
            )
        if (path := self._replaced()) is not None:
            raise ValueError(
                f"weight {path} of the model is another tensor than when it was wrapped, or none "
                "(as after load_state_dict with assign=True, or pruning); wrap it again"
            )

    def are_those_of(self, model: nn.Module) -> bool:
        """Whether a model is the one that was wrapped, or has its tensors and no others."""
        if model is self._owner():
            return True
        return _addresses(_weights(model)) == _addresses(self._weights)

    def unseen_hook(self, model: nn.Module) -> str | None:
        """Where a model has a forward hook that it had not when it was wrapped; None: nowhere. As
        PEFT gives it some for one call (``adapter_names``)."""
        for path, module in model.named_modules():
            for hook in hooks_of(module):
                if id(hook) not in self._hooks:
                    return path or type(module).__name__
        return None

    def switched_adapter(self, model: nn.Module) -> str | None:
        """Where a model runs other PEFT adapters than when it was wrapped, or scales them by other
        numbers; None: nowhere. What was merged and taken out is in the weights."""
        # A layer that got its first adapter later names the active ones, and has none of them.
        usual: frozenset[str] = frozenset().union(*self._adapters.values())
        for name, run in adapters_run(model).items():
            known = self._adapters.get(name)
            if run.keys() != usual if known is None else run != known:
                return name
        return None

    def stamp(self) -> Stamp:
        """Changes whenever torch sees the weights change: see ``blocks.stamp``."""
        return stamp(self._weights)

    def _replaced(self) -> str | None:
        """Where the model has another tensor than when it was wrapped; None: nowhere."""
        module = self._owner()
        found: list[nn.Module | None] = []
        for above, name, weights, path, was in self._places:
            if name:
                holder = found[above]
                module = None if holder is None else holder._modules.get(name)  # noqa: SLF001
            found.append(module)
            if module is None:
                continue
            for own, weight in weights:
                now = module._parameters.get(own, module._buffers.get(own))  # noqa: SLF001
                # Another module may have none, and a dictionary of adapters' weights fewer; any
                # other computes it now, or is pruned.
                lost = module is was() and not _holds_entries(module)
                if now is not weight and (now is not None or lost):
                    return f"{path}.{own}".removeprefix(".")
        return None


def hooks_of(module: nn.Module) -> list[object]:
    """A module's forward hooks, but for transformers' own that change no output: they collect
    hidden states, and are left behind once it was asked for some, or let gradients through."""
    # torch has no public way to ask.
    found = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001
    return [hook for hook in found if getattr(hook, "__module__", None) not in HARMLESS]


def _holds_entries(module: nn.Module) -> bool:
    """Whether it is a dictionary of tensors: torch's, or PEFT's of buffers."""
    return isinstance(module, nn.ParameterDict) or type(module).__name__ == "BufferDict"


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, and what else a checkpoint has of it: some experts' biases are buffers."""
    yield from model.parameters()
    yield from (buffer for m in model.modules() for _, buffer in _kept_buffers(m))


def _kept_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    lost = module._non_persistent_buffers_set  # noqa: SLF001
    return [(n, b) for n, b in module._buffers.items() if b is not None and n not in lost]  # noqa: SLF001


def _places(model: nn.Module) -> list[Place]:
    """Of a model's modules that have weights or lead to some, each behind the one it is in."""
    places: list[Place] = []
    numbers: dict[str, int] = {}
    for path, module in model.named_modules():
        if path and next(_weights(module), None) is None:
            continue
        above, _, name = path.rpartition(".")
        own = [(n, w) for n, w in module._parameters.items() if w is not None]  # noqa: SLF001
        weights = (*own, *_kept_buffers(module))
        places.append(Place(numbers.get(above, 0), name, weights, path, weakref.ref(module)))
        numbers[path] = len(numbers)
    return places


def _addresses(weights: Iterable[Tensor]) -> list[int]:
    return [w.data_ptr() for w in weights]


def _kinds(weights: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device, torch.Size]]:
    """What a weight may not lose while a twin shares it; its values may change."""
    return [(w.dtype, w.device, w.shape) for w in weights]
