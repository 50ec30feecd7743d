"""What was computed for one request serves those that begin like it: the right tokens, each block once, and none in use is forgotten."""

import copy

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, SMALL, written
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from course_lib.generation import generate
from course_lib.kv_cache import PrefixCache
from course_lib.kv_cache.blocks import OutOfBlocks
from course_lib.memory.meta import cache_argument
from course_lib.models import load

SIZE = 4


def llama() -> transformers.PretrainedConfig:
    return CONFIGURATIONS["llama"]()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(llama()).eval()


def drawn(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], (batch, length))


def feed(cache: PrefixCache, ids: torch.Tensor) -> None:
    """Write tokens that say which they are: key and value of a token are its number."""
    past = cache.get_seq_length()
    new = ids[:, past:, None].float().transpose(1, 2)[..., None].expand(-1, 2, -1, 8)
    for layer in range(len(cache.layers)):
        cache.update(new, -new, layer)


def contents(cache: PrefixCache) -> list[list[int]]:
    """Read back which tokens the cache holds, and that all layers, heads and channels agree."""
    first = cache.layers[0].keys
    if first is None:
        return [[] for _ in cache.block_tables]
    for layer in cache.layers:
        assert torch.equal(layer.keys, first[:, :1, :, :1].expand_as(first))
        assert torch.equal(layer.values, -layer.keys)
    return first[:, 0, :, 0].long().tolist()


def checked(cache: PrefixCache, *forks: PrefixCache) -> None:
    """Count all references: those of sequences and those of the tree."""
    tables = [row for one in (cache, *forks) for row in one.block_tables]
    cache.tree.pool.check([*tables, cache.tree.blocks()])
    assert cache.stored_tokens == sum(len(node.tokens) for node in cache.tree.nodes.values())


def request(cache: PrefixCache, ids: torch.Tensor) -> int:
    reused = cache.begin(ids)
    feed(cache, ids)
    cache.commit(ids)
    return reused


