"""Published figures: several runs become one, with their spread and where they come from."""

import json

import pytest
from benchmarks import publish


def run(ratio, day, commit):
    found = {"median": ratio, "q1": ratio - 0.01, "q3": ratio + 0.01, "min": 0.1, "max": 9.0}
    versions = dict.fromkeys(("tensordict", "gymnasium", "torchrl", "stable-baselines3"))
    entry = {
        "title": "a case",
        "frames_per_second": {"gleanrl": round(100 * ratio), "loop": 100},
        "quartiles": {"gleanrl": [1, 2], "loop": [1, 2]},
        "ratios": {"loop": {"target": 0.9, **found, "met": ratio >= 0.9}},
        "cpu_ratios": {},
        "agreement": [],
        "skipped": {},
        "load_average": [ratio, 0, 0],
    }
    return {
        "created": f"2026-01-0{day}T10:00:00",
        "commit": commit and {"id": commit * 8, "changed": False},
        "versions": {"python": "3.11", "torch": "2.13.0", "gleanrl": "1.2", **versions},
        "machine": {"cpu": "Z80", "usable_cores": 2, "load_average": [0, 0, 0]},
        "settings": {},
        "cases": {"case": entry},
    }


@pytest.fixture
def published(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "PUBLISHED", tmp_path / "published")

    def take(*runs):
        files = [tmp_path / f"{number}.json" for number in range(len(runs))]
        for file, found in zip(files, runs, strict=True):
            file.write_text(json.dumps(found))
        publish.take("single", files)
        return publish.table("single").splitlines()

    return take


def test_several_runs_are_one_figure_with_their_spread(published):
    lines = published(run(1.81, 1, "a"), run(0.8, 2, "b"), run(0.84, 3, "b"))
    assert lines[2] == "| a case | loop | 0.84 (0.80 to 1.8) | 0.9, **missed** |"
    assert lines[4] == "Median, least and largest of 3 runs, begun in 3 hours."
    assert lines[5] == "2026-01-01 and 2026-01-02 and 2026-01-03, 2 cores of Z80, load 0.8 to 1.8."
    assert lines[6] == "GleanRL: 1.2 (aaaaaaaa), 1.2 (bbbbbbbb)."


def test_a_run_without_a_commit_says_so(published):
    lines = published(run(1.0, 1, None))
    assert lines[2] == "| a case | loop | 1.0 (0.99 to 1.0) | 0.9 |"
    assert lines[4] == "Median and quartiles of the turns of one run."
    assert lines[6] == "GleanRL: version and commit not recorded."


def test_runs_of_one_hour_do_not_claim_several(published):
    lines = published(run(1.0, 1, "a"), run(2.0, 1, "a"))
    assert lines[4] == "Median, least and largest of 2 runs."


def test_what_any_run_disagreed_in_is_published(published):
    runs = [run(1.0, 1, "a"), run(1.0, 2, "a")]
    runs[0]["cases"]["case"].update(agreement=["WRONG: loop"], skipped={"pool": "absent"})
    published(*runs)
    entry = json.loads((publish.PUBLISHED / "single.json").read_text())["cases"]["case"]
    assert entry["agreement"] == ["WRONG: loop"]
    assert entry["skipped"] == {"pool": "absent"}


def test_limits_name_the_three_that_are_furthest_from_their_target(published, monkeypatch):
    monkeypatch.setattr(publish, "SUITES", ("single",))
    found = run(0.5, 1, "a")
    found["cases"] = {
        f"{r}": {**run(r, 1, "a")["cases"]["case"], "title": f"{r}"}
        for r in (0.5, 0.2, 0.8, 0.3, 1)
    }
    publish.PUBLISHED.mkdir(exist_ok=True)
    (publish.PUBLISHED / "reasons.json").write_text(json.dumps({"single/0.2/loop": "Slow."}))
    published(found)
    lines = publish.table("limits").splitlines()
    assert lines[0] == "4 of 5 targets are missed. Furthest from the target are:"
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| 0.2", "| 0.3", "| 0.5"]
    assert lines[4].endswith("| Slow. |")
