"""Checkpoints: loading one through transformers, and the one inside the package."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.hub import has_file

from layerskip.admission import refusal
from layerskip.errors import UnsupportedModelError
from layerskip.files import read_json
from layerskip.plan import PlanFile

BUILTIN = "builtin"
PLAN_FILE = "layerskip.json"
GENERATION_CONFIG = "generation_config.json"
# Vocabularies of tokenizers, by the names that most kinds have for them.
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def builtin_folder() -> Path:
    """Folder of the checkpoint that ships with the package."""
    return Path(__file__).parent / "checkpoints" / "small"


def pick_device(device: str) -> str:
    """ "cpu", "cuda", or for "auto" CUDA where there is one."""
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'auto', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use 'cpu'")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def pick_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """A torch dtype, or "auto" for the checkpoint's own."""
    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")


def load_config(folder: str | Path, **hub: Any) -> Any:
    """The checkpoint's config; one clear sentence if there is none or it is not supported."""
    folder = _weights_of(folder)
    path = Path(folder)
    looks_local = path.is_absolute() or str(folder).startswith(".") or path.exists()
    if looks_local and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise ValueError(f"model {str(folder)!r} {what}; give a checkpoint folder or a hub id")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **hub)
    except Exception as error:  # noqa: BLE001  a wrong value is an error of any kind
        raise ValueError(f"model {str(folder)!r} cannot be loaded: {_sentence(error)}") from None


def _weights_of(folder: str | Path) -> str | Path:
    """The checkpoint that an adapter's folder names; any other folder itself."""
    adapter = Path(folder) / "adapter_config.json"
    if not adapter.is_file() or (Path(folder) / "config.json").is_file():
        return folder
    content = read_json(adapter, "adapter's config")
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{adapter} does not say of which checkpoint it is; load both with peft, and wrap them"
        )
    return base


def trained_exits(config: Any, plan: PlanFile) -> tuple[int, ...]:
    """Exit layers that a checkpoint was trained for, by its config or its plan file; often none."""
    found = getattr(config, "early_exit_layers", None) or plan.measurements.get("trained_exits")
    depth = config.num_hidden_layers
    if not isinstance(found, list | tuple):
        return ()
    return tuple(sorted({e for e in found if type(e) is int and 0 < e < depth}))


def read_checkpoint(
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None,
    hub: Mapping[str, Any],
    check: Callable[[Any], None] = lambda config: None,
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer (None if the checkpoint has none), as transformers has them.

    Everything that can be refused is refused before any weight is read: ``check`` is called with
    the config. ``hub`` has transformers' arguments for what is not in a folder.
    """
    wanted = pick_dtype(dtype)
    config = load_config(folder, **hub)
    reason = refusal(config)
    if reason is not None:
        raise UnsupportedModelError(f"model {str(folder)!r}: {reason}")
    check(config)
    ends = Path(_weights_of(folder)) / GENERATION_CONFIG
    try:
        if ends.is_file():  # transformers passes over one that it can't read: text would not end
            GenerationConfig.from_pretrained(ends.parent)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=wanted,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # Else an adapter's config is looked for on the network, and in another cache.
            adapter_kwargs={name: hub[name] for name in ("cache_dir", "local_files_only")},
            **hub,
        )
    except Exception as error:  # noqa: BLE001  as above
        raise ValueError(f"model {str(folder)!r} cannot be loaded: {_sentence(error)}") from None
    model, report = loaded
    # Transformers goes on with random numbers in their place.
    lacking = sorted([*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"model {str(folder)!r} cannot be loaded: {len(lacking)} weights are missing or have "
            f"another shape than config.json says, the first of them {lacking[0]}"
        )
    return model, _load_tokenizer(folder, **hub)


def _load_tokenizer(folder: str | Path, **hub: Any) -> Any:
    """The tokenizer, of an adapter without one its checkpoint's; None if there is none."""
    for where in dict.fromkeys((folder, _weights_of(folder))):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **hub)
        except Exception as error:  # noqa: BLE001  tokenizers has no other kind
            names = (*VOCABULARY_FILES, "tokenizer_config.json")
            if any(has_file(where, name, **hub) for name in names):
                raise ValueError(
                    f"the tokenizer of {str(where)!r} cannot be loaded: {_sentence(error)}"
                ) from None
        else:
            if _has_vocabulary(tokenizer, where, **hub):
                return tokenizer
    return None


def _has_vocabulary(tokenizer: Any, where: str | Path, **hub: Any) -> bool:
    """Whether the tokenizer's vocabulary was there.

    Where it was not, transformers makes up an empty one for many families.
    """
    own = getattr(tokenizer, "vocab_files_names", {}).values()
    if not own:  # it is of bytes
        return True
    # What was read of a hub id is in the cache by now.
    cached = {**hub, "local_files_only": True}
    return any(has_file(where, name, **cached) for name in {*VOCABULARY_FILES, *own})


def _sentence(error: Exception) -> str:
    """The first line of an error that others raised, and what a colon at its end announces."""
    if isinstance(error, ArithmeticError | LookupError):  # its text alone says little
        return repr(error)
    first, *more = str(error).strip().split("\n")
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def known_plan(folder: str | Path) -> PlanFile | None:
    """The folder's ``layerskip.json``, if it has one."""
    path = Path(folder) / PLAN_FILE
    return PlanFile.load(path) if path.is_file() else None


def held_out_modules() -> list[str]:
    """Standard-library modules that the built-in checkpoint never saw."""
    card = json.loads((builtin_folder() / PLAN_FILE).read_text(encoding="utf-8"))
    modules: list[str] = card["held_out_modules"]
    return modules
