"""Which models are let in, and one sentence for each that is not, before anything is built."""

import sys
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layerskip.errors import UnsupportedModelError
from layerskip.families import ropes, unsuitable

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
GROWING = ("dynamic", "longrope")
ATTENTION_NAMES = ("attention", "attn", "self_attention", "self_attn")
DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# PEFT methods that are layers and nothing else. The others also prepend to the cache or to the
# prompt, or look at the whole call, which running layer by layer would leave out.
ADAPTERS = (
    *("ADALORA", "FOURIERFT", "IA3", "LN_TUNING", "LOHA", "LOKR"),
    *("LORA", "OFT", "TRAINABLE_TOKENS", "VERA"),
)


def refusal(config: object) -> str | None:
    """Why a checkpoint with this config cannot be decoded, or None if it can."""
    reason = unsuitable(config)
    if reason is not None:
        family = getattr(config, "model_type", None)
        return f"architecture {family!r} is not supported: {reason}"
    reason = changing_rope(config)
    if reason is not None:
        return reason
    method = _quantisation(config)
    if method not in (None, "torchao"):
        return (
            f"quantised weights are not supported ({method}), but for torchao's int8 weight-only "
            "ones; load the checkpoint in bfloat16 or float32"
        )
    return None


def changing_rope(config: object) -> str | None:
    """Why the positions of a model with this config do not stand still, or None if they do."""
    for parameters in ropes(config):
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            why = "changes with the length of the text" if rope_type in GROWING else "is not known"
            return f"rope type {rope_type!r} {why}; supported are {', '.join(ROPE_TYPES)}"
    return None


def unwrapped(model: object) -> object:
    """The model inside ``torch.compile`` and PEFT's wrapper.

    Its modules are what decodes: adapters are inside them, and nothing compiled is run.
    """
    while isinstance(model, nn.Module):
        compiled = dict(model.named_children()).get("_orig_mod")
        # Whoever holds a PeftModel has imported peft; nobody else needs to.
        peft = sys.modules.get("peft")
        if compiled is not None:
            model = compiled
        elif peft is not None and isinstance(model, peft.PeftModel):
            _check_adapters(model)
            model = model.get_base_model()
        else:
            break
    return model


def model_inside(model: object) -> PreTrainedModel:
    """The same, of what has to have one inside; ``TypeError`` if it has not."""
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers causal language model, got {type(inner).__name__}; "
            "give the model itself, not what wraps it"
        )
    return inner


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """A model's decoder layers: the outermost list that is as long as its config says."""
    return cast(nn.ModuleList, model.get_submodule(_place_of_layers(model)))


def _place_of_layers(model: PreTrainedModel) -> str:
    depth = model.config.num_hidden_layers
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    place = next((name for name, count in lists.items() if count == depth), None)
    if place is None:
        raise UnsupportedModelError(
            f"the config says num_hidden_layers={depth}, and no list of modules in "
            f"{type(model).__name__} has as many (there are {lists or 'none'}); set it to the "
            "number of layers that the model has"
        )
    return place


