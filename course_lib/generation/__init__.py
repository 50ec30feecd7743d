"""From logits to text: choosing tokens, one after the other.

Functions
---------
generate
    Greedy or sampled continuations, with any cache of `course_lib.kv_cache` or of Transformers, or without one.
choose_tokens, token_chances
    How one token is chosen from its logits, and with which chances.
speculative_generate
    A continuation in fewer passes of the model, which checks what something cheaper drafts.
accept_tokens
    Which drafted tokens are kept, so that the text is distributed as the model's own.
expected_tokens, expected_speedup
    What drafts of a length save, by how often they are accepted.
first_layers
    The beginning of a decoder, as a draft for it.

Classes
-------
ChatSession
    A conversation that computes only what is new in it.
PromptLookup
    Drafts what followed the text's last tokens before.
TextStream
    The text of tokens while they come.
ContinuousBatcher
    Many texts at a time, which arrive and end when they will.
"""

from course_lib.generation.batching import BatchStats, ContinuousBatcher, NewToken, Request
from course_lib.generation.chat import ChatSession
from course_lib.generation.drafts import PromptLookup, first_layers
from course_lib.generation.loop import GenerationResult, generate
from course_lib.generation.sampling import choose_tokens, token_chances
from course_lib.generation.speculative import (
    SpeculativeResult,
    accept_tokens,
    expected_speedup,
    expected_tokens,
    speculative_generate,
)
from course_lib.generation.text import TextStream

__all__ = [
    "BatchStats",
    "ChatSession",
    "ContinuousBatcher",
    "GenerationResult",
    "NewToken",
    "PromptLookup",
    "Request",
    "SpeculativeResult",
    "TextStream",
    "accept_tokens",
    "choose_tokens",
    "expected_speedup",
    "expected_tokens",
    "first_layers",
    "generate",
    "speculative_generate",
    "token_chances",
]
