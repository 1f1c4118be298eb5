"""Signals that end a command."""

import signal
import subprocess
import sys
import threading

import pytest

from layerskip.commands.signals import ended_by_sigterm, importing

ENDED = """
import os, signal, sys, tempfile
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a parent may have it ignored
from layerskip.cli import main
from layerskip.commands import facts

def told(*_):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit("went on")

facts.run_info = told
try:
    main(["info"])
finally:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def run(script: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-c", script, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_command_that_sigterm_ends_leaves_no_temporary_files(tmp_path):
    done = run(ENDED, tmp_path)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert not list(tmp_path.iterdir())


def test_handlers_of_others_stay():
    def own(*_):
        raise AssertionError

    usual = {n: signal.signal(n, own) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ended_by_sigterm(), importing():
            assert [signal.getsignal(n) for n in usual] == [own, own]
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def test_threads_leave_signals_alone():
    found = []

    def decode():
        with ended_by_sigterm(), importing():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


SPY = """
import importlib.abc, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
LONG = {"torch.functional", "transformers.modeling_utils"}  # in the middle of both

class Spy(importlib.abc.MetaPathFinder):
    seen = {}

    def find_spec(self, name, path, target=None):
        if name in LONG:
            handlers = {signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
            self.seen.setdefault(name, handlers)

sys.meta_path.insert(0, Spy())
from layerskip.cli import main

main(sys.argv[1:])
assert "torch.functional" in Spy.seen
assert all(seen == {signal.SIG_DFL} for seen in Spy.seen.values()), Spy.seen
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "/nowhere", "--prompt", "x"],
        ["measure", "/nowhere", "--prompts", "{file}", "--out", "{out}"],
        pytest.param(["info", "/nowhere"], marks=pytest.mark.slow),
        pytest.param(["ab", "/nowhere", "--prompts", "{file}"], marks=pytest.mark.slow),
        pytest.param(["search", "/nowhere", "--out", "{out}"], marks=pytest.mark.slow),
    ],
    ids=lambda argv: argv[0],
)
def test_ctrl_c_while_torch_is_imported_reaches_no_python(tmp_path, argv):
    """It would come out of the imports as something else, or abort."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    done = run(SPY, *(word.format(file=file, out=tmp_path / "out") for word in argv))
    assert done.returncode == 0, done.stderr
