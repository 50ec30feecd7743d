"""The counts of operations and bytes are those of programs that run, tile by tile, with every access noted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.attention.cost import Cost, flash_cost, on_chip_bytes, standard_cost, standard_steps

LENGTHS = st.integers(1, 40)
BLOCKS = st.integers(1, 16)


class Meter:
    """Main memory that notes what it delivers and takes, and a processor that notes what it computes."""

    def __init__(self, itemsize: int) -> None:
        self.itemsize, self.bytes, self.flops = itemsize, 0, 0

    def move(self, *shape: int, itemsize: int | None = None) -> None:
        values = 1
        for size in shape:
            values *= size
        self.bytes += values * (itemsize or self.itemsize)

    def product(self, rows: int, inner: int, columns: int) -> None:
        for _ in range(rows * columns):
            self.flops += 2 * inner

    def each(self, operations: int, *shape: int) -> None:
        values = 1
        for size in shape:
            values *= size
        self.flops += operations * values

    @property
    def cost(self) -> Cost:
        return Cost(self.flops, self.bytes)


def run_standard(query_len: int, kv_len: int, dim: int, itemsize: int) -> Cost:
    meter = Meter(itemsize)
    meter.move(query_len, dim)  # Q
    meter.move(kv_len, dim)  # K
    meter.product(query_len, dim, kv_len)
    meter.move(query_len, kv_len)  # S goes
    meter.move(query_len, kv_len)  # and returns
    meter.each(6, query_len, kv_len)
    meter.move(query_len, kv_len)  # P goes
    meter.move(query_len, kv_len)  # and returns
    meter.move(kv_len, dim)  # V
    meter.product(query_len, kv_len, dim)
    meter.move(query_len, dim)  # O
    return meter.cost


def run_flash(
    query_len: int, kv_len: int, dim: int, itemsize: int, block_q: int, block_k: int, causal: bool, cached: bool
) -> Cost:
    meter, kept = Meter(itemsize), set()
    offset = kv_len - query_len
    for top in range(0, query_len, block_q):
        rows = range(top, min(top + block_q, query_len))
        meter.move(len(rows), dim)  # Q
        for left in range(0, kv_len, block_k):
            columns = range(left, min(left + block_k, kv_len))
            if causal and columns[0] > offset + rows[-1]:
                continue
            fetched = [key for key in columns if not (cached and key in kept)]
            kept.update(columns)
            meter.move(2, len(fetched), dim)  # K and V
            meter.product(len(rows), dim, len(columns))
            meter.each(5, len(rows), len(columns))
            meter.each(dim + 5, len(rows))  # the correction
            meter.product(len(rows), len(columns), dim)
        meter.each(dim + 3, len(rows))
        meter.move(len(rows), dim)  # O
        meter.move(len(rows), itemsize=4)  # log-sum-exp
    return meter.cost


@given(LENGTHS, LENGTHS, st.integers(1, 8), st.sampled_from([2, 4]))
def test_ordinary_attention_is_counted_as_it_runs(query_len, kv_len, dim, itemsize):
    counted = standard_cost(query_len, kv_len, dim, itemsize=itemsize)
    assert counted == run_standard(query_len, kv_len, dim, itemsize)
    steps = standard_steps(query_len, kv_len, dim, itemsize=itemsize)
    assert list(steps) == ["scores", "softmax", "output"]
    assert counted.flops == sum(step.flops for step in steps.values())


@given(LENGTHS, LENGTHS, st.integers(1, 8), st.sampled_from([2, 4]), BLOCKS, BLOCKS, st.booleans(), st.booleans())
def test_flash_attention_is_counted_as_it_runs(query_len, kv_len, dim, itemsize, block_q, block_k, causal, cached):
    counted = flash_cost(
        query_len,
        kv_len,
        dim,
        block_q=block_q,
        block_k=block_k,
        itemsize=itemsize,
        causal=causal,
        keys_once=cached,
    )
    assert counted == run_flash(query_len, kv_len, dim, itemsize, block_q, block_k, causal, cached)


@pytest.mark.parametrize("block_q", [64, 128, 256])
def test_in_16_bits_the_intensity_of_long_sequences_is_the_number_of_queries_in_a_block(block_q):
    cost = flash_cost(2**17, 2**17, 128, block_q=block_q, block_k=128)
    assert cost.intensity == pytest.approx(block_q, rel=0.02)


def test_traffic_grows_linearly_where_keys_are_kept_and_with_the_square_where_they_are_not():
    def growth(**options):
        return flash_cost(2**16, 2**16, 64, **options).bytes / flash_cost(2**15, 2**15, 64, **options).bytes

    assert growth(keys_once=True) == pytest.approx(2)
    assert growth(keys_once=False) == pytest.approx(4, rel=0.02)


def test_time_is_bound_by_the_slower_of_arithmetic_and_traffic():
    assert Cost(100, 10).seconds(flops_per_second=10, bytes_per_second=100) == 10
    assert Cost(100, 10).seconds(flops_per_second=1000, bytes_per_second=1) == 10
    assert Cost(100, 10).intensity == 10
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)


def test_a_block_of_queries_fills_the_chip_with_itself_its_keys_and_its_sums():
    shared, registers = on_chip_bytes(64, block_q=128, block_k=32, itemsize=2, stages=3)
    assert shared == 128 * 64 * 2 + 3 * (32 * 64 + 32 * 64) * 2
    assert registers == 4 * (128 * 64 + 128 * 32 + 128 + 128)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
@pytest.mark.parametrize("name", ["query_len", "kv_len", "head_dim", "itemsize", "block_q", "block_k"])
def test_a_size_that_is_no_size_is_refused_by_name(name, size):
    sizes = {"query_len": 8, "kv_len": 8, "head_dim": 4, "itemsize": 2, "block_q": 2, "block_k": 2} | {name: size}
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        flash_cost(**sizes)
