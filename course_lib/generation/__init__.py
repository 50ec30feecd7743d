"""From logits to text: choosing tokens, one after the other.

Functions
---------
generate
    Greedy or sampled continuations, with any cache of `course_lib.kv_cache` or of Transformers, or without one.
choose_tokens
    How one token is chosen from its logits.

Classes
-------
ChatSession
    A conversation that computes only what is new in it.
TextStream
    The text of tokens while they come.
"""

from course_lib.generation.chat import ChatSession
from course_lib.generation.loop import GenerationResult, generate
from course_lib.generation.sampling import choose_tokens
from course_lib.generation.text import TextStream

__all__ = ["ChatSession", "GenerationResult", "TextStream", "choose_tokens", "generate"]
