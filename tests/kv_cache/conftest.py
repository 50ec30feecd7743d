"""Caches and models that every test of a cache meets."""

from collections.abc import Callable

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, LOSSLESS
from transformers import AutoModelForCausalLM, PretrainedConfig

from course_lib.kv_cache import KVCache

#: What takes only some of the models; a test of its own sees that it refuses the others.
ONLY = {"prefix": ("llama", "qwen3")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every model that it takes, with every cache that takes the model."""
    wanted = [name for name in ("theirs", "lossless") if name in metafunc.fixturenames]
    mark = metafunc.definition.get_closest_marker("families")
    families = mark.args if mark else CONFIGURATIONS
    if len(wanted) == 2:
        pairs = [(one, name) for one in families for name in LOSSLESS if one in ONLY.get(name, CONFIGURATIONS)]
        metafunc.parametrize(wanted, pairs, indirect=True)
    elif wanted:
        metafunc.parametrize(wanted[0], families if wanted == ["theirs"] else LOSSLESS, indirect=True)


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGURATIONS[request.param]()).eval()


@pytest.fixture
def lossless(request: pytest.FixtureRequest) -> Callable[[PretrainedConfig], KVCache]:
    return LOSSLESS[request.param]
