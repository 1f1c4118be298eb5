from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from toys import VOCAB_SIZE, make_tokenizer
from transformers import PreTrainedTokenizerFast

from layerskip import text as text_module
from layerskip.text import TextStream, by_origin

TOKENIZER = make_tokenizer()
# Bytes stand in for tokens that are missing, as Llama 2, Mistral and Gemma have them.
BYTES = [f"<0x{b:02X}>" for b in (*"A😀é€".encode(), 0x80)]
FALLBACK_TOKENS = ["<unk>", "</s>", *dict.fromkeys(BYTES), "▁", "a", "▁a", "é", "\ufffd"]
IDS = st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=24)  # mostly broken UTF-8
TEXT = st.text(st.sampled_from("aet h\n😀é€\u0301"), max_size=16)


def encode(text: str, cuts: list[bool] = ()) -> list[int]:
    """Ids of ``text``: the tokenizer's, or with ``cuts`` its bytes, merged only where False."""
    if not cuts:
        return TOKENIZER(text)["input_ids"]
    pieces, symbols = [], TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    for symbol in "".join(piece for piece, _ in symbols):
        pair = pieces[-1] + symbol if pieces else ""
        merges = pair in TOKENIZER.get_vocab() and not cuts[len(pieces) % len(cuts)]
        pieces = [*pieces[:-1], pair] if merges else [*pieces, symbol]
    return TOKENIZER.convert_tokens_to_ids(pieces)


def make_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Decodes a run of byte tokens at once: one broken character breaks all of them."""
    vocabulary = {token: i for i, token in enumerate(FALLBACK_TOKENS)}
    bpe = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    spaces = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


FALLBACK = make_fallback_tokenizer()
SPACED_TOKENS = ["<unk>", "</s>", "▁.", "▁'", "▁n", "'t", "▁a", "s", "."]


def make_cleaning_tokenizer() -> PreTrainedTokenizerFast:
    """No BPE: transformers takes blanks before punctuation away, unless it is told not to."""
    unigram = models.Unigram([(token, -1.0) for token in SPACED_TOKENS], unk_id=0)
    tokenizer = Tokenizer(unigram)
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=True
    )


CLEANING = make_cleaning_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


# Three tokens; the last one ends an emoji and begins another.
ENDS_INSIDE = encode("😀😀", [False, False, True, False])[:3]


def run(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """All pieces of a stream, with the last one from ``finish``."""
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


def cut_at_stop(ids: list[int], stops: tuple[str, ...]) -> str:
    """The text of the fewest tokens that hold a stop string, cut before it; else all of it."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        unfinished = text.endswith("\ufffd") and count < len(ids)
        found = [] if unfinished else [text.find(s) for s in stops if s in text]
        if found:
            return text[: min(found)]
    return decode(ids)


@given(IDS.filter(bool), st.integers(0, 24))
@example(ENDS_INSIDE, 1)
def test_text_by_origin_is_the_text_of_its_tokens(ids, cut):
    stream, origins = TextStream(TOKENIZER, ()), [str(i) for i in range(len(ids))]
    pieces, cut = [], min(cut, len(ids) - 1)
    for part, reason in ((slice(0, cut), None), (slice(cut, None), "length")):
        record = SimpleNamespace(token_ids=ids[part], origins=origins[part], finish_reason=reason)
        pieces += by_origin(stream, record)
    assert "".join(text for text, _ in pieces) == decode(ids)
    assert [origin for _, origin in pieces] == [*origins, origins[-1]]  # what was held back


@given(IDS)
@example(encode("😀")[:1])  # ends inside a character
def test_pieces_of_any_tokens_join_to_the_whole(ids):
    assert "".join(run(ids)[0]) == decode(ids)


@given(IDS, st.lists(st.integers(0, 24), max_size=4))
@example(ENDS_INSIDE, [2])
def test_several_tokens_give_the_text_of_one_after_another(ids, ends):
    stream, places = TextStream(TOKENIZER, ()), [0, *sorted(ends), len(ids)]
    pieces = [stream.push_all(ids[a:b]) for a, b in pairwise(places)]
    assert "".join([*pieces, stream.finish()]) == decode(ids)


