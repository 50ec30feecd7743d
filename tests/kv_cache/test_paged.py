"""Blocks are taken as tokens come, shared by what is equal, copied before they change, and all given back."""

import copy

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, SMALL, WINDOW, written
from hypothesis import given
from hypothesis import strategies as st

from course_lib.attention import attention
from course_lib.kv_cache import PagedCache
from course_lib.kv_cache.blocks import BlockPool, OutOfBlocks

HEADS, DIM, LAYERS, SIZE = 2, 8, 3, 4
#: Bytes of a block's keys and values in all layers, in float32.
BLOCK = 2 * LAYERS * HEADS * SIZE * DIM * 4


def llama() -> transformers.PretrainedConfig:
    return CONFIGURATIONS["llama"]()


def run(cache: PagedCache, batch: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write fresh tokens as a model does, layer by layer, and return what each layer then saw, copied."""
    found = []
    for layer in range(len(cache.layers)):
        keys, values = cache.update(
            torch.randn(batch, HEADS, length, DIM), torch.randn(batch, HEADS, length, DIM), layer
        )
        found.append((keys.clone(), values.clone()))
    return found


def held(cache: PagedCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def same(one, other, tokens=None) -> bool:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(torch.equal(a[:, :, :tokens], b[:, :, :tokens]) for a, b in pairs)


def pool(cache: PagedCache) -> BlockPool:
    return cache.tables[None].pages.pool


# ---- the pool


def test_a_pool_counts_references_and_blocks():
    blocks = BlockPool(5)
    first = blocks.allocate(3)
    assert first == [0, 1, 2]
    blocks.share(first[:2])
    blocks.release(first)
    blocks.check([first[:2]])
    assert (blocks.used, blocks.free, blocks.total) == (2, 3, 5)
    with pytest.raises(OutOfBlocks, match="num_blocks is 5, of which 3 are free, and this takes 4"):
        blocks.allocate(4)
    for refused in (blocks.share, blocks.release):
        with pytest.raises(ValueError, match="block 2 is free"):
            refused([2])
    with pytest.raises(ValueError, match="block 1 has a count of 1"):
        blocks.check([[0]])
    with pytest.raises(ValueError, match="4"):
        blocks.check([[0], [1], [4]])


def test_a_pool_without_a_number_grows_by_an_eighth_or_what_is_needed():
    blocks = BlockPool()
    blocks.allocate(80)
    assert blocks.total == 80
    blocks.allocate(1)
    assert blocks.total == 90
    blocks.allocate(20)
    assert blocks.total == 101


# ---- what is allocated


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 40])
def test_less_than_one_block_of_a_sequence_is_unused(length):
    cache = PagedCache(llama(), block_size=SIZE)
    run(cache, 3, length)
    assert cache.lengths == [length] * 3
    assert all(0 <= waste < SIZE for waste in cache.waste)
    assert cache.waste == [-length % SIZE] * 3
    assert pool(cache).used == 3 * -(-length // SIZE)
    assert cache.nbytes == pool(cache).total * BLOCK == 3 * -(-length // SIZE) * BLOCK
    assert cache.used_nbytes == 3 * length * BLOCK // SIZE


def test_decoding_allocates_an_eighth_ahead_at_most():
    cache = PagedCache(llama(), block_size=SIZE)
    run(cache, 2, 100)
    for _ in range(60):
        run(cache, 2, 1)
        assert all(waste < SIZE for waste in cache.waste)
    assert cache.used_nbytes == 2 * 160 * BLOCK // SIZE
    assert 2 * 160 * BLOCK // SIZE <= cache.nbytes <= 9 / 8 * 2 * 160 * BLOCK // SIZE


def test_a_pool_of_fixed_size_is_allocated_whole():
    cache = PagedCache(llama(), block_size=SIZE, num_blocks=20)
    assert cache.nbytes == 0
    run(cache, 1, 1)
    assert cache.nbytes == 20 * BLOCK


def test_what_a_window_has_passed_is_given_back():
    cache = PagedCache(CONFIGURATIONS["gemma3"](), block_size=SIZE)
    run(cache, 2, 50)
    for _ in range(50):
        run(cache, 2, 1)
    assert sorted(cache.tables, key=str) == [WINDOW, None]
    windowed, full = cache.tables[WINDOW], cache.tables[None]
    assert all(len(row) == 25 for row in full.rows)
    assert all(len(row) <= -(-(WINDOW - 1) // SIZE) + 1 for row in windowed.rows)
    windowed.pages.pool.check(windowed.rows)
    full.pages.pool.check(full.rows)


def test_layers_with_a_window_take_no_more_blocks_than_it_needs(tmp_path):
    cache = PagedCache(CONFIGURATIONS["gemma3"](), block_size=SIZE)
    for _ in range(60):
        run(cache, 2, 1)
    cache.save(tmp_path / "cache")
    for one in (cache, PagedCache.load(tmp_path / "cache", CONFIGURATIONS["gemma3"]())):
        run(one, 2, 1)
        assert one.tables[WINDOW].pages.pool.total <= 2 * 4
        assert one.tables[None].pages.pool.used == 2 * 16


def test_crop_gives_blocks_back_and_reset_all_memory():
    cache = PagedCache(llama(), block_size=SIZE)
    before = run(cache, 2, 22)
    cache.crop(-9)
    assert [len(row) for row in cache.block_tables] == [4, 4]
    assert pool(cache).used == 8
    assert same(run(cache, 2, 1), before, 13)
    cache.crop(-14)
    assert (pool(cache).used, cache.lengths, cache.used_nbytes) == (0, [0, 0], 0)
    run(cache, 2, 3)
    cache.reset()
    assert (cache.nbytes, cache.used_nbytes, pool(cache).used) == (0, 0, 0)
    cache.update(torch.randn(5, 1, 2, 6, dtype=torch.bfloat16), torch.randn(5, 1, 2, 4, dtype=torch.bfloat16), 0)
    assert cache.lengths == [2] * 5


# ---- sharing


def test_beams_share_the_blocks_of_what_they_have_in_common():
    cache = PagedCache(llama(), block_size=SIZE)
    before = run(cache, 1, 38)
    alone = cache.used_nbytes
    cache.batch_repeat_interleave(4)
    assert cache.used_nbytes == alone
    assert pool(cache).used == 10
    after = run(cache, 4, 1)
    # Nine blocks are full and stay common; the tenth is each beam's own now.
    assert pool(cache).used == 9 + 4
    assert cache.used_nbytes == (36 + 4 * 3) * BLOCK // SIZE
    assert same(after, [(k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1)) for k, v in before], 38)
    pool(cache).check(cache.block_tables)
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    assert pool(cache).used == 10
    assert same(held(cache), [(k[[2] * 4], v[[2] * 4]) for k, v in after])


def test_a_model_with_beams_needs_fewer_blocks_than_its_rows_have():
    model = transformers.AutoModelForCausalLM.from_config(llama()).eval()
    cache = PagedCache(model.config, block_size=SIZE)
    written(model, torch.randint(1, SMALL["vocab_size"], (1, 64)), cache, 6, num_beams=4)
    assert len(cache.block_tables) == 4
    # The prompt's sixteen blocks once, and two for each of four.
    assert pool(cache).used <= 16 + 4 * 2
    pool(cache).check(cache.block_tables)


def test_forks_continue_independently_and_share_the_past():
    cache = PagedCache(llama(), block_size=SIZE)
    before = run(cache, 2, 22)
    fork = cache.fork()
    assert pool(fork) is pool(cache)
    assert pool(cache).used == 12
    assert same(held(fork), before)
    ours, theirs = run(cache, 2, 3), run(fork, 2, 5)
    assert same(held(cache), ours)
    assert same(held(fork), theirs)
    assert same(ours, before, 22)
    assert same(theirs, before, 22)
    assert not same(ours, theirs, 25)
    # Five full blocks of each sequence are common; of the sixth and seventh each has its own.
    assert pool(cache).used == 2 * (5 + 2 + 2)
    pool(cache).check(cache.block_tables + fork.block_tables)
    fork.crop(-20)
    assert same(run(fork, 2, 1), before, 7)
    assert same(held(cache), ours)


def test_a_fork_that_is_gone_leaves_nothing_behind():
    cache = PagedCache(llama(), block_size=SIZE)
    run(cache, 2, 9)
    fork = cache.fork()
    run(fork, 2, 9)
    del fork
    pool(cache).check(cache.block_tables)
    fork = cache.fork()
    cache.reset()
    pool(fork).check(fork.block_tables)
    assert fork.nbytes > 0
    with pytest.raises(
        TypeError, match=r"the blocks, which hold other sequences too, have 2 heads of 8, torch\.float32"
    ):
        cache.update(torch.randn(2, HEADS, 1, DIM).double(), torch.randn(2, HEADS, 1, DIM).double(), 0)
    run(cache, 1, 2)
    pool(fork).check(fork.block_tables + cache.block_tables)


def test_a_written_block_that_is_cropped_and_shared_is_copied_before_it_changes():
    """The same slots are written again after a fork: that they were writable before must not count."""
    cache = PagedCache(llama(), block_size=SIZE)
    run(cache, 1, 6)
    before = run(cache, 1, 1)
    fork = cache.fork()
    cache.crop(-1)
    after = run(cache, 1, 1)
    assert same(held(fork), before)
    assert same(held(cache), after)


def test_a_deep_copy_has_a_pool_of_its_own():
    cache = PagedCache(llama(), block_size=SIZE)
    before = run(cache, 2, 10)
    fork = cache.fork()
    twin = copy.deepcopy(cache)
    assert pool(twin) is not pool(cache)
    pool(twin).check(twin.block_tables)
    run(twin, 2, 4)
    fork.crop(-10)
    run(fork, 2, 4)
    assert same(held(cache), before)


# ---- a full pool


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral"])
def test_a_full_pool_is_one_clear_error_and_changes_nothing(family):
    cache = PagedCache(CONFIGURATIONS[family](), block_size=SIZE, num_blocks=6)
    with pytest.raises(OutOfBlocks, match="num_blocks is 6, of which 6 are free, and this takes 8"):
        run(cache, 8, 3)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    before = run(cache, 2, 3)
    with pytest.raises(OutOfBlocks, match="num_blocks is 6, of which 4 are free, and this takes 6"):
        run(cache, 2, 10)
    assert [layer.seen for layer in cache.layers] == [3] * 3
    assert same(held(cache), before)
    assert same(run(cache, 2, 3), before, 3)


def test_a_pool_that_is_full_for_later_layers_changes_nothing_in_the_first_ones():
    """Layers with a window come first and have room: they must not take the token that the others cannot."""
    cache = PagedCache(CONFIGURATIONS["gemma3"](), block_size=SIZE, num_blocks=10)
    for _ in range(5 * SIZE):
        run(cache, 2, 1)
    before, tables = held(cache), [[list(row) for row in table.rows] for table in cache.tables.values()]
    with pytest.raises(OutOfBlocks, match="num_blocks is 10, of which 0 are free, and this takes 2"):
        run(cache, 2, 1)
    assert [layer.seen for layer in cache.layers] == [5 * SIZE] * 3
    assert same(held(cache), before)
    assert [table.rows for table in cache.tables.values()] == tables


def test_beams_copy_no_more_blocks_than_they_must():
    cache = PagedCache(llama(), block_size=SIZE, num_blocks=13)
    run(cache, 1, 38)
    cache.batch_repeat_interleave(4)
    run(cache, 4, 1)  # the last of the four keeps the block that the others had in common with it
    assert pool(cache).used == 13


def test_a_copy_that_finds_no_block_is_an_error_and_changes_nothing():
    cache = PagedCache(llama(), block_size=SIZE, num_blocks=3)
    before = run(cache, 1, 10)
    fork = cache.fork()
    for one in (cache, fork):
        with pytest.raises(OutOfBlocks, match="of which 0 are free, and this takes 1"):
            run(one, 1, 1)
        assert same(held(one), before)
    fork.reset()
    assert same(run(cache, 1, 1), before, 10)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": 2.5}, {"num_blocks": 0}, {"num_blocks": True}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number of at least 1"):
        PagedCache(llama(), **options)


# ---- reading in place


@given(
    rows=st.integers(1, 16),
    past=st.integers(1, 40),
    window=st.sampled_from([None, WINDOW]),
    softcap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
)
def test_queries_attend_in_place_to_what_update_returns(rows, past, window, softcap, alibi):
    config = CONFIGURATIONS["mistral" if window else "llama"]()
    cache = PagedCache(config, block_size=SIZE)
    run(cache, 2, past)
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer in cache.tables[window].pages.layers:  # what lies beyond the tokens may be anything
        for tensor in layer:
            slots = tensor.flatten(1, 2)
            used = torch.zeros(slots.shape[1], dtype=torch.bool)
            used[
                cache.tables[window].slots(cache.tables[window].starts[0], cache.tables[window].ends[0], tensor.device)
            ] = 1
            slots[:, ~used] = torch.nan
    q, k, v = (torch.randn(2, heads, rows, DIM) for heads in (4, HEADS, HEADS))
    slopes = torch.rand(4) if alibi else None
    twin = cache.fork()
    keys, values = twin.layers[0].update(k, v)
    expected = attention(
        q, keys, values, causal=True, sliding_window=window, softcap=softcap, alibi_slopes=slopes, scale=0.3
    )
    assert cache.layers[0].attend(q, k, v) is None  # there is no kernel on a CPU
    found = cache.layers[0]._attend(q, k, v, scale=0.3, alibi_slopes=slopes, softcap=softcap)
    torch.testing.assert_close(found, expected)
    assert cache.layers[0].seen == twin.layers[0].seen == past + rows


def test_a_lone_sequence_is_read_where_it_stands():
    cache = PagedCache(llama(), block_size=SIZE)
    run(cache, 1, 30)
    assert cache.layers[1].keys.untyped_storage().data_ptr() in {
        tensor.untyped_storage().data_ptr() for tensor in cache.tensors().values()
    }


def test_tokens_written_in_inference_mode_can_be_continued_outside():
    cache = PagedCache(llama(), block_size=SIZE)
    with torch.inference_mode():
        before = run(cache, 2, 5)
    after = run(cache, 2, 1)
    with torch.inference_mode():
        assert same(run(cache, 2, 1), after, 6)
    assert same(after, before, 5)