def row(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


# ---- what is found


@pytest.mark.parametrize("common", [0, 1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 17])
def test_the_longest_common_beginning_is_found_token_by_token(common):
    cache = PrefixCache(llama(), block_size=SIZE)
    first, second = drawn(1, 18), drawn(1, 18)
    second[:, :common] = first[:, :common]
    second[:, common] = first[:, common] % (SMALL["vocab_size"] - 1) + 1
    assert request(cache, first) == 0
    assert request(cache, second) == common
    assert contents(cache) == second.tolist()
    assert cache.begin(torch.cat((first, first), 1)) == 18
    assert contents(cache) == first.tolist()
    assert (cache.requests, cache.hits, cache.reused_tokens) == (3, 1 + (common > 0), 18 + common)
    checked(cache)


def test_the_last_token_always_runs():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(1, 2 * SIZE)
    request(cache, ids)
    for length in range(1, 2 * SIZE + 1):
        assert cache.begin(ids[:, :length]) == length - 1


def test_a_batch_reuses_what_every_row_has():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(3, 12)
    ids[:, 0] = torch.tensor([1, 2, 3])
    request(cache, ids)
    other = ids.clone()
    other[1, 9] += 1
    assert cache.begin(other) == 9
    assert contents(cache) == ids[:, :9].tolist()
    other[2, 0] = 9
    assert cache.begin(other) == 0
    checked(cache)


def test_equal_sequences_are_stored_once():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(1, 10)
    request(cache, ids.repeat(3, 1))
    assert (cache.stored_tokens, len(cache.tree.blocks())) == (10, 3)
    request(cache, torch.cat((ids, ids), 1))
    assert (cache.stored_tokens, len(cache.tree.blocks())) == (20, 5)
    request(cache, ids[:, :6])
    assert (cache.stored_tokens, len(cache.tree.blocks())) == (20, 5)
    cache.begin(row(*[59] * 5))
    assert cache.tree.pool.used == 5
    checked(cache)


def test_bytes_in_use_count_shared_blocks_once():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(1, 10)
    request(cache, ids)
    token = cache.used_nbytes // 10
    assert token == 2 * 3 * 2 * 8 * 4
    cache.begin(torch.cat((ids, ids), 1))
    assert cache.used_nbytes == 10 * token
    feed(cache, torch.cat((ids, ids), 1))
    # The third block, which held two tokens, was copied before it was filled up.
    assert cache.used_nbytes == 22 * token
    cache.begin(row(59, 59))
    assert cache.used_nbytes == 10 * token
    assert cache.nbytes == cache.tree.pool.total * SIZE * token
    cache.reset()
    assert (cache.nbytes, cache.used_nbytes, cache.stored_tokens) == (0, 0, 0)
    assert request(cache, ids) == 0


# ---- what is forgotten


def test_the_least_recently_used_ends_go_first():
    cache = PrefixCache(llama(), block_size=SIZE, max_tokens=12)
    request(cache, row(1, 2, 3, 4, 5, 6))
    request(cache, row(1, 2, 3, 4, 7, 8))
    assert cache.stored_tokens == 8
    assert cache.begin(row(1, 2, 3, 4, 5, 6, 9)) == 6
    request(cache, row(9, 9, 9, 9, 9, 9))
    assert cache.stored_tokens <= 12
    assert cache.begin(row(1, 2, 3, 4, 7, 8, 9)) == 4
    assert cache.begin(row(1, 2, 3, 4, 5, 6, 9)) == 6
    assert cache.begin(row(9, 9, 9, 9, 9, 9, 9)) == 6
    checked(cache)


def test_storing_counts_as_use():
    cache = PrefixCache(llama(), block_size=SIZE, max_tokens=8)
    request(cache, row(1, 1, 1, 1))
    cache.begin(row(1, 1, 1, 1, 1))
    request(cache, row(2, 2, 2, 2))
    request(cache, row(3, 3, 3, 3))
    found = [cache.tree.match([number] * 5)[0] for number in (1, 2, 3)]
    assert found == [0, 4, 4]


def test_a_sequence_longer_than_what_may_be_stored_is_stored_in_part():
    cache = PrefixCache(llama(), block_size=SIZE, max_tokens=10)
    ids = drawn(1, 30)
    request(cache, ids)
    assert cache.stored_tokens == 10
    assert cache.begin(ids) == 10
    checked(cache)


def test_what_a_sequence_uses_is_not_forgotten():
    cache = PrefixCache(llama(), block_size=SIZE, max_tokens=8)
    ids = drawn(1, 9)
    request(cache, ids[:, :8])
    assert cache.begin(ids) == 8
    fork = cache.fork()
    assert request(fork, ids + 60) == 0
    assert cache.stored_tokens == 8
    assert contents(cache) == ids[:, :8].tolist()
    assert cache.tree.match(ids[0].tolist())[0] == 8
    checked(cache, fork)
    fork.begin(row(1))
    cache.begin(row(1))
    request(cache, ids + 60)
    assert cache.begin(ids) == 0
    checked(cache, fork)


def test_a_full_pool_forgets_before_it_refuses():
    cache = PrefixCache(llama(), block_size=SIZE, num_blocks=6)
    for _ in range(5):
        ids = drawn(1, 12)
        request(cache, ids)
        assert contents(cache) == ids.tolist()
        assert cache.begin(ids) == 11
        checked(cache)
    with pytest.raises(OutOfBlocks, match="num_blocks is 6"):
        feed(cache, drawn(1, 60))
    assert contents(cache) == ids[:, :11].tolist()
    checked(cache)


def test_what_is_stored_stays_as_it_was_when_its_sequence_goes_back():
    """The slots that were written last are written again after a crop, with other tokens."""
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = row(1, 2, 3, 4, 5, 6)
    cache.begin(ids)
    feed(cache, ids[:, :5])
    feed(cache, ids)
    cache.commit(ids)
    cache.crop(-1)
    feed(cache, row(1, 2, 3, 4, 5, 9))
    assert contents(cache) == [[1, 2, 3, 4, 5, 9]]
    cache.commit(row(1, 2, 3, 4, 5, 9))
    assert cache.begin(row(1, 2, 3, 4, 5, 6, 7)) == 6
    assert contents(cache) == [[1, 2, 3, 4, 5, 6]]
    checked(cache)


# ---- what must not be mistaken


def test_text_that_is_split_otherwise_is_not_taken_for_the_same():
    """Decoding and encoding again may give other tokens for the same text: what was read decides."""
    model, tokenizer = load("smollm2-135m")
    cache = PrefixCache(model.config)
    ids = tokenizer("The lighthouse stands", return_tensors="pt")["input_ids"]
    # Letter by letter a model may write, and read, what the tokenizer joins.
    letters = [tokenizer.encode(letter)[0] for letter in " on the shore"]
    read = torch.cat((ids, torch.tensor([letters])), 1)
    text = tokenizer.decode(read[0])
    again = tokenizer(text, return_tensors="pt")["input_ids"]
    assert text == "The lighthouse stands on the shore"
    assert again.shape[1] < read.shape[1]
    argument = cache_argument(model)
    cache.begin(read)
    with torch.no_grad():
        model(read, **{argument: cache})
    cache.commit(read)
    common = int((read[0, : again.shape[1]] == again[0]).long().cumprod(0).sum())
    assert common < again.shape[1] - 1
    assert cache.begin(again) == common
    with torch.no_grad():
        found = model(again[:, common:], **{argument: cache}).logits[:, -1]
        expected = model(again).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert cache.begin(torch.cat((read, read), 1)) == read.shape[1]


def test_padding_is_not_taken_for_tokens(model):
    """The same numbers mean other positions where the first of them are padding."""
    cache = PrefixCache(model.config, block_size=SIZE)
    ids = drawn(2, 10)
    ids[:, :3] = 7
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    cache.begin(ids, mask)
    output = written(model, ids, cache, 4, attention_mask=mask)
    cache.commit(output)
    assert cache.begin(ids) == 0
    assert cache.begin(ids, mask) == 9
    assert torch.equal(written(model, ids, cache, 4, attention_mask=mask), output)
    checked(cache)


def test_models_whose_layers_forget_are_refused():
    for family in ("gemma2", "gemma3", "mistral"):
        with pytest.raises(ValueError, match="only a window or keep a state"):
            PrefixCache(CONFIGURATIONS[family]())
    recurrent = transformers.Qwen3NextConfig(
        **SMALL, layer_types=["linear_attention", "full_attention", "full_attention"]
    )
    with pytest.raises(ValueError, match="only a window or keep a state"):
        PrefixCache(recurrent)
    with pytest.raises(ValueError, match="max_tokens must be a whole number of at least 1, got 0"):
        PrefixCache(llama(), max_tokens=0)


def test_what_cannot_be_the_sequences_in_the_cache_is_not_stored():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(2, 9)
    with pytest.raises(ValueError, match="token_ids has 2 sequences, and the cache holds 0"):
        cache.commit(ids)
    cache.begin(ids)
    feed(cache, ids)
    other = ids.clone()
    other[1, 4] += 1
    with pytest.raises(ValueError, match="does not begin, in row 1, with the input_ids"):
        cache.commit(other)
    with pytest.raises(ValueError, match="token_ids has 1 sequences, and the cache holds 2"):
        cache.commit(ids[:1])
    with pytest.raises(ValueError, match="input_ids has shape"):
        cache.begin(ids[0])
    with pytest.raises(ValueError, match="at least one token"):
        cache.begin(ids[:, :0])
    with pytest.raises(ValueError, match="attention_mask has shape"):
        cache.begin(ids, torch.ones(2, 3))
    assert cache.stored_tokens == 0
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="reorder_cache"):
        cache.commit(ids)
    cache.begin(ids)
    checked(cache)


