"""Conversations: the replies of a session that computes everything anew, with as little computed as token ids allow."""

import re

import pytest
import torch
from transformers import DynamicCache as TheirCache
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from course_lib import kv_cache
from course_lib.generation import ChatSession, generate
from course_lib.models import ByteTokenizer, DecoderConfig, DecoderLM, load

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


class Chatty(ByteTokenizer):
    """Bytes with a template that shows the last reply as it was and older ones without thoughts and outer spaces."""

    bos = ""

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt
        assert tokenize
        assert return_dict
        last, text = len(messages) - 1, self.bos
        for place, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant" and place < last - 1:
                content = re.sub("[aeiou]", "", content).strip()
            text += f"<{message['role'][0]}>{content}\n"
        return self(text + "<a>")

    def decode(self, token_ids, *, skip_special_tokens=True):
        # ASCII, so that a reply has as many characters as tokens.
        return bytes(token % 96 + 32 for token in token_ids).decode()


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=None)).eval()


@pytest.fixture(scope="module", params=["DecoderLM", "Transformers"])
def model(request, theirs):
    return DecoderLM.from_transformers(theirs) if request.param == "DecoderLM" else theirs


def fresh_reply(session: ChatSession, text: str, new: int) -> list[int]:
    """Return what the model writes next when all is computed anew, without a session."""
    messages = [*session.messages, {"role": "user", "content": text}]
    ids = session.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    ids = torch.tensor([ids["input_ids"]])
    ends = session._end_tokens()
    return generate(session.model, ids, max_new_tokens=new, cache=None, eos_token_id=ends).sequences[0].tolist()


TEXTS = ("Hello there", "What then?", "", "Ünïcode, and a rather longer message than before.", "x")


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "paged", "prefix", "object"])
def test_tokens_are_those_without_reuse_though_the_template_rewrites_history(model, cache):
    kind = TheirCache(config=model.config) if cache == "object" else cache
    session = ChatSession(model, Chatty(), cache=kind, system="Be brief.", max_tokens=800)
    for turn, text in enumerate(TEXTS):
        expected = fresh_reply(session, text, 12)
        reply = session.send(text, max_new_tokens=12)
        assert session.result.sequences[0].tolist() == expected
        assert reply == Chatty().decode(expected[-12:])
        assert session.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        assert session.reused_tokens + session.processed_tokens == len(expected) - 12
        # System message and first question are never rewritten, and a reply but for its last token only one turn later.
        assert session.reused_tokens >= (0 if turn == 0 else len("<s>Be brief.\n<u>Hello there\n<a>"))
    assert len(session.messages) == 11


def test_only_what_follows_the_first_difference_is_computed(model):
    session = ChatSession(model, Chatty())
    session.send("one", max_new_tokens=5)
    before = session.result.sequences.shape[1]
    # As if the reply had been bytes that decode otherwise: only the question and the mark before the reply are alike.
    ids = session._render([*session.messages, {"role": "user", "content": "two"}])
    held = session.result.sequences[0, :-1].tolist()
    common = next(i for i, pair in enumerate(zip(ids, held, strict=False)) if pair[0] != pair[1])
    session.send("two", max_new_tokens=5)
    assert (session.reused_tokens, session.processed_tokens) == (common, len(ids) - common)
    assert common >= before - 5
    assert session.cache.get_seq_length() == len(ids) + 4


@pytest.mark.parametrize("cache", ["dynamic", "prefix", "static"])
def test_the_oldest_turns_give_way_and_positions_stay_right(model, cache):
    session = ChatSession(model, Chatty(), cache=cache, system="Stay.", max_tokens=100)
    texts = [f"message number {n}" for n in range(7)]
    for text in texts:
        session.send(text, max_new_tokens=10)
        shown = [message["content"] for message in session.messages if message["role"] == "user"]
        assert session.messages[0] == {"role": "system", "content": "Stay."}
        assert session.messages[1]["role"] == "user"
        assert shown == texts[texts.index(text) + 1 - len(shown) : texts.index(text) + 1]
        assert session.result.sequences.shape[1] <= 100
        # The same messages in a session without a past.
        ids = session._render(session.messages[:-1])
        anew = generate(model, torch.tensor([ids]), max_new_tokens=10, cache=None).sequences
        assert torch.equal(session.result.sequences, anew)
    assert 1 < len(shown) < 7


def test_a_message_that_is_too_long_alone_is_refused_and_changes_nothing(model):
    session = ChatSession(model, Chatty(), system="Stay.", max_tokens=60)
    session.send("short", max_new_tokens=8)
    messages, held = list(session.messages), session.cache.get_seq_length()
    with pytest.raises(
        ValueError, match=r"^text makes a prompt of 66 tokens and max_new_tokens is 8; max_tokens 60 has no"
    ):
        session.send("l" * 50, max_new_tokens=8)
    assert (session.messages, session.cache.get_seq_length()) == (messages, held)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("cache", ["dynamic", "prefix", "object"])
def test_a_reply_that_is_interrupted_leaves_the_conversation_as_it_was(model, error, cache):
    kind = TheirCache(config=model.config) if cache == "object" else cache
    session = ChatSession(model, Chatty(), cache=kind)
    session.send("one", max_new_tokens=5)
    before, pieces = list(session.messages), []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise error

    with pytest.raises(error):
        session.send("two", max_new_tokens=9, on_text=interrupt)
    assert session.messages == before
    expected = fresh_reply(session, "three", 9)
    session.send("three", max_new_tokens=9)
    assert session.result.sequences[0].tolist() == expected


