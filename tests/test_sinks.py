"""Sinks: what is remembered, written and counted is what the rounds say."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from layerskip import Round, SelfSpeculativeLM
from layerskip.cost import CostTable, Curve
from layerskip.outputs import GenerationOutput
from layerskip.telemetry import runs
from layerskip.telemetry.buckets import MOST_NAMES, OTHER
from layerskip.telemetry.runs import JsonLines, read_lines
from layerskip.telemetry.sinks import (
    EDGES,
    JsonlSink,
    MemorySink,
    PrometheusSink,
)

PER_POSITION = "num_accepted_tokens_per_pos_total"
C, BETA = 0.25, 0.5  # of the table below: a verify pass of more than one row takes 1.5
COST = CostTable(
    Curve((1, 2), (0,), ((0.2, 0.2),)),
    Curve((1, 2), (0,), ((0.05, 0.05),)),
    Curve((1, 2, 64), (0,), ((1.0, 1.5, 1.5),)),
    0.0,
    1,
    {},
)


def a_round(drafted: int, accepted: int, **changes: object) -> Round:
    """A round of a row that goes on: all but the last token were drafted."""
    origin = "plain" if not drafted else "bonus" if accepted == drafted else "recovered"
    record = Round(
        row=0,
        index=1,
        token_ids=(7,) * (accepted + 1),
        text="",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        origin=origin,
        draft_seconds=0.25 * drafted,
        verify_seconds=1.0,
        positions=drafted + 1,
        drafter="early_exit" if drafted else "none",
        num_draft_passes=drafted,
    )
    return replace(record, **changes)


PREFILL = a_round(0, 0, index=0, origin="prefill")
ROUNDS = [PREFILL, a_round(3, 3), a_round(3, 1), a_round(0, 0), a_round(2, 0, drafter="lookup")]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def decoded(wrap, tmp_path: Path) -> tuple[MemorySink, Path, GenerationOutput]:
    memory, path = MemorySink(), tmp_path / "rounds.jsonl"
    lm: SelfSpeculativeLM = wrap()
    with JsonlSink(path) as file:
        both = [memory, file]
        out = lm.generate(
            [5, 6, 7],
            max_new_tokens=24,
            labels={"task": "toy"},
            on_round=lambda record: [sink(record) for sink in both] and None,
        )
    return memory, path, out


def test_memory_and_file_hold_every_round(decoded) -> None:
    memory, path, out = decoded
    assert tuple(memory.rounds) == out.rounds
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    assert abs(time.time() - times[-1]) < 60.0
    assert lines == [record.to_dict() for record in out.rounds]
    assert {line["labels"]["task"] for line in lines} == {"toy"}


def test_a_file_is_closed_once_however_often_it_is_asked_to(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "rounds.jsonl") as sink:
        sink(ROUNDS[1])
        sink.close()
    sink.close()
    assert len(list(read_lines(tmp_path / "rounds.jsonl"))) == 1


def test_a_line_is_in_the_file_when_the_round_has_ended(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "rounds.jsonl")
    sink(ROUNDS[1])
    assert [e["num_accepted_tokens"] for e in read_lines(tmp_path / "rounds.jsonl")] == [3]
    sink.close()


def test_a_line_that_another_process_adds_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole_lines = tmp_path / "rounds.jsonl", runs.whole_lines
    path.write_bytes(b'{"n": 1}\n')

    def others_go_on(of: BinaryIO) -> int:
        size = whole_lines(of)
        with path.open("ab") as file:
            file.write(b'{"n": 2}\n')
        return size

    monkeypatch.setattr(runs, "whole_lines", others_go_on)
    file = JsonLines(path)
    file.append([{"n": 3}])
    file.close()
    assert [entry["n"] for entry in read_lines(path)] == [1, 2, 3]


def test_a_cut_off_line_nested_too_deep_to_be_read_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b'{"a":' * 200_000)
    JsonLines(path).close()
    assert [entry["n"] for entry in read_lines(path)] == [1]


def test_two_that_open_a_file_with_a_cut_off_line_lose_none_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole_lines = tmp_path / "rounds.jsonl", runs.whole_lines
    path.write_bytes(b'{"n": 1}\n{"n')
    looked, done = threading.Event(), threading.Event()

    def slowly(of: BinaryIO) -> int:
        size = whole_lines(of)
        if not looked.is_set():
            looked.set()
            done.wait(0.2)  # the other one goes on meanwhile, if nothing keeps it
        return size

    def other() -> None:
        looked.wait()
        file = JsonLines(path)
        file.append([{"n": 2}])
        file.close()
        done.set()

    monkeypatch.setattr(runs, "whole_lines", slowly)
    thread = threading.Thread(target=other)
    thread.start()
    file = JsonLines(path)
    thread.join()
    file.append([{"n": 3}])
    file.close()
    assert [entry["n"] for entry in read_lines(path)] == [1, 2, 3]


def test_a_line_that_another_process_is_writing_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    raw, half, opened = file._file, threading.Event(), threading.Event()

    def write(data: memoryview) -> int:
        count = raw.write(data[:5])
        if not half.is_set():
            half.set()
            opened.wait(0.2)
        return count

    def other() -> None:
        half.wait()
        JsonLines(path).close()
        opened.set()

    thread = threading.Thread(target=other)
    thread.start()
    monkeypatch.setattr(file, "_file", SimpleNamespace(write=write, fileno=raw.fileno))
    file.append([{"n": 1, "long": "x" * 20}])
    monkeypatch.undo()
    thread.join()
    file.close()
    assert [entry["n"] for entry in read_lines(path)] == [1]


def test_an_interruption_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    raw, room = file._file, [5]

    def write(data: memoryview) -> int:
        if not room:
            raise KeyboardInterrupt
        return raw.write(data[: room.pop()])

    monkeypatch.setattr(file, "_file", SimpleNamespace(write=write, fileno=raw.fileno))
    with pytest.raises(KeyboardInterrupt):
        file.append([{"n": 1}])
    monkeypatch.undo()
    file.append([{"n": 2}])
    file.close()
    assert [entry["n"] for entry in read_lines(path)] == [2]


@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_line_that_was_cut_off_is_dropped_at_the_next_start(
    tmp_path: Path, whole: int, size: int
) -> None:
    path = tmp_path / "rounds.jsonl"
    lines = [json.dumps({"n": i, "long": "x" * size}).encode() + b"\n" for i in range(whole)]
    path.write_bytes(b"".join(lines) + b'{"n": 99, "long": "' + b"y" * size)
    assert [e["n"] for e in read_lines(path)] == list(range(whole))
    file = JsonLines(path)
    file.append([{"n": whole}])
    file.close()
    assert [e["n"] for e in read_lines(path)] == list(range(whole + 1))


@pytest.mark.parametrize(
    ("torn", "kept"), [(b'{"n": 2, "long', [1, 3, 4]), (b'{"n": 2}', [1, 2, 3, 4])]
)
def test_a_line_that_another_writer_died_in_takes_none_with_it(
    tmp_path: Path, torn: bytes, kept: Sequence[int]
) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    file.append([{"n": 1}])
    with path.open("ab") as other:
        other.write(torn)
    file.append([{"n": 3}])
    file.append([{"n": 4}])
    file.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["n"] for line in lines] == kept


def test_a_file_that_was_cut_within_a_line_loses_that_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    file.append([{"n": 1}, {"n": 2, "long": "x" * 100}])
    os.truncate(path, 50)
    file.append([{"n": 3}])
    file.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 3]


def test_what_became_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    path.write_bytes(b"notes")
    with pytest.raises(ValueError, match=r"rounds\.jsonl does not hold JSON lines, and is left"):
        file.append([{"n": 1}])
    file.close()
    assert path.read_bytes() == b"notes"


@pytest.mark.parametrize("before", [b"", b'{"n": 0}\n'])
def test_a_line_that_lacks_but_its_end_is_kept(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(before + b'{"n": 1}')
    file = JsonLines(path)
    file.append([{"n": 2}])
    file.close()
    assert path.read_bytes() == before + b'{"n": 1}\n{"n": 2}\n'


def test_zeros_that_a_loss_of_power_left_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n": 0}\n' + b"\0" * 4096)
    file = JsonLines(path)
    file.append([{"n": 1}])
    file.close()
    assert path.read_bytes() == b'{"n": 0}\n{"n": 1}\n'


@pytest.mark.parametrize("content", [b"notes", b"a\nb", b"\x80PNG\n\x00"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.txt does not hold JSON lines, and is left"):
        JsonlSink(path)
    assert path.read_bytes() == content


def test_a_line_that_the_disk_has_no_room_for_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.jsonl"
    file = JsonLines(path)
    file.append([{"n": 1}])
    raw, room = file._file, [5]

    def write(data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return raw.write(data[: room.pop()])

    monkeypatch.setattr(file, "_file", SimpleNamespace(write=write, fileno=raw.fileno))
    with pytest.raises(ValueError, match=r"rounds\.jsonl cannot be written: No space left"):
        file.append([{"n": 2}])
    monkeypatch.undo()
    file.append([{"n": 3}])
    file.close()
    assert [entry["n"] for entry in read_lines(path)] == [1, 3]


FULL = """
import resource, sys
from pathlib import Path
from layerskip.telemetry.runs import JsonLines

