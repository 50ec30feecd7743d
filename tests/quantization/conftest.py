"""Settings of these tests, and models small enough to quantise many times."""

import pytest
import torch

from course_lib.models import DecoderConfig, DecoderLM


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def decoder():
    """A function that returns a fresh decoder with large random weights, so that small changes show in its tokens."""

    def build(**options) -> DecoderLM:
        shape = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3}
        config = DecoderConfig(num_attention_heads=4, num_key_value_heads=2, **shape | options)
        model = DecoderLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
        return model

    return build
