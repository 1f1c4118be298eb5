"""Operations whose checks and grid arithmetic are done once for arguments of one form.

Of its tensors an operation of ``kernels`` asks nothing but shapes, strides, dtypes, devices and
alignment. So what it makes and launches for some arguments it makes and launches for all others
of the same form: it is watched the first time, and its steps are repeated from then on. A refusal
is no step: bad arguments are refused every time.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from layerskip.ops.launch import Argument, Dim3, Launcher
from layerskip.ops.layout import ALIGNMENT

KEPT_FORMS = 1024  # of arguments, of all operations together
P = ParamSpec("P")
R = TypeVar("R")
Ops = TypeVar("Ops", bound="PreparedOps")
Launch = Callable[[str, Dim3, Dim3, int, Sequence[Argument]], None]
Pick = Callable[[Sequence[Any]], Any]


class PreparedOps:
    """What operations marked ``prepared`` are methods of.

    Args:
        launcher: starts their kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launch = launcher.launch
        self._steps: dict[Any, _Steps | None] = {}  # None: they cannot be told

    def run(self, operation: Callable[..., R], args: Sequence[Any], options: dict[str, Any]) -> R:
        """The operation, or its steps if it has been run with arguments of this form."""
        given = (*args, *options.values())
        key = (operation, *options, *map(_form, given))
        steps = self._steps.get(key)
        if steps is not None:
            return steps.repeat(given, self._launch)
        if key in self._steps or _repeats(given):
            return operation(self, *args, **options)
        with _Watch(given, self._launch) as watch:
            result = operation(type(self)(watch), *args, **options)
        if len(self._steps) >= KEPT_FORMS:  # prompts of ever new lengths
            self._steps.clear()
        self._steps[key] = watch.steps(result)
        return result


def prepared(
    operation: Callable[Concatenate[Ops, P], R],
) -> Callable[Concatenate[Ops, P], R]:
    """Mark an operation whose steps can be repeated.

    They follow from the form of its arguments and from the numbers among them. Its tensors it
    makes by ``new_empty``; all else that it does is to launch kernels.
    """

    @functools.wraps(operation)
    def call(self: Ops, /, *args: P.args, **options: P.kwargs) -> R:
        return self.run(operation, args, options)

    return call


def _repeats(given: Sequence[Any]) -> bool:
    """Whether a tensor is there twice: nobody could tell which of the two a kernel takes."""
    tensors = [id(thing) for thing in given if isinstance(thing, Tensor)]
    return len({*tensors}) < len(tensors)


def _form(arg: Any) -> Any:
    """All that an operation may ask of an argument: equal ones are alike to it."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.stride(), arg.dtype, arg.device, arg.data_ptr() % ALIGNMENT
    if arg is None:
        return None
    return type(arg), arg or repr(arg)  # Python calls 0.0, -0.0, 0 and False equal


@dataclass(frozen=True)
class _Steps:
    """What an operation does, without any tensor.

    Things have places: first the operation's arguments, then what it makes, then constants.

    Attributes:
        made: by ``new_empty``, in order: the place of the tensor asked, sizes, options.
        constants: what kernels are given besides.
        starts: kernel, grid, block, shared memory, and which things are its arguments, in order.
        result: which things are returned.
    """

    made: list[tuple[int, Sequence[Any], dict[str, Any]]]
    constants: list[Argument]
    starts: list[tuple[str, Dim3, Dim3, int, Pick]]
    result: Pick

    def repeat(self, given: Sequence[Any], launch: Launch) -> Any:
        """Do it again with other arguments of the same form."""
        things = [*given]
        for asked, sizes, options in self.made:
            things.append(things[asked].new_empty(*sizes, **options))
        things += self.constants
        for kernel, grid, block, smem, pick in self.starts:
            launch(kernel, grid, block, smem, pick(things))
        return self.result(things)


class _Watch(TorchFunctionMode):
    """Sees what an operation makes and launches. It is a launcher, too, and starts the kernels.

    Args:
        given: the operation's arguments.
        launch: starts a kernel.
    """

    def __init__(self, given: Sequence[Any], launch: Launch) -> None:
        super().__init__()
        self._things, self._start = [*given], launch
        self._made: list[tuple[int, Sequence[Any], dict[str, Any]]] = []
        self._starts: list[tuple[str, Dim3, Dim3, int, Sequence[Argument]]] = []
        self._clear = True

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is Tensor.new_empty:
            self._made.append((self._place(args[0]), args[1:], kwargs or {}))
            self._things.append(out)
        elif isinstance(out, Tensor):
            self._clear = False
        return out

    def launch(
        self, kernel: str, grid: Dim3, block: Dim3, smem: int, args: Sequence[Argument]
    ) -> None:
        """As of ``Launcher``."""
        self._start(kernel, grid, block, smem, args)
        self._starts.append((kernel, grid, block, smem, args))

    def steps(self, result: Any) -> _Steps | None:
        """What was seen; None if more was done than can be told."""
        constants: list[Argument] = []
        places = [self._places(args, constants) for *_, args in self._starts]
        outputs = self._places(result if isinstance(result, tuple) else [result], constants)
        if not self._clear:
            return None
        starts = [
            (kernel, grid, block, smem, _picking(at))
            for (kernel, grid, block, smem, _), at in zip(self._starts, places, strict=True)
        ]
        picks = _picking(outputs) if isinstance(result, tuple) else operator.itemgetter(*outputs)
        return _Steps(self._made, constants, starts, picks)

    def _places(self, args: Iterable[Any], constants: list[Argument]) -> list[int]:
        """Where things are; what is no tensor is added to the constants."""
        places = []
        for arg in args:
            if isinstance(arg, Tensor):
                places.append(self._place(arg))
            else:
                places.append(len(self._things) + len(constants))
                constants.append(arg)
        return places

    def _place(self, tensor: Tensor) -> int:
        for place, thing in enumerate(self._things):
            if thing is tensor:
                return place
        self._clear = False
        return -1


def _picking(places: Sequence[int]) -> Pick:
    """The things at these places, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda things: tuple(things[place] for place in places)
