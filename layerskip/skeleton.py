"""A checkpoint's own forward with its layers taken out, for any family.

Transformers writes the same three things around the layers of every decoder: what comes before
them (embeddings, positions), what each is called with (rotary tables, ALiBi, masks), and what
follows (final norm, head, scaling, capping of logits). The skeleton is a copy of the model whose
layers are stand-ins. Run with stand-ins that let hidden states through, it tells what it would
have called each layer with; run with stand-ins that return given states, it gives their logits.
So none of the three needs a line per family.
"""

import copy
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.admission import decoder_layers
from layerskip.ambient import Decoding
from layerskip.draft_head import Projection
from layerskip.errors import UnsupportedModelError
from layerskip.guest import NAME, RUN, CacheGuest, LayerCall, LearntMask, Lesson, Places, Running
from layerskip.layout import Layout

EMPTIED = (dict, OrderedDict, set)
TUNED_NORMS = "ln_tuning_layers"  # where PEFT's LN tuning has them
PARAM_WRAPPER = "ParamWrapper"  # PEFT's, of ``target_parameters``


def share_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` with its own modules and config over the same tensors."""
    twin = copy_around(model, {})
    config = twin.config
    config._attn_implementation = NAME  # noqa: SLF001
    config._experts_implementation = NAME  # noqa: SLF001
    # What a user wants to look at is not collected in every pass.
    config.output_attentions = config.output_hidden_states = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    turn = threading.RLock()  # they may be nested
    for module in twin.modules():
        if type(module).__name__ == PARAM_WRAPPER:
            module.forward = _in_turn(module.forward, turn)
    return twin.eval()


def _in_turn(forward: Callable[..., Any], turn: threading.RLock) -> Callable[..., Any]:
    """For a module that other attributes stand in while it runs: a second thread would see them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return forward(*args, **kwargs)

    return run


def copy_around(model: PreTrainedModel, instead: dict[int, nn.Module]) -> PreTrainedModel:
    """A copy that shares every tensor and has other modules instead of those with these ids.

    Shared too: the user's hooks, which may hold what cannot be copied, and PEFT's record of what
    is merged into the weights. Not of an adapter that is disabled: it would take later merges out
    of the user's weights. Nor of tuned norms, which are merged by swapping modules.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {}
    for module in model.modules():
        # A module has a dozen that are empty, of hooks it might have had: most of what is copied.
        found = [value for value in vars(module).values() if type(value) in EMPTIED and not value]
        empty |= {id(value): type(value)() for value in found}
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
        hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())  # noqa: SLF001
        shared += [h for h in hooks if not isinstance(getattr(h, "__self__", None), nn.Module)]
        disabled = getattr(module, "disable_adapters", False)
        if not disabled and not hasattr(module, TUNED_NORMS):
            shared.append(vars(module).get("merged_adapters"))
    try:
        return copy.deepcopy(model, empty | {id(item): item for item in shared} | instead)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedModelError(f"the model's modules cannot be copied: {error}") from None


class Embedded(Tensor):
    """Embedded tokens that no position has been added to: they have not entered the stack yet.

    The type stays with the rows when they are sliced, padded or stacked.
    """


class StandIn(nn.Module):
    """In the place of a decoder layer: notes what it is called with, returns what it is told."""

    def __init__(self, layer: nn.Module, run: Running) -> None:
        super().__init__()
        self.run, self.in_tuple = run, False
        # Bodies read plain attributes of their layers, such as the type of attention.
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        if self.run.injected is not None:
            hidden = self.run.injected
        else:
            self.run.calls.append(LayerCall(hidden, args, kwargs))
        return (hidden, None) if self.in_tuple else hidden


class FirstLayer(nn.Module):
    """In the place of layer 0 while a model is learnt: the layer itself, watched."""

    def __init__(self, layer: nn.Module, run: Running, stand_ins: list[StandIn]) -> None:
        super().__init__()
        self.layer, self.run, self.stand_ins = layer, run, stand_ins

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.run.calls.append(LayerCall(hidden, args, kwargs))
        out = self.layer(hidden, *args, **kwargs)
        for stand_in in self.stand_ins:
            stand_in.in_tuple = isinstance(out, tuple)
        return out


class HeadStandIn(nn.Linear):
    """In the place of the head: does what it is told."""

    def __init__(self, head: nn.Linear, run: Running) -> None:
        nn.Module.__init__(self)
        self.run = run
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias  # bodies ask for their dtype

    def forward(self, hidden: Tensor) -> Tensor:
        project = self.run.project
        return super().forward(hidden) if project is None else project(hidden)


class Skeleton:
    """``embed``, ``run`` and ``head`` of any family whose layers use our cache.

    Attributes:
        windows: each layer's sliding window, None where it sees everything.
        one_row: whether a pass may hold tokens of one row only, because the layers have attention
            code of their own, which knows no rows.
        probed: one layer of each kind, for the probe of bits.
        widths: of what the layers' weights read and write.
        softcap, sinks: of the attention of layer 0.
    """

    divides_products = False
    fewest_rows, products = 0, ()

    def __init__(self, twin: PreTrainedModel, attention_before: str) -> None:
        self._run = Running()
        self._layers = list(decoder_layers(twin))
        for module in chain.from_iterable(layer.modules() for layer in self._layers):
            setattr(module, RUN, self._run)
        stand_ins = [StandIn(layer, self._run) for layer in self._layers]
        pairs = zip(self._layers, stand_ins, strict=True)
        self._model = copy_around(twin, {id(layer): stand_in for layer, stand_in in pairs})
        self._trimmed: PreTrainedModel | None = None
        self._body: Any = self._model.base_model
        self._embedding = cast(nn.Embedding, self._model.get_input_embeddings())
        weight = self._embedding.weight
        self._blank = weight.new_zeros(1, 1, weight.shape[1])
        self._everything = self._blank.new_zeros(1, 1, 1, 1)
        self._takes_positions = "position_ids" in inspect.signature(self._body.forward).parameters
        self.one_row = False
        lesson, calls = self._learn(stand_ins)
        self.windows = tuple(_window(call) for call in calls)
        self.num_kv_heads, self.head_dim = lesson.num_kv_heads, lesson.head_dim
        self.group = lesson.num_heads // lesson.num_kv_heads if lesson.asked else 1
        self.softcap, self.sinks = lesson.softcap, lesson.sinks
        self.one_row = not lesson.asked
        if self.one_row:
            twin.config._attn_implementation = attention_before  # noqa: SLF001
            self._model.config._attn_implementation = attention_before  # noqa: SLF001
        self.backend = "the checkpoint's own modules, attention " + (
            "their own, one row a pass" if self.one_row else "by torch"
        )
        self.probed = self._one_of_each_kind()
        weights = (p for i in self.probed for p in self._layers[i].parameters() if p.ndim > 1)
        self.widths = {width for weight in weights for width in weight.shape[-2:]}

    def _learn(self, stand_ins: list[StandIn]) -> tuple[Lesson, list[LayerCall]]:
        """Two tokens through layer 0: the shapes of its attention, and every layer's mask."""
        lesson, places = Lesson(2), decoder_layers(self._model)
        places[0] = FirstLayer(self._layers[0], self._run, stand_ins)
        positions = torch.arange(2, device=self._blank.device)[None]
        with Decoding(), self._running(lesson):
            calls = self._calls(self._blank.expand(1, 2, -1), positions, lesson, None)
        places[0] = stand_ins[0]
        return lesson, calls

    def _one_of_each_kind(self) -> tuple[int, ...]:
        kinds: dict[object, int] = {}
        for i, layer in enumerate(self._layers):
            shapes = tuple(p.shape for p in layer.parameters())
            kinds.setdefault((shapes, *map(type, layer.modules())), i)
        return tuple(kinds.values())

    def refresh(self) -> bool:
        """Nothing is copied of the weights: changes are seen."""
        return False

    def embed(self, ids: Tensor) -> Tensor:
        """``(tokens,)`` -> ``(tokens, width)``, to be entered by ``run``."""
        return self._embedding(ids).as_subclass(Embedded)

    def run(self, hidden: Tensor, layers: Iterable[int], layout: Layout) -> Tensor:
        """``(rows, hidden)`` -> the same, through these layers; ``Embedded`` enters first."""
        entering = isinstance(hidden, Embedded)
        hidden = hidden.as_subclass(Tensor)[None]
        inputs = hidden if entering else self._blank.expand(1, layout.num_rows, -1)
        mask = self._everything
        if self.one_row:
            mask = torch.ones(1, layout.num_visible, device=hidden.device)
        with self._running(layout):
            calls = self._calls(inputs, layout.positions, layout, mask)
            hidden = calls[0].hidden if entering else hidden
            for i in layers:
                out = self._layers[i](hidden, *calls[i].args, **calls[i].kwargs)
                hidden = out[0] if isinstance(out, tuple) else out
        return hidden[0]

    def head(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """``(rows, hidden)`` -> ``(rows, vocab)``: all that follows the layers.

        Args:
            project: in the place of a plain Linear head; as many columns come out as it gives.
        """
        rows, model = len(hidden), self._model if project is None else self._with_head_stand_in()
        kwargs: dict[str, Any] = {} if self.one_row else {"attention_mask": self._everything}
        if self._takes_positions:
            kwargs["position_ids"] = torch.zeros(1, rows, dtype=torch.int64, device=hidden.device)
        self._run.injected, self._run.project = hidden.as_subclass(Tensor)[None], project
        try:
            out = model(
                inputs_embeds=self._blank.expand(1, rows, -1),
                use_cache=False,
                return_dict=True,
                **kwargs,
            )
        finally:
            self._run.injected = self._run.project = None
        return out.logits[0]

    def _with_head_stand_in(self) -> PreTrainedModel:
        """The skeleton with a stand-in for its head, made once: the full head stays as it is."""
        if self._trimmed is None:
            head = cast(nn.Linear, self._model.get_output_embeddings())
            shared = {id(stand_in): stand_in for stand_in in decoder_layers(self._model)}
            instead = shared | {id(head): HeadStandIn(head, self._run)}
            self._trimmed = copy_around(self._model, instead)
        return self._trimmed

    @contextmanager
    def _running(self, places: Places) -> Iterator[None]:
        self._run.places = places
        try:
            yield
        finally:
            self._run.places, self._run.calls = None, []

    def _calls(
        self, inputs: Tensor, positions: Tensor, places: Places, mask: Tensor | None
    ) -> list[LayerCall]:
        """What the body calls each layer with, for ``inputs`` ``(1, rows, width)``."""
        calls: list[LayerCall] = []
        self._run.calls = calls
        self._body(
            inputs_embeds=inputs,
            attention_mask=mask,
            past_key_values=CacheGuest(places, hands_back=self.one_row),
            use_cache=True,
            return_dict=True,
            **({"position_ids": positions} if self._takes_positions else {}),
        )
        return calls


def _window(call: LayerCall) -> int | None:
    """The sliding window of the mask that a layer was called with."""
    given = (*call.args, *call.kwargs.values())
    return next((mask.window for mask in given if isinstance(mask, LearntMask)), None)
