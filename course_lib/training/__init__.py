"""The few lines that trained the course's own checkpoints.

Functions
---------
load_corpus
    The bytes that they read, the same on every machine.
train, Recipe
    The loop, and its numbers.
evaluation_texts, evaluate
    Bits per byte of the same bytes after contexts of several lengths.
make_checkpoint
    A shipped checkpoint, from nothing.
"""

from course_lib.training.corpus import Corpus, load_corpus
from course_lib.training.loop import Recipe, bits_per_byte, train
from course_lib.training.recipes import (
    CONFIGS,
    LENGTHS,
    RECIPES,
    SCORED,
    SEEDS,
    UPTRAINED,
    UPTRAINING,
    build,
    evaluate,
    evaluation_texts,
    make_checkpoint,
)

__all__ = [
    "CONFIGS",
    "LENGTHS",
    "RECIPES",
    "SCORED",
    "SEEDS",
    "UPTRAINED",
    "UPTRAINING",
    "Corpus",
    "Recipe",
    "bits_per_byte",
    "build",
    "evaluate",
    "evaluation_texts",
    "load_corpus",
    "make_checkpoint",
    "train",
]
