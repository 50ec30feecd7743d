"""The companion library of *LLM Inference, Measured*.

Importing it costs nothing: neither torch nor transformers is loaded until a room that needs them is.
"""

__version__ = "0.1.0"
