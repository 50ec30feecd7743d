"""The study of key-value heads on a CPU."""

import dataclasses

import pytest
import studies
import torch

from course_lib.kv_cache import DynamicCache
from course_lib.memory import StepCost


@pytest.fixture(scope="module")
def study():
    """The study of a model with few words, which is sooner made."""
    found = studies.load("heads_on_cpu")
    fields = found.published_config(found.MODEL) | {"vocab_size": 300}
    found.published_config = lambda name: fields
    return found


@pytest.fixture(scope="module")
def models(study):
    with torch.no_grad():
        return study.decoders(1)


@pytest.fixture
def quick(study, models, monkeypatch):
    """Replace the decoders by those of one layer, made once."""
    monkeypatch.setattr(study, "decoders", lambda layers: models)


def test_layouts_differ_in_keys_and_values_alone(study, models):
    first = models[9]
    assert first.config.num_attention_heads == 9
    for heads, model in models.items():
        attention = model.layers[0].self_attn
        assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (64 * heads, 576)
        assert attention.q_proj.weight.shape == (576, 576)
        assert model.config.num_key_value_heads == heads
        for shared in ("embed_tokens", "lm_head", "norm"):
            assert getattr(model, shared) is getattr(first, shared)
        assert model.layers[0].mlp is first.layers[0].mlp
        assert all(0 < weight.std() < 1 for weight in attention.parameters())


@torch.no_grad()
def test_layouts_write_with_a_cache_what_they_write_without(models):
    text = torch.randint(300, (1, 9))
    for model in models.values():
        cache = DynamicCache(model.config)
        model(text[:, :8], cache=cache)
        torch.testing.assert_close(
            model(text[:, 8:], cache=cache).logits[0, 0], model(text).logits[0, 8], rtol=1e-3, atol=1e-3
        )


def test_every_layout_is_timed_at_every_context(study, quick, monkeypatch, tmp_path):
    runs = studies.run(study, monkeypatch, tmp_path, "--context", "64,96", "--layers", "1", "--rounds", "1")
    kinds = [("attention", 9, 1), ("attention", 3, 1), ("attention", 3, 2), ("attention", 1, 1)]
    kinds += [("step", heads, 1) for heads in (9, 3, 1)]
    assert sorted((run["context"], run["what"], run["kv_heads"], run["times"]) for run in runs) == sorted(
        (context, *kind) for context in (64, 96) for kind in kinds
    )
    assert all(run["seconds"] > 0 and run["by_bytes"] > 0 and run["predicted"] >= 0 for run in runs)
    attention = {(run["context"], run["kv_heads"], run["times"]): run for run in runs if run["what"] == "attention"}
    for context in (64, 96):
        assert attention[context, 9, 1]["bytes"] == 9 * attention[context, 1, 1]["bytes"] == 2 * 9 * 64 * 4 * context
        assert attention[context, 9, 1]["flops"] == attention[context, 1, 1]["flops"] == 4 * 9 * 64 * context
        assert attention[context, 3, 2]["flops"] == 2 * attention[context, 3, 1]["flops"]


@torch.no_grad()
def test_a_step_leaves_the_cache_as_long_as_it_was(study, quick, monkeypatch):
    caches = []
    right = study.filled
    monkeypatch.setattr(study, "filled", lambda model, tokens: caches.append(right(model, tokens)) or caches[-1])
    study.measure([40, 64], 1, 1)
    assert [cache.get_seq_length() for cache in caches] == [40, 40, 40]


@torch.no_grad()
def test_wrong_attention_is_not_timed(study, models, monkeypatch):
    cache = study.filled(models[3], 40)
    study.check(models[3], cache, 40)
    right = study.sdpa_attention
    monkeypatch.setattr(study, "sdpa_attention", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(ArithmeticError, match=r"3 heads: attention errs by .*nothing was timed"):
        study.check(models[3], cache, 40)


@torch.no_grad()
def test_a_cache_of_another_size_than_is_counted_ends_the_study(study, models):
    cache = study.filled(models[3], 40)
    with pytest.raises(ArithmeticError, match=r"the cache holds 61440 bytes, counted are 62976"):
        study.check(models[3], cache, 41)


@pytest.mark.parametrize(
    ("kv_heads", "cores", "share"),
    [(9, 2, 5 / 9), (3, 2, 2 / 3), (1, 2, 1 / 2), (9, 1, 1), (1, 16, 1 / 16), (3, 16, 1 / 3)],
)
def test_whole_heads_go_to_cores_but_a_single_one_is_cut(study, kv_heads, cores, share):
    assert study.busiest(kv_heads, cores) == pytest.approx(share)


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_times_that_follow_the_model_are_predicted_from_one_layout(study, cores):
    """Of a machine with other rates for bytes, operations and weights, and a fixed cost a step."""
    rates = {"bytes": 3e-11, "flops": 2e-11, "weights": 5e-11, "fixed": 1e-4}

    def seconds(run):
        share = study.busiest(run.kv_heads, cores)
        alone = share * (rates["bytes"] * run.cost.cache_bytes + rates["flops"] * run.cost.attention_flops)
        return rates["fixed"] + alone + (rates["weights"] * run.cost.weight_bytes if run.what == "step" else 0)

    runs = []
    for heads in (9, 3, 1):
        for context in (2048, 8192):
            for what, times in (("attention", 1), ("attention", 2), ("step", 1)):
                cost = study.step_cost(study.config(heads, 30), context=context, dtype="float32")
                if what == "attention":
                    cost = StepCost(0, cost.cache_bytes, 0, times * cost.attention_flops)
                run = study.Run(what, heads, context, times, cost, 0.0)
                runs.append(run._replace(seconds=seconds(run)))
    for one in study.predictions(runs, cores):
        assert one["predicted"] == pytest.approx(one["seconds"], rel=1e-3)
    by_bytes = {(one["what"], one["kv_heads"], one["context"]): one for one in study.predictions(runs, cores)}
    alone = {heads: by_bytes["attention", heads, 8192]["by_bytes"] for heads in (9, 3, 1)}
    assert alone[9] == pytest.approx(3 * alone[3]) == pytest.approx(9 * alone[1])


def test_the_fit_sees_nothing_of_the_layouts_that_it_predicts(study):
    costs = {heads: study.step_cost(study.config(heads, 1), context=64, dtype="float32") for heads in (9, 3, 1)}
    runs = [
        study.Run(
            what,
            heads,
            context,
            times,
            dataclasses.replace(cost, cache_bytes=cost.cache_bytes * context),
            1e-3 * context,
        )
        for heads, cost in costs.items()
        for context in (1, 2)
        for what, times in (("attention", 1), ("attention", 2), ("step", 1))
    ]
    slower = [run if run.kv_heads == 3 else run._replace(seconds=100 * run.seconds) for run in runs]
    predicted = [[one["predicted"] for one in study.predictions(some, 2)] for some in (runs, slower)]
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize(
    "arguments", [("--layers", "0"), ("--rounds", "0"), ("--context", "64"), ("--context", "0,64")]
)
def test_numbers_that_make_no_study_are_refused(study, monkeypatch, capsys, arguments):
    studies.refuses(study, monkeypatch, capsys, *arguments)
