"""The shipped checkpoints: what their logs say is what they are, and the recipe makes them again."""

import json
import subprocess
import sys
from statistics import mean

import pytest
import torch

from course_lib.models import ModelUnavailableError, load, mha_to_gqa
from course_lib.models.checkpoints import FOLDER, log_name, names, read_checkpoint, training_log, write_checkpoint
from course_lib.training import (
    CONFIGS,
    LENGTHS,
    RECIPES,
    SCORED,
    SEEDS,
    UPTRAINED,
    UPTRAINING,
    Corpus,
    Recipe,
    build,
    evaluate,
    evaluation_texts,
    load_corpus,
    recipes,
    train,
)

LOGS = [(name, seed) for name, seeds in SEEDS.items() if name in CONFIGS for seed in seeds]
SHIPPED = [*CONFIGS, *UPTRAINED]
MEGABYTES = {"native": 10}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_every_recipe_has_its_weights_and_its_logs_and_nothing_else_is_shipped():
    assert names() == sorted(SHIPPED)
    logs = {log_name(name, seed) for name, seeds in SEEDS.items() for seed in seeds}
    assert {file.name for file in FOLDER.iterdir()} == logs | {f"{name}.safetensors" for name in SHIPPED}
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 40e6


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_are_small_enough_and_loadable_in_every_precision(name):
    assert (FOLDER / f"{name}.safetensors").stat().st_size <= 1e6 * MEGABYTES.get(name, 4)
    model, tokenizer = load(f"course/{name}", device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight is model.embed_tokens.weight
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    ids = tokenizer("import numpy", return_tensors="pt")["input_ids"]
    for dtype in ("float16", "bfloat16", "float64"):
        other, _ = load(f"course/{name}", dtype=dtype, device="cpu")
        assert (other(ids).logits - model(ids).logits).abs().max() < 0.3


@pytest.mark.parametrize(("name", "seed"), LOGS)
def test_a_log_is_of_the_recipe_as_it_stands(name, seed):
    log = training_log(name, seed)
    assert (log["name"], log["config"]) == (name, CONFIGS[name])
    assert log["recipe"] == vars(Recipe(**vars(RECIPES[name]) | {"seed": seed}))
    assert log["command"] == f"course train {name} --seed {seed}"
    assert len(log["losses"]) == RECIPES[name].steps
    assert mean(log["losses"][-100:]) < 0.5 * log["losses"][0]


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_weights_have_the_logged_loss(name, corpus):
    texts, logged = evaluation_texts(corpus)[:6], training_log(name)["evaluation"]
    model, _ = load(f"course/{name}", device="cpu")
    found = evaluate(model, texts, (64, 128, 512))
    assert list(found) == ([64, 128] if name == "learned" else [64, 128, 512])
    for length, bits in found.items():
        torch.testing.assert_close(bits, torch.tensor(logged[str(length)][:6]), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_few_steps_of_the_recipe_land_on_the_logged_losses(name, corpus):
    model, recipe = build(name), RECIPES[name]
    losses = train(model, corpus, recipe, stop_after=4)
    assert losses == pytest.approx(training_log(name)["losses"][:4], rel=2e-3)


@pytest.mark.parametrize("seed", SEEDS["uptraining"])
def test_an_uptraining_log_has_every_way_to_group_and_a_control(seed):
    log = training_log("uptraining", seed)
    assert log["command"] == f"course train uptraining --seed {seed}"
    found = {(run["kv_heads"], run["init"], run["recipe"]["steps"]) for run in log["runs"]}
    ways = {(heads, init, 50) for heads in (2, 1) for init in ("mean", "first", "random")}
    assert found == ways | {(4, None, 50)} | {(heads, "mean" if heads < 4 else None, 200) for heads in (4, 2, 1)}
    assert 20 * UPTRAINING.steps == RECIPES["rope"].steps
    own = training_log("rope", seed)["evaluation"]["128"]
    for run in log["runs"]:
        recipe = vars(UPTRAINING) | {"steps": run["recipe"]["steps"], "seed": seed + 100}
        assert run["recipe"] == recipe
        assert len(run["losses"]) == recipe["steps"]
        assert len(run["before"]) == len(run["after"]) == len(own)
        if run["init"] is None:
            # Seed 0's weights are the shipped ones; those of the others were made again, not to the last digit.
            assert seed or run["before"] == pytest.approx(own, abs=2e-3)
            assert mean(run["before"]) == pytest.approx(mean(own), abs=0.01)


@pytest.mark.parametrize("name", UPTRAINED)
def test_uptrained_weights_have_the_logged_bits_and_start_from_the_grouped_ones(name, corpus):
    heads, texts = UPTRAINED[name], evaluation_texts(corpus)[:6]
    runs = [run for run in training_log("uptraining")["runs"] if run["kv_heads"] == heads]
    (logged,) = (run for run in runs if run["init"] == "mean" and run["recipe"]["steps"] == UPTRAINING.steps)
    model, _ = load(f"course/{name}", device="cpu")
    assert model.config.num_key_value_heads == heads
    torch.testing.assert_close(
        evaluate(model, texts, (128,))[128], torch.tensor(logged["after"][:6]), atol=2e-3, rtol=1e-3
    )
    model = mha_to_gqa(load("course/rope", device="cpu")[0], heads)
    torch.testing.assert_close(
        evaluate(model, texts, (128,))[128], torch.tensor(logged["before"][:6]), atol=2e-3, rtol=1e-3
    )
    losses = train(model, corpus, Recipe(**logged["recipe"]), stop_after=3)
    assert losses == pytest.approx(logged["losses"][:3], rel=2e-3)


def test_evaluation_texts_are_distinct_and_share_their_last_bytes_at_every_length(corpus):
    texts = evaluation_texts(corpus)
    assert texts.shape[1] == max(LENGTHS) + 1
    assert len(texts.unique(dim=0)) == len(texts)
    model = build("alibi").eval()
    found = evaluate(model, texts[:2])
    assert list(found) == list(LENGTHS)
    ids = texts[:2].long()
    chances = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = -chances[:, -SCORED:].mean(1) / torch.tensor(2.0).log()
    torch.testing.assert_close(found[2048], expected.detach(), atol=1e-4, rtol=1e-4)


def test_the_first_texts_come_from_different_files():
    files = [torch.full((5 * 2049,), number, dtype=torch.uint8) for number in range(3)]
    files.append(torch.full((2048,), 99, dtype=torch.uint8))
    texts = evaluation_texts(Corpus(files[0], files), per_file=2)
    assert texts[:, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_checkpoint_is_made_whole_and_an_interrupted_one_goes_on(tmp_path, monkeypatch, corpus):
    tiny = CONFIGS["rope"] | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setitem(recipes.CONFIGS, "rope", tiny)
    monkeypatch.setitem(recipes.RECIPES, "rope", Recipe(steps=6, batch_size=2, context=16))
    monkeypatch.setattr(recipes, "evaluation_texts", lambda corpus: evaluation_texts(corpus)[:2])
    state = tmp_path / ".rope-seed1.state"
    recipe = Recipe(steps=6, batch_size=2, context=16, seed=1)
    begun = train(build("rope", 1), corpus, recipe, state=state, stop_after=3)
    log = json.loads(recipes.make_checkpoint("rope", 1, tmp_path).read_text())
    assert log["losses"][:3] == [round(loss, 4) for loss in begun]
    assert [file.name for file in tmp_path.iterdir()] == ["rope-seed1.json"]
    recipes.make_checkpoint("rope", 0, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rope-seed1.json", "rope.json", "rope.safetensors"]
    again = read_checkpoint(tmp_path / "rope.safetensors", dtype=torch.float32, device=torch.device("cpu"))
    found = evaluate(again, evaluation_texts(corpus)[:2], (64,))[64]
    logged = json.loads((tmp_path / "rope.json").read_text())["evaluation"]["64"]
    torch.testing.assert_close(found, torch.tensor(logged), atol=1e-3, rtol=1e-3)


def test_an_interrupted_uptraining_goes_on_and_writes_weights_for_seed_0_only(tmp_path, monkeypatch, corpus):
    tiny = CONFIGS["rope"] | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setitem(recipes.CONFIGS, "rope", tiny)
    monkeypatch.setitem(recipes.RECIPES, "rope", Recipe(steps=4, batch_size=2, context=16))
    monkeypatch.setattr(recipes, "UPTRAINING", Recipe(steps=1, batch_size=2, context=16))
    monkeypatch.setattr(recipes, "evaluation_texts", lambda corpus: evaluation_texts(corpus)[:2])
    for seed, weights in ((1, []), (0, ["gqa-uptrained.safetensors", "mqa-uptrained.safetensors"])):
        folder = tmp_path / str(seed)
        place = recipes.make_checkpoint("uptraining", seed, folder)
        assert sorted(file.name for file in folder.iterdir()) == sorted([*weights, place.name])
        assert len(json.loads(place.read_text())["runs"]) == 10


def test_a_damaged_file_is_one_sentence(tmp_path):
    place = tmp_path / "rope.safetensors"
    write_checkpoint(place, build("rope"), CONFIGS["rope"])
    whole = place.read_bytes()
    for damaged in (whole[:1000], whole[:-100], b"", whole.replace(b"hidden_size", b"hidden_sise")):
        place.write_bytes(damaged)
        with pytest.raises(
            ModelUnavailableError, match=r"^rope\.safetensors is damaged \(.*\): install the course anew\.$"
        ):
            read_checkpoint(place, dtype=torch.float32, device=torch.device("cpu"))


def test_unknown_names_are_refused_and_known_ones_listed():
    with pytest.raises(
        ValueError, match=r"^name must be one of course/alibi, .*course/sinusoidal, got 'course/rop'\.$"
    ):
        load("course/rop")
    with pytest.raises(
        ValueError, match=r"^name is 'rop'; the course trains none, sinusoidal, learned, rope, alibi, gqa, mqa, native$"
    ):
        build("rop")
    with pytest.raises(ValueError, match=r"^name 'rope' with seed 7 has no training log; there are alibi, "):
        training_log("rope", 7)


def test_loading_asks_no_network(tmp_path):
    code = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from course_lib.models import load\n"
        "print(load('course/rope', device='cpu')[0].config.position)"
    )
    environment = {"COURSE_CACHE": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == "rope\n"
