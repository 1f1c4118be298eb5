"""Ctrl-C at any line: a constraint that is interrupted, asked again, and compared."""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from layerskip import constraint, grammar_xgrammar
from layerskip.constraint import Constraint

FILES = {constraint.__file__, grammar_xgrammar.__file__}


def answers(asked: Constraint, questions: Sequence[tuple[str, tuple]], step: int) -> list[Any]:
    """What a constraint says, with a Ctrl-C before the step-th line or return: the question that
    it breaks off is put again. The last answer is whether the walk came so far."""
    left = step

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        nonlocal left
        code = frame.f_code
        # What a generator that is dropped raises, nobody sees.
        if code.co_filename not in FILES or code.co_flags & inspect.CO_GENERATOR:
            return None
        left -= event in ("line", "return")
        if left < 0:
            raise KeyboardInterrupt
        return trace

    said, before = [], sys.gettrace()
    sys.settrace(trace)
    try:
        for name, arguments in questions:
            try:
                said.append(getattr(asked, name)(*arguments))
            except KeyboardInterrupt:  # which ends the tracing
                said.append(getattr(asked, name)(*arguments))
    finally:
        sys.settrace(before)
    said = [s.isfinite().tolist() if isinstance(s, torch.Tensor) else s for s in said]
    return [*said, left < 0]


def assert_same_wherever_interrupted(
    made: Callable[[], Constraint], questions: Sequence[tuple[str, tuple]]
) -> None:
    """Interrupted at each place in turn, a constraint says what it says undisturbed."""
    *wanted, _ = answers(made(), questions, sys.maxsize)
    step, interrupted = 0, True
    while interrupted:
        *said, interrupted = answers(made(), questions, step)
        assert said == wanted, f"interrupted at place {step}"
        step += 1
    assert step > 100