def test_other_tokens_for_a_stored_block_are_refused():
    cache = PrefixCache(llama(), block_size=SIZE)
    feed(cache, row(1, 2, 3))
    cache.commit(row(1, 2, 3))
    with pytest.raises(ValueError, match="token_ids are not those that block 0 was stored with"):
        cache.commit(row(4, 2, 3))
    checked(cache)


def test_repeated_and_selected_sequences_are_known():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(2, 6)
    ids[:, 0] = torch.tensor([1, 2])
    request(cache, ids)
    assert cache.begin(torch.cat((ids, ids), 1)) == 6
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    longer = torch.cat((ids[[1, 0]], ids, ids), 1)
    longer[:, 6:12] = ids[[1, 0]]
    feed(cache, longer)
    cache.commit(longer)
    assert cache.begin(longer.repeat(1, 2)) == 18
    assert contents(cache) == longer.tolist()
    checked(cache)


# ---- in models


def test_generate_of_transformers_writes_the_same_with_what_is_stored(model):
    cache = PrefixCache(model.config, block_size=SIZE)
    system = drawn(2, 21)
    for turn in range(3):
        ids = torch.cat((system, drawn(2, 5)), 1)
        expected = written(model, ids, transformers.DynamicCache(config=model.config), 8)
        assert cache.begin(ids) == (21 if turn else 0)
        found = written(model, ids, cache, 8)
        assert torch.equal(found, expected)
        cache.commit(found)
    # The next turn takes up the whole history but its last token, which was written and never read.
    ids = torch.cat((found, drawn(2, 3)), 1)
    expected = written(model, ids, transformers.DynamicCache(config=model.config), 8)
    assert cache.begin(ids) == found.shape[1] - 1
    assert torch.equal(written(model, ids, cache, 8), expected)
    checked(cache)


