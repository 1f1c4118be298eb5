"""Options of the benchmarks, the checkpoint they share, and what their JSON says of the machine."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cells import Cell, cells_of
from lab import Lab, Options
from measuring import Results, modes_of

import layerskip
from layerskip.checkpoint import pick_device, pick_dtype
from layerskip.fingerprint import device_name
from layerskip.journal import Journal
from layerskip.prompts import read_prompts

RECIPES = Path(__file__).parent / "recipes"
TOLD = ("python_version", "system", "machine")
SMOKE = {"limit": 2, "seconds": 0.0, "tokens": 6, "max_repeated": 1.0, "draft_model": "none"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("layerskip")
    group.addoption("--model", default="builtin", help="folder, hub id or 'builtin'")
    group.addoption("--device", default="auto", help="cpu, cuda or auto")
    group.addoption("--dtype", default=None, help="bfloat16, float16 or float32")
    group.addoption(
        "--prompts", default=None, type=Path, help="JSON lines of yours, in the place of our tasks"
    )
    group.addoption("--exit-layer", default=None, type=int, help="of a model without a plan")
    group.addoption(
        "--draft-model", default="auto", help="independent, same tokenizer; none leaves it out"
    )
    group.addoption("--matrix", default="quick", choices=["quick", "full"], help="which cells")
    group.addoption("--cells", default=None, help="only these, comma-separated")
    group.addoption("--limit", default=12, type=int, help="most prompts of a cell (12)")
    group.addoption("--seconds", default=46.0, type=float, help="of a cell, about (46)")
    group.addoption("--resume", default=None, type=Path, help="journal of measured cells")
    group.addoption("--smoke", action="store_true", help="2 prompts, 6 tokens each")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse, before a checkpoint is loaded, what leaves nothing to measure."""
    limit = config.getoption("--limit")
    if limit < 1:
        raise pytest.UsageError(f"--limit must be 1 or more prompts of a cell, got {limit}")
    seconds = config.getoption("--seconds")
    if not 0.0 <= seconds < math.inf:  # at 0 a cell is one prompt
        raise pytest.UsageError(f"--seconds must be a number of 0 or more, got {seconds}")
    chosen(config)
    try:
        pick_device(config.getoption("--device"))
        pick_dtype(config.getoption("--dtype"))
        if config.getoption("--prompts") is not None:
            read_prompts(config.getoption("--prompts"))
    except (ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Training steps are no cells: ``pytest bench/recipes`` measures them."""
    asked = any("recipes" in Path(argument).parts for argument in config.args)
    return True if collection_path == RECIPES and not asked else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"name", "mode"} <= set(metafunc.fixturenames):  # names, for the JSON holds no cells
        cells = chosen(metafunc.config).items()
        pairs = [(name, mode) for name, cell in cells for mode in modes_of(cell)]
        metafunc.parametrize(("name", "mode"), pairs, ids=map(":".join, pairs))


def chosen(config: pytest.Config) -> dict[str, Cell]:
    """The cells that are asked for, by name."""
    own_prompts = config.getoption("--prompts") is not None
    by_name = {c.name: c for c in cells_of(config.getoption("--matrix"), own_prompts)}
    if config.getoption("--cells") is None:
        return by_name
    wanted = [name.strip() for name in config.getoption("--cells").split(",")]
    for name in wanted:
        if name not in by_name:
            raise pytest.UsageError(f"--cells has {name!r}; allowed are {', '.join(by_name)}")
    return {name: by_name[name] for name in wanted}


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    config = request.config
    names = ("model", "device", "dtype", "prompts", "exit_layer", "draft_model", "limit", "seconds")
    given = {name: config.getoption(f"--{name.replace('_', '-')}") for name in names}
    return opened(Options(**given | (SMOKE if config.getoption("--smoke") else {})))


def opened(options: Options) -> Lab:
    """The checkpoints that are asked for; as from the command line one sentence if there are none,
    in the place of a traceback from each mode."""
    try:
        lab = Lab(options)
        if options.draft_model != "auto":  # which takes two minutes, and not all cells want it
            lab.draft_model  # noqa: B018
    except (ValueError, OSError) as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return lab


@pytest.fixture
def cell(request: pytest.FixtureRequest, name: str) -> Cell:
    return chosen(request.config)[name]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Results]:
    path = request.config.getoption("--resume")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with closing(Journal(path, lab.subject())) as journal:
        yield Results(journal.once)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """What may be published, and what decides a speed."""
    told: dict[str, Any] = {name: machine_info.get(name) for name in TOLD}
    cuda = torch.cuda.is_available()
    told |= {
        "processor": device_name(torch.device("cpu")),
        "gpu": device_name(torch.device("cuda")) if cuda else None,
        "threads": torch.get_num_threads(),
        "layerskip": layerskip.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # The rest of pytest-benchmark reads these two.
    told["cpu"] = {"brand_raw": told["processor"]}
    told["node"] = ""
    machine_info.clear()
    machine_info.update(told)


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict) -> None:
    """Names of folders and branches mean nothing elsewhere."""
    commit_info["project"] = "layerskip"
    commit_info.pop("branch", None)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict) -> None:
    """The whole matrix is kept without its single samples, which are most of its file."""
    if config.getoption("--matrix") == "full":
        for benchmark in output_json["benchmarks"]:
            benchmark["stats"].pop("data", None)
