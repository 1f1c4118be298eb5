"""Where speculation pays: what was decided for each kind of request, and its file.

``layerskip report`` writes a policy from measurements; decoding reads it, request by request.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from layerskip.files import read_json, write_json
from layerskip.params import MAX_NUM_DRAFT_TOKENS, check_integer

POLICY_VERSION = 1


@dataclass(frozen=True)
class Rule:
    """What requests of one task and prompt length do.

    Attributes:
        task: value of the policy's label; "" is of requests without it.
        prompt_tokens: lengths of prompt from the first number up to, and without, the second; None
            has no end.
        max_draft_tokens: most that a round drafts; 0 switches drafting off, None leaves it to the
            controller alone.
        reason: why, with its numbers, for people.
    """

    task: str
    prompt_tokens: tuple[int, int | None]
    max_draft_tokens: int | None
    reason: str = ""

    def __post_init__(self) -> None:
        for name, text in (("task", self.task), ("reason", self.reason)):
            if not isinstance(text, str):
                raise TypeError(f"a rule's {name} must be text, got {text!r}")
        if not isinstance(self.prompt_tokens, tuple) or len(self.prompt_tokens) != 2:
            raise TypeError(f"prompt_tokens must be two numbers, got {self.prompt_tokens!r}")
        low, high = self.prompt_tokens
        check_integer("the first of prompt_tokens", low, 0)
        if high is not None:
            check_integer("the second of prompt_tokens", high, low + 1)
        if self.max_draft_tokens is not None:
            check_integer("max_draft_tokens", self.max_draft_tokens, 0, MAX_NUM_DRAFT_TOKENS)

    def covers(self, task: str, prompt_tokens: int) -> bool:
        """Whether it is about such a request."""
        low, high = self.prompt_tokens
        return self.task == task and low <= prompt_tokens and (high is None or prompt_tokens < high)


@dataclass(frozen=True)
class Policy:
    """Rules, at most one for a request; what none covers is left to the controller.

    Attributes:
        rules: any order; those of a task may not overlap.
        label: that holds the task; None: all requests are of the task "".
        measured: by what the rules were chosen, for people.
    """

    rules: tuple[Rule, ...] = ()
    label: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple) or not all(isinstance(r, Rule) for r in self.rules):
            raise TypeError(f"rules must be a tuple of Rule, got {self.rules!r}")
        if self.label is not None and not isinstance(self.label, str):
            raise TypeError(f"a policy's label must be text or None, got {self.label!r}")
        if not isinstance(self.measured, Mapping):
            raise TypeError(f"measured must be a mapping, got {self.measured!r}")
        for task in {rule.task for rule in self.rules}:
            own = (rule.prompt_tokens for rule in self.rules if rule.task == task)
            for (_, end), (start, _) in pairwise(sorted(own, key=itemgetter(0))):
                if end is None or end > start:
                    raise ValueError(
                        f"two rules of task {task!r} cover prompts of {start} tokens; keep one"
                    )

    def max_draft_tokens(self, labels: Mapping[str, str], prompt_tokens: int) -> int | None:
        """As of the request's rule; None, too, for a request of which nothing is known."""
        task = task_of(labels, self.label)
        caps = (rule.max_draft_tokens for rule in self.rules if rule.covers(task, prompt_tokens))
        return next(caps, None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it."""
        rules = [asdict(rule) | {"prompt_tokens": list(rule.prompt_tokens)} for rule in self.rules]
        known = {"label": self.label, "rules": rules, "measured": dict(self.measured)}
        return {"version": POLICY_VERSION, **known}

    @classmethod
    def from_dict(cls, content: Any) -> "Policy":
        """The policy that ``to_dict`` wrote.

        Raises:
            ValueError: it is none, is of another version, or a rule is not right.
        """
        version = content.get("version") if isinstance(content, Mapping) else None
        if type(version) is not int or version != POLICY_VERSION:
            got = content.get("version") if isinstance(content, Mapping) else content
            raise ValueError(f"a policy of version {POLICY_VERSION} was expected, got {got!r}")
        unknown = sorted(set(content) - {"version", "label", "rules", "measured"})
        if unknown:
            raise ValueError(f"a policy has no {', '.join(map(repr, unknown))}")
        rules, measured = content.get("rules"), content.get("measured", {})
        if not isinstance(rules, list) or not isinstance(measured, Mapping):
            raise ValueError("a policy's rules must be a list, and measured an object")
        return cls(
            tuple(_rule(number, rule) for number, rule in enumerate(rules, 1)),
            content.get("label"),
            dict(measured),
        )

    def save(self, path: str | Path) -> None:
        """Write the policy as a JSON file that people may edit."""
        write_json(path, self.to_dict(), indent=2)

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Read a policy written by ``save``, or by hand."""
        content = read_json(path, "policy")
        try:
            return cls.from_dict(content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a policy ({error})") from None


def _rule(number: int, content: Any) -> Rule:
    fields = {"task", "prompt_tokens", "max_draft_tokens", "reason"}
    if not isinstance(content, Mapping) or not {"prompt_tokens", "max_draft_tokens"} <= set(
        content
    ):
        raise ValueError(f"rule {number} needs prompt_tokens and max_draft_tokens, got {content!r}")
    if not set(content) <= fields:
        unknown = ", ".join(map(repr, sorted(set(content) - fields)))
        raise ValueError(f"rule {number} has no {unknown}")
    span = content["prompt_tokens"]
    if not isinstance(span, list) or len(span) != 2:
        raise ValueError(f"rule {number}: prompt_tokens must be two numbers, got {span!r}")
    try:
        return Rule(**{**content, "task": content.get("task", ""), "prompt_tokens": tuple(span)})
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule {number}: {error}") from None


def task_of(labels: Mapping[str, str], label: str | None) -> str:
    """A request's task: what it has for the label that holds it, or ""."""
    return labels.get(label, "") if label is not None else ""