def test_an_interruption_between_layers_does_no_harm(model):
    session = ChatSession(model, Chatty())
    session.send("one", max_new_tokens=5)
    layers = model.layers if isinstance(model, DecoderLM) else model.model.layers
    hook = layers[1].register_forward_pre_hook(lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.send("two", max_new_tokens=5)
    hook.remove()
    expected = fresh_reply(session, "two", 5)
    session.send("two", max_new_tokens=5)
    assert session.result.sequences[0].tolist() == expected


@pytest.mark.parametrize("cache", ["dynamic", "object"])
def test_a_window_that_cannot_go_back_is_filled_anew(cache):
    torch.manual_seed(1)
    config = MistralConfig(**SMALL, sliding_window=16, bos_token_id=None, eos_token_id=None)
    model = MistralForCausalLM(config).eval()
    kind = TheirCache(config=model.config) if cache == "object" else cache
    session = ChatSession(model, Chatty(), cache=kind)
    for text in TEXTS[:3]:
        expected = fresh_reply(session, text, 9)
        session.send(text, max_new_tokens=9)
        assert session.result.sequences[0].tolist() == expected


@pytest.mark.parametrize("cache", ["quantized", "window"])
def test_a_cache_that_loses_something_still_holds_the_conversation(model, cache):
    """Its replies are its own, but the tokens that it holds are those of the conversation, also where it cannot go back."""
    kind = kv_cache.SlidingWindowCache(model.config, window=32, sinks=2) if cache == "window" else cache
    session = ChatSession(model, Chatty(), cache=kind)
    for text in TEXTS:
        session.send(text, max_new_tokens=9)
        assert session.cache.get_seq_length() == session.result.sequences.shape[1] - 1
        assert session.reused_tokens + session.processed_tokens == session.result.sequences.shape[1] - 9
    assert len(session.messages) == 2 * len(TEXTS)


def test_conversations_share_a_prefix_cache(model):
    cache = kv_cache.PrefixCache(model.config, block_size=4)
    first, second = (ChatSession(model, Chatty(), cache=cache, system="Be brief and kind.") for _ in range(2))
    for text in ("one", "two"):
        for session in (first, second):
            expected = fresh_reply(session, text, 9)
            session.send(text, max_new_tokens=9)
            assert session.result.sequences[0].tolist() == expected
    assert second.reused_tokens > len("<s>Be brief and kind.")


def test_options_reach_the_loop_and_pieces_make_the_reply(model):
    session, pieces, tokens = ChatSession(model, Chatty()), [], []
    reply = session.send(
        "tell", max_new_tokens=30, on_text=pieces.append, on_token=tokens.append, temperature=1.5, seed=3
    )
    assert "".join(pieces) == reply
    assert len(tokens) == 30
    stop = reply[7:9]
    again, pieces = ChatSession(model, Chatty()), []
    short = again.send("tell", max_new_tokens=30, on_text=pieces.append, temperature=1.5, seed=3, stop=stop)
    assert short == "".join(pieces) == reply[: reply.index(stop)]
    ended = ChatSession(model, Chatty()).send(
        "tell", max_new_tokens=30, eos_token_id=int(tokens[4]), temperature=1.5, seed=3
    )
    assert reply.startswith(ended)
    assert len(ended) <= 5


def test_smollm2_reuses_all_but_the_end_of_its_own_reply():
    model, tokenizer = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    session = ChatSession(model, tokenizer, system="You are brief.")
    held = 0
    for text in ("Name a colour.", "And another."):
        expected = fresh_reply(session, text, 6)
        reply = session.send(text, max_new_tokens=6)
        written = expected[len(expected) - session.result.tokens[0] :]
        assert session.result.sequences[0].tolist() == expected
        assert reply == tokenizer.decode(written, skip_special_tokens=True)
        assert session.reused_tokens == held
        held = session.cache.get_seq_length()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": ByteTokenizer()}, "tokenizer is a ByteTokenizer without a chat template; one is needed"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"cache": None}, "cache is None; a conversation without one"),
        ({"cache": "static"}, "cache is 'static' and max_tokens None; a static cache has room for"),
        ({"cache": "page"}, "cache is 'page'; accepted are dynamic, static"),
    ],
)
def test_sessions_that_cannot_be_are_refused(options, message):
    model = DecoderLM(DecoderConfig(**SMALL))
    with pytest.raises(ValueError, match=f"^{message}"):
        ChatSession(model, options.pop("tokenizer", Chatty()), **options)
    cache = generate(model, torch.ones(1, 3).long(), max_new_tokens=1).cache
    with pytest.raises(ValueError, match=r"^cache holds 3 tokens; an empty one is needed$"):
        ChatSession(model, Chatty(), cache=cache)
    with pytest.raises(ValueError, match=r"^max_new_tokens must be a whole number"):
        ChatSession(model, Chatty()).send("a", max_new_tokens=0)
    session = ChatSession(model, Chatty(), cache=kv_cache.DynamicCache(model.config))
    with pytest.raises(ValueError, match=r"^top_k must be a whole number"):
        session.send("a", top_k=0, temperature=1.0)
    assert session.messages == []
