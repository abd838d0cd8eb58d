"""Gathering whole trajectories over batches, and copies of their end flags."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from frames_rig import assert_same, ids_from, make_batch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack
from tests.covering import examples

from gleanrl import Collector, ConfigError
from gleanrl.collectors.utils import split_trajectories
from gleanrl.engine.whole_trajectories import WholeTrajectories, end_flags


def test_end_flags_are_fresh_memory():
    batch = make_batch([0, 0], [False, True])
    end_flags(batch).fill_(True)
    assert batch["next", "done"].sum() == 1


def stream(ended, cuts):
    """Cut one ``[P, T]`` stream of trajectories into batches along time."""
    whole = make_batch(ids_from(ended), ended)
    edges = [0, *cuts, ended.shape[-1]]
    return [whole[:, a:b] for a, b in itertools.pairwise(edges)]


def drain(assembler, batches):
    out = []
    for batch in batches:
        assembler.push(batch.clone())
        while (td := assembler.pop()) is not None:
            out.append(td)
    return out


def test_a_trajectory_that_its_environment_left_is_dropped_and_counted():
    assembler = WholeTrajectories(1)
    assembler.belong_to(2)
    assembler.push(make_batch([[0, 0, 0], [1, 1, 1]], [[False] * 3, [False] * 3]))
    # A worker was lost: its environment, number 1, goes on with a trajectory far away.
    assembler.push(make_batch([[0, 0, 2], [1001, 1001, 1003]], [[False, True, False]] * 2))
    assert assembler.frames_discarded == 3
    assembler.flush()
    assert assembler.frames_discarded == 3 + 2  # of trajectories that run
    assembler.reset()
    assert assembler.frames_discarded == 5 + 7  # of those that have ended


def test_trajectories_come_whole_in_the_order_in_which_they_ended():
    assembler = WholeTrajectories(2)
    assembler.push(make_batch([[0, 0, 2], [1, 1, 1]], [[False, True, False], [False] * 3]))
    assert assembler.pop() is None
    assembler.push(
        make_batch([[2, 2, 4], [1, 3, 3]], [[False, True, False], [True, False, True]], 7)
    )
    out = assembler.pop()
    assert out["pixels"].tolist() == [[1, 2, 0, 0], [4, 5, 6, 10]]
    assert out["collector", "mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert out.names == [None, "time"]
    out = assembler.pop()
    assert out["pixels"].tolist() == [[3, 7, 8], [11, 12, 0]]
    assert assembler.pop() is None
    assembler.flush()
    assert assembler.frames_discarded == 1
    assembler.reset()
    assert assembler.frames_discarded == 1


def test_ends_at_the_same_time_are_ordered_by_id():
    assembler = WholeTrajectories(3, "cat")
    ids = [[9, 9, 12], [3, 3, 3], [5, 5, 14]]
    ended = [[False, True, False], [True, False, True], [False, True, False]]
    assembler.push(make_batch(ids, ended))
    out = assembler.pop()
    assert out["collector", "traj_ids"].tolist() == [3, 5, 5, 9, 9]
    assert out.names == ["time"]


@examples(30)
@given(
    st.integers(1, 4).flatmap(
        lambda envs: st.lists(
            st.lists(st.booleans(), min_size=envs, max_size=envs), min_size=8, max_size=40
        )
    ),
    st.sets(st.integers(1, 7)),
    st.integers(1, 4),
)
def test_cutting_the_stream_elsewhere_changes_no_trajectory(ended, cuts, number):
    ended = torch.tensor(ended).T
    whole = split_trajectories(make_batch(ids_from(ended), ended))
    complete = whole["next", "done"].any(1).squeeze(-1)
    batches = stream(ended, sorted(cuts))
    padded = drain(WholeTrajectories(number), batches)
    flat = drain(WholeTrajectories(number, "cat"), batches)
    assert len(padded) == int(complete.sum()) // number
    expected = {
        int(row["collector", "traj_ids"][0]): row[row["collector", "mask"]]
        for row in whole[complete]
    }
    for rows, frames in zip(padded, flat, strict=True):
        mask = rows["collector", "mask"]
        assert_same(rows[mask].exclude(("collector", "mask")), frames)
        for row in rows:
            row = row[row["collector", "mask"]]
            assert_same(row, expected.pop(int(row["collector", "traj_ids"][0])))


def test_what_is_kept_is_copied():
    batch = make_batch([0, 0], [False, False])
    assembler = WholeTrajectories(1)
    assembler.push(batch)
    batch.zero_()
    assembler.push(make_batch([0, 1], [True, False], 3))
    assert assembler.pop()["pixels"].tolist() == [[1, 2, 3]]


def tensors_nbytes():
    """The memory of all tensors there are."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_memory_follows_what_is_pending_and_not_what_went_through():
    before, assembler = tensors_nbytes(), WholeTrajectories(50)
    ended = torch.ones(2, 50, dtype=torch.bool)
    ended[0] = False
    for k in range(200):
        ids = torch.arange(100 * k, 100 * k + 100).reshape(2, 50)
        ids[0] = 10**6
        assembler.push(make_batch(ids, ended))
        assert assembler.pop().shape == (50, 1)
    frame = sum(value.nbytes for value in make_batch([0]).values(True, True))
    assert tensors_nbytes() - before <= frame * (2 * 200 * 50 + 200)
    ended[0, -1] = True
    assembler.push(make_batch(ids, ended))
    out = [assembler.pop()["collector", "mask"].sum(1)]
    ids[0] = 0
    assembler.push(make_batch(ids, ended))
    out.append(assembler.pop()["collector", "mask"].sum(1))
    assert torch.cat(out).max() == 201 * 50


