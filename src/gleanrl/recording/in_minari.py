"""Frames in Minari's episodes, which have one observation more than actions, written by Minari."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import h5py
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from minari.serialization import deserialize_space

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import ACTION, END_FLAGS, NEXT, OBSERVATION, TRAJ_IDS, Key
from gleanrl.core.window import Array
from gleanrl.envs.factory import make_gym
from gleanrl.envs.spaces import Actions, Leaf, leaf_field, observation_leaves, rebuild, space_leaves
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFile, TensorFileError, inside
from gleanrl.recording.dataset import DATA, NO_OBSERVATION, Dataset, Metadata, Part
from gleanrl.recording.episode_stats import Episode, end_keys, episodes_of

Space: TypeAlias = gym.Space[Any]
Files: TypeAlias = Mapping[Key, TensorFile]
_BATCH_BYTES = 1 << 25
"""Episodes of so many bytes are handed to Minari at once."""


def write(dataset: Dataset, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Have Minari write all episodes into ``data`` of the directory.

    An episode that was cut, by the end of the recording say, is truncated at its last step.
    """
    episodes, shape = episodes_of(dataset), _Shape(dataset, facts)
    storage = MinariStorage.new(
        dataset.directory / DATA,
        *(shape.observation, shape.action, shape.spec),
        data_format="hdf5",
        jpeg_encoding=False,
    )
    name = dataset_id(dataset.directory)
    storage.update_metadata(
        {"dataset_id": name, "minari_version": importlib.metadata.version("minari")}
        | ({"algorithm_name": str(facts["policy"])} if facts.get("policy") else {})
    )
    row = sum(file.nbytes for file in dataset.metadata.files)
    waiting: list[EpisodeBuffer] = []
    for number, episode in enumerate(episodes):
        waiting.append(shape.buffer(episode, _seed(episode, number, facts)))
        if sum(map(len, waiting)) * row > _BATCH_BYTES or number == len(episodes) - 1:
            storage.update_episodes(waiting)
            waiting = []
    storage.update_episode_metadata(
        {"traj_id": episode.id, "cut": not episode.ended} for episode in episodes
    )
    cut = [number for number, episode in enumerate(episodes) if not episode.ended]
    return {"minari_id": name, "episodes_cut": cut, "infos": [".".join(key) for key in shape.infos]}


def parts(directory: Path, metadata: Metadata) -> list[EpisodePart]:
    """Open a dataset: each episode is a part."""
    try:
        # Not by Minari, which would make an environment that the file names.
        texts = tensor_files.read_description(inside(directory, f"{DATA}/metadata.json"))
        spaces_of = [
            deserialize_space(texts[f"{name}_space"]) for name in ("observation", "action")
        ]
        file = h5py.File(inside(directory, f"{DATA}/main_data.hdf5"), "r")
        return [
            EpisodePart(_own(file, f"episode_{number}"), metadata, *spaces_of)
            for number in range(len(file))
        ]
    except Exception as err:  # of any file and any JSON
        raise TensorFileError(
            f"{directory / DATA} cannot be read as a Minari dataset: {err}"
        ) from err


def _own(file: h5py.Group, name: str) -> Any:
    """Return a group or array of ``file`` that lies in it; HDF5 can refer to other files."""
    found: Any = file
    for part in name.split("/"):
        if not isinstance(found.get(part, getlink=True), h5py.HardLink):
            raise LookupError(f"{name!r} is missing or leads out of the file")
        found = found[part]
    if isinstance(found, h5py.Dataset) and (found.external or found.is_virtual):
        raise LookupError(f"{name!r} leads out of the file")
    return found


