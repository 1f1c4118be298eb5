"""Settings of a recipe: a YAML file, overridden by ``key=value`` on the command line."""

import argparse
import dataclasses
import difflib
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from layerskip.files import write_text
from layerskip.params import check_integer, check_number

T = TypeVar("T")
MixedPrecision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True)
class RunSettings:
    """What both recipes are told; each adds its own in a subclass.

    Attributes:
        model: a folder, a hub id, or "builtin".
        data: a file, a folder, or a hub id of ``datasets`` (``data.load``).
        held_out: held-out texts of their own, in the place of a share of the data; "": none.
        out: folder of the run.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16": of the frozen weights.
        steps: of the optimiser.
        batch_size: sequences of one step, over all processes and accumulated micro-batches, so
            that a step is the same whatever it is divided into.
        gradient_accumulation: micro-batches that each process divides its share of a step into.
        seq_len: tokens of a packed sequence.
        learning_rate: at its highest.
        clip: norm that gradients are cut to; above 0.
        mixed_precision: "no", "bf16" or "fp16", as accelerate takes it.
        seed: of the order of the data and of all that is drawn.
        held_out_share: of the rows, never trained on; above 0, at most 0.5.
        save_every, eval_every: steps.
        resume: go on from the last checkpoint in ``out``.
        eval_tokens: of held-out text, for the curve of acceptance.
        final_tokens, final_prompts, max_new_tokens: of the final measurement: held-out text,
            prompts, and tokens after each.
        temperature: of the final measurement, beside greedy; above 0.
    """

    model: str = "builtin"
    data: str = ""
    held_out: str = ""
    out: str = ""
    dtype: str = "auto"
    steps: int = 200
    batch_size: int = 8
    gradient_accumulation: int = 1
    seq_len: int = 512
    learning_rate: float = 1e-3
    clip: float = 1.0
    mixed_precision: MixedPrecision = "no"
    seed: int = 0
    held_out_share: float = 0.05
    save_every: int = 50
    eval_every: int = 50
    resume: bool = True
    eval_tokens: int = 4_000
    final_tokens: int = 20_000
    final_prompts: int = 24
    max_new_tokens: int = 64
    temperature: float = 0.8

    def __post_init__(self) -> None:
        for name in ("model", "data", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing; give {name}=... or write it into the YAML")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        least = {"seq_len": 2, "max_new_tokens": 2, "seed": 0}
        names = ("steps", "batch_size", "gradient_accumulation", "save_every", "eval_every")
        measured = ("eval_tokens", "final_tokens", "final_prompts")
        for name, low in (dict.fromkeys((*names, *measured), 1) | least).items():
            check_integer(name, getattr(self, name), low)
        check_number("clip", self.clip, 1e-6, 1e6)  # by 0 nothing would be trained
        check_number("learning_rate", self.learning_rate, 0.0, 10.0)
        check_number("held_out_share", self.held_out_share, 1e-6, 0.5)
        check_number("temperature", self.temperature, 1e-3, 10.0)
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of gradient_accumulation "
                f"({self.gradient_accumulation})"
            )


def check_exits(exits: Sequence[int]) -> None:
    """Raise unless these are exit layers, each once, the shallowest first."""
    if not exits or list(exits) != sorted(set(exits)):
        raise ValueError(f"exits must be ascending exit layers, got {list(exits)}")
    for layer in exits:
        check_integer("an exit", layer, 1)


