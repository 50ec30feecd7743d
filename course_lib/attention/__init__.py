"""Attention: one call, four ways to compute it.

Functions
---------
attention, attention_varlen
    Scaled dot-product attention of padded and of packed sequences.
choose_backend
    Which way ``backend="auto"`` takes, and why.
"""

from course_lib.attention.backends import BackendChoice
from course_lib.attention.functional import attention, attention_varlen, choose_backend

__all__ = ["BackendChoice", "attention", "attention_varlen", "choose_backend"]
