"""Settings of a recipe: YAML and the command line, checked against the class."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from recipe_modules import imported


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(["settings", "lora_early_exit", "exit_adapter"]) as modules:
        yield modules


def settings_class(recipes: SimpleNamespace) -> Any:
    @dataclasses.dataclass(frozen=True)
    class Settings(recipes.settings.RunSettings):
        data: str = "some.jsonl"
        out: str = "runs/some"
        scales: dict[int, float] = dataclasses.field(default_factory=dict)
        exits: tuple[int, ...] = ()
        exit_layer: int | Literal["auto"] | None = None
        curriculum: Literal["none", "rotational"] = "none"

    return Settings


def test_what_the_command_line_says_counts_most(recipes: SimpleNamespace, tmp_path: Path) -> None:
    config = tmp_path / "some.yaml"
    config.write_text("steps: 7\nlearning_rate: 1e-4\nscales: {2: 1}\n")
    settings = recipes.settings.from_command_line(
        settings_class(recipes),
        "A recipe.",
        tmp_path / "none.yaml",
        ["steps=8", f"--config={config}", "exits=[1, 2]", "data=007", "steps=9"],
    )
    assert (settings.steps, settings.learning_rate, settings.data) == (9, 1e-4, "007")
    assert settings.scales == {2: 1.0}
    assert settings.exits == (1, 2)


@pytest.mark.parametrize("text", ["no", "1e-4", "null", "12", "true", "a: b", "é\n", ""])
def test_saved_settings_are_read_back(recipes: SimpleNamespace, tmp_path: Path, text: str) -> None:
    settings = settings_class(recipes)(
        model=text or "x", learning_rate=1e-5, scales={3: 0.5}, exits=(2,), exit_layer="auto"
    )
    recipes.settings.save(settings, tmp_path / "settings.yaml")
    assert recipes.settings.read(type(settings), tmp_path / "settings.yaml") == settings


@pytest.mark.parametrize(
    ("content", "overrides", "said"),
    [
        ("", ["step=3"], r"there is no setting 'step'; did you mean steps\?"),
        ("stps: 3", [], r"there is no setting 'stps'; did you mean steps\?"),
        ("1: 3", [], "there is no setting '1'; there are model, data"),
        ("", ["zzz=3"], r"there is no setting 'zzz'; there are model, data"),
        ("", ["steps"], "'steps' is no setting; write key=value"),
        ("", ["steps=3.5"], "steps must be a whole number, got 3.5"),
        ("", ["steps=true"], "steps must be a whole number, got True"),
        ("", ["resume=1"], "resume must be true or false, got 1"),
        ("", ["learning_rate=fast"], "learning_rate must be a number, got 'fast'"),
        ("", ["learning_rate=.nan"], "learning_rate must be finite"),
        ("", ["learning_rate=true"], "learning_rate must be a number, got True"),
        ("", ["curriculum=gradual"], "curriculum must be one of none, rotational, got 'gradual'"),
        ("", ["exits=[1, x]"], r"exits\[1\] must be a whole number, got 'x'"),
        ("", ["exit_layer=x"], "exit_layer must be a whole number or one of auto or null"),
        ("", ["exits=["], r"'\[' is not a value"),
        ("", ["held_out_share=0.9"], "held_out_share must be"),
        ("", ["batch_size=6", "gradient_accumulation=4"], "batch_size .6. must be a multiple"),
        ("", ["data="], "data is missing; give data="),
        ("steps: 1\nsteps: 2\n", [], "are not YAML: steps stands there twice"),
        ("- steps", [], "must be a mapping of keys to values, got"),
        ("a: [", [], "are not YAML"),
    ],
)
def test_a_wrong_setting_is_named(
    recipes: SimpleNamespace, tmp_path: Path, content: str, overrides: list[str], said: str
) -> None:
    config = tmp_path / "some.yaml"
    config.write_text(content)
    with pytest.raises(ValueError, match=said) as caught:
        recipes.settings.read(settings_class(recipes), config, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("08", 8), ("+7", 7), ("0", 0)])
def test_whole_numbers_are_decimal(
    recipes: SimpleNamespace, tmp_path: Path, text: str, value: int
) -> None:
    config = tmp_path / "some.yaml"
    config.write_text(f"seed: {text}\nexits: [{text}]\n")
    kinds = settings_class(recipes)
    assert recipes.settings.read(kinds, None, [f"seed={text}", "data=x"]).seed == value
    found = recipes.settings.read(kinds, config, ["data=x"])
    assert (found.seed, found.exits) == (value, (value,))


def test_words_are_words(recipes: SimpleNamespace, tmp_path: Path) -> None:
    config = tmp_path / "some.yaml"
    config.write_text("mixed_precision: no\nexit_layer:\ncurriculum: none\n")
    settings = recipes.settings.read(settings_class(recipes), config, ["exit_layer=auto"])
    assert (settings.mixed_precision, settings.curriculum) == ("no", "none")
    assert settings.exit_layer == "auto"


@pytest.mark.parametrize("recipe", ["lora_early_exit", "exit_adapter"])
def test_a_models_folder_is_no_output(
    recipes: SimpleNamespace, tmp_path: Path, recipe: str
) -> None:
    """A layerskip.json of its own would be written over."""
    (tmp_path / "config.json").write_text("{}")
    given = [f"data={tmp_path}", f"model={tmp_path}", f"out={tmp_path}"]
    with pytest.raises(SystemExit, match=r"is a model's folder \(it holds config\.json\); give"):
        getattr(recipes, recipe).main(given)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_result_does_not_replace_what_it_is_made_of(
    recipes: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    given = ["data=stdlib", f"model={tmp_path / 'model'}", f"out={tmp_path}"]
    with pytest.raises(SystemExit, match="is where this run's result goes; give another out"):
        recipes.lora_early_exit.main(given)


@pytest.mark.parametrize("recipe", ["lora_early_exit", "exit_adapter"])
def test_an_output_that_is_a_file_is_said_before_a_model_is_loaded(
    recipes: SimpleNamespace, tmp_path: Path, recipe: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        given = [f"model={tmp_path / 'none'}", f"data={file}", f"out={out}"]
        with pytest.raises(SystemExit, match=rf"^{recipe}: out .* cannot be made: .*file is no f"):
            getattr(recipes, recipe).main(given)
    assert file.read_text() == "mine"
