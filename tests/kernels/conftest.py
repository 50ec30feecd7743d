"""What tests of kernels share."""

import pytest


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each load and store that kernels make in Triton's interpreter, masked elements left out."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[int] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers, mask):
        found.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)

    def counting_load(self, pointers, mask, *others):
        count(pointers, mask)
        return load(self, pointers, mask, *others)

    def counting_store(self, pointers, value, mask, *others):
        count(pointers, mask)
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
    return found
