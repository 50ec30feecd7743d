"""The course's parts beside other libraries.

``integrations.transformers`` puts our attention under any Transformers model; ``integrations.bitsandbytes`` loads models that
bitsandbytes quantises, and converts its weights to ours and back; ``integrations.parallel`` and ``integrations.pipeline`` run a model in
several processes of ``torch.distributed``.
"""
