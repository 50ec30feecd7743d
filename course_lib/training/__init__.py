"""The few lines that trained the course's own checkpoints.

Functions
---------
load_corpus
    The bytes that they read, the same on every machine.
train, Recipe
    The loop, and its numbers.
"""

from course_lib.training.corpus import Corpus, load_corpus
from course_lib.training.loop import Recipe, bits_per_byte, train

__all__ = ["Corpus", "Recipe", "bits_per_byte", "load_corpus", "train"]
