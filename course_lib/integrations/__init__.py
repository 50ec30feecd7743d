"""The course's parts beside other libraries.

``integrations.transformers`` puts our attention under any Transformers model; ``integrations.bitsandbytes`` loads models that
bitsandbytes quantises, and converts its weights to ours and back.
"""
