"""The pretraining recipe at smoke size: stop, go on, export, decode."""

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_modules import RECIPES, environment, exiting, full_disk, imported
from rich.console import Console
from torch.nn import functional as F

from layerskip import SelfSpeculativeLM
from layerskip.params import SHARPNESS
from layerskip.plan import PlanFile
from layerskip.prompts import Example

MODULES = ("checkpoints", "corpus", "trainer", "export", "pretrain_small")
WORDS = ("def", "return", "if", "else", "for", "in", "x", "y", "value", "=", "+", "(", ")", ":")


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(MODULES) as modules:
        yield modules


def write_texts(folder: Path, count: int) -> Path:
    """``count`` files of about 2 kB that a tiny model can learn something from."""
    folder.mkdir()
    for i in range(count):
        lines = [" ".join(WORDS[(i * 7 + j * k) % len(WORDS)] for k in range(9)) for j in range(60)]
        (folder / f"text{i}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def command(out: Path, *options: object) -> list[str]:
    script = str(RECIPES / "pretrain_small.py")
    return [sys.executable, script, "--smoke", "--device", "cpu", "--out", str(out)] + [
        str(option) for option in options
    ]


def read_log(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]  # the last one may be half written


def run(argv: list[str]) -> str:
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_process(recipes: SimpleNamespace, argv: list[str], *, ends_with: int = 0) -> str:
    """What the recipe prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "120")
        with exiting(ends_with):
            recipes.pretrain_small.main(argv[2:])
    return printed.getvalue()


def terminated(recipes: SimpleNamespace, argv: list[str], *, step: int) -> str:
    """The same, of a run that gets SIGTERM in this step."""
    trainer, before = recipes.trainer.Trainer, signal.getsignal(signal.SIGTERM)
    right = trainer.step

    def terminating(self: Any, corpus: Any) -> dict[str, Any]:
        record = right(self, corpus)
        if record["step"] == step:
            signal.raise_signal(signal.SIGTERM)
        return record

    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody notes the signal"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "step", terminating)
            return in_process(recipes, argv, ends_with=128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def trained(recipes: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on the user's own text and questions: terminated midway, then finished."""
    base = tmp_path_factory.mktemp("recipe")
    out, text = base / "run", write_texts(base / "text", 6)
    questions = base / "questions.jsonl"
    row = json.dumps({"question": "How many?", "answer": "3 + 4 = 7"}) + "\n"
    questions.write_text(row * 40, encoding="utf-8")
    options = ("--text", text, "--math", questions, "--math-held-out", questions, "--minutes", 99)
    first = terminated(recipes, command(out, *options), step=3)
    stopped_at = len(read_log(out))
    files = {p.name for p in out.iterdir()}
    second = in_process(recipes, command(out, *options, "--max-steps", stopped_at + 3))
    return {
        "out": out,
        "first": first,
        "second": second,
        "stopped_at": stopped_at,
        "files_when_stopped": files,
    }


def test_a_signal_stops_it_with_everything_saved(trained: dict[str, Any]) -> None:
    assert trained["stopped_at"] == 3
    assert f"stopped at step {trained['stopped_at']}" in trained["first"]
    assert trained["files_when_stopped"] == {"state.pt", "log.jsonl", "tokenizer.json"}


def test_the_same_command_goes_on_from_the_step(trained: dict[str, Any]) -> None:
    assert f"going on from step {trained['stopped_at']}" in trained["second"]
    log = read_log(trained["out"])
    assert [r["step"] for r in log] == list(range(1, trained["stopped_at"] + 4))
    assert [r["tokens"] for r in log] == sorted({r["tokens"] for r in log})
    assert {r["exit_layer"] for r in log} <= {1, 2}
    assert all(0 < r["loss"] < 10 for r in log)


def test_it_writes_curves_and_an_ordinary_folder(trained: dict[str, Any]) -> None:
    out, folder = trained["out"], trained["out"] / "checkpoint"
    for path in (out / "curves.png", folder / "curves.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    expected = {"README.md", "config.json", "generation_config.json", "layerskip.json"}
    assert expected | {"model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in folder.iterdir())
    assert not list(out.glob("*.partial"))


def test_a_plan_gets_the_calibration_of_its_drafts(
    trained: dict[str, Any],
    recipes: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, export = tmp_path / "checkpoint", recipes.export
    shutil.copytree(trained["out"] / "checkpoint", folder)
    path = folder / "layerskip.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    assert "calibration" not in before  # of the user's text no function is known
    export.calibrate(folder)
    assert json.loads(path.read_text(encoding="utf-8")) == before
    long = Example("x = 1\n" * 5000)  # as many tokens as there are positions, and more
    monkeypatch.setattr(export, "held_out_code", lambda modules, limit: [long])
    export.calibrate(folder)
    assert json.loads(path.read_text(encoding="utf-8")) == before
    monkeypatch.setattr(
        export, "held_out_code", lambda modules, limit: [Example(f"x = {i}") for i in range(4)]
    )
    export.calibrate(folder)
    after = json.loads(path.read_text(encoding="utf-8"))
    points = after.pop("calibration")
    assert after == before | {"sharpness": SHARPNESS}
    known = SelfSpeculativeLM.from_pretrained(folder).plan_file.calibration
    assert {kind: [list(p) for p in found] for kind, found in known.items()} == points
    assert points["greedy"] != points["sampled"]


def test_its_card_and_plan_say_what_was_measured(trained: dict[str, Any]) -> None:
    folder = trained["out"] / "checkpoint"
    plan = json.loads((folder / "layerskip.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    (held_out,) = plan["held_out_modules"]
    assert held_out.startswith("text")
    assert f"`{held_out}`" in card
    assert plan["trained_exits"] == [1, 2]
    assert PlanFile.load(folder / "layerskip.json").measurements == {"trained_exits": [1, 2]}
    for name in ("code_bits_per_byte", "code_agreement_2", "math_bits_per_byte"):
        assert f"| {name} | {plan['scores'][name]:.3f} |" in card


def test_its_checkpoint_decodes_identically_with_and_without_drafts(
    trained: dict[str, Any],
) -> None:
    lm = SelfSpeculativeLM.from_pretrained(trained["out"] / "checkpoint")
    assert lm.plan.num_layers == 4
    assert lm.plan.layers in ((0,), (0, 1))
    assert lm.stack.dtype == torch.bfloat16
    for prompt in ("def x", "Question: How many?\nAnswer:"):
        plain = lm.generate(prompt, max_new_tokens=32, num_draft_tokens=0)
        assert lm.generate(prompt, max_new_tokens=32).token_ids == plain.token_ids
    chat = lm.generate(messages=[{"role": "user", "content": "How many?"}], max_new_tokens=4)
    assert len(chat.token_ids) > 0


def test_a_text_folder_without_text_is_refused_in_one_sentence(
    recipes: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "image.bin").write_bytes(b"\x00")
    with pytest.raises(SystemExit, match=r"^pretrain_small: .* holds no .* text to train on$"):
        recipes.pretrain_small.main(["--smoke", f"--out={tmp_path}/run", f"--text={tmp_path}"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--smoke", "--minutes=0"), "minutes must be finite and at least 1e-06, got 0"),
        (("--smoke", "--num-layers=1"), r"exit_weights has a layer 1; an exit lies in \[1, 0\]"),
        (("--num-layers=3",), r"exit_weights has a layer 3; an exit lies in \[1, 2\]"),
        (("--config=ROWS",), r"there is no setting 'question'"),
        (("--config=EXITS: {1: 0.0}",), r"exit_weights are all 0; give an exit more"),
        (("--config=EXITS: {1: -1.0}",), r"exit_weights\.1 must be finite and between 0 and"),
        (("--config=EXITS: {1: .nan}",), r"exit_weights\.1 must be finite and between 0 and"),
        (("--config=nowhere.yaml",), r"settings nowhere\.yaml cannot be read"),
        (("--smoke", "--math=ROWS"), "line 2 is no JSON object with 'question' and 'answer'"),
    ],
)
def test_mistakes_end_it_with_one_sentence(
    recipes: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(recipes.trainer.Trainer, "step", None)
    rows, text = tmp_path / "rows.jsonl", write_texts(tmp_path / "text", 2)
    rows.write_text('{"question": "1?", "answer": "1"}\n' * ("--smoke" in options))
    with rows.open("a") as file:
        file.write('{"question": "2?"}\n')
    argv = [option.replace("ROWS", str(rows)) for option in options]
    if "EXITS" in argv[0]:
        config = tmp_path / "exits.yaml"
        config.write_text(argv[0].replace("--config=EXITS", "exit_weights"))
        argv = [f"--config={config}"]
    with pytest.raises(SystemExit, match=f"^pretrain_small: .*{said}"):
        recipes.pretrain_small.main([*argv, f"--out={tmp_path}/run", f"--text={text}"])
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_flags_count_more_than_the_yaml(recipes: SimpleNamespace, tmp_path: Path) -> None:
    recipe, config = recipes.pretrain_small, tmp_path / "some.yaml"
    shipped = recipe.read_settings(recipe.parse(["--out=run"]))
    assert shipped.exit_weights == {1: 0.08, 2: 0.84, 3: 0.04, 4: 0.04}
    config.write_text("learning_rate: 5e-3\nnum_layers: 3\nexit_weights: {4: 1}\n")
    settings = recipe.read_settings(
        recipe.parse(["--out=run", f"--config={config}", "--num-layers=8", "--minutes=1e-05"])
    )
    found = (settings.learning_rate, settings.num_layers, settings.minutes)
    assert found == (0.005, 8, 1e-05)


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\x03\x04 half of one"])
def test_a_damaged_state_is_named(recipes: SimpleNamespace, tmp_path: Path, content: bytes) -> None:
    text = write_texts(tmp_path / "text", 2)
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(
        SystemExit, match=r"state\.pt cannot be loaded .*, delete it to begin again"
    ):
        recipes.pretrain_small.main(["--smoke", f"--out={tmp_path}", f"--text={text}"])


@pytest.mark.slow
def test_the_smoke_run_on_the_standard_library(tmp_path: Path) -> None:
    run(command(tmp_path / "run", "--minutes", 0.05, "--max-steps", 6))
    assert 0 < len(read_log(tmp_path / "run")) <= 6
    lm = SelfSpeculativeLM.from_pretrained(tmp_path / "run" / "checkpoint")
    plain = lm.generate("import os\n", max_new_tokens=24, num_draft_tokens=0)
    assert lm.generate("import os\n", max_new_tokens=24).token_ids == plain.token_ids
    plan = json.loads((tmp_path / "run/checkpoint/layerskip.json").read_text(encoding="utf-8"))
    assert len(plan["held_out_modules"]) > 20


@pytest.mark.parametrize(
    ("name", "held_out"),
    [
        ("email/parser.py", True),
        ("lib2to3/pgen2/tokenize.py", True),
        ("stringprep.py", True),
        ("wsgiref/handlers.py", True),
        ("json/decoder.py", False),
        ("os.py", False),
        ("tokenize.py", False),
    ],
)
def test_what_is_held_out_stays_held_out(
    recipes: SimpleNamespace, name: str, held_out: bool
) -> None:
    assert recipes.corpus.is_held_out(name) == held_out


def test_about_one_path_in_forty_is_held_out(recipes: SimpleNamespace) -> None:
    names = [f"package/module{i}.py" for i in range(8000)]
    held_out = sum(map(recipes.corpus.is_held_out, names))
    assert 160 <= held_out <= 240  # 200 expected, 3 standard deviations


@pytest.mark.parametrize("count", [1, 2, 5, 80])
def test_something_is_held_out_of_any_text(
    recipes: SimpleNamespace, tmp_path: Path, count: int
) -> None:
    corpus = recipes.corpus
    files = list(corpus.text_files(write_texts(tmp_path / "text", count)))
    train, held_out = corpus.read_documents(files)
    assert all(train.values())
    assert all(held_out.values())
    texts = {name: path.read_text(encoding="utf-8") for name, path in files}
    if count == 1:
        (name,) = texts
        assert train[name] + held_out[name] == texts[name]
    else:
        assert train | held_out == texts
        assert not train.keys() & held_out.keys()


def test_what_is_no_text_is_left_out(recipes: SimpleNamespace, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", 3)
    for i in range(20):  # one of them has the lowest hash
        (folder / f"empty{i}.py").write_text("\n" * (i % 2))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "data.bin").write_bytes(b"\x00")
    train, held_out = recipes.corpus.read_documents(recipes.corpus.text_files(folder))
    assert set(train) | set(held_out) == {"text0.py", "text1.py", "text2.py"}


def test_files_that_are_all_held_out_are_divided(recipes: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "stringprep.py").write_text("a = 1\n" * 40)
    train, held_out = recipes.corpus.read_documents(recipes.corpus.text_files(tmp_path))
    assert len(train["stringprep.py"]) == 19 * len(held_out["stringprep.py"])


def test_a_tokenizer_is_kept_with_a_state_and_no_sooner(
    recipes: SimpleNamespace, tmp_path: Path
) -> None:
    """Or a run that came to nothing would leave its own to another text's."""
    text, kept = write_texts(tmp_path / "text", 6), tmp_path / "tokenizer.json"

    def corpus(vocab_size: int) -> Any:
        return recipes.corpus.Corpus(tmp_path, vocab_size=vocab_size, seed=0, text=text)

    first = corpus(300)
    assert not first.found
    assert not kept.exists()
    first.keep_tokenizer()
    content = kept.read_text("utf-8")
    again = corpus(400)
    assert again.found
    assert again.digest == first.digest
    again.keep_tokenizer()
    assert kept.read_text("utf-8") == content
    size = first.tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match=f"has {size} ids, and the model {size - 1}; delete it"):
        corpus(size - 1)


def test_a_run_that_ends_before_its_first_step_knows_its_text(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes.pretrain_small, "train", lambda *_: signal.SIGINT)  # as if stopped
    options = ["--smoke", f"--out={tmp_path}/run"]
    for name, count in (("text", 6), ("other", 5)):
        write_texts(tmp_path / name, count)
    with exiting(128 + signal.SIGINT):
        recipes.pretrain_small.main([*options, f"--text={tmp_path}/text"])
    with pytest.raises(SystemExit, match=r"pretrain_small: .*content of data"):
        recipes.pretrain_small.main([*options, f"--text={tmp_path}/other"])
    with exiting(128 + signal.SIGINT):
        recipes.pretrain_small.main([*options, f"--text={tmp_path}/text"])


def test_a_run_says_that_it_has_the_tokenizer_that_it_found(
    recipes: SimpleNamespace, trained: dict[str, Any]
) -> None:
    assert "with the tokenizer that is in" not in trained["first"]
    assert "with the tokenizer that is in" in trained["second"]


def test_exits_that_were_not_trained_are_not_said_to_be(
    recipes: SimpleNamespace, tmp_path: Path
) -> None:
    text = write_texts(tmp_path / "text", 6)
    options = ("--text", text, "--minutes", 99, "--max-steps", 1, "--early-exit", 0)
    in_process(recipes, command(tmp_path / "run", *options))
    plan = json.loads((tmp_path / "run" / "checkpoint" / "layerskip.json").read_text("utf-8"))
    assert plan["trained_exits"] == []
    with pytest.raises(ValueError, match="num_layers must be at least 2"):
        recipes.trainer.Settings(num_layers=1, early_exit=0.0)


def test_an_exit_without_weight_was_not_trained(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recipes.pretrain_small.SMOKE, "exit_weights", {1: 0.0, 2: 1.0})
    options = ("--text", write_texts(tmp_path / "text", 6), "--minutes", 99, "--max-steps", 1)
    in_process(recipes, command(tmp_path / "run", *options))
    plan = json.loads((tmp_path / "run" / "checkpoint" / "layerskip.json").read_text("utf-8"))
    assert plan["trained_exits"] == [2]


def test_a_single_token_is_not_enough_to_hold_out(recipes: SimpleNamespace, tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text", 2)
    (text / "stringprep.py").write_text("x")  # held out by its hash
    with pytest.raises(ValueError, match=r"text \(stringprep\.py\) is shorter than two tokens"):
        recipes.corpus.Corpus(tmp_path, vocab_size=300, seed=0, text=text)
    assert not (tmp_path / "tokenizer.json").exists()


@given(text=st.text())
def test_a_small_tokenizer_loses_nothing(recipes: SimpleNamespace, text: str) -> None:
    tokenizer = recipes.corpus.train_tokenizer(["def f():\n    return 12\n"], 300)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 256}, "vocab_size must be between 257 and 65536, got 256"),
        ({"vocab_size": 65537}, "vocab_size must be between 257 and 65536"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
        ({"max_positions": 0}, "max_positions must be at least 1"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"num_kv_heads": 2}, "num_heads must be divisible by num_kv_heads, got 5 and 2"),
        ({"num_heads": 3}, "hidden_size must be divisible by num_heads, got 320 and 3"),
        ({"head_dim": 63}, "head_dim must be even, got 63"),
        ({"batch_tokens": 1000}, "batch_tokens must be divisible by micro_tokens, got 1000 and"),
        ({"micro_tokens": 16384}, "divisible by micro_tokens, got 8192 and 16384"),
        ({"micro_tokens": 256}, "micro_tokens must be divisible by seq_len, got 256 and 512"),
        ({"micro_tokens": 512}, "micro_tokens must be divisible by long_seq_len, got 512 and"),
        ({"layer_dropout": 2.0}, "layer_dropout must be finite and between 0 and 1"),
        ({"distil": 5.0}, "distil must be finite and between 0 and 1"),
        ({"math_share": 2.0}, "math_share must be finite and between 0 and 1"),
        ({"learning_rate": -1.0}, "learning_rate must be finite and at least 0"),
        ({"seed": 2**63}, "seed must be between 0 and"),
    ],
)
def test_settings_that_no_model_can_have_are_refused(
    recipes: SimpleNamespace, changes: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        recipes.trainer.Settings(**changes)


@pytest.mark.parametrize("length", [1, 7, 128, 129, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunked_attention_is_causal_attention(
    recipes: SimpleNamespace, length: int, kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(length)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, length, 16, generator=generator)

    query, key, value = random(4), random(kv_heads), random(kv_heads)
    got, _ = recipes.trainer.chunked_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.25
    )
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.fixture
def make_trainer(recipes: SimpleNamespace) -> Any:
    settings = recipes.trainer.Settings(
        **recipes.pretrain_small.SMOKE | {"minutes": 1e6, "max_steps": 40, "layer_dropout": 0.3}
    )
    return lambda: recipes.trainer.Trainer(settings, "cpu")


@pytest.fixture
def corpus(recipes: SimpleNamespace, tmp_path: Path) -> Any:
    text = write_texts(tmp_path / "text", 4)
    return recipes.corpus.Corpus(tmp_path, vocab_size=300, seed=0, text=text)


def test_going_on_gives_what_never_stopping_gives(
    make_trainer: Any, corpus: Any, tmp_path: Path
) -> None:
    def losses(trainer: Any, steps: int) -> list[tuple[float, ...]]:
        records = [trainer.step(corpus) for _ in range(steps)]
        names = ("step", "tokens", "loss", "exit_layer", "exit_loss")
        return [tuple(record[name] for name in names) for record in records]

    whole = losses(make_trainer(), 6)
    first = make_trainer()
    parts = losses(first, 3)
    first.save(tmp_path / "state.pt")
    second = make_trainer()
    second.load(tmp_path / "state.pt")
    assert parts + losses(second, 3) == whole
    assert not (tmp_path / "state.partial").exists()


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ({"seed": 1}, "some", r"another seed \(0, now 1\)"),
        ({"learning_rate": 0.5, "minutes": 3.0}, "some", "another learning_rate "),
        ({}, "other", r"another content of data \(some, now other\)"),
        ({"max_steps": 50, "minutes": 3.0, "micro_tokens": 512}, "some", None),
    ],
)
def test_another_run_is_not_gone_on_with(
    recipes: SimpleNamespace,
    make_trainer: Any,
    tmp_path: Path,
    changes: Any,
    data: str,
    said: Any,
) -> None:
    make, base = recipes.trainer.Trainer, make_trainer().settings
    first, state = make(base, "cpu", "some"), tmp_path / "state.pt"
    first.steps = 3
    first.save(state)
    second = make(replace(base, **changes), "cpu", data)
    if said is None:
        second.load(state)
        assert second.steps == 3
    else:
        with pytest.raises(ValueError, match=f"state.pt was made with {said}"):
            second.load(state)
        assert second.steps == 0


def test_other_text_has_another_digest(recipes: SimpleNamespace, tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text", 4)
    one, same = (recipes.corpus.Corpus(tmp_path, vocab_size=300, seed=0, text=text) for _ in "ab")
    (text / "text9.py").write_text("x = 1\n")
    other = recipes.corpus.Corpus(tmp_path, vocab_size=300, seed=0, text=text)
    assert one.digest == same.digest != other.digest


def test_a_killed_run_logs_no_step_twice(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = write_texts(tmp_path / "text", 4), tmp_path / "run"
    argv = [f"--out={out}", f"--text={text}", "--smoke", "--device=cpu", "--vocab-size=300"]
    monkeypatch.setattr(recipes.pretrain_small, "train", lambda *_: signal.SIGINT)  # as if stopped
    with exiting(128 + signal.SIGINT):
        recipes.pretrain_small.main(argv)
    log = out / "log.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    log.write_text("".join(lines) + '{"step": 4, "lo')
    monkeypatch.setattr(recipes.trainer.Trainer, "load", lambda self, _: setattr(self, "steps", 2))
    with exiting(128 + signal.SIGINT):
        recipes.pretrain_small.main(argv)
    assert log.read_text() == "".join(lines[:2])


def test_ctrl_c_outside_training_is_one_line(
    recipes: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes.pretrain_small, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        recipes.pretrain_small.main(["--out", str(tmp_path / "out")])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "pretrain_small: interrupted; the same command goes on\n"


def test_a_full_disk_is_one_sentence_and_leaves_the_state_before(
    recipes: SimpleNamespace, make_trainer: Any, tmp_path: Path
) -> None:
    trainer, state = make_trainer(), tmp_path / "run" / "state.pt"
    state.parent.mkdir()
    trainer.save(state)
    before = state.read_bytes()
    said = r"state\.partial cannot be written: File too large$"
    with full_disk(len(before) // 2), pytest.raises(ValueError, match=said):
        trainer.save(state)
    assert state.read_bytes() == before
    assert list(state.parent.iterdir()) == [state]

    text, out = write_texts(tmp_path / "text", 4), tmp_path / "another"
    with full_disk(10_000), pytest.raises(SystemExit, match=rf"^pretrain_small: [^\n]*{said}"):
        in_process(recipes, command(out, "--text", text))
    assert not out.exists()


@pytest.mark.parametrize("error", [RuntimeError("of torch"), ValueError("of ours")])
def test_an_error_of_something_else_than_the_disk_is_no_sentence_about_it(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(type(error), match=f"^{error}$"):
        recipes.checkpoints.write_state(tmp_path / "state.pt", {})


def test_an_interrupt_in_the_midst_of_a_file_is_one(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of torch's file fails over it."""

    class Interrupted(io.FileIO):
        came = False

        def write(self, content: Any) -> int:
            if len(content) > 9_999 and not self.came:
                self.came = True
                raise KeyboardInterrupt
            return super().write(content)

    def opened(path: Path, mode: str) -> io.FileIO:
        return Interrupted(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(KeyboardInterrupt):
        recipes.checkpoints.write_state(tmp_path / "state.pt", {"weight": torch.zeros(99_999)})


@pytest.mark.parametrize("signalled", [False, True])
def test_signals_are_noted_in_training_alone(
    recipes: SimpleNamespace, tmp_path: Path, signalled: bool
) -> None:
    """One that comes in the last step, too, ends the command before it measures."""
    done: list[int] = []

    def step(corpus: object) -> dict[str, float]:
        if signalled:
            signal.raise_signal(signal.SIGINT)
        done.append(1)
        return {"step": 1, "loss": 1.0}

    trainer = SimpleNamespace(
        settings=recipes.trainer.Settings(),
        seconds=0.0,
        progress=lambda: float(len(done)),
        step=step,
        log=[],
        save=lambda path: None,
    )
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    console, state = Console(quiet=True), tmp_path / "state.pt"
    stopped = recipes.pretrain_small.train(trainer, None, state, console)
    assert stopped == (signal.SIGINT if signalled else 0)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_lowers_the_loss(make_trainer: Any, corpus: Any) -> None:
    trainer = make_trainer()
    losses = [trainer.step(corpus)["loss"] for _ in range(12)]
    assert min(losses[-3:]) < losses[0] - 0.5
