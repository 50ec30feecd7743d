"""Advice: the guide's five rows with the ledger's numbers, an arithmetic that adds up, and verdicts that fit the workload."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import claims
from course_lib.memory import advise, cards, estimate, find_card, kv_cache_bytes, published_names, step_cost
from course_lib.memory.advice import GOALS
from course_lib.memory.scenario import FEW_ROWS

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip


def steps(advice):
    return {step.name.split(" (")[0]: step for step in advice.steps}


def test_octocoder_gets_the_guides_remedies():
    found = advise("octocoder", gpu="A100-40GB", context=16_000, goal="memory")
    assert found.card == find_card("A100 40GB")
    assert [row.number for row in found.rows if row.verdict == "use"] == [5, 3, 1]
    assert list(steps(found)) == [
        "nothing but the model",
        "a KV cache",
        "flash attention",
        "8-bit weights",
        "4-bit weights",
    ]
    assert [step.fits for step in found.steps] == [False, False, True, True, True]
    assert found.enough is steps(found)["flash attention"]
    assert found.result.memory < 0.4 * found.enough.memory
    # What the guide does not say: its model has 8,192 positions.
    assert found.row(4).verdict == "change the model"
    assert "8,192" in found.summary


def test_octocoders_numbers_are_those_of_the_ledger():
    ledger = claims.load()
    found = advise("octocoder", gpu="A100-40GB", context=16_000)
    reason = found.row(5).reason
    for claim in ("mqa-400mb", "octocoder-cache-15gb"):
        assert f"{ledger[claim].expect:,} bytes" in reason
    assert f"{ledger['octocoder-cache-elements'].expect:,} values" in reason
    assert any(f"{ledger['mqa-400mb'].expect:,} bytes" in line for line in found.arithmetic["a KV cache"])
    # The source's own prompt is short: its three peaks.
    short = steps(advise("octocoder", gpu="A100-40GB", context=100, new_tokens=60))
    for name, claim in (
        ("flash attention", "octocoder-bf16"), ("8-bit weights", "octocoder-int8"), ("4-bit weights", "octocoder-4bit")
    ):  # fmt: skip
        peak = ledger[claim]
        assert short[name].memory / 2**30 == pytest.approx(peak.expect, rel=peak.tolerance)


def test_every_step_is_what_the_estimator_and_the_roofline_say():
    card = find_card("A100 80GB SXM")
    found = steps(advise("llama-3.1-8b", gpu=card, context=10_000, batch_size=3, new_tokens=1_000))
    for name, options in (
        ("a KV cache", {"attention": "eager"}), ("flash attention", {}),
        ("8-bit weights", {"quantization": "int8"}), ("4-bit weights", {"quantization": "nf4"}),
    ):  # fmt: skip
        memory = estimate("llama-3.1-8b", batch_size=3, prompt_tokens=9_000, new_tokens=1_000, **options).total
        assert found[name].memory == memory
        scheme = {"quantization": options.get("quantization")}
        decode = step_cost("llama-3.1-8b", context=10_000, batch_size=3, **scheme)
        assert found[name].seconds == decode.seconds(2039e9, 312e12)
    prompt = step_cost("llama-3.1-8b", context=9_000, query_tokens=9_000, batch_size=3, logits_to_keep=1)
    assert found["flash attention"].first_seconds == prompt.flops / 312e12
    plain = step_cost("llama-3.1-8b", context=10_000, query_tokens=10_000, batch_size=3, logits_to_keep=1)
    scores = 4 * 3 * 32 * 10_000**2 * 2 * 32
    assert found["nothing but the model"].seconds == max(plain.flops / 312e12, (plain.weight_bytes + scores) / 2039e9)


def evaluate(text: str) -> float:
    """Compute an expression of the arithmetic: words are units."""
    numbers = re.sub(
        r"bytes/s|operations/s|[A-Za-z]+-?[A-Za-z]*", "", text.replace(" × ", " * ").replace("^", "**").replace(",", "")
    )
    return eval(numbers.strip(), {"__builtins__": {}})


@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from([name for name in published_names() if name != "gpt-3"]),
    card=st.sampled_from(cards()),
    context=st.integers(2, 20_000),
    batch=st.sampled_from((1, 2, 16, 17, 300)),
    goal=st.sampled_from(GOALS),
    chunk=st.sampled_from((None, 256)),
)
def test_the_five_rows_hold_together_and_their_arithmetic_adds_up(model, card, context, batch, goal, chunk):
    found = advise(model, gpu=card, context=context, batch_size=batch, goal=goal, prefill_chunk=chunk)
    assert sorted(row.number for row in found.rows) == [1, 2, 3, 4, 5]
    used = [row.verdict == "use" for row in found.rows]
    assert used == sorted(used, reverse=True)
    assert all(not row.steps or row.verdict == "use" for row in found.rows)
    assert all(row.reason for row in found.rows)
    for step in (*found.steps, *(other for row in found.rows for other in row.what_if)):
        assert step.fits == (step.memory <= card.memory_bytes)
        assert 0 < step.first_seconds <= step.answer_seconds
        assert (step.sequences is None) == (goal != "throughput")
        for line in step.arithmetic:
            told = re.fullmatch(r"(weights|KV cache|activations|workspace): (.+) = ([\d,]+) bytes = [\d,.]+ GiB", line)
            if told:
                assert evaluate(told[2]) == int(told[3].replace(",", "")), line
            elif not line.startswith("peak"):
                parts = line.split(": ", 1)[1].removesuffix("; the longer counts").split("; ")
                times = [evaluate(part.rsplit(" = ", 1)[0]) for part in parts if " = " in part]
                whole = step.first_seconds if line.startswith("first") else step.seconds
                assert max(times) == pytest.approx(whole, rel=1e-12), line
    needs = found.row(2)
    assert found.result.fits or needs.verdict == "no help"
    if needs.steps:
        held = estimate(model, batch_size=batch, prompt_tokens=1, new_tokens=context - 1)
        assert needs.steps[-1].cards <= math.ceil(held.total / 1e9)


def test_fewer_cards_than_needed_do_not_hold_it():
    found = advise("bloom", gpu="A100 80GB SXM", context=2_048, goal="memory")
    (many,) = found.row(2).steps
    assert many.cards == 2
    assert many.fits
    before = found.steps[-2]
    assert not before.fits
    assert f"needs {many.cards} cards" in found.summary
    assert "With weights in bfloat16: 5 cards" in found.row(2).reason


def test_throughput_says_how_many_sequences_fit_where_all_do_not():
    found = advise("llama-3.1-8b", gpu="L4", context=8_192, batch_size=64, goal="throughput")
    assert found.enough is None
    assert f"fit in 22.35 GiB; of 64 sequences, {found.result.sequences} do." in found.summary
    assert 0 < found.result.sequences < 64


def test_without_room_for_activations_no_number_of_cards_helps():
    found = advise("falcon-40b", gpu="A100 80GB SXM", context=4_096, batch_size=512, goal="latency")
    assert found.row(2).verdict == "no help"
    assert "prefill_chunk" in found.row(2).reason
    assert found.enough is None
    pieces = advise("falcon-40b", gpu="A100 80GB SXM", context=4_096, batch_size=512, goal="latency", prefill_chunk=16)
    assert pieces.row(2).verdict == "use"


@pytest.mark.parametrize(
    ("model", "words", "what_if"),
    [
        ("octocoder", "one key-value head already", []),
        ("llama-3.1-8b", "grouped heads already", []),
        ("deepseek-v3", "latent attention already", []),
        ("falcon-40b", "Transformers repeats them", []),
        ("llama-2-7b", "keys and values of its own", [8, 1]),
    ],
)
def test_grouped_heads_are_advice_only_for_models_that_have_none(model, words, what_if):
    row = advise(model, gpu="B200", context=4_000).row(5)
    assert row.verdict == "use"
    assert words in row.reason
    assert [int(step.name.split()[0]) for step in row.what_if] == what_if


def test_grouping_divides_the_cache_and_nothing_else():
    found = advise("llama-2-7b", gpu="A100 80GB SXM", context=4_000)
    held = kv_cache_bytes("llama-2-7b", 4_000)
    eight, one = found.row(5).what_if
    assert found.result.memory - eight.memory == held - held // 4
    assert found.result.memory - one.memory == held - held // 32
    assert one.seconds < eight.seconds < found.result.seconds


def test_flash_attention_changes_the_prompt_and_not_decoding():
    found = steps(advise("octocoder", gpu="A100-40GB", context=16_000))
    before, after = found["a KV cache"], found["flash attention"]
    assert before.memory - after.memory == 48 * (16_000 - 256) ** 2 * 8
    assert after.first_seconds < before.first_seconds
    assert after.seconds == before.seconds


def test_where_the_peak_is_elsewhere_flash_attention_is_no_help():
    row = advise("smollm2-135m", gpu="T4", context=4).row(3)
    assert row.verdict == "no help"
    assert row.steps == ()


def test_four_bits_are_faster_for_one_sequence_and_slower_for_many():
    one = advise("llama-2-7b", gpu="A100 80GB SXM", context=200, goal="latency")
    assert one.row(1).verdict == "use"
    assert one.result.seconds < 0.4 * steps(one)["flash attention"].seconds
    many = advise("llama-2-7b", gpu="A100 80GB SXM", context=200, batch_size=200, goal="latency")
    four = next(step for step in many.row(1).what_if if "nf4" in step.name)
    assert four.seconds > steps(many)["flash attention"].seconds
    assert "4-bit weights" not in steps(many)


def test_kernels_multiply_as_many_rows_by_codes_as_the_library_does():
    from course_lib.quantization.linear import FEW_ROWS_ON_A_CARD

    assert FEW_ROWS == FEW_ROWS_ON_A_CARD


def test_experts_are_not_quantised():
    row = advise(MIXTRAL, gpu="H100 SXM", context=8_000).row(1)
    assert row.verdict == "no help"
    assert "97 % of them are stacked experts" in row.reason


def test_a_quantised_checkpoint_is_not_quantised_again():
    stored = {"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    found = advise(MIXTRAL | {"quantization_config": stored}, gpu="H100 SXM", context=100)
    assert found.row(1).verdict == "already so"
    assert found.start.memory < advise(MIXTRAL, gpu="H100 SXM", context=100).start.memory


@pytest.mark.parametrize(("model", "scheme"), [("deepseek-v3", "fp8"), ("gpt-oss-20b", "mxfp4")])
def test_a_checkpoint_published_in_few_bits_counts_as_published(model, scheme):
    found = advise(model, gpu="H200", context=8_000, batch_size=32, goal="throughput")
    assert found.row(1).verdict == "already so"
    assert scheme in found.row(1).reason
    stored = estimate(model)
    weights = next(line for line in found.start.arithmetic if line.startswith("weights"))
    assert f"= {stored.weights + stored.quantization_constants:,} bytes" in weights
    assert f"{4 if scheme == 'fp8' else 1} bytes × " in weights
    assert not any("turned back" in line for step in found.steps for line in step.arithmetic)


@pytest.mark.parametrize(
    ("model", "context", "verdict", "words"),
    [
        ("octocoder", 8_192, "not needed", "8,192"),
        ("octocoder", 8_193, "change the model", "cannot run 8,193 tokens at all"),
        ("llama-2-7b", 4_096, "already so", "rotary"),
        ("llama-2-7b", 8_192, "use", "2.00 times as many"),
        ("mpt-7b", 8_192, "already so", "ALiBi"),
        ("gpt-3", 4_000, "change the model", "only 2,048"),
    ],
)
def test_positions_reach_as_far_as_the_model_has_them(model, context, verdict, words):
    row = advise(model, gpu="B200", context=context).row(4)
    assert row.verdict == verdict
    assert words in row.reason


def test_one_new_token_needs_no_cache():
    found = advise("llama-2-7b", gpu="B200", context=1_000, new_tokens=1)
    assert found.row(5).verdict == "not needed"
    assert "a KV cache" not in steps(found)


def test_throughput_counts_the_sequences_that_fit():
    found = advise("llama-3.1-8b", gpu="A100-40GB", context=8_000, goal="throughput", prefill_chunk=256)
    for step in found.steps[2:]:
        assert step.sequences > 1
    flash = steps(found)["flash attention"]
    options = {"prompt_tokens": 256, "new_tokens": 8_000 - 256}
    assert estimate("llama-3.1-8b", batch_size=flash.sequences, **options).fits(found.card.memory_bytes)
    assert not estimate("llama-3.1-8b", batch_size=flash.sequences + 1, **options).fits(found.card.memory_bytes)
    rates = [step.tokens_per_second for step in found.steps]
    assert rates == sorted(rates)


def test_without_an_arithmetic_rate_bytes_alone_bound_the_time():
    found = advise("llama-2-7b", gpu="RTX 4090", context=1_000)
    assert found.card.tensor_flops_per_second is None
    assert any("bytes alone" in line for line in found.result.arithmetic)


def test_the_text_names_every_row_and_step():
    found = advise("llama-2-7b", gpu="L4", context=1_000, goal="latency")
    text = str(found)
    for row in found.rows:
        assert row.reason in text
        for step in (*row.steps, *row.what_if):
            assert step.told in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "A100"}, "gpu must be one of A100 40GB, A100 80GB PCIe, A100 80GB SXM, ..., got 'A100'"),
        ({"goal": "speed"}, "goal must be one of memory, latency, throughput, got 'speed'"),
        ({"context": 1}, "context must be a whole number of at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"new_tokens": 100}, "new_tokens must be a whole number of at most 99, got 100"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"model": "octopus"}, "neither a published name"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        advise(**{"model": "octocoder", "gpu": "T4", "context": 100, **arguments})


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100-40GB", "A100 40GB"), ("a100_40gb", "A100 40GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"), ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"), ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("4090", "RTX 4090"), ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("h100-sxm", "H100 SXM"), ("AMD Instinct MI300X", "MI300X"),
    ],
)  # fmt: skip
def test_a_card_is_found_however_its_name_is_written(written, name):
    assert find_card(written).name == name


def test_every_card_is_found_by_its_own_name_and_no_other_by_a_part_of_it():
    for card in cards():
        assert find_card(card.name) == card == find_card(card.name.upper().replace(" ", "-"))
    for part in ("L40", "A100 80GB", "H100", "RTX", ""):
        with pytest.raises(ValueError, match="card must be one of"):
            find_card(part)
    with pytest.raises(TypeError, match="card must be a card's name, got None"):
        find_card(None)
