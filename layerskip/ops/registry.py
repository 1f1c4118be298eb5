"""The operations as torch operators, ``torch.ops.layerskip.*``.

An operator's schema is its definition's signature. The tensors' device says what runs: on a CPU
the definition, on a CUDA device the kernels; tracing sees empty outputs. By ``Library.define`` and
``impl``: an operator made by ``custom_op`` costs ten times as much a call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerskip.ops import arguments, definitions
from layerskip.ops.catalog import CATALOG
from layerskip.ops.kernels import KernelOps
from layerskip.ops.launch import DriverLauncher

NAMESPACE = "layerskip"
# Each operator and the arguments that it changes.
OPERATORS: dict[str, tuple[str, ...]] = {
    "rms_norm": (),
    "add_rms_norm": (),
    "linear": (),
    "swiglu": (),
    "rope_append_kv": ("q", "k_cache", "v_cache"),
    "decode_attention": (),
    "gumbel_noise": (),
    "gumbel_from_bits": (),
    "lm_head_argmax": (),
    "accept_tokens": ("cache_seqlens", "num_left"),
    "accept_block": ("cache_seqlens", "num_left"),
}
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@functools.cache
def cuda_launcher(device: torch.device) -> DriverLauncher:
    """What launches on one GPU, with all kernels compiled and loaded.

    Args:
        device: with an index, as tensors have it.
    """
    return DriverLauncher(device, [(k.name, k.source) for k in CATALOG.values()])


@functools.cache
def cuda_ops(device: torch.device) -> KernelOps:
    """The kernels on one GPU, compiled and loaded on first use."""
    return KernelOps(cuda_launcher(device))


@functools.cache
def cuda_noise(device: torch.device) -> KernelOps | None:
    """``gumbel_noise`` alone on one GPU; None if it cannot be had there.

    A model that no kernel runs is sampled, too: it does not wait until all are compiled.

    Args:
        device: with an index, as tensors have it.
    """
    kernel = CATALOG["gumbel_noise"]
    try:
        return KernelOps(DriverLauncher(device, [(kernel.name, kernel.source)]))
    except RuntimeError:  # a KernelBuildError, or what the driver says: the host can draw, too
        return None


def _on_cpu(name: str) -> Callable[..., Any]:
    check, define = getattr(arguments, name), getattr(definitions, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return define(*args, **kwargs)

    return run


def _on_cuda(name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(cuda_ops(args[0].device), name)(*args, **kwargs)

    return run


def _register(name: str, changed: tuple[str, ...]) -> Callable[..., Any]:
    """Define an operator; returns the function that users call, documented as the definition."""
    definition = getattr(definitions, name)
    _LIBRARY.define(name + torch.library.infer_schema(definition, mutates_args=changed))
    _LIBRARY.impl(name, _on_cpu(name), "CPU")
    _LIBRARY.impl(name, _on_cuda(name), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", getattr(arguments, name), lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    @functools.wraps(definition)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


FUNCTIONS = {name: _register(name, changed) for name, changed in OPERATORS.items()}
