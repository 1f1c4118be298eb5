"""What type checkers make of the API: `make lint` reads this, nothing runs it."""

from typing import assert_type

from layerskip import GenerationOutput, SamplingParams, SelfSpeculativeLM


def one_or_more(texts: str | list[str]) -> str | list[str]:
    return texts


def use(lm: SelfSpeculativeLM, number: int) -> None:
    sampling = SamplingParams(temperature=0.8, seed=0)
    assert_type(lm.generate("text", max_new_tokens=8, sampling=sampling), GenerationOutput)
    assert_type(lm.generate([5, 6, 7]), GenerationOutput)
    chat = lm.generate(messages=[{"role": "user", "content": "text"}])
    assert_type(chat, GenerationOutput)
    assert_type(lm.generate(["one", "two"]), list[GenerationOutput])
    assert_type(lm.generate([[5, 6], [7]], num_return_sequences=2), list[GenerationOutput])
    several = lm.generate("text", num_return_sequences=number)
    assert_type(several, GenerationOutput | list[GenerationOutput])
    some: str | list[str] = ["one"] if number else "text"
    assert_type(lm.generate(one_or_more(some)), GenerationOutput | list[GenerationOutput])
    lm.generate("text", temperature=0.8)  # type: ignore[call-overload]
