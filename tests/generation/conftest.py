"""A small model of Transformers, and the same one as a DecoderLM."""

import pytest
import torch
from small_llama import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from course_lib.models import DecoderLM


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=None)).eval()


@pytest.fixture(scope="module", params=["DecoderLM", "Transformers"])
def model(request, theirs):
    return DecoderLM.from_transformers(theirs) if request.param == "DecoderLM" else theirs
