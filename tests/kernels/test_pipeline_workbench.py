"""The study of pipelines."""

import statistics

import pytest
import studies


@pytest.fixture(scope="module")
def study():
    return studies.load("pipeline_parallel")


def test_stages_in_processes_wait_as_recorded(study, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(study, "MODELS", ("smollm2-135m",))
    runs = studies.run(study, monkeypatch, tmp_path, "--model", "course/rope", "--tokens", "5", "--in-flight", "1,3")
    maps, one, three = runs[:-2], runs[-2], runs[-1]
    assert [sum(share["layers"] for share in run["shares"]) for run in maps] == [30] * len(study.CARDS)
    assert one["layers"] == three["layers"] == [[0, 2], [2, 4]]
    for run, requests in ((one, 1), (three, 3)):
        assert run["in_flight"] == requests
        when = {tuple(slot[:3]): slot[3:] for slot in run["slots"]}
        tokens, order = (1, 2, 3, 4), range(requests)
        assert when.keys() == {(stage, request, token) for stage in (0, 1) for request in order for token in tokens}
        for stage, request, token in when.keys() - {(0, request, 1) for request in order}:
            before = (0, request, token) if stage else (1, request, token - 1)
            assert when[stage, request, token][0] >= when[before][1], "it waits for what it needs"
    # One request is in one stage at a time, however fast the machine is.
    assert statistics.mean(one["idle"]) >= 0.5
    assert statistics.mean(one["predicted_idle"]) >= 0.5
    assert one["transfer_seconds"] > 0
    shown = capsys.readouterr().out
    assert "course/rope in 2 stages" in shown
    assert "smollm2-135m" in shown


@pytest.mark.parametrize(
    "wrong", [["--tokens", "1"], ["--in-flight", "2,1"], ["--in-flight", "1,9"], ["--in-flight", "0"]]
)
def test_options_out_of_range_are_refused(study, monkeypatch, capsys, wrong):
    studies.refuses(study, monkeypatch, capsys, *wrong)