def fallback_ids(*tokens: str) -> list[int]:
    return [FALLBACK_TOKENS.index(token) for token in tokens]


@given(
    st.lists(st.integers(1, len(FALLBACK_TOKENS) - 1), max_size=16), st.lists(st.integers(0, 16))
)
@example(fallback_ids("a", "<0x41>", "<0x80>", "a"), [])
@example(fallback_ids("<0xC3>", "<0xA9>", "<0x41>", "<0x80>", "a"), [3])
@example(fallback_ids("a", "<0x41>", "<0x41>", "<0x80>", "a"), [1, 3])
def test_the_text_of_byte_tokens_depends_on_no_round(ids, ends):
    alone, stream = TextStream(FALLBACK, ()), TextStream(FALLBACK, ())
    pieces = [alone.push(token) for token in ids]
    places = [0, *sorted(min(end, len(ids)) for end in ends), len(ids)]
    for start, end in pairwise(places):
        assert stream.push_all(ids[start:end]) == "".join(pieces[start:end])
        stream = stream.fork()
    assert stream.finish() == alone.finish()


@given(
    st.lists(st.integers(1, len(SPACED_TOKENS) - 1), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
)
@example([6, 3, 6], [2])
def test_blanks_before_punctuation_depend_on_no_round(ids, ends):
    places = [0, *sorted(min(end, len(ids)) for end in ends), len(ids)]
    for one_by_one in (False, True):
        stream, text = TextStream(CLEANING, ()), ""
        for start, end in pairwise(places):
            part = ids[start:end]
            text += "".join(map(stream.push, part)) if one_by_one else stream.push_all(part)
        spelt = "".join(SPACED_TOKENS[i] for i in ids if i > 1).replace("▁", " ")
        assert text + stream.finish() == spelt.removeprefix(" ")


def test_several_tokens_hold_back_no_more_than_the_last_ones():
    stream = TextStream(TOKENIZER, ())
    assert stream.push_all([*encode("ate"), encode("😀")[0]]) == "ate"
    assert stream.push_all(encode("😀")[1:]) == "😀"


def test_several_tokens_are_decoded_at_once():
    calls = []

    def decode(ids, **settings):
        calls.append(tuple(ids))
        return TOKENIZER.decode(ids, **settings)

    stream, ids = TextStream(SimpleNamespace(decode=decode), ()), encode("aet hate hat")
    assert stream.push_all(ids) == "aet hate hat"
    assert calls == [(), tuple(ids)]


def test_a_fast_tokenizer_is_asked_without_its_checks(monkeypatch):
    monkeypatch.delattr("transformers.tokenization_utils_base.to_py_obj")  # the first of them
    assert "".join(run(encode("aet hate hat"))[0]) == "aet hate hat"


@pytest.mark.parametrize("name", ["decode", "_decode"])
@pytest.mark.parametrize("place", ["subclass", "instance"])
def test_a_fast_tokenizer_that_decodes_otherwise_does_so(name, place):
    class Loud(PreTrainedTokenizerFast):
        pass

    tokenizer = Loud(tokenizer_object=TOKENIZER.backend_tokenizer)
    as_usual = getattr(tokenizer, name)

    def decode(*ids, **settings):
        return as_usual(*ids, **settings).upper()

    if place == "subclass":
        setattr(Loud, name, lambda _, *ids, **settings: decode(*ids, **settings))
    else:
        setattr(tokenizer, name, decode)
    stream = TextStream(tokenizer, ())
    assert stream.push_all(encode("aet")) + stream.finish() == "AET"


@given(TEXT, st.lists(st.booleans(), min_size=1, max_size=7))
def test_pieces_of_text_are_whole_characters(text, cuts):
    pieces, stream = run(encode(text, cuts))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert not stream.stopped


def test_a_character_comes_out_with_its_last_byte():
    first, second = encode("😀")
    stream = TextStream(TOKENIZER, ())
    assert [stream.push(first), stream.push(second)] == ["", "😀"]
    assert stream.finish() == ""


@given(TEXT, st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_stop_strings_cut_wherever_tokens_end(text, cuts, data):
    stops = tuple(data.draw(st.lists(stops_near(text), min_size=1, max_size=3)))
    ids = encode(text, cuts)
    pieces, stream = run(ids, stops)
    assert "".join(pieces) == cut_at_stop(ids, stops)
    assert stream.stopped == any(s in text for s in stops)


def stops_near(text: str) -> st.SearchStrategy[str]:
    """Pieces of the text, and strings that begin like one."""
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 5))
    inside = spans.map(lambda s: text[s[0] : s[0] + s[1]] or "x")
    return st.one_of(inside, inside.map(lambda s: s + "!"), TEXT.filter(bool))