log, gone, others = Path(sys.argv[1]), Path(sys.argv[1] + ".1"), int(sys.argv[2])
file = JsonLines(log)
file.append([{"n": 1}])
log.rename(gone)
if others:
    JsonLines(log).append([{"n": n} for n in range(others)])
most = gone.stat().st_size + 5
resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
try:
    file.append([{"n": 2}])
except ValueError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append([{"n": 3}])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="renames no open file, and has no limits")
@pytest.mark.parametrize("others", [0, 100])
def test_a_full_disk_cuts_off_its_own_line_after_the_log_was_renamed(
    tmp_path: Path, others: int
) -> None:
    """Its name may be that of another's file by then, or of none."""
    log = tmp_path / "rounds.jsonl"
    argv = [sys.executable, "-c", FULL, str(log), str(others)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{log} cannot be written: File too large\n"
    assert [entry["n"] for entry in read_lines(tmp_path / "rounds.jsonl.1")] == [1, 3]
    assert [entry["n"] for entry in read_lines(log)] == list(range(others))


def test_a_damaged_line_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n"\n{"n": 3}\n')
    with pytest.raises(ValueError, match=r"rounds\.jsonl is damaged \(line 2\)"):
        list(read_lines(path))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rounds\.jsonl cannot be written: No such file"):
        JsonlSink(tmp_path / "none" / "rounds.jsonl")


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null")
def test_what_is_on_no_disk_is_closed_without_a_word() -> None:
    with JsonlSink("/dev/null") as sink:
        sink(ROUNDS[1])


def test_any_other_reason_why_the_disk_has_it_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(runs.os, "fsync", fail)
    sink = JsonlSink(tmp_path / "rounds.jsonl")
    with pytest.raises(ValueError, match=r"rounds\.jsonl cannot be written: Input/output error"):
        sink.close()
    sink._lines.close()


def test_nothing_is_written_over_a_full_disk() -> None:
    sink = JsonlSink("/dev/full") if Path("/dev/full").exists() else pytest.skip("no /dev/full")
    with pytest.raises(ValueError, match="/dev/full cannot be written: No space left"):
        sink(ROUNDS[1])
    sink._lines.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"selfspec_{name}", labels)


