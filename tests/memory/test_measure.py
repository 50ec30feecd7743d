"""The peak is the true one, to the byte, on a CPU; and a measurement never disturbs the next."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.memory.measure import flush, peak_memory

KIB = 1024


def test_peak_is_that_of_the_worst_moment_not_the_sum_nor_the_end():
    with peak_memory("cpu") as peak:
        first = torch.empty(100 * KIB, dtype=torch.uint8)
        second = torch.empty(50 * KIB, dtype=torch.uint8)
        del first
        third = torch.empty(70 * KIB, dtype=torch.uint8)
        del second, third
    assert peak.bytes == 150 * KIB


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5000)), max_size=60))
def test_any_sequence_of_allocations_and_releases_is_counted_to_the_byte(steps):
    slots: dict[int, torch.Tensor] = {}
    sizes: dict[int, int] = {}
    expected = 0
    with peak_memory("cpu") as peak:
        for slot, size in steps:
            slots.pop(slot, None)
            sizes.pop(slot, None)
            if size % 3:
                slots[slot] = torch.empty(size, dtype=torch.float32)
                sizes[slot] = 4 * size
            expected = max(expected, sum(sizes.values()))
    assert peak.bytes == expected


def test_views_and_in_place_operations_cost_nothing():
    x = torch.randn(64, 64)
    with peak_memory("cpu") as peak:
        y = x.t()[3:].unsqueeze(0).expand(5, -1, -1)
        x.add_(x).mul_(x).relu_()
        y = y.detach()
    assert peak.bytes == 0


def test_buffers_inside_an_operator_are_seen():
    x = torch.randn(300, 40)
    with peak_memory("cpu") as peak:
        torch.nn.functional.layer_norm(x, (40,))
    # The result, and a float32 mean and reciprocal deviation for each row that the caller never sees.
    assert peak.bytes == x.nbytes + 2 * 300 * 4


def test_what_autograd_saves_is_in_the_peak():
    weight = torch.randn(128, 128, requires_grad=True)
    x = torch.randn(128, 128)
    with peak_memory("cpu") as without, torch.no_grad():
        torch.sin(torch.sin(torch.sin(x * weight)))
    with peak_memory("cpu") as with_graph:
        torch.sin(torch.sin(torch.sin(x * weight)))
    # Without a graph two activations live at once; with one, sin keeps each input: four.
    assert (without.bytes, with_graph.bytes) == (2 * x.nbytes, 4 * x.nbytes)


def test_backward_is_measured_too():
    weight = torch.randn(256, 256, requires_grad=True)
    with peak_memory("cpu") as peak:
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert peak.bytes >= weight.nbytes + 4
    assert peak.bytes <= 3 * weight.nbytes + 64


def test_memory_from_before_the_block_does_not_count():
    held = torch.empty(500 * KIB, dtype=torch.uint8)
    with peak_memory("cpu") as peak:
        del held
        kept = torch.empty(10 * KIB, dtype=torch.uint8)
    assert peak.bytes == 10 * KIB
    del kept


def test_releasing_what_an_earlier_block_allocated_does_not_lower_the_peak():
    with peak_memory("cpu"):
        kept = [torch.empty(300 * KIB, dtype=torch.uint8) for _ in range(4)]
    with peak_memory("cpu") as second:
        kept.clear()
        again = torch.empty(200 * KIB, dtype=torch.uint8)
    assert second.bytes == 200 * KIB
    del again


def test_a_mapped_file_is_not_memory_but_a_copy_of_it_is(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * KIB))
    with peak_memory("cpu") as peak:
        mapped = torch.from_file(str(file), size=16 * KIB, dtype=torch.float32)
        kept = mapped[: 4 * KIB].clone()
        del mapped
    assert peak.bytes == kept.nbytes


def test_user_annotations_do_not_hide_allocations():
    with peak_memory("cpu") as peak, torch.profiler.record_function("a step"):
        kept = torch.empty(10 * KIB, dtype=torch.uint8)
    assert peak.bytes == 10 * KIB
    del kept


def test_hundreds_of_thousands_of_events_are_all_kept():
    with peak_memory("cpu") as peak:
        kept = [torch.empty(1) for _ in range(100_000)]
    assert peak.bytes == 4 * len(kept)


def test_blocks_do_not_nest_and_the_outer_one_survives():
    with peak_memory("cpu") as outer:
        with pytest.raises(RuntimeError, match="do not nest"), peak_memory("cpu"):
            pass
        failed: list[BaseException] = []

        def elsewhere():
            try:
                with peak_memory("cpu"):
                    pass
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        kept = torch.empty(KIB, dtype=torch.uint8)
    assert len(failed) == 1
    assert outer.bytes == KIB
    with peak_memory("cpu") as after:
        pass
    assert after.bytes == 0
    del kept


def test_a_running_profiler_is_a_clear_error_and_is_left_alone():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match="one is running"), peak_memory("cpu"):
            pass
        torch.ones(3).add(1)
    assert any(event.name == "aten::add" for event in profiler.events())
    with peak_memory("cpu") as peak:
        pass
    assert peak.bytes == 0


@pytest.mark.parametrize("still_running", [False, True])
def test_a_profiler_started_inside_is_a_clear_error_and_is_left_alone(still_running):
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    peak = peak_memory("cpu")

    def profile():
        profiler.start()
        torch.ones(3).add(1)
        if not still_running:
            profiler.stop()

    with pytest.raises(RuntimeError, match="started inside this peak_memory block"), peak:
        profile()
    if still_running:
        profiler.stop()
    assert any(event.name == "aten::add" for event in profiler.events())
    with pytest.raises(RuntimeError, match="once its `with` block is left"):
        _ = peak.bytes
    with peak_memory("cpu") as after:
        torch.empty(KIB, dtype=torch.uint8)
    assert after.bytes == KIB


def test_a_profiler_started_inside_does_not_hide_the_block_s_own_error():
    def fail():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), peak_memory("cpu"):
        fail()


def test_bytes_are_there_after_an_exception_and_not_before_the_end():
    peak = peak_memory("cpu")
    with pytest.raises(RuntimeError, match="once its `with` block is left"):
        _ = peak.bytes
    with pytest.raises(ZeroDivisionError), peak:
        _ = torch.empty(KIB, dtype=torch.uint8).numel() / 0
    assert peak.bytes == KIB


@pytest.mark.parametrize("device", ["meta", "gpu", "mps", 3.5, [], False, ""])
def test_other_devices_are_one_clear_error(device):
    with pytest.raises(ValueError, match=r"device must be 'cpu' or a CUDA device .* got"):
        peak_memory(device)


def test_default_device_is_the_one_the_course_runs_on():
    with peak_memory() as peak:
        kept = torch.empty(512 * KIB, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    assert peak.bytes == kept.nbytes


def test_nothing_is_printed():
    code = (
        "import torch\nfrom course_lib.memory.measure import peak_memory\n"
        "with peak_memory('cpu') as peak:\n    torch.empty(10)\nprint(peak.bytes)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (shown.stdout.strip(), shown.stderr) == ("40", "")


def test_flush_releases_unreachable_cycles():
    class Node:
        pass

    node = Node()
    node.self, node.tensor = node, torch.empty(KIB, dtype=torch.uint8)
    alive = weakref.ref(node)
    gc.disable()
    try:
        with peak_memory("cpu") as peak:
            del node
            flush()
            kept = torch.empty(KIB // 2, dtype=torch.uint8)
        assert alive() is None
    finally:
        gc.enable()
    assert peak.bytes == kept.nbytes


def test_flush_works_before_torch_is_imported():
    code = "import sys\nfrom course_lib.memory.measure import flush\nflush()\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")
def test_cuda_peak_is_beyond_what_was_there_and_flush_makes_the_next_clean():
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    with peak_memory("cuda") as first:
        torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    flush()
    with peak_memory("cuda") as second:
        kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert (first.bytes, second.bytes) == (3 * 2**20, 2**20)
    assert torch.cuda.memory_allocated() == held.nbytes + kept.nbytes
