"""The training loop: batches of random windows, AdamW, a warm-up and a cosine, in few enough lines to read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch.nn import functional

from course_lib.models import DecoderLM
from course_lib.training.corpus import Corpus


@dataclass(frozen=True)
class Recipe:
    """The numbers of a training run; with the same seed, machine and number of threads it gives the same weights."""

    steps: int = 2000
    batch_size: int = 32
    context: int = 128
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: up in a line, down to a tenth along a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train(
    model: DecoderLM,
    corpus: Corpus,
    recipe: Recipe,
    *,
    state: Path | None = None,
    stop_after: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model in place.

    Parameters
    ----------
    model : DecoderLM
        On any device; its weights change.
    corpus : Corpus
        What it reads.
    recipe : Recipe
        How long and how fast.
    state : Path, optional
        A file that keeps the run every 100 steps; if it is there, the run goes on from it.
    stop_after : int, optional
        End after this step of the recipe's.
    on_step : callable, optional
        Called with each step and its loss.

    Returns
    -------
    list of float
        The loss of each step, in nats per byte.

    Raises
    ------
    ValueError
        If ``state`` belongs to another recipe.
    """
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
    losses: list[float] = []
    if state is not None and state.exists():
        kept = torch.load(state, weights_only=True, map_location=model.device)
        if kept["recipe"] != asdict(recipe):
            raise ValueError(f"state {state.name} belongs to another recipe, {kept['recipe']}; remove it to start anew")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]

    model.train()
    last = min(recipe.steps, stop_after or recipe.steps)
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=last, completed=len(losses))
        for step in range(len(losses), last):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            inputs, targets = draw(corpus.train, recipe, step, model.device)
            loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            losses.append(loss.item())
            if on_step:
                on_step(step, losses[-1])
            progress.update(task, advance=1, description=f"training, loss {losses[-1]:.3f}")
            if state is not None and (len(losses) % 100 == 0 or len(losses) == last):
                _keep(state, model, optimizer, losses, recipe)
    model.eval()
    return losses


def draw(data: torch.Tensor, recipe: Recipe, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows of one step and, one byte further, their targets; a step draws the same whenever it runs."""
    generator = torch.Generator().manual_seed(1_000_003 * recipe.seed + step)
    starts = torch.randint(0, len(data) - recipe.context, (recipe.batch_size, 1), generator=generator)
    windows = data[starts + torch.arange(recipe.context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def _keep(state: Path, model: DecoderLM, optimizer: torch.optim.Optimizer, losses: list[float], recipe: Recipe) -> None:
    """Write the run's state, whole or not at all."""
    state.parent.mkdir(parents=True, exist_ok=True)
    fresh = state.with_suffix(".part")
    content: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content | {"losses": losses, "recipe": asdict(recipe)}, fresh)
    os.replace(fresh, state)


@torch.no_grad()
def bits_per_byte(model: DecoderLM, texts: torch.Tensor, *, predict: int, batch_size: int = 16) -> torch.Tensor:
    """Return how many bits a model needs for each byte at the end of texts.

    Parameters
    ----------
    model : DecoderLM
        A byte-level model.
    texts : Tensor
        Bytes ``[texts, length]``.
    predict : int
        How many last bytes of each text are scored, so that texts of several lengths can share their targets.
    batch_size : int
        Texts in one forward pass.

    Returns
    -------
    Tensor
        float32, ``[texts]``: the mean over a text's scored bytes.

    Raises
    ------
    ValueError
        If a text has no byte before the first scored one.
    """
    if not 1 <= predict < texts.shape[1]:
        raise ValueError(f"predict is {predict}; 1 to {texts.shape[1] - 1} bytes of these texts can be scored")
    found = []
    for some in torch.split(texts, batch_size):
        tokens = some.long().to(model.device)
        logits = model(tokens[:, :-1], logits_to_keep=predict).logits.float()
        losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, -predict:], reduction="none")
        found.append(losses.mean(dim=1) / math.log(2))
    return torch.cat(found)
