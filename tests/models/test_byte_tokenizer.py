"""ByteTokenizer: every text there and back, and a Transformers tokenizer's calls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.models import ByteTokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_every_text_comes_back(text):
    tokenizer = ByteTokenizer()
    encoded = tokenizer(text, return_tensors="pt")
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape == (1, len(text.encode()))
    assert tokenizer.decode(encoded["input_ids"][0]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_a_batch_is_padded_on_the_left(texts):
    tokenizer = ByteTokenizer()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    for text, ids, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        assert mask.sum() == len(text.encode())
        assert tokenizer.decode(ids[mask.bool()]) == text
        assert mask.tolist() == sorted(mask.tolist())
    unpadded = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert tokenizer.batch_decode(unpadded) == texts


def test_bytes_that_are_no_text_do_not_stop_generation():
    assert ByteTokenizer().decode(torch.tensor([65, 255, 66])) == "A\N{REPLACEMENT CHARACTER}B"


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="return_tensors is 'np'; 'pt' or None is accepted"):
        ByteTokenizer()("a", return_tensors="np")
    with pytest.raises(ValueError, match="the texts have different lengths; padding=True is needed"):
        ByteTokenizer()(["a", "ab"], return_tensors="pt")