def from_command_line(cls: type[T], description: str, config: Path, argv: Sequence[str]) -> T:
    """Settings from ``--config FILE key=value ...``.

    Args:
        cls: a frozen dataclass.
        description: of ``--help``.
        config: read where no other is given.
        argv: arguments without the script's name.

    Raises:
        ValueError: as of ``read``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=config, help=f"default: {config.name}")
    keys = ", ".join(_fields(cls))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys: {keys}")
    args = parser.parse_intermixed_args(argv)
    return read(cls, args.config, args.overrides)


def command() -> str:
    """The command line that runs this process again."""
    return shlex.join(["python", *sys.argv])


def read(cls: type[T], config: Path | None, overrides: Sequence[str] = ()) -> T:
    """Settings from a YAML file and ``key=value`` pairs, which count more; later ones most.

    Args:
        cls: a frozen dataclass of strings, numbers, booleans, literals, tuples, mappings, and
            optional ones of these.
        config: the file; None: the class's defaults.
        overrides: as on the command line; values are YAML, but text stays as it is typed.

    Raises:
        ValueError: a key is unknown (the nearest is named), a value is of another type than its
            key's, the file cannot be read, or the class refuses what it is given.
    """
    values = _load(config) if config is not None else {}
    kinds = _fields(cls)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} is no setting; write key=value")
        if key not in kinds:
            raise ValueError(_unknown(key, kinds))
        values[key] = _typed(kinds[key], text)
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(_unknown(str(key), kinds))
        values[key] = _checked(kinds[key], value, key)
    return cls(**values)


def save(settings: Any, path: Path) -> None:
    """Write settings, a dataclass, as YAML that ``read`` takes back."""
    content = _plain(dataclasses.asdict(settings))
    write_text(path, yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Loader(yaml.SafeLoader):
    """YAML whose words and numbers are those of YAML 1.2: PyYAML takes ``no`` for false and 1e-4
    for text. A key that stands there twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice")
        return mapping


# PyYAML takes 010 for 8, and 08 for an error.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 10))


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would take for something else than text."""


def _resolvers() -> Iterator[tuple[str, str, str]]:
    """Tag, what is read as it, and the characters that it may begin with."""
    number = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
    yield "tag:yaml.org,2002:bool", "true|false|True|False", "tfTF"
    yield "tag:yaml.org,2002:int", "[-+]?[0-9]+", "-+0123456789"
    yield "tag:yaml.org,2002:float", number, "-+.0123456789"
    yield "tag:yaml.org,2002:null", "~|null|", "~n"


def _take_yaml_1_2(cls: Any) -> None:
    cls.yaml_implicit_resolvers = {}
    for tag, pattern, first in _resolvers():
        cls.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list(first))


_take_yaml_1_2(_Loader)
_take_yaml_1_2(_Dumper)


def _load(config: Path) -> dict[str, Any]:
    try:
        values = yaml.load(config.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"settings {config} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"settings {config} are not YAML: {said}") from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"settings {config} must be a mapping of keys to values, got {values!r}")
    return values or {}


def _fields(cls: Any) -> dict[str, Any]:
    """Every key and its type."""
    kinds = typing.get_type_hints(cls)
    return {f.name: kinds[f.name] for f in dataclasses.fields(cls)}


def _unknown(key: str, kinds: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.5)
    return f"there is no setting {key!r}" + (
        f"; did you mean {near[0]}?" if near else f"; there are {', '.join(kinds)}"
    )


def _typed(kind: Any, text: str) -> Any:
    """An override's value. Text is taken as it is, so that no folder's name becomes a number."""
    options = _options(kind)
    if all(o is str or typing.get_origin(o) is Literal for o in options if o is not type(None)):
        return None if type(None) in options and text in ("null", "") else text
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is not a value") from None


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union; a type alone is its only one."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _checked(kind: Any, value: Any, key: str) -> Any:
    for option in _options(kind):
        try:
            return _of_kind(option, value, key)
        except TypeError:
            continue
    raise ValueError(f"{key} must be {_named(kind)}, got {value!r}")


def _of_kind(kind: Any, value: Any, key: str) -> Any:
    """The value as that type; TypeError if it is of another."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {
            _checked(args[0], k, key): _checked(args[1], v, f"{key}.{k}") for k, v in value.items()
        }
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError


def _named(kind: Any) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    said = []
    for option in _options(kind):
        origin = typing.get_origin(option)
        if option is type(None):
            said.append("null")
        elif origin is Literal:
            said.append("one of " + ", ".join(map(str, typing.get_args(option))))
        elif origin is tuple:
            said.append(f"a list, each {_named(typing.get_args(option)[0])}")
        else:
            said.append(names.get(option, "a mapping"))
    return " or ".join(said)


def _plain(value: Any) -> Any:
    """With lists for tuples, which YAML does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
