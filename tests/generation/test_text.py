"""Text while it is written: certain pieces only, whole characters, and stop strings wherever tokens part them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.generation import TextStream
from course_lib.models import ByteTokenizer, load


class Pieces:
    """A tokenizer whose tokens are the pieces it was given."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, tokens, *, skip_special_tokens):
        return "".join(self.pieces[token] for token in tokens)


@given(st.text())
def test_characters_come_whole(text):
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.end() == text == stream.text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_text_ends_before_the_first_stop_string_and_nothing_of_it_is_shown(pieces, stop):
    stream = TextStream(Pieces(pieces), stop)
    shown, written = "", ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        written += pieces[token]
        places = [written.find(one) for one in stop if one in written]
        assert stream.stopped == bool(places)
        if places:
            assert stream.text == shown == written[: min(places)]
            break
        assert stream.text == written
        assert written.startswith(shown)
        assert shown == written or any(one.startswith(written[len(shown) :]) for one in stop)
    shown += stream.end()
    assert shown == stream.text


def test_what_cannot_become_a_stop_string_comes_at_once():
    stream = TextStream(Pieces(["ab", "c", "a", "x", "", "</", "s"]), "</s>")
    assert [stream.push(token) for token in range(7)] == ["ab", "c", "a", "x", "", "", ""]
    assert stream.end() == "</s"


def test_half_a_character_at_the_end_comes_with_the_end():
    stream = TextStream(ByteTokenizer(), "never")
    assert [stream.push(byte) for byte in "aé".encode()[:2]] == ["a", ""]
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


@pytest.mark.parametrize("text", ["Ça va? 🙂👍🏽 日本語 naïve", " leading space\n\nand lines"])
def test_a_real_vocabulary_parts_characters_and_nothing_is_lost(text):
    _, tokenizer = load("smollm2-135m")
    tokens = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.end() == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_may_be_told_alone_and_nothing_follows_it():
    stream = TextStream(Pieces(["one", "two", "three"]), "etw")
    assert [stream.push(token) for token in range(3)] == ["on", "", ""]
    assert (stream.text, stream.stopped, stream.end()) == ("on", True, "")
