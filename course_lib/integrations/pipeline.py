"""A pipeline of processes, each with some layers of a decoder, and the schedule that says how long each of them waits.

Chapter 12 (notebooks/12-beyond-one-gpu.ipynb) simulates schedules and measures them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Cache

from course_lib.generation import generate
from course_lib.integrations.parallel import everyones, group
from course_lib.kv_cache import DynamicCache
from course_lib.memory.units import whole
from course_lib.models import load
from course_lib.models.decoder import DecoderLM
from course_lib.models.layout import product

# ---- schedules


@dataclass(frozen=True)
class Slot:
    """A stage's work on one token of one request, from `start` to `end` in seconds."""

    stage: int
    request: int
    token: int
    start: float
    end: float


def simulate(
    stage_seconds: Sequence[float], *, requests: int = 1, tokens: int = 1, transfer: float = 0.0
) -> list[Slot]:
    """Return the schedule of a pipeline whose stages serve requests in turn, a token of each, as soon as they can.

    Parameters
    ----------
    stage_seconds : sequence of float
        What each stage needs for a token of a request, or for one of the micro-batches into which a batch is cut.
    requests : int
        How many are in flight: requests, or micro-batches.
    tokens : int
        Tokens of each; the next one begins when the last stage has written the one before.
    transfer : float
        Seconds from one stage to the next, and from the last to the first.

    Returns
    -------
    list of Slot
        In the order of their ends.
    """
    free = [0.0] * len(stage_seconds)
    ready = [0.0] * whole(requests, "requests", least=1)
    slots = []
    for token in range(whole(tokens, "tokens", least=1)):
        for request in range(requests):
            for stage, seconds in enumerate(stage_seconds):
                start = max(free[stage], ready[request])
                free[stage] = start + seconds
                ready[request] = free[stage] + transfer
                slots.append(Slot(stage, request, token, start, free[stage]))
    return sorted(slots, key=lambda slot: slot.end)


def idle(slots: Iterable[Slot]) -> list[float]:
    """Return the share of the time, from the first start to the last end, in which each stage does nothing."""
    slots = list(slots)
    lasted = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    busy = [0.0] * (1 + max(slot.stage for slot in slots))
    for slot in slots:
        busy[slot.stage] += slot.end - slot.start
    return [1 - seconds / lasted for seconds in busy]


# ---- stages