def test_nested_flags_end_nothing_where_the_root_has_flags():
    batch = make_batch([0, 0, 0], [False, False, True])
    batch["next", "agents"] = {"done": torch.ones(3, 2, 1).bool()}
    assembler = WholeTrajectories(1)
    assembler.push(batch)
    assert assembler.pop().shape == (1, 3)


def test_truncation_alone_and_nested_flags_end_a_trajectory():
    batch = make_batch([0, 0, 1])
    flags = {"done", "terminated", "truncated"}
    batch["next"] = batch["next"].exclude(*flags)
    batch["next", "agents"] = {
        "truncated": torch.tensor([[[0], [0]], [[0], [1]], [[0], [0]]]).bool()
    }
    assembler = WholeTrajectories(1)
    assembler.push(batch)
    assert assembler.pop().shape == (1, 2)


def test_an_end_with_the_same_id_after_it_still_ends():
    assembler = WholeTrajectories(2)
    assembler.push(make_batch([0, 0, 0, 0], [False, True, False, True]))
    assert assembler.pop()["pixels"].tolist() == [[1, 2], [3, 4]]


def test_frames_never_collected_are_not_pushed():
    assembler = WholeTrajectories(1, "cat")
    assembler.push(make_batch([[0, 0, -1], [-1, -1, -1]]))
    assembler.push(make_batch([[-1, -1, -1]]))
    assembler.push(make_batch([[0, 2, 2]], [[True, False, False]], 11))
    assert assembler.pop()["pixels"].tolist() == [1, 2, 11]


def test_flush_drops_what_runs_and_reset_drops_everything():
    assembler = WholeTrajectories(2)
    assembler.push(make_batch([0, 0, 1, 1, 1], [False, True, False, False, False]))
    assembler.flush()
    assert assembler.frames_discarded == 3
    assembler.push(make_batch([1, 1], [False, True], 9))
    assert assembler.pop()["pixels"].tolist() == [[1, 2], [9, 10]]
    assembler.push(make_batch([5, 6], [True, False]))
    assembler.reset()
    assembler.reset()
    assert assembler.frames_discarded == 5


def test_entries_that_are_not_tensors_and_ragged_frames_pass_through():
    batch = make_batch([0, 1, 1], [True, False, True])
    batch["word"] = NonTensorStack("a", "b", "c")
    assembler = WholeTrajectories(2)
    assembler.push(batch)
    assert assembler.pop()["word"] == [["a", "a"], ["b", "c"]]
    ragged = [batch[i].set("x", torch.zeros(i + 1)) for i in range(3)]
    assembler = WholeTrajectories(2, "cat")
    assembler.push(LazyStackedTensorDict.lazy_stack(ragged))
    assert [frame["x"].shape[0] for frame in assembler.pop().unbind(0)] == [1, 2, 3]


def test_wrong_use_is_named():
    with pytest.raises(ConfigError, match=r"trajs_per_batch \(0\)"):
        Collector("CartPole-v1", frames_per_batch=8, total_frames=8, trajs_per_batch=0)
    with pytest.raises(ConfigError, match="traj_format \\('flat'\\)"):
        Collector(
            "CartPole-v1",
            frames_per_batch=8,
            total_frames=8,
            trajs_per_batch=1,
            traj_format="flat",
        )
    with pytest.raises(ConfigError, match=r"need \('collector', 'traj_ids'\)"):
        WholeTrajectories(1).push(make_batch([0]).exclude("collector"))
