"""Cutting batches into trajectories."""

from __future__ import annotations

import warnings

import pytest
import torch
from frames_rig import assert_same, flags, ids_from, make_batch
from hypothesis import given
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass
from tests.covering import examples

from gleanrl import ConfigError
from gleanrl.collectors.utils import split_trajectories

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing torchrl warns about its own classes
    from torchrl.collectors.utils import split_trajectories as torchrl_split


@tensorclass
class Pose:
    position: torch.Tensor


@examples(60)
@given(flags())
def test_rows_equal_torchrl_given_ids(ended):
    batch = make_batch(ids_from(ended, 5), ended)
    assert_same(split_trajectories(batch), torchrl_split(batch))


@examples(60)
@given(flags())
def test_rows_equal_torchrl_given_only_end_flags(ended):
    batch = make_batch(ids_from(ended), ended).exclude("collector")
    assert_same(split_trajectories(batch), torchrl_split(batch))


@examples(40)
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


@examples(40)
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
    with pytest.raises(ConfigError, match="cannot hold 'x': its shape changes"):
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


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_numbers_of_every_kind_are_padded(dtype):
    batch = make_batch([0, 0, 1, 1, 1])
    batch["kind"] = batch["observation"][:, 0].to(torch.int64).to(dtype)
    rows = split_trajectories(batch)
    assert rows["kind"].dtype == dtype
    expected = rows["observation"][..., 0].to(torch.int64).to(dtype)
    assert rows["kind"].tolist() == expected.tolist()
