"""Every cache, driven through random operations beside plain tensors that are cut and joined by hand."""

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cache_cases import CONFIGURATIONS, STATEFUL, Driven
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from course_lib.kv_cache import KVCache

HEADS, HEAD_DIM = 2, 8


@dataclass
class Plain:
    """What a cache should hold: keys and values of every token that ever came, and how many a window has dropped of each layer."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    dropped: list[int]

    def copy(self) -> "Plain":
        return Plain(list(self.keys), list(self.values), list(self.dropped))

    @property
    def seen(self) -> int:
        return self.keys[0].shape[2]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def select(self, rows: torch.Tensor) -> None:
        self.keys = [tensor[rows] for tensor in self.keys]
        self.values = [tensor[rows] for tensor in self.values]


def machine(driven: Driven, configuration: str) -> type[RuleBasedStateMachine]:
    config = CONFIGURATIONS[configuration]()

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pairs: list[tuple[KVCache, Plain | None]] = []
            self.recording = False

        @initialize(seed=st.integers(0, 2**32 - 1), recording=st.booleans())
        def begin(self, seed: int, recording: bool) -> None:
            self.random = torch.Generator().manual_seed(seed)
            cache = driven.empty(config)
            self.windows = [getattr(layer, "window", None) for layer in cache.layers]
            self.recording = recording
            if recording:
                cache.activate_past_recording()
            self.pairs = [(cache, None)]

        def draw(self, *shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=self.random) * 2 - 1

        def close(self, found: torch.Tensor | None, expected: torch.Tensor) -> None:
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=0, atol=driven.tolerance)

        @rule(which=st.integers(0, 5), length=st.integers(0, 13), batch=st.integers(0, 3))
        def update(self, which: int, length: int, batch: int) -> None:
            cache, plain = self.pairs[which % len(self.pairs)]
            if plain is None:
                none = [torch.empty(batch, HEADS, 0, HEAD_DIM)] * len(cache.layers)
                plain = Plain(list(none), list(none), [0] * len(cache.layers))
            plain = plain.copy()
            before, total = plain.seen, plain.seen + length
            for index, window in enumerate(self.windows):
                kept = before if window is None else min(before, window - 1)
                size, offset = cache.get_mask_sizes(length, index)
                assert offset == before - kept
                assert size >= kept + length  # more where slots are shown that are not filled yet
                new = [self.draw(plain.batch, HEADS, length, HEAD_DIM) for _ in range(2)]
                found = cache.update(new[0].clone(), new[1].clone(), index)
                plain.keys[index] = torch.cat((plain.keys[index], new[0]), 2)
                plain.values[index] = torch.cat((plain.values[index], new[1]), 2)
                for side, whole in zip(found, (plain.keys[index], plain.values[index]), strict=True):
                    assert side.shape[2] == size
                    self.close(side[:, :, : kept + length], whole[:, :, total - kept - length :])
                if window is not None and not self.recording:
                    plain.dropped[index] = max(plain.dropped[index], total - (window - 1))
            self.pairs[which % len(self.pairs)] = (cache, plain)

        @precondition(lambda self: any(plain for _, plain in self.pairs))
        @rule(which=st.integers(0, 5), share=st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]))
        def crop(self, which: int, share: float) -> None:
            cache, plain = self.pairs[which % len(self.pairs)]
            if plain is None:
                return
            count = round(plain.seen * share)
            back = plain.seen - count
            possible = all(
                window is None or plain.dropped[index] <= max(back - (window - 1), 0) or not count
                for index, window in enumerate(self.windows)
            )
            if not possible:
                with pytest.raises(ValueError, match="window"):
                    copy.deepcopy(cache).crop(-count)
                return
            cache.crop(-count)
            plain.keys = [tensor[:, :, :back] for tensor in plain.keys]
            plain.values = [tensor[:, :, :back] for tensor in plain.values]
            for index, window in enumerate(self.windows):
                if window is not None:
                    plain.dropped[index] = max(min(plain.dropped[index], back), back - (window - 1), 0)

        @precondition(lambda self: any(plain for _, plain in self.pairs))
        @rule(which=st.integers(0, 5), kind=st.sampled_from(["beams", "repeat", "mask", "some"]), data=st.data())
        def rows(self, which: int, kind: str, data: st.DataObject) -> None:
            cache, plain = self.pairs[which % len(self.pairs)]
            if plain is None or plain.batch > 8:
                return
            batch = plain.batch
            if kind == "beams":
                rows = torch.tensor(
                    data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)) if batch else []
                )
                cache.reorder_cache(rows.long())
                plain.select(rows.long())
            elif kind == "repeat":
                cache.batch_repeat_interleave(2)
                plain.select(torch.arange(batch).repeat_interleave(2))
            elif kind == "mask":
                mask = torch.tensor(
                    data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)), dtype=torch.bool
                )
                cache.batch_select_indices(mask)
                plain.select(mask)
            elif batch:
                rows = torch.tensor(data.draw(st.lists(st.integers(-batch, batch - 1), max_size=3))).long()
                cache.batch_select_indices(rows)
                plain.select(rows)

        @rule(which=st.integers(0, 5))
        def fork(self, which: int) -> None:
            if len(self.pairs) < 4:
                cache, plain = self.pairs[which % len(self.pairs)]
                self.pairs.append((copy.deepcopy(cache), plain and plain.copy()))

        @precondition(lambda self: not self.recording)
        @rule(which=st.integers(0, 5))
        def through_a_file(self, which: int) -> None:
            cache, plain = self.pairs[which % len(self.pairs)]
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "cache")
                self.pairs[which % len(self.pairs)] = (type(cache).load(Path(folder) / "cache", config), plain)

        @rule(which=st.integers(0, 5))
        def reset(self, which: int) -> None:
            cache, _ = self.pairs[which % len(self.pairs)]
            cache.reset()
            self.pairs[which % len(self.pairs)] = (cache, None)

        def teardown(self) -> None:
            for cache, plain in self.pairs:
                assert cache.get_seq_length() == (plain.seen if plain else 0)
                if plain is None:
                    continue
                places = getattr(cache, "places", {"memory": cache.nbytes})
                assert sum(places.values()) >= cache.used_nbytes
                # Read all of it once more: whatever was done to one cache has left the others alone.
                for index, window in enumerate(self.windows):
                    kept = plain.seen if window is None else min(plain.seen, window - 1)
                    none = torch.empty(plain.batch, HEADS, 0, HEAD_DIM)
                    keys, values = cache.update(none, none, index)
                    self.close(keys[:, :, :kept], plain.keys[index][:, :, plain.seen - kept :])
                    self.close(values[:, :, :kept], plain.values[index][:, :, plain.seen - kept :])

    return Machine


@pytest.mark.parametrize(
    ("name", "configuration"), [(name, one) for name, driven in STATEFUL.items() for one in driven.configurations]
)
def test_whatever_happens_a_cache_holds_what_plain_tensors_hold(name, configuration):
    run_state_machine_as_test(
        machine(STATEFUL[name], configuration),
        settings=settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