class EpisodePart(Part):
    """One episode; entries are at Minari's places."""

    def __init__(self, group: Any, metadata: Metadata, observation: Space, action: Space) -> None:
        """Find the entries in the HDF5 ``group`` of an episode."""
        self._group = group
        self.frames = len(_own(group, "rewards"))
        self._paths: dict[Key, str] = {
            (NEXT, "reward"): "rewards",
            (NEXT, "terminated"): "terminations",
            (NEXT, "truncated"): "truncations",
        }
        for leaf in observation_leaves(observation):
            self._paths[leaf.key] = _path("observations", leaf)
            self._paths[NEXT, *leaf.key] = _path("observations", leaf)
        self._starts: dict[Key, Any] = {}
        numbers = {}
        for leaf in space_leaves(action, ACTION):
            self._paths[leaf.key] = _path("actions", leaf)
            self._starts[leaf.key] = getattr(leaf.space, "start", 0)
            if isinstance(leaf.space, spaces.Discrete):  # though recorded as one-hot vectors, say
                numbers[leaf.key] = (), torch.int64
        for name in metadata.facts.get("infos", ()):
            self._paths[tuple(name.split("."))] = f"infos/{name}"
        self.files = [
            TensorFile(f.key, *numbers.get(f.key, (f.shape, f.dtype)), f.file)
            for f in metadata.files
            if f.key in self._paths or f.key == TRAJ_IDS
        ]

    def _values(self, file: TensorFile) -> torch.Tensor:
        """Return the elements of an entry; discrete actions as numbers from 0."""
        key = file.key
        if key == TRAJ_IDS:
            return torch.full((self.frames,), int(self._group.attrs["traj_id"]))
        values = _own(self._group, self._paths[key])[...]
        if self._paths[key].startswith("observations"):
            values = values[1:] if key[0] == NEXT else values[:-1]
        if key == (NEXT, "truncated") and self._group.attrs.get("cut"):
            values[-1] = False  # as it was recorded
        return torch.from_numpy(np.asarray(values - self._starts.get(key, 0)))


def _path(group: str, leaf: Leaf) -> str:
    parts = [f"_index_{part}" if isinstance(part, int) else part for part in leaf.path]
    return "/".join([group, *parts])


def dataset_id(directory: Path) -> str:
    """Return Minari's id of a dataset: its path below Minari's root, else its last part."""
    default = Path.home() / ".minari" / "datasets"
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or default).resolve()
    below = directory.is_relative_to(root) and directory != root
    return directory.relative_to(root).as_posix() if below else directory.name


def _seed(episode: Episode, number: int, facts: Mapping[str, Any]) -> int | None:
    """Return the seed of this episode; only the first of each environment has one."""
    seed, num_envs = facts.get("seed"), facts.get("num_envs")
    if seed is None or num_envs is None or episode.id >= num_envs:
        return None
    return int(seed) + (0 if facts.get("static_seed") else episode.id)


class _Shape:
    """How frames become Minari's episodes."""

    def __init__(self, dataset: Dataset, facts: Mapping[str, Any]) -> None:
        """Take the spaces of the environment if they fit the data, else boxes like the data."""
        files = {file.key: file for file in dataset.metadata.files}
        self.spec = _env_spec(facts)
        self.observation, self.action = _spaces(facts, files) or _boxes(files)
        self._seen = observation_leaves(self.observation)
        actions = _decoder(self.action, files)
        assert actions is not None  # such spaces were chosen
        self._actions = actions
        self._rewards = [key for key in files if key[0] == NEXT and key[-1] == "reward"]
        self._flags = end_keys(tuple(files))
        used = {leaf.key for leaf in self._seen} | set(self._actions.specs)
        self.infos = [
            key
            for key in files
            if not {key[0], key[-1]} & {NEXT, "collector", "is_init", *END_FLAGS}
            and key not in used
        ]

    def buffer(self, episode: Episode, seed: int | None) -> EpisodeBuffer:
        """Return ``episode`` as Minari's `EpisodeBuffer`."""
        observed = {
            leaf.path: _array(
                torch.cat([episode.read(leaf.key), episode.read((NEXT, *leaf.key))[-1:]])
            ).astype(leaf.space.dtype)
            for leaf in self._seen
        }
        actions = self._actions.decode([_array(episode.read(key)) for key in self._actions.specs])
        rewards = [episode.read(key).reshape(len(episode), -1).sum(1) for key in self._rewards]
        flags: dict[str, Array] = {}
        for key in self._flags:
            own = episode.read(key).reshape(len(episode), -1).any(1).numpy()
            flags[key[-1]] = own | flags.get(key[-1], False)
        cut = flags.get("truncated", np.zeros(len(episode), bool))
        dead = flags.get("terminated", flags.get("done", cut) & ~cut)
        cut[-1] |= not dead[-1]
        return EpisodeBuffer(
            seed=seed,
            observations=rebuild(self.observation, (), observed),
            actions=actions,
            rewards=sum(map(_array, rewards)),
            terminations=dead,
            truncations=cut,
            infos={".".join(key): _array(episode.read(key)) for key in self.infos},
        )