def counted(registry: CollectorRegistry, rounds: Sequence[Round], **settings) -> PrometheusSink:
    sink = PrometheusSink(registry, **settings)
    for record in rounds:
        sink(record)
    return sink


def test_counters_are_defined_as_in_vllm(registry: CollectorRegistry) -> None:
    counted(registry, ROUNDS)
    assert value(registry, "num_drafts_total") == 3
    assert value(registry, "num_draft_tokens_total") == 8
    assert value(registry, "num_accepted_tokens_total") == 4
    per_position = [value(registry, PER_POSITION, position=str(i)) for i in range(4)]
    assert per_position == [2, 1, 1, None]
    assert value(registry, "num_emitted_tokens_total") == 1 + 4 + 2 + 1 + 1
    modes = {m: value(registry, "rounds_total", mode=m) for m in ("plain", "early_exit", "lookup")}
    assert modes == {"plain": 1, "early_exit": 2, "lookup": 1}
    assert value(registry, "k_current") == 2
    assert value(registry, "draft_seconds_total") == pytest.approx(2.0)
    assert value(registry, "verify_seconds_total") == pytest.approx(4.0)  # without the prefill's


def test_names_can_be_vllms_own(registry: CollectorRegistry) -> None:
    counted(registry, ROUNDS, prefix="vllm:spec_decode")
    page = generate_latest(registry).decode()
    assert "vllm:spec_decode_num_drafts_total 3.0" in page
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2.0' in page


