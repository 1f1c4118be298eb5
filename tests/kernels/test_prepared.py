"""Steps that are repeated: the same kernels with the same arguments as of an operation run anew."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from layerskip.graphs import taped
from layerskip.ops import arguments, prepared
from layerskip.ops.kernels import KernelOps
from layerskip.ops.prepared import PreparedOps
from layerskip.ops.registry import OPERATORS

ROWS, WIDTH, DIM = 3, 64, 64


class Remembering:
    """A launcher that only remembers."""

    def __init__(self):
        self.started = []

    def launch(self, *start):
        self.started.append(start)


def noise(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def whole(*shape, dtype=torch.int64):
    return torch.randint(1, 5, shape, dtype=dtype)


def state():
    return [whole(ROWS, dtype=torch.int32), whole(ROWS, dtype=torch.int32), whole(2)]


def caches():
    return [noise(ROWS, 512, 1, DIM), noise(ROWS, 512, 1, DIM), whole(ROWS, dtype=torch.int32)]


def heads(count):
    return noise(ROWS, 2, count, DIM)


def probabilities(length):
    return noise(ROWS, length, 9, dtype=torch.float32)


def choice():
    return {
        "vocab_ids": whole(40, dtype=torch.int32),
        "temperature": torch.rand(ROWS),
        "seeds": whole(ROWS),
        "positions": whole(ROWS),
        "norm_weight": noise(WIDTH),
    }


def roped():
    keys, values, lengths = caches()
    tables = [noise(90, DIM // 2, dtype=torch.float32) for _ in range(2)]
    return heads(2), heads(1), heads(1), keys, values, *tables, lengths


def product(rows=ROWS):
    named = {"residual": noise(rows, WIDTH), "norm_weight": noise(WIDTH), "eps": 1e-5}
    return (noise(rows, WIDTH), noise(WIDTH, WIDTH)), named


def split():
    return (heads(2), *caches()), {"softmax_scale": 0.3, "window": 4, "sinks": torch.randn(2)}


CALLS = {
    "rms_norm": lambda: ((noise(ROWS, WIDTH), noise(WIDTH)), {"eps": 1e-6}),
    "add_rms_norm": lambda: (
        (noise(ROWS, WIDTH), noise(ROWS, WIDTH), noise(WIDTH)),
        {"eps": 1e-6},
    ),
    "linear": product,
    "swiglu": lambda: ((noise(ROWS, WIDTH), noise(32, WIDTH), noise(32, WIDTH)), {}),
    "rope_append_kv": lambda: (roped(), {"interleaved": True}),
    "decode_attention": split,
    "gumbel_noise": lambda: ((whole(ROWS), whole(ROWS)), {"vocab_size": 70, "starts": whole(ROWS)}),
    "gumbel_from_bits": lambda: ((whole(7, dtype=torch.int32),), {}),
    "lm_head_argmax": lambda: ((noise(ROWS, WIDTH), noise(90, WIDTH)), choice()),
    "accept_tokens": lambda: ((whole(ROWS, 2), whole(ROWS, 3), *state()), {}),
    "accept_block": lambda: (
        (whole(ROWS, 2), probabilities(2), probabilities(3), whole(ROWS), whole(ROWS), *state()),
        {},
    ),
}


def told(things, given):
    """Tensors of the call by their names, what was made in it by order and form; numbers."""
    made: dict[int, int] = {}
    described = []
    for thing in things:
        if not isinstance(thing, Tensor):
            described.append((type(thing), getattr(thing, "value", thing)))
        elif id(thing) in given:
            described.append(given[id(thing)])
        else:
            place = made.setdefault(id(thing), len(made))
            described.append((place, thing.shape, thing.stride(), thing.dtype))
    return described


def run(ops, name, call):
    """What an operation starts and returns, in words that other tensors of its form have, too."""
    args, options = call
    given = {id(t): place for place, t in enumerate(args)}
    given |= {id(t): key for key, t in options.items() if isinstance(t, Tensor)}
    launcher = ops._launch.__self__
    launcher.started.clear()
    result = getattr(ops, name)(*args, **options)
    outputs = result if isinstance(result, tuple) else [result]
    things = [x for *sizes, args in launcher.started for x in (*sizes, *args)]
    return told([*things, *outputs], given), type(result)


def new_ops():
    return KernelOps(Remembering())


def test_every_operation_is_here():
    assert CALLS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_starts_the_same_kernels_with_its_own_tensors(name, monkeypatch):
    ops, calls = new_ops(), [CALLS[name]() for _ in range(2)]
    first = run(ops, name, calls[0])
    anew = run(new_ops(), name, calls[1])

    def never(*args, **kwargs):
        raise AssertionError("checked again")

    monkeypatch.setattr(arguments, name, never)
    assert run(ops, name, calls[1]) == anew == first
    assert run(ops, name, calls[0]) == first
    assert len(ops._launch.__self__.started) > 0
    with pytest.raises(AssertionError, match="checked again"):
        run(new_ops(), name, calls[1])


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_makes_what_the_first_made_in_the_same_order(name):
    ops, (args, options) = new_ops(), CALLS[name]()
    tapes = [taped(lambda: getattr(ops, name)(*args, **options)) for _ in range(2)]
    assert tapes[0] == tapes[1]


def shifted(t):
    """The same numbers, at no multiple of 16 bytes."""
    room = t.new_empty(t.numel() + 1)
    return room[1:].view(t.shape).copy_(t)


def strided(t):
    """The same numbers, with a gap after each row."""
    room = t.new_empty(t.shape[0], t.shape[1] + 8)
    return room[:, : t.shape[1]].copy_(t)


def other_forms():
    (x, weight), named = product()
    norm, residual = named["norm_weight"], named["residual"]
    halves = {key: t.half() for key, t in (("residual", residual), ("norm_weight", norm))}
    return {
        "more rows": product(9),
        "many rows": product(100),
        "no row": product(0),
        "another width": ((x, noise(32, WIDTH)), named | {"residual": noise(ROWS, 32)}),
        "no residual": ((x, weight), named | {"residual": None}),
        "a bias": ((x, weight), named | {"bias": noise(WIDTH)}),
        "a bias in its place": ((x, weight), {"residual": residual, "bias": norm, "eps": 1e-5}),
        "no norm": ((x, weight), {"residual": residual}),
        "another eps": ((x, weight), named | {"eps": 1e-3}),
        "no alignment": ((shifted(x), weight), named),
        "strides": ((strided(x), weight), named),
        "another dtype": ((x.half(), weight.half()), named | halves),
        "one tensor twice": ((x, weight), named | {"residual": x}),
    }


@pytest.mark.parametrize("other", other_forms())
def test_arguments_of_another_form_have_steps_of_their_own(other):
    ops, call = new_ops(), other_forms()[other]
    first = run(ops, "linear", product())
    for _ in range(2):
        got = run(ops, "linear", call)
        assert got == run(new_ops(), "linear", call)
        assert got != first
        assert run(ops, "linear", product()) == first


def test_a_tensor_given_twice_says_nothing_of_two_tensors():
    ops, ((x, weight), named) = new_ops(), product()
    for _ in range(2):
        run(ops, "linear", ((x, weight), named | {"residual": x}))
    other = ((x, weight), named)
    assert run(ops, "linear", other) == run(new_ops(), "linear", other)
    # And the other way round: steps of two tensors are right for one that is given twice.
    twice = ((x, weight), named | {"residual": x})
    assert run(ops, "linear", twice) == run(new_ops(), "linear", twice)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (0, False), (1, True), (1, 1.0)], ids=str)
def test_numbers_that_python_calls_equal_are_told_apart(one, other):
    class Numbered(PreparedOps):
        @prepared.prepared
        def start(self, x, number):
            self._launch("kernel", (1, 1, 1), (1, 1, 1), 0, (x, number))

    ops = Numbered(Remembering())
    for number in (one, other, one, other):
        ops.start(torch.zeros(1), number)
    numbers = [args[1] for *_, args in ops._launch.__self__.started]
    assert [*map(repr, numbers)] == [*map(repr, (one, other, one, other))]


BAD = {
    "shape": (noise(ROWS, WIDTH + 1), noise(WIDTH, WIDTH)),
    "dtype": (noise(ROWS, WIDTH), noise(WIDTH, WIDTH).half()),
    "device": (noise(ROWS, WIDTH), noise(WIDTH, WIDTH).to("meta")),
    "dimensions": (noise(WIDTH), noise(WIDTH, WIDTH)),
    "columns": (noise(ROWS, WIDTH), noise(WIDTH, WIDTH).T),
    "single precision": (noise(ROWS, WIDTH).float(), noise(WIDTH, WIDTH).float()),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_in_the_same_words_every_time(case):
    ops, words = new_ops(), []
    run(ops, "linear", ((noise(ROWS, WIDTH), noise(WIDTH, WIDTH)), {}))
    for place in (ops, ops, new_ops()):
        with pytest.raises(ValueError, match=r"^linear: ") as refused:
            run(place, "linear", (BAD[case], {}))
        words.append(str(refused.value))
        assert place._launch.__self__.started == []
    assert words == [words[0]] * 3


def test_a_launch_that_fails_leaves_no_steps():
    ops, call = new_ops(), product()
    launcher, start = ops._launch.__self__, Remembering.launch

    def fail(*args):
        raise RuntimeError("the driver is gone")

    ops._launch = fail
    with pytest.raises(RuntimeError, match="the driver is gone"):
        ops.linear(*call[0], **call[1])
    ops._launch = start.__get__(launcher)
    assert run(ops, "linear", call) == run(new_ops(), "linear", call)


def test_steps_keep_no_tensor_alive():
    ops = new_ops()
    args, options = split()
    kept = [weakref.ref(t) for t in (*args, ops.decode_attention(*args, **options))]
    ops._launch.__self__.started.clear()
    assert ops._steps
    del args, options
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_forms_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(prepared, "KEPT_FORMS", 4)
    ops = new_ops()
    for rows in range(1, 10):
        call = product(rows)
        assert run(ops, "linear", call) == run(new_ops(), "linear", call)
        assert 0 < len(ops._steps) <= 4


class Careless(PreparedOps):
    """Operations that do more than to make tensors and launch."""

    @prepared.prepared
    def views(self, x):
        self._launch("kernel", (1, 1, 1), (1, 1, 1), 0, (x[:1], 1))

    @prepared.prepared
    def fills(self, x):
        x.zero_()
        self._launch("kernel", (1, 1, 1), (1, 1, 1), 0, (x, 1))

    @prepared.prepared
    def returns(self, x):
        return x + 1


def test_what_cannot_be_told_is_done_anew():
    ops = Careless(Remembering())
    for i in range(3):
        x = torch.full((2,), float(i + 1))
        ops.views(x)
        assert ops._launch.__self__.started.pop()[-1][0].item() == i + 1
        assert ops.returns(x).tolist() == [i + 2] * 2
        ops.fills(x)
        assert x.tolist() == [0, 0]


def test_threads_prepare_side_by_side():
    ops, starts = new_ops(), threading.Barrier(4, timeout=20)
    want = run(new_ops(), "linear", product())
    found = []

    def work():
        (x, weight), named = product()
        starts.wait()
        found.extend((x, ops.linear(x, weight, **named)) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = {id(args[0]): args for *_, args in ops._launch.__self__.started}
    assert len(found) == 80
    assert len(started) == 4
    assert {id(x) for x, _ in found} == started.keys()
    assert run(ops, "linear", product()) == want
