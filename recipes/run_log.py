"""What a run notes as it goes: a line of JSON a step, TensorBoard, and the curve of acceptance."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from table import plot_acceptance

from layerskip.files import write_text

METRICS, CURVE = "metrics.jsonl", "acceptance.png"


class RunLog:
    """``metrics.jsonl``, ``tensorboard/`` and ``acceptance.png`` in the folder of a run.

    Records of steps after the checkpoint that a run goes on from are taken out: those steps are
    taken again.

    Args:
        out: folder of the run.
        accelerator: whose trackers are used; made with ``log_with="tensorboard"`` and
            ``project_dir=out``. Its main process alone writes.
        step: that the run goes on from.
    """

    def __init__(self, out: Path, accelerator: Accelerator, *, step: int = 0) -> None:
        self.out, self.accelerator = out, accelerator
        self._path = out / METRICS
        if accelerator.is_main_process:
            drop_later(self._path, step)
        accelerator.init_trackers("tensorboard")

    def add(self, record: Mapping[str, Any]) -> None:
        """Note a record, which names its ``step``."""
        if not self.accelerator.is_main_process:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.accelerator.log(dict(_scalars(record)), step=record["step"])

    def history(self) -> list[tuple[int, dict[int, float]]]:
        """Step and acceptance by exit layer of every evaluation so far."""
        return [
            (r["step"], {int(e): a for e, a in r["acceptance"].items()})
            for r in read_records(self._path)
            if "acceptance" in r
        ]

    def plot(self) -> None:
        """Draw the curve anew, once there is an evaluation."""
        if self.accelerator.is_main_process and self.history():
            plot_acceptance(self.history(), self.out / CURVE)


def drop_later(path: Path, step: int) -> None:
    """Take out of a log the records of steps after the one that a run goes on from."""
    # At step 0 there is no checkpoint: what is there is of a start that came to nothing.
    kept = [r for r in read_records(path) if r["step"] <= step] if step else []
    write_text(path, "".join(json.dumps(r) + "\n" for r in kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a log; a line that a crash cut off, or that is none, is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a record; those by exit layer as ``acceptance/exit_2``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/exit_{e}", float(v)) for e, v in value.items())
        elif name != "step":
            yield name, float(value)