def split_layers(model: DecoderLM, stages: int) -> list[range]:
    """Return which layers each stage holds so that all multiply about as many weights; the last one has the output head too.

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    layers = len(model.layers)
    whole(stages, "stages", least=1, most=layers)
    each = sum(weight.numel() for weight in model.layers[0].parameters())
    share = (layers * each + model.lm_head.weight.numel()) / stages
    # A stage has at least one layer, however large the head is.
    cuts = [min(max(round(stage * share / each), stage), layers - stages + stage) for stage in range(stages)]
    return [range(*ends) for ends in pairwise([*cuts, layers])]


class Stage(DecoderLM):
    """Consecutive layers of a decoder, the embedding before the first and the output head after the last.

    Parameters
    ----------
    model : DecoderLM
        Whose layers it shares; with positions that attention adds, or none.
    layers : range
        Which.

    Raises
    ------
    ValueError
        If positions are added to the embedding.
    """

    def __init__(self, model: DecoderLM, layers: range) -> None:
        nn.Module.__init__(self)
        if model.config.position in ("learned", "sinusoidal"):
            raise ValueError(f"model has {model.config.position} positions; accepted are rope, alibi, none")
        self.config, self._rope, self.own = model.config, None, layers
        self.layers = model.layers[layers.start : layers.stop]
        self.first, self.last = layers.start == 0, layers.stop == len(model.layers)
        if self.first:
            self.embed_tokens = model.embed_tokens
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(self, inputs: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        """Return the hidden states for the next stage, or the logits of the last token.

        Parameters
        ----------
        inputs : Tensor
            Of the first stage token ids ``[batch, length]``, of the others hidden states ``[batch, length, hidden_size]``.
        cache : transformers.Cache
            Made for the whole model; the stage fills its own layers.

        Returns
        -------
        Tensor
            ``[batch, length, hidden_size]``, or of the last stage ``[batch, 1, vocab_size]``.
        """
        past, length = int(cache.get_seq_length(self.own.start)), inputs.shape[1]
        place = self._place(past, torch.arange(past, past + length, device=inputs.device), None)
        hidden: torch.Tensor = self.embed_tokens(inputs) if self.first else inputs
        for layer in self.layers:
            hidden = layer(hidden, place, cache)
        return product(self.norm(hidden[:, -1:]), self.lm_head)[0] if self.last else hidden


# ---- processes


def pipeline(
    prompts: Sequence[str], new_tokens: int, in_flight: Sequence[int], *, model: str = "smollm2-135m"
) -> dict[str, Any]:
    """Continue texts, each process with some of a model's layers, and compare with one process that has all.

    To be called by every process of ``torchrun`` or of :func:`course_lib.integrations.parallel.launch`.

    Parameters
    ----------
    prompts : sequence of str
        The texts.
    new_tokens : int
        How many tokens to add to each, at least 2.
    in_flight : sequence of int
        For each of the runs, how many of the texts, from the first, are in the pipeline at the same time.
    model : str
        As for :func:`course_lib.models.load`, in float32.

    Returns
    -------
    dict
        ``texts``; ``device`` and ``backend``; ``layers``, first and last but one, and ``weight_bytes`` of each stage; ``runs``: for
        each ``in_flight`` the ``slots``, as lists, of all tokens after the first new one, by the clock that processes of a machine
        share, from the first start; and ``idle`` of each stage.

    Raises
    ------
    ArithmeticError
        If the pipeline writes other tokens than one process alone.
    """
    whole(new_tokens, "new_tokens", least=2)
    for count in in_flight:
        whole(count, "in_flight", least=1, most=len(prompts))
    with group() as device:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        decoder, tokenizer = load(model, dtype="float32", device=device, as_decoder=True)
        texts = [tokenizer(prompt, return_tensors="pt")["input_ids"].to(device) for prompt in prompts]
        parts, last = split_layers(decoder, ranks), rank == ranks - 1
        alone = [generate(decoder, text, max_new_tokens=new_tokens).sequences for text in texts] if last else []
        worker = _Worker(Stage(decoder, parts[rank]))
        del decoder  # and with it the layers of the other stages
        runs = [worker.run(texts[:count], new_tokens) for count in in_flight]
        right = all(torch.equal(*pair) for written, _ in runs for pair in zip(written, alone, strict=False))
        size = sum(weight.nbytes for weight in worker.stage.parameters())
        reports = everyones((right, size, [slots for _, slots in runs]))
        texts = everyones([tokenizer.decode(tokens[0].tolist()) for tokens in alone])[-1]
        backend = dist.get_backend()
    if not reports[-1][0]:
        raise ArithmeticError(f"{ranks} stages write other tokens than one process alone")
    found = []
    for run, count in enumerate(in_flight):
        slots = sorted((slot for *_, by_run in reports for slot in by_run[run]), key=lambda slot: slot.end)
        begun = min(slot.start for slot in slots)
        slots = [replace(slot, start=slot.start - begun, end=slot.end - begun) for slot in slots]
        found.append({"in_flight": count, "idle": idle(slots), "slots": [astuple(slot) for slot in slots]})
    return {
        "texts": texts,
        "device": device.type,
        "backend": backend,
        "layers": [[part.start, part.stop] for part in parts],
        "weight_bytes": [size for _, size, _ in reports],
        "runs": found,
    }


class _Worker:
    """Runs a stage: takes what the one before sends, and hands on what it makes of it."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.rank, self.last = stage, dist.get_rank(), dist.get_world_size() - 1
        self.back = dist.new_group()  # tokens must not queue behind hidden states
        self.sent: list[tuple[Any, torch.Tensor]] = []

    @torch.no_grad()
    def run(self, texts: Sequence[torch.Tensor], new_tokens: int) -> tuple[list[torch.Tensor], list[Slot]]:
        """Continue texts; return them, which only the last stage knows whole, and the slots of all tokens after the first."""
        caches = [DynamicCache(self.stage.config) for _ in texts]
        texts, slots = list(texts), []
        for token in range(new_tokens):
            for request, text in enumerate(texts):
                inputs = self._take(text, token)
                start = self._now()
                made = self.stage(inputs, caches[request])
                if self.stage.last:
                    made = made[:, -1].argmax(-1, keepdim=True)
                    texts[request] = torch.cat((text, made), 1)
                slots.append(Slot(self.rank, request, token, start, self._now()))
                if not self.stage.last:
                    self._send(made, self.rank + 1, None)
                elif token + 1 < new_tokens:
                    self._send(made, 0, self.back)
            if token == 0:  # the prompts
                slots.clear()
                dist.barrier()
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        dist.barrier()
        return texts, slots

    def _take(self, text: torch.Tensor, token: int) -> torch.Tensor:
        """Return the stage's inputs: token ids of the first stage, hidden states of the others."""
        length = 1 if token else text.shape[1]
        if not self.stage.first:
            inputs = torch.empty(1, length, self.stage.config.hidden_size, device=text.device)
            dist.recv(inputs, self.rank - 1)
            return inputs
        if token:
            text = torch.empty(1, 1, dtype=torch.long, device=text.device)
            dist.recv(text, self.last, group=self.back)
        return text

    def _send(self, made: torch.Tensor, to: int, among: Any) -> None:
        made = made.contiguous()
        self.sent.append((dist.isend(made, to, group=among), made))

    def _now(self) -> float:
        if self.stage.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()