def test_our_own_loop_begins_and_commits(model):
    cache = PrefixCache(model.config, block_size=SIZE)
    ids = drawn(1, 20)
    first = generate(model, ids, max_new_tokens=6, cache=cache).sequences
    assert cache.stored_tokens == 25
    longer = torch.cat((first, drawn(1, 4)), 1)
    expected = generate(model, longer, max_new_tokens=6).sequences
    assert torch.equal(generate(model, longer, max_new_tokens=6, cache=cache).sequences, expected)
    assert (cache.requests, cache.reused_tokens) == (2, 25)


def test_beams_after_begin_share_the_prefix(model):
    cache = PrefixCache(model.config, block_size=SIZE)
    ids = drawn(1, 30)
    request_ids = torch.cat((ids, drawn(1, 3)), 1)
    expected = written(model, request_ids, transformers.DynamicCache(config=model.config), 6, num_beams=3)
    cache.begin(ids)
    cache.commit(written(model, ids, cache, 1))
    assert cache.begin(request_ids) == 30
    cache.batch_repeat_interleave(3)
    assert torch.equal(written(model, request_ids, cache, 6, num_beams=3), expected)
    assert len({tuple(blocks[:7]) for blocks in cache.block_tables}) == 1
    checked(cache)


def test_a_deep_copy_has_a_tree_of_its_own():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(1, 2000)
    request(cache, ids)
    fork = cache.fork()
    twin = copy.deepcopy(cache)
    checked(twin)
    checked(cache, fork)
    assert request(twin, ids + 60) == 0
    assert cache.begin(ids + 60) == 0
    assert twin.begin(ids) == 1999
    checked(twin)
    checked(cache, fork)


def test_requests_at_a_time_store_into_one_tree():
    cache = PrefixCache(llama(), block_size=SIZE)
    ids = drawn(1, 9)
    request(cache.fork(), ids)
    one, other = cache.fork(), cache.fork()
    longer = torch.cat((ids, drawn(1, 4)), 1), torch.cat((ids, drawn(1, 4)), 1)
    for fork, whole in zip((one, other), longer, strict=True):
        assert fork.begin(whole) == 9
        feed(fork, whole)
    for fork, whole in zip((one, other), longer, strict=True):
        fork.commit(whole)
        assert contents(fork) == whole.tolist()
    checked(cache, one, other)


# ---- whatever happens


