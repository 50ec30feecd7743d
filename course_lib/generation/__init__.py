"""From logits to text: choosing tokens, one after the other.

Functions
---------
generate
    Greedy or sampled continuations, with any cache of Transformers or without one.
choose_tokens
    How one token is chosen from its logits.
"""

from course_lib.generation.loop import GenerationResult, generate
from course_lib.generation.sampling import choose_tokens

__all__ = ["GenerationResult", "choose_tokens", "generate"]
