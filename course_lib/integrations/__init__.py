"""The course's parts under other libraries: ``integrations.transformers`` puts our attention under any Transformers model."""
