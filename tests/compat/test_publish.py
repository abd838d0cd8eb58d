"""Published figures: several runs become one, with their spread and where they come from."""

import json

import pytest
from benchmarks import publish
from tools import torchrl_scripts


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


def scripts(tmp_path, monkeypatch, *runs):
    """Take runs of scripts, each on a day with frames per second; return the published rows."""
    monkeypatch.setattr(publish, "PUBLISHED", tmp_path)
    origin = {key: run(1.0, 1, "a")[key] for key in ("commit", "versions", "machine")}
    for day, rows in enumerate(runs, 1):
        found = [
            {"script": script, **{k: {"ended": "limit", "collecting": v} for k, v in rates.items()}}
            for script, rates in rows.items()
        ]
        (tmp_path / "run").write_text(
            json.dumps({**origin, "created": f"2026-01-0{day}", "scripts": found})
        )
        publish.take("scripts", [tmp_path / "run"])
    rows = json.loads((tmp_path / "scripts.json").read_text())["scripts"]
    return {row["script"]: (row["created"], row.get("gleanrl")) for row in rows}


BOTH = {"gleanrl": 4.0, "torchrl": 2.0}


def test_scripts_that_were_not_run_again_stay_as_they_are(tmp_path, monkeypatch):
    runs = {"a": BOTH, "b": BOTH}, {"a": {}, "b": BOTH, "c": {}}
    rows = scripts(tmp_path, monkeypatch, *runs)
    ours = {"ended": "limit", "collecting": 4.0}
    days = {"a": ("2026-01-01", ours), "b": ("2026-01-02", ours), "c": ("2026-01-02", None)}
    assert rows == days
    assert "2.0 times as fast in the median" in publish.table("scripts_median")


def test_a_run_of_one_library_is_not_published(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="take runs of both libraries"):
        scripts(tmp_path, monkeypatch, {"a": BOTH}, {"a": {"gleanrl": 8.0}})
    assert scripts(tmp_path, monkeypatch)["a"][0] == "2026-01-01"


def test_scripts_published_in_one_piece_keep_where_they_come_from(tmp_path, monkeypatch):
    scripts(tmp_path, monkeypatch, {"a": BOTH})
    (tmp_path / "run").rename(tmp_path / "scripts.json")
    assert set(scripts(tmp_path, monkeypatch, {}, {"b": BOTH})) == {"a", "b"}
    assert "2026-01-01 and 2026-01-02" in publish.table("scripts")


def test_no_script_with_both_libraries_has_no_median(tmp_path, monkeypatch):
    scripts(tmp_path, monkeypatch, {"a": {}})
    assert publish.table("scripts_median") == "No script was measured with both libraries.\n"


def test_an_expression_that_cannot_be_read_is_an_error_of_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        torchrl_scripts.main([".", "-k", "("])
    assert "-k (: missing )" in capsys.readouterr().err