def test_a_batch_shares_its_seconds_out(registry: CollectorRegistry) -> None:
    counted(registry, [replace(r, rows=4) for r in ROUNDS[1:2] * 4])
    assert value(registry, "draft_seconds_total") == pytest.approx(0.75)
    assert value(registry, "verify_seconds_total") == pytest.approx(1.0)


def test_the_histogram_is_by_label(registry: CollectorRegistry) -> None:
    labelled = [replace(r, labels={"task": "code"}) for r in ROUNDS]
    counted(registry, [*labelled, a_round(20, 18)], label="task")
    name = "accepted_per_round"
    code = [value(registry, f"{name}_bucket", bucket="code", le=f"{e}.0") for e in EDGES]
    assert code == [1, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert value(registry, f"{name}_count", bucket="code") == 3
    assert value(registry, f"{name}_sum", bucket="code") == 4
    none = [value(registry, f"{name}_bucket", bucket="", le=le) for le in ("16.0", "+Inf")]
    assert none == [0, 1]


def test_labels_of_many_values_end_in_one_bucket(registry: CollectorRegistry) -> None:
    rounds = [a_round(1, 1, labels={"user": str(i)}) for i in range(MOST_NAMES + 5)]
    counted(registry, rounds, label="user")
    name = "accepted_per_round_count"
    assert value(registry, name, bucket=OTHER) == 5
    assert value(registry, name, bucket=str(MOST_NAMES)) is None


def test_the_inequality_is_in_plain_passes(registry: CollectorRegistry) -> None:
    rounds = [a_round(3, a, labels={"t": t}) for t, a in (("good", 3), ("bad", 0)) * 50]
    counted(registry, rounds, label="t", cost=COST)
    assert value(registry, "cost_ratio_c") == pytest.approx(C)
    assert value(registry, "verify_overhead_beta") == pytest.approx(BETA)
    margins = [value(registry, "inequality_margin", bucket=b) for b in ("good", "bad")]
    assert margins == pytest.approx([4 - (1 + 3 * C + BETA), 1 - (1 + 3 * C + BETA)])


@pytest.mark.parametrize(("rows", "c", "beta"), [(1, C, BETA), (8, 0.125, 3.0)])
def test_the_inequality_is_of_as_many_rows_as_share_the_round(
    registry: CollectorRegistry, rows: int, c: float, beta: float
) -> None:
    """Eight rows of four tokens are 32, which take four times as long here as eight of one."""
    verify = Curve((1, 4, 8, 32), (0,), ((1.0, 1.5, 2.0, 8.0),))
    cost = replace(COST, verify=verify)
    counted(registry, [a_round(3, 3, rows=rows)] * 50, cost=cost)
    assert value(registry, "cost_ratio_c") == pytest.approx(c)
    assert value(registry, "verify_overhead_beta") == pytest.approx(beta)
    margin = value(registry, "inequality_margin", bucket="")
    assert margin == pytest.approx(4 - (1 + 3 * c + beta))


def test_gauges_forget_what_is_long_past(registry: CollectorRegistry) -> None:
    sink = counted(registry, [a_round(3, 3)] * 1000, cost=COST)
    before = value(registry, "inequality_margin", bucket="")
    for _ in range(3000):
        sink(a_round(3, 0))
    now = value(registry, "inequality_margin", bucket="")
    assert before == pytest.approx(4 - (1 + 3 * C + BETA))
    assert now == pytest.approx(1 - (1 + 3 * C + BETA), abs=0.02)


def test_without_a_cost_table_there_is_no_margin(registry: CollectorRegistry) -> None:
    counted(registry, ROUNDS)
    assert value(registry, "inequality_margin", bucket="") is None
    assert value(registry, "cost_ratio_c") is None


def test_drift_is_shown_as_its_monitor_has_it(registry: CollectorRegistry) -> None:
    state = SimpleNamespace(down=0.25, up=0.5, num_down_alarms=2, num_up_alarms=0)
    counted(registry, ROUNDS, drift=SimpleNamespace(states=lambda: {"code": state}))
    for direction, gathered, alarms in (("down", 0.25, 2), ("up", 0.5, 0)):
        labels = {"bucket": "code", "direction": direction}
        assert value(registry, "drift", **labels) == gathered
        assert value(registry, "drift_alarms_total", **labels) == alarms


@pytest.mark.parametrize(
    ("rounds", "error"),
    [
        ([a_round(2, 2, chances=(0.95, 0.95))], 0.05),
        ([a_round(2, 0, chances=(0.95, 0.95))], 0.95),  # the second was held against nothing
        ([a_round(2, 1, chances=(0.75, 0.25))], (0.25 + 0.25) / 2),
        ([a_round(1, 1, chances=(0.52,)), a_round(1, 0, chances=(0.58,))], 0.05),  # one bin
        # The row ended inside the block: what became of the third token, nobody knows.
        ([a_round(3, 2, chances=(0.9, 0.9, 0.9), token_ids=(7, 7), origin="recovered")], 0.1),
        ([a_round(1, 1)], None),
    ],
)
def test_the_calibration_error_is_of_chances_that_were_tried(
    registry: CollectorRegistry, rounds: Sequence[Round], error: float | None
) -> None:
    counted(registry, rounds)
    assert value(registry, "draft_ece") == (error if error is None else pytest.approx(error))


def test_a_name_is_in_a_registry_once(registry: CollectorRegistry) -> None:
    first = PrometheusSink(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        PrometheusSink(registry)
    first.close()
    PrometheusSink(registry)


def test_what_is_no_cost_table_is_refused_before_a_scrape_fails(
    registry: CollectorRegistry,
) -> None:
    with pytest.raises(
        TypeError, match=r"must be a CostTable or None, got 'cost\.json'; CostTable"
    ):
        PrometheusSink(registry, cost="cost.json")
    PrometheusSink(registry)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install \"layerskip\[report\]\""):
        PrometheusSink()


def test_counters_are_those_of_the_stats(wrap, registry: CollectorRegistry) -> None:
    sink = PrometheusSink(registry)
    outputs = wrap().generate([[5, 6], [8, 9, 10]], max_new_tokens=20, on_round=sink)
    stats = [out.stats for out in outputs]
    drafted = sum(s.num_draft_tokens for s in stats)
    assert value(registry, "num_draft_tokens_total") == drafted > 0
    accepted = sum(s.num_accepted_tokens for s in stats)
    assert value(registry, "num_accepted_tokens_total") == accepted
    assert value(registry, "num_emitted_tokens_total") == 40
    drafts = sum(s.num_rounds - s.num_plain_rounds for s in stats)
    assert value(registry, "num_drafts_total") == drafts