@given(IDS, st.lists(st.text(st.sampled_from("aet oin😀"), min_size=1, max_size=3), max_size=2))
@example(ENDS_INSIDE, ["😀"])
def test_text_of_any_tokens_is_cut_before_the_stop(ids, stops):
    pieces, _ = run(ids, tuple(stops))
    assert "".join(pieces) == cut_at_stop(ids, tuple(stops))


def test_text_that_may_become_a_stop_is_held_back():
    stream = TextStream(TOKENIZER, ("END", "ENTER"))
    pieces = [stream.push(token) for token in encode("aENt", [True])]
    assert pieces == ["a", "", "", "ENt"]
    pieces = [stream.push(token) for token in encode("tEND", [True])]
    assert pieces == ["t", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_what_was_held_back_comes_at_the_end():
    stream = TextStream(TOKENIZER, ("END",))
    assert [stream.push(token) for token in encode("aEN", [True])] == ["a", "", ""]
    assert stream.finish() == "EN"


@pytest.mark.parametrize("special", ["<s>", "</s>"])
def test_special_tokens_are_no_text(special):
    ids = [*encode("at"), TOKENIZER.convert_tokens_to_ids(special), *encode("e")]
    assert "".join(run(ids)[0]) == "ate"


@pytest.mark.parametrize("ids", [[1], [0, 1], [encode("é", [True])[1]]])
def test_long_runs_without_text_are_not_decoded_again(ids):
    def num_decoded(count: int) -> int:
        calls = []

        def decode(ids, **settings):
            calls.append(len(ids))
            return TOKENIZER.decode(ids, **settings)

        stream = TextStream(SimpleNamespace(decode=decode), ())
        assert not any(stream.push_all(ids) for _ in range(count))
        return sum(calls)

    assert num_decoded(400) < 2.5 * num_decoded(200)


# Special tokens, one with text, bytes of characters, and an id that is no token.
BYTE_LEVEL = [0, 1, *encode("a😀é", [True]), VOCAB_SIZE]
FALLING_BACK = fallback_ids("</s>", "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xC3>", "<0xA9>")


@pytest.mark.parametrize(("tokenizer", "ids"), [(TOKENIZER, BYTE_LEVEL), (FALLBACK, FALLING_BACK)])
@given(data=st.data())
def test_long_runs_without_text_give_the_pieces_of_short_ones(tokenizer, ids, data):
    def pieces(tokens: list[int]) -> list[str]:
        stream = TextStream(tokenizer, ())
        return [*(stream.push(token) for token in tokens), stream.finish()]

    runs = st.tuples(st.sampled_from(ids), st.sampled_from([1, 1, 1, 20]))
    tokens = [token for token, n in data.draw(st.lists(runs, max_size=16)) for _ in range(n)]
    found = pieces(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "RECENT", 1000)
        assert found == pieces(tokens)
    kept = [i for i, token in enumerate(tokens) if token not in tokenizer.all_special_ids]
    assert [found[i] for i in (*kept, -1)] == pieces([tokens[i] for i in kept])


def test_a_character_comes_out_behind_ids_that_are_no_tokens():
    first, second = encode("😀")
    assert "".join(run([first, *[VOCAB_SIZE] * 20, second])[0][:-1]) == "😀"


def test_a_blank_that_is_stripped_where_it_stands_alone_stays():
    words = ("<s>", "a", " ", "b")

    def decode(ids, *, skip_special_tokens, **_):
        text = "".join(words[i] for i in ids if i or not skip_special_tokens)
        return text.strip() if skip_special_tokens else text

    stream = TextStream(SimpleNamespace(decode=decode), ())
    assert "".join([*map(stream.push, (1, 0, 2, 3)), stream.finish()]) == "a b"