def _around_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the decoder layers are in: the model, its body, and what is between."""
    names = _place_of_layers(model).split(".")
    return [model.get_submodule(".".join(names[:i])) for i in range(len(names))]


def check_model(model: object) -> None:
    """Raise ``UnsupportedModelError`` with the reason unless ``model`` can be wrapped."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a transformers causal language model, got {type(model).__name__}"
        )
    reason = refusal(model.config)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it as a causal LM"
        )
    inspections = (_head_size, _places, _kinds, _dtypes, _code_of_layers, _code_around_layers)
    for inspect in (*inspections, _functions_by_name):
        reason = inspect(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(f"weight {name} holds NaN or infinite values; the file is damaged")


def _head_size(model: PreTrainedModel) -> str | None:
    head, ids = model.get_output_embeddings(), model.config.vocab_size
    weight = getattr(head, "weight", None)
    if callable(weight):  # as of torch's own quantisation
        kind = type(head)
        return f"the head is a {kind.__name__} of {kind.__module__}, whose weight is no tensor"
    if weight is None or len(weight) == ids:
        return None
    return (
        f"the head gives {len(weight)} scores, and the config says vocab_size={ids}; "
        "resize_token_embeddings changes both"
    )


def _quantisation(config: object) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def _check_adapters(model: nn.Module) -> None:
    """Raise unless every active adapter of a PeftModel is made of layers alone."""
    configs: dict[str, object] = model.peft_config  # type: ignore[assignment]
    active: Iterable[str] = model.active_adapters  # type: ignore[assignment]
    for config in (configs[name] for name in active):
        kind = getattr(config, "peft_type", None)
        method = str(getattr(kind, "value", kind))
        if method not in ADAPTERS:
            raise UnsupportedModelError(
                f"PEFT method {method} is not supported; supported are {', '.join(ADAPTERS)}"
            )
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise UnsupportedModelError(
                "activated LoRA is not supported: it looks for its invocation tokens in each "
                "call; use a LoRA without alora_invocation_tokens"
            )


def _places(model: PreTrainedModel) -> str | None:
    devices = {p.device for p in model.parameters()}
    kinds = {d.type for d in devices}
    if "meta" in kinds:
        return (
            "some weights have no values (device 'meta'): offloaded or never loaded; load it whole"
        )
    if len(devices) > 1:
        return f"the model is spread over {len(devices)} devices; load it on one"
    other = kinds - set(DEVICES)
    if other:
        return f"device {other.pop()!r} is not supported; move the model to {' or '.join(DEVICES)}"
    return None


def _kinds(model: PreTrainedModel) -> str | None:
    """Weights are plain tensors: others bring their own products, whose rows we know nothing of."""
    for name, parameter in model.named_parameters():
        kind = type(parameter)
        if kind is not nn.Parameter and not _is_int8(parameter):
            package = kind.__module__.partition(".")[0]
            return (
                f"weight {name} is a {kind.__name__} of {package}, which is not supported; "
                "load the checkpoint in bfloat16 or float32, unsharded"
            )
    return None


def _is_int8(weight: Tensor) -> bool:
    """Whether this is torchao's int8 weight-only quantisation: every row of a pass for itself."""
    kind = type(weight)
    ours = kind.__name__ == "Int8Tensor" and kind.__module__.startswith("torchao.")
    return ours and getattr(weight, "act_quant_kwargs", None) is None


def _dtypes(model: PreTrainedModel) -> str | None:
    # Adapters cast to what they need, and PEFT keeps them in float32 on a bfloat16 model.
    adapted = [
        f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer")
    ]
    found: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        own = all(
            name.startswith(f"{prefix}base_layer.") or not name.startswith(prefix)
            for prefix in adapted
        )
        if own:
            found.setdefault(parameter.dtype, name)
    for dtype, name in found.items():
        if dtype not in DTYPES:
            supported = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            return f"weight {name} is {dtype}; supported are {supported}"
    if len(found) > 1:
        several = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        return f"the model has weights of several dtypes ({several}); cast it to one"
    return None


def _code_of_layers(model: PreTrainedModel) -> str | None:
    """What a copy of the modules would not copy, or what would change the weights."""
    around = _around_layers(model)
    for name, part in model.named_modules():
        if hasattr(part, "_orig_mod"):
            return f"{name} is a compiled module; give the model as it was before torch.compile"
        if "forward" in vars(part) and part not in around:
            if hasattr(part, "_hf_hook"):
                return f"{name} is moved about by accelerate; load the model whole, on one device"
            return f"{name} has a forward in the place of its class's; delete that attribute"
        if getattr(part, "merged", False) and getattr(part, "disable_adapters", False):
            return (
                f"{name} has an adapter that is merged and disabled: its first pass would change "
                "the weights; unmerge it first"
            )
    for layer in decoder_layers(model):
        attention = [part for name, part in layer.named_children() if name in ATTENTION_NAMES]
        for part in (layer, *attention):
            if not _is_transformers_own(type(part).forward):
                return f"{type(part).__name__} is not a layer of transformers"
    return None


def _code_around_layers(model: PreTrainedModel) -> str | None:
    """What decoding would pass by: it runs embedding, layers, norm and head by itself."""
    for part in _around_layers(model):
        name, own = type(part).__name__, type(part).forward
        if not _is_transformers_own(own):
            return f"{name}.forward is not transformers' own, and decoding would not run it"
        # torch has no public way to ask.
        if part._forward_hooks or part._forward_pre_hooks:  # noqa: SLF001
            return (
                f"{name} has a forward hook, which decoding would not run; remove it, or hook "
                "the layers instead"
            )
        replaced = vars(part).get("forward")
        replaced = getattr(replaced, "_torchdynamo_orig_callable", replaced)
        moved = hasattr(part, "_hf_hook")  # accelerate's, for the whole of a model on one device
        if replaced is not None and not moved and getattr(replaced, "__func__", None) is not own:
            return f"{name} has a forward in the place of its class's, which would not be run"
    return None


def _functions_by_name(model: PreTrainedModel) -> str | None:
    """Functions of the user's that layers would call by the names in the config: decoding has its
    own in their place. Hub kernels, whose names have a slash, compute what transformers' do."""
    attention = ("attention", "_attn_implementation", ALL_ATTENTION_FUNCTIONS)
    experts = ("experts", "_experts_implementation", ALL_EXPERTS_FUNCTIONS)
    for what, where, known in (attention, experts):
        name = getattr(model.config, where, None)
        function = known.get(name) if isinstance(name, str) and "/" not in name else None
        ours = getattr(function, "__module__", "").startswith("layerskip.")  # of a twin
        if function is not None and not ours and not _is_transformers_own(function):
            return (
                f"the config's {what} implementation {name!r} is not transformers' own, and "
                "decoding would not run it; set one of transformers', as 'sdpa' or 'grouped_mm'"
            )
    return None


def _is_transformers_own(function: object) -> bool:
    return getattr(function, "__module__", "").startswith("transformers.")


def is_finite(weight: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    values = weight.dequantize() if _is_int8(weight) else weight.detach()
    # The sum is finite unless an entry is not: one read of the weights, no mask.
    return bool(torch.isfinite(values.sum(dtype=torch.float32)))
