"""What `make gpu-check` and `make gpu-bench` share: records that survive what hangs or fails."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import frame  # noqa: E402

FACTS = {"gpu": "NVIDIA H1/H2 "}


def new_run(folder, commit="abc"):
    return frame.Run(folder, FACTS, commit=commit, sizes="toy", suffix="-decoding")


def passing(found):
    found |= {"ok": True, "share": 0.5}


def on_disk(run):
    return json.loads(run.file.read_text(encoding="utf-8"))


def test_a_section_is_on_disk_before_it_ends_and_after(tmp_path, capsys):
    run = new_run(tmp_path)
    seen = []

    def look(found):
        passing(found)
        seen.append(on_disk(run)["sections"]["one"])

    assert run.section("one", look, hung=60)
    assert seen == [{"ok": False, "unfinished": True}]
    assert run.file.name.endswith("-NVIDIA-H1-H2-decoding.json")
    after = on_disk(run)["sections"]["one"]
    assert (after["ok"], after["share"], "unfinished" in after) == (True, 0.5, False)
    assert "one: ok" in capsys.readouterr().out


def test_an_error_is_recorded_and_numbers_that_json_lacks_are_texts(tmp_path):
    run = new_run(tmp_path)

    def broken(found):
        found["share"] = float("nan")
        raise RuntimeError("an illegal address")

    assert not run.section("one", broken, hung=60)
    found = on_disk(run)["sections"]["one"]
    assert "an illegal address" in found["error"]
    assert found["share"] == "nan"


@pytest.mark.parametrize(
    ("commit", "kept"), [("abc", ["one", "two"]), ("abc-changed", ["two"]), ("unknown", ["two"])]
)
def test_sections_of_the_same_sources_are_added_to(tmp_path, commit, kept):
    new_run(tmp_path, commit).section("one", passing, hung=60)
    again = new_run(tmp_path, commit)
    again.section("two", passing, hung=60)
    assert list(on_disk(again)["sections"]) == kept


def test_sections_of_other_sources_or_a_broken_record_are_not(tmp_path):
    first = new_run(tmp_path, "abc")
    first.section("one", passing, hung=60)
    assert frame.earlier(first.file, first.record["machine"] | {"commit": "abd"}) == {}
    first.file.write_text("{", encoding="utf-8")
    assert frame.earlier(first.file, first.record["machine"]) == {}


HANGING = """
import sys, time
sys.path.insert(0, {bench!r})
from gpu import frame
run = frame.Run(__import__("pathlib").Path({out!r}), {{"gpu": "x"}}, commit="c", sizes="toy",
                suffix="")
run.section("one", lambda found: found.update(ok=True), hung=60)
run.section("two", lambda found: time.sleep(60), hung=0.3)
"""


def test_a_section_that_hangs_ends_the_process_and_loses_nothing(tmp_path):
    script = HANGING.format(bench=str(BENCH), out=str(tmp_path))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert time.monotonic() - began < 55
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    (file,) = tmp_path.glob("*.json")
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"]
    assert sections["one"]["ok"]
    assert sections["two"] == {"ok": False, "unfinished": True}


def test_a_part_is_interrupted_and_the_alarm_is_off_afterwards():
    with pytest.raises(TimeoutError, match="longer than"), frame.limited(0.05):
        time.sleep(5)
    with frame.limited(5):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_findings_are_printed_on_one_line():
    assert frame.in_words({"a": 1.23456, "b": [1, {"c": "d"}]}) == "a 1.235, b [1, c d]"