class Requests(RuleBasedStateMachine):
    """Requests of a few token ids, side by side in forks of one cache, beside plain lists of their tokens."""

    caches: list[tuple[PrefixCache, list[list[int]]]]

    @initialize(limit=st.sampled_from([None, 9, 40]), blocks=st.sampled_from([None, 24]))
    def begin(self, limit: int | None, blocks: int | None) -> None:
        self.caches = [(PrefixCache(llama(), block_size=3, num_blocks=blocks, max_tokens=limit), [])]
        self.limit = limit

    def tokens(self, data: st.DataObject, batch: int) -> list[list[int]]:
        length = data.draw(st.integers(1, 12))
        return data.draw(
            st.lists(st.lists(st.integers(1, 2), min_size=length, max_size=length), min_size=batch, max_size=batch)
        )

    def put(self, which: int, rows: list[list[int]]) -> None:
        self.caches[which % len(self.caches)] = (self.caches[which % len(self.caches)][0], rows)

    @rule(which=st.integers(0, 3), batch=st.integers(1, 3), data=st.data())
    def ask(self, which: int, batch: int, data: st.DataObject) -> None:
        cache, _ = self.caches[which % len(self.caches)]
        rows = self.tokens(data, batch)
        reused = cache.begin(torch.tensor(rows))
        assert reused < len(rows[0])
        self.put(which, [row[:reused] for row in rows])
        assert contents(cache) == [row[:reused] for row in rows]
        self.write(which, rows)

    @precondition(lambda self: any(rows for _, rows in self.caches))
    @rule(which=st.integers(0, 3), data=st.data())
    def go_on(self, which: int, data: st.DataObject) -> None:
        _, rows = self.caches[which % len(self.caches)]
        more = self.tokens(data, len(rows))
        self.write(which, [row + new for row, new in zip(rows, more, strict=True)])

    def write(self, which: int, rows: list[list[int]]) -> None:
        cache, before = self.caches[which % len(self.caches)]
        if not rows:
            return
        try:
            feed(cache, torch.tensor(rows))
        except OutOfBlocks:
            assert contents(cache) == before
            return
        self.put(which, rows)

    @rule(which=st.integers(0, 3))
    def store(self, which: int) -> None:
        cache, rows = self.caches[which % len(self.caches)]
        if rows:
            cache.commit(torch.tensor(rows, dtype=torch.long).reshape(len(rows), -1))
            if not self.limit:
                assert all(cache.tree.match(row)[0] == len(row) for row in rows)

    @rule(which=st.integers(0, 3), count=st.integers(0, 5))
    def crop(self, which: int, count: int) -> None:
        cache, rows = self.caches[which % len(self.caches)]
        count = min(count, cache.get_seq_length())
        if rows and count:
            cache.crop(-count)
            self.put(which, [row[: len(row) - count] for row in rows])

    @rule(which=st.integers(0, 3), rows=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def choose(self, which: int, rows: list[int]) -> None:
        cache, before = self.caches[which % len(self.caches)]
        if before and before[0]:
            rows = [row % len(before) for row in rows]
            cache.batch_select_indices(torch.tensor(rows))
            self.put(which, [before[row] for row in rows])

    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        if len(self.caches) < 4:
            cache, rows = self.caches[which % len(self.caches)]
            self.caches.append((cache.fork(), rows))

    @precondition(lambda self: len(self.caches) > 1)
    @rule()
    def drop(self) -> None:
        self.caches.pop()

    @rule()
    def duplicate(self) -> None:
        cache, rows = self.caches[0]
        self.caches = [(copy.deepcopy(cache), rows)]

    @invariant()
    def every_sequence_holds_its_tokens_and_references_add_up(self) -> None:
        for cache, rows in self.caches:
            assert contents(cache) == rows or not any(rows)
        checked(*(cache for cache, _ in self.caches))
        tree = self.caches[0][0].tree
        assert tree.stored_tokens <= (self.limit or tree.stored_tokens)
        for block, node in tree.nodes.items():
            for tokens, child in node.children.items():
                assert tree.nodes[child].tokens == tokens
                assert tree.nodes[child].parent == block
                assert not any(one != tokens and one[: len(tokens)] == tokens for one in node.children)
            assert not node.children or len(node.tokens) in (0, 3)


Requests.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
)
TestRequests = Requests.TestCase
