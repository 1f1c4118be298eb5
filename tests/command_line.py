"""The command line as the tests call it: here or in a process of its own, and how it refuses."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from layerskip.cli import main


@dataclass(frozen=True)
class Result:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The last line of stdout."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def run(*argv: object) -> Result:
    """``layerskip ARGV`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stopped:
            code = stopped.code
    return Result(code, out.getvalue(), err.getvalue())


def run_apart(*argv: object) -> Result:
    """The same in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "layerskip.cli", *map(str, argv)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *words: str) -> None:
    """One sentence on stderr, nothing on stdout, exit code 2."""
    assert result.code == 2, result
    assert result.err.startswith("layerskip: ")
    assert len(result.err.splitlines()) == 1, result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    for word in words:
        assert word in result.err
