"""Cutting batches into trajectories, and gathering whole trajectories over batches."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from gleanrl import ConfigError
from gleanrl.engine.padding import end_flags
from gleanrl.engine.trajectories import WholeTrajectories, split_trajectories

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing torchrl warns about its own classes
    from torchrl.collectors.utils import split_trajectories as torchrl_split


def make_batch(ids, ended=None, start=1):
    """A batch over ``ids``; every frame is numbered, from ``start`` on."""
    ids = torch.as_tensor(ids)
    ended = torch.zeros_like(ids, dtype=torch.bool) if ended is None else torch.as_tensor(ended)
    number = torch.arange(start, start + ids.numel(), dtype=torch.float32).reshape(ids.shape)
    return TensorDict(
        {
            "observation": number.unsqueeze(-1).repeat_interleave(3, -1),
            "pixels": number.to(torch.uint8),
            "agents": TensorDict(
                {"action": number[..., None, None].expand(*ids.shape, 2, 4).clone()},
                batch_size=(*ids.shape, 2),
            ),
            "collector": {"traj_ids": ids},
            "next": {
                "reward": number.unsqueeze(-1),
                "done": ended.unsqueeze(-1),
                "terminated": ended.unsqueeze(-1).clone(),
            },
        },
        batch_size=ids.shape,
        names=[None] * (ids.ndim - 1) + ["time"],
    )


@tensorclass
class Pose:
    position: torch.Tensor


def assert_same(ours, theirs):
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert ours[key].dtype == theirs[key].dtype
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


@st.composite
def flags(draw, max_ndim=2):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_ndim))
    shape[-1] = draw(st.integers(1, 12))
    bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return torch.tensor(bits).reshape(shape)


def ids_from(ended, first=0):
    """Trajectory ids that change after every end and with every row."""
    starts = torch.ones_like(ended)
    starts[..., 1:] = ended[..., :-1]
    return starts.reshape(-1).cumsum(0).reshape(ended.shape) - 1 + first


@settings(max_examples=60, deadline=None)
@given(flags())
def test_rows_equal_torchrl_given_ids(ended):
    batch = make_batch(ids_from(ended, 5), ended)
    assert_same(split_trajectories(batch), torchrl_split(batch))


@settings(max_examples=60, deadline=None)
@given(flags())
def test_rows_equal_torchrl_given_only_end_flags(ended):
    batch = make_batch(ids_from(ended), ended).exclude("collector")
    assert_same(split_trajectories(batch), torchrl_split(batch))


@settings(max_examples=40, deadline=None)
@given(flags(max_ndim=3))
def test_the_valid_frames_read_in_order_are_the_batch(ended):
    batch = make_batch(ids_from(ended), ended)
    out = split_trajectories(batch)
    mask = out["collector", "mask"]
    assert out.ndim == 2
    for key in batch.keys(True, True):
        flat = batch[key].flatten(0, ended.ndim - 1)
        torch.testing.assert_close(out[key][mask], flat, rtol=0, atol=0)
        assert not out[key][~mask].any()


@settings(max_examples=40, deadline=None)
@given(flags())
def test_splitting_twice_changes_nothing(ended):
    once = split_trajectories(make_batch(ids_from(ended), ended))
    assert_same(split_trajectories(once), once)


def test_an_id_that_comes_back_starts_a_row_of_its_own():
    out = split_trajectories(make_batch([7, 7, 3, 7, 7, 7]))
    assert out["pixels"].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert out["collector", "traj_ids"].tolist() == [[7, 7, 0], [3, 0, 0], [7, 7, 7]]


def test_frames_never_collected_are_left_out():
    out = split_trajectories(make_batch([[4, 4, 9, -1], [5, -1, -1, -1]]))
    assert out["pixels"].tolist() == [[1, 2], [3, 0], [5, 0]]
    assert out["collector", "mask"].tolist() == [[True, True], [True, False], [True, False]]


def test_an_existing_mask_is_honoured():
    batch = make_batch([[4, 4, 4], [5, 5, 5]])
    batch["collector", "mask"] = torch.tensor([[True, True, False], [True, False, False]])
    assert split_trajectories(batch)["pixels"].tolist() == [[1, 2], [4, 0]]


def test_a_batch_without_any_valid_frame_gives_no_rows():
    out = split_trajectories(make_batch([[-1, -1], [-1, -1]]))
    assert out.shape == (0, 0)
    assert out["observation"].shape == (0, 0, 3)


def test_rows_of_a_three_dimensional_batch_are_told_apart_without_ids():
    batch = make_batch(torch.zeros(2, 3, 4, dtype=torch.int64)).exclude("collector")
    out = split_trajectories(batch)
    assert out.shape == (6, 4)
    assert out["traj_ids"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_nested_end_flags_tell_trajectories_apart():
    ended = torch.zeros(4, 2, 1, dtype=torch.bool)
    ended[1, 1] = True
    batch = TensorDict({"x": torch.arange(1, 5), "next": {"agents": {"terminated": ended}}}, [4])
    assert split_trajectories(batch)["x"].tolist() == [[1, 2], [3, 4]]
    assert split_trajectories(batch, done_key=("agents", "terminated"))["x"].shape == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "mask_key"),
    [
        ({"prefix": "meta"}, ("meta", "mask")),
        ({"trajectory_key": ("meta", "traj_ids")}, ("meta", "mask")),
        ({"trajectory_key": "episode"}, ("mask",)),
    ],
)
def test_the_mask_stands_beside_the_ids(arguments, mask_key):
    batch = make_batch([0, 0, 1])
    batch["meta"] = {"traj_ids": torch.tensor([0, 1, 1])}
    batch["episode"] = torch.tensor([0, 1, 1])
    ours, theirs = split_trajectories(batch, **arguments), torchrl_split(batch, **arguments)
    assert mask_key in ours.keys(True, True)
    assert_same(ours, theirs)


def test_the_input_stays_as_it_was_and_the_name_of_time_is_kept():
    batch = make_batch([0, 0, 1])
    before = batch.clone()
    assert split_trajectories(batch).names == [None, "time"]
    assert split_trajectories(make_batch([3, 3]).exclude("collector")).shape == (1, 2)
    assert_same(batch, before)


def test_entries_that_are_not_tensors_repeat_their_last_value():
    batch = make_batch([0, 0, 0, 1])
    batch["task"] = NonTensorData("reach", batch_size=[4])
    batch["word"] = NonTensorStack("a", "b", "c", "d")
    out = split_trajectories(batch)
    assert out["word"] == [["a", "b", "c"], ["d", "d", "d"]]
    assert out["task"] == "reach"
    even = split_trajectories(batch[[0, 1, 3, 3]])
    assert even["word"] == [["a", "b"], ["d", "d"]]


def test_tensorclasses_stay_what_they_are():
    batch = make_batch([0, 0, 1])
    batch["pose"] = Pose(position=torch.arange(1, 4), batch_size=[3])
    pose = split_trajectories(batch)["pose"]
    assert isinstance(pose, Pose)
    assert pose.position.tolist() == [[1, 2], [3, 0]]


def test_lazily_stacked_frames_are_split_like_dense_ones():
    batch = make_batch([0, 0, 1])
    lazy = LazyStackedTensorDict.lazy_stack(batch.unbind(0))
    assert_same(split_trajectories(lazy), split_trajectories(batch))


def test_frames_of_changing_shape_are_refused():
    frames = [TensorDict({"x": torch.zeros(n), "traj_ids": torch.tensor(0)}, []) for n in (1, 2)]
    with pytest.raises(ConfigError, match="shape changes from frame to frame"):
        split_trajectories(LazyStackedTensorDict.lazy_stack(frames))


def test_missing_ids_and_flags_are_named():
    batch = TensorDict({"x": torch.zeros(2), "next": {"x": torch.zeros(2)}}, [2])
    with pytest.raises(ConfigError, match="none of 'done', 'terminated' and 'truncated'"):
        split_trajectories(batch)
    with pytest.raises(ConfigError, match=r"neither trajectory ids nor \('next', 'over'\)"):
        split_trajectories(batch, done_key="over")
    with pytest.raises(ConfigError, match="no 'next' entry"):
        split_trajectories(batch.select("x"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [True, torch.strided, torch.jagged])
def test_nested_rows_hold_the_frames_of_the_padded_ones(layout):
    batch = make_batch([0, 0, 1, 2, 2, 2])
    nested, padded = split_trajectories(batch, as_nested=layout), split_trajectories(batch)
    mask = padded["collector", "mask"]
    assert nested["observation"].is_nested
    for key in batch.keys(True, True):
        rows = nested[key].unbind()
        for row, frames, valid in zip(rows, padded[key], mask, strict=True):
            torch.testing.assert_close(row, frames[valid], rtol=0, atol=0)
    assert nested["observation"].layout == (
        torch.jagged if layout is torch.jagged else torch.strided
    )


def test_nested_rows_refuse_what_is_not_a_tensor():
    batch = make_batch([0, 0, 1])
    batch["word"] = NonTensorStack("a", "b", "c")
    with pytest.raises(ConfigError, match="as_nested cannot be set"):
        split_trajectories(batch, as_nested=torch.jagged)


def test_end_flags_are_fresh_memory():
    batch = make_batch([0, 0], [False, True])
    end_flags(batch).fill_(True)
    assert batch["next", "done"].sum() == 1


# -- whole trajectories ----------------------------------------------------------------------------


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
    pending = assembler.pending
    assert (pending.complete, pending.partial, pending.frames) == (2, 2, 9)
    assert assembler.frames_discarded == 3


def test_trajectories_come_whole_in_the_order_in_which_they_ended():
    assembler = WholeTrajectories(2)
    assembler.push(make_batch([[0, 0, 2], [1, 1, 1]], [[False, True, False], [False] * 3]))
    assert assembler.pop() is None
    assert assembler.pending.complete == 1
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
    pending = assembler.pending
    assert (pending.complete, pending.partial, pending.frames) == (0, 1, 1)


def test_ends_at_the_same_time_are_ordered_by_id():
    assembler = WholeTrajectories(3, "cat")
    ids = [[9, 9, 12], [3, 3, 3], [5, 5, 14]]
    ended = [[False, True, False], [True, False, True], [False, True, False]]
    assembler.push(make_batch(ids, ended))
    out = assembler.pop()
    assert out["collector", "traj_ids"].tolist() == [3, 5, 5, 9, 9]
    assert out.names == ["time"]


@settings(max_examples=30, deadline=None)
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


def test_memory_follows_what_is_pending_and_not_what_went_through():
    assembler = WholeTrajectories(50)
    ended = torch.ones(2, 50, dtype=torch.bool)
    ended[0] = False
    for k in range(200):
        ids = torch.arange(100 * k, 100 * k + 100).reshape(2, 50)
        ids[0] = 10**6
        assembler.push(make_batch(ids, ended))
        assert assembler.pop().shape == (50, 1)
    stored = sum(chunk.shape[0] for chunk in assembler._chunks.values())
    assert assembler.pending.frames == 200 * 50
    assert stored <= 2 * 200 * 50 + 100
    assert len(assembler._chunks) <= 65
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
    assert assembler.flush() == 3
    pending = assembler.pending
    assert (pending.complete, pending.partial, pending.frames) == (1, 0, 2)
    assembler.push(make_batch([1, 1], [False, True], 9))
    assert assembler.pop()["pixels"].tolist() == [[1, 2], [9, 10]]
    assembler.push(make_batch([5, 6], [True, False]))
    assert assembler.reset() == 2
    assert assembler.pending.frames == 0
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
        WholeTrajectories(0)
    with pytest.raises(ConfigError, match="traj_format \\('flat'\\)"):
        WholeTrajectories(1, "flat")
    with pytest.raises(ConfigError, match=r"need \('collector', 'traj_ids'\)"):
        WholeTrajectories(1).push(make_batch([0]).exclude("collector"))
