"""What the model itself writes after the user's prompts: text on which a draft is judged.

Along the model's own text a draft reads, in training, exactly what it reads in decoding: a drafted
token counts only if it is the token that the model writes.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any

from checkpoints import loading
from data import Sample

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.fingerprint import fingerprint

ROWS = 8  # decoded together


def beginnings(
    samples: Sequence[Sample], count: int, *, most: int, seed: int
) -> list[tuple[int, ...]]:
    """Prompts to go on from: rows' own prompts, each used in turn, and random places of texts.

    Args:
        samples: with a prompt, or plain texts.
        count: of prompts.
        most: tokens of a prompt; the end of a longer one is taken.
        seed: of places and order.

    Raises:
        ValueError: the samples hold no token to begin with.
    """
    draw = random.Random(seed)
    usable = [s for s in samples if s.num_prompt_tokens or len(s.ids) > 1]
    if not usable:
        raise ValueError("there is nothing to go on from: no row has a prompt or two tokens")
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        for sample in draw.sample(usable, len(usable)):
            end = sample.num_prompt_tokens or draw.randrange(1, len(sample.ids))
            found.append(sample.ids[max(0, end - most) : end])
    return found[:count]


def written(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """The prompts with what the model writes after them, kept in a file under ``folder``.

    Its name holds a hash of all that decides the text: another model, prompt or setting is another
    file. Rows are appended as they are done, so that the same call goes on where the last stopped.

    Args:
        lm: of the model.
        prompts: token ids; prompt i is followed with the seed ``seed + i``.
        folder: of the file; made if it is not there.
        max_new_tokens: of each.
        temperature: 0 is greedy.
        seed: of the draws.
        on_progress: called with (prompts done, prompts).
    """
    path = folder / f"{_key(lm, prompts, max_new_tokens, temperature, seed)}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with loading(path, "have the model write it again"):
        rows = _read(path)
    with path.open("a", encoding="utf-8") as file:
        for start in range(len(rows), len(prompts), ROWS):
            on_progress(start, len(prompts))
            part = prompts[start : start + ROWS]
            for row in _decode(lm, part, max_new_tokens, temperature, seed + start):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    on_progress(len(prompts), len(prompts))
    pairs = zip(prompts, rows, strict=True)
    return [Sample((*prompt, *row), num_prompt_tokens=len(prompt)) for prompt, row in pairs]


def num_prompts(tokens: int, max_new_tokens: int) -> int:
    """How many continuations make so many tokens, if none ends early."""
    return math.ceil(tokens / max_new_tokens)


def _decode(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[list[int]]:
    batch = lm.open_batch(max_new_tokens=max_new_tokens)
    rows = []
    for i, prompt in enumerate(prompts):
        own = SamplingParams(temperature=temperature, seed=seed + i if temperature else None)
        rows.append(batch.add(list(prompt), sampling=own))
    while batch.unfinished:
        batch.step()
    return [list(batch.remove(row).token_ids) for row in rows]


def _read(path: Path) -> list[list[int]]:
    """Whole lines of the file; a line that was cut off in writing is taken out of it."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [[index(token) for token in json.loads(line)] for line in whole.splitlines()]


def _key(lm: SelfSpeculativeLM, prompts: Sequence[Sequence[int]], *settings: Any) -> str:
    dtype = str(lm.stack.dtype)  # rounding decides texts, too
    content = [fingerprint(lm.stack.twin), dtype, [list(p) for p in prompts], *settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
