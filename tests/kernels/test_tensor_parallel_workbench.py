"""Three processes that share each layer of SmolLM2 write what one writes."""

import json
import os
import subprocess
import sys

import pytest
import studies

from course_lib.generation import generate
from course_lib.models import load


@pytest.fixture(scope="module")
def study():
    return studies.load("tensor_parallel")


def test_three_processes_write_the_tokens_of_one(study, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "3", str(studies.KERNELS / "tensor_parallel.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--tokens", "6", "--json", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.iterdir()
    (run,) = json.loads(record.read_text(encoding="utf-8"))["runs"]

    model, tokenizer = load("smollm2-135m", dtype="float32", device="cpu")
    ids = tokenizer(study.PROMPT, return_tensors="pt")["input_ids"]
    expected = generate(model, ids, max_new_tokens=6)
    assert [one["tokens"] for one in run["ranks"]] == [expected.sequences[0].tolist()] * 3
    assert run["text"] in done.stdout.encode().decode("unicode_escape")

    norms = 4 * sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    assert [one["weight_bytes"] for one in run["ranks"]] == [(size - norms) // 3 + norms] * 3, (
        "only norms are not split"
    )
    assert [3 * one["cache_bytes"] for one in run["ranks"]] == [expected.cache.used_nbytes] * 3
    hidden, layers, vocabulary = model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size
    # Two a layer and one after the embedding; the logits are put together.
    assert run["exchanged"] == {
        "all_reduce": {"count": 2 * layers + 1, "bytes": 4 * hidden * (2 * layers + 1)},
        "all_gather": {"count": 1, "bytes": 4 * vocabulary},
    }


def test_heads_that_do_not_divide_are_one_line(study, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tensor_parallel.py"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "2 processes cannot share 9 query and 3 key-value heads evenly; 1, 3 can\n"


def test_one_token_is_no_decode(study, monkeypatch, capsys):
    studies.refuses(study, monkeypatch, capsys, "--tokens", "1")
