"""Training: the same bytes, the same weights, interrupted or not."""

import math

import pytest
import torch

from course_lib.models import DecoderConfig, DecoderLM
from course_lib.training import Corpus, Recipe, bits_per_byte, load_corpus, train

TINY = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
RECIPE = Recipe(steps=12, batch_size=4, context=16, warmup=4)


def model() -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderConfig(**TINY))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    data = torch.tensor(list(b"def f(x): return x + 1\n" * 200), dtype=torch.uint8)
    return Corpus(data, [data[:300]])


def test_a_run_learns_and_is_repeatable(corpus):
    first, second = model(), model()
    losses = train(first, corpus, Recipe(steps=60, batch_size=8, context=16, learning_rate=1e-2, warmup=10))
    assert abs(losses[0] - math.log(256)) < 0.2
    assert losses[-1] < 0.6 * losses[0]
    assert train(second, corpus, Recipe(steps=60, batch_size=8, context=16, learning_rate=1e-2, warmup=10)) == losses
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_an_interrupted_run_ends_as_an_uninterrupted_one(corpus, tmp_path):
    whole, broken, resumed = model(), model(), model()
    expected = train(whole, corpus, RECIPE)
    train(broken, corpus, RECIPE, state=tmp_path / "run.pt", stop_after=5)
    assert train(resumed, corpus, RECIPE, state=tmp_path / "run.pt") == expected
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_another_recipes_state_is_refused(corpus, tmp_path):
    train(model(), corpus, RECIPE, state=tmp_path / "run.pt", stop_after=2)
    with pytest.raises(ValueError, match=r"^state run.pt belongs to another recipe"):
        train(model(), corpus, Recipe(steps=13, batch_size=4, context=16), state=tmp_path / "run.pt")


def test_a_seed_draws_its_own_windows(corpus):
    losses = [train(model(), corpus, Recipe(steps=3, batch_size=4, context=16, seed=seed)) for seed in (0, 1)]
    assert losses[0] != losses[1]


@torch.no_grad()
def test_bits_per_byte_scores_the_last_bytes_alone(corpus):
    one = model().double()
    texts = torch.randint(0, 256, (3, 20), dtype=torch.uint8)
    logits = one(texts.long()).logits
    chances = logits.log_softmax(-1)[:, :-1].gather(-1, texts.long()[:, 1:, None])[..., 0]
    expected = -chances[:, -5:].mean(1) / math.log(2)
    torch.testing.assert_close(bits_per_byte(one, texts, predict=5, batch_size=2), expected.float())
    for predict in (0, 20):
        with pytest.raises(ValueError, match=rf"^predict is {predict}; 1 to 19 bytes of these texts can be scored$"):
            bits_per_byte(one, texts, predict=predict)


def test_the_corpus_is_the_same_everywhere_and_split_by_file():
    corpus = load_corpus()
    assert (len(corpus.train), len(corpus.held_out), sum(map(len, corpus.held_out))) == (15_359_211, 48, 793_594)
    train_bytes = corpus.train.numpy().tobytes()
    assert not any(text.numpy().tobytes() in train_bytes for text in corpus.held_out if len(text) > 200)