def _array(values: torch.Tensor) -> Array:
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


def _spaces(facts: Mapping[str, Any], files: Files) -> tuple[Space, Space] | None:
    """Return the spaces of the environment, if they are known and the data are of them."""
    texts = [facts.get(name) for name in ("observation_space", "action_space")]
    try:
        if all(texts):
            observation, action = (deserialize_space(json.dumps(text)) for text in texts)
        else:
            observation, action = _spaces_of_env(facts)
        seen = [leaf_field(leaf) for leaf in observation_leaves(observation)]
    except Exception:  # not registered here, no description of a space, or without fixed shape
        return None
    fit = all(
        key in files and files[key].shape == file.shape
        for file in seen
        for key in (file.key, (NEXT, *file.key))
    )
    return (observation, action) if fit and _decoder(action, files) is not None else None


def _spaces_of_env(facts: Mapping[str, Any]) -> tuple[Space, Space]:
    """Make the environment of a card, which may come from anyone.

    Only its id and its ``kwargs`` are used, of what is registered here.
    """
    name, spec = facts["env"], _env_spec(facts)
    if ":" in name:
        raise ConfigError(f"{name!r:.50} would import a module")
    env = make_gym(name, **({} if spec is None else spec.kwargs))
    with contextlib.closing(env):
        return env.observation_space, env.action_space


def _env_spec(facts: Mapping[str, Any]) -> EnvSpec | None:
    """Return the spec that a card has, if Gymnasium can read it.

    A spec may name any callable, so no environment must be made from it.
    """
    with contextlib.suppress(Exception):  # of a file that anyone may have written
        return EnvSpec.from_json(facts["env_spec"])
    return None


def _decoder(space: Space, files: Files) -> Actions | None:
    """Return a decoder of recorded actions of ``space``, ``None`` if the data have none."""
    for categorical in (True, False):
        with contextlib.suppress(ConfigError):
            actions = Actions(space, 1, categorical, batched=True)
            if all(f.key in files and files[f.key].shape == f.shape for f in actions.fields):
                return actions
    return None


def _boxes(files: Files) -> tuple[Space, Space]:
    """Return unbounded spaces with the shapes and dtypes of the data."""
    observed = {
        key: _box(file)
        for key, file in files.items()
        if (NEXT, *key) in files and key[-1] not in NO_OBSERVATION
    }
    acted = {key[1:]: _box(file) for key, file in files.items() if key[0] == ACTION[0]}
    if not observed:
        raise TensorFileError("Minari's episodes need an entry at the root and under 'next'")
    if list(observed) == [OBSERVATION]:
        return observed[OBSERVATION], _nested(acted)
    return _nested(observed), _nested(acted)


def _box(file: TensorFile) -> Space:
    kind = np.dtype(_array(torch.empty(0, dtype=file.dtype)).dtype)
    if kind.kind == "b":
        return spaces.Box(0, 1, file.shape, np.int8)
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, file.shape, kind.type)
    limits = np.iinfo(kind.name)
    return spaces.Box(limits.min, limits.max, file.shape, kind.type)


def _nested(boxes: Mapping[Key, Space]) -> Space:
    """Return a space of spaces, nested as their keys are."""
    if () in boxes:
        return boxes[()]
    names = dict.fromkeys(key[0] for key in boxes)
    return spaces.Dict(
        {
            name: _nested({key[1:]: box for key, box in boxes.items() if key[0] == name})
            for name in names
        }
    )
