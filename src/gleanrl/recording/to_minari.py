"""A dataset as Minari's: episodes with one observation more than actions, written by Minari."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from minari.serialization import deserialize_space

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import ACTION, END_FLAGS, NEXT, OBSERVATION, Key
from gleanrl.envs.spaces import Actions, leaf_field, observation_leaves, rebuild
from gleanrl.memory.tensor_files import TensorFile, TensorFileError
from gleanrl.recording.dataset import DATA, Dataset
from gleanrl.recording.index import Array, Episode, end_keys, episodes_of
from gleanrl.recording.origin import env_spec

Space: TypeAlias = gym.Space[Any]
Files: TypeAlias = Mapping[Key, TensorFile]
_BATCH_BYTES = 1 << 25
"""Episodes of so many bytes are handed to Minari at once."""


def write(dataset: Dataset, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Have Minari write all episodes into ``data`` of the directory; on failure remove it again.

    An episode that was cut, by the end of the recording say, is truncated at its last step.
    """
    episodes, shape = episodes_of(dataset), _Shape(dataset, facts)
    folder = dataset.directory / DATA
    try:
        storage = MinariStorage.new(
            folder, shape.observation, shape.action, shape.spec, "hdf5", jpeg_encoding=False
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
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    cut = [number for number, episode in enumerate(episodes) if not episode.ended]
    return {"minari_id": name, "episodes_cut": cut, "infos": [".".join(key) for key in shape.infos]}


def dataset_id(directory: Path) -> str:
    """Return what Minari calls a dataset: its path below Minari's root, else its last part."""
    default = Path.home() / ".minari" / "datasets"
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or default).resolve()
    below = directory.is_relative_to(root) and directory != root
    return directory.relative_to(root).as_posix() if below else directory.name


def _seed(episode: Episode, number: int, facts: Mapping[str, Any]) -> int | None:
    """Return what the environment was seeded with for this episode: the first one of each is."""
    seed, num_envs = facts.get("seed"), facts.get("num_envs")
    if seed is None or num_envs is None or episode.id >= num_envs:
        return None
    return int(seed) + (0 if facts.get("static_seed") else episode.id)


class _Shape:
    """How frames become Minari's episodes."""

    def __init__(self, dataset: Dataset, facts: Mapping[str, Any]) -> None:
        """Take the spaces of the environment if they fit the data, else boxes like the data."""
        files = {file.key: file for file in dataset.metadata.files}
        self.spec = env_spec(facts)
        self.observation, self.action = _spaces(facts, self.spec, files) or _boxes(files)
        self._seen = observation_leaves(self.observation)
        self._actions = _actions(self.action, files)
        assert self._actions is not None
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
        """Return ``episode`` as Minari takes it."""
        observed = {
            leaf.path: _array(
                torch.cat([episode.read(leaf.key), episode.read((NEXT, *leaf.key))[-1:]])
            ).astype(leaf.space.dtype)
            for leaf in self._seen
        }
        assert self._actions is not None
        actions = self._actions.decode([_array(episode.read(key)) for key in self._actions.specs])
        rewards = [episode.read(key).reshape(len(episode), -1).sum(1) for key in self._rewards]
        over = {key[-1]: False for key in self._flags}
        flags = {
            name: np.any([self._flag(episode, key) for key in self._flags if key[-1] == name], 0)
            for name in over
        }
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

    @staticmethod
    def _flag(episode: Episode, key: Key) -> Array:
        return episode.read(key).reshape(len(episode), -1).any(1).numpy()


def _array(values: torch.Tensor) -> Array:
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


def _spaces(facts: Mapping[str, Any], spec: Any, files: Files) -> tuple[Space, Space] | None:
    """Return the spaces of the environment, if they are known and the data are of them."""
    texts = [facts.get(name) for name in ("observation_space", "action_space")]
    if all(texts):
        observation, action = (deserialize_space(json.dumps(text)) for text in texts)
    elif spec is not None:
        with gym.make(spec) as env:
            observation, action = env.observation_space, env.action_space
    else:
        return None
    try:
        seen = [leaf_field(leaf) for leaf in observation_leaves(observation)]
    except ConfigError:  # a space without fixed shape
        return None
    fit = all(file.key in files and files[file.key].shape == file.shape for file in seen)
    return (observation, action) if fit and _actions(action, files) is not None else None


def _actions(space: Space, files: Files) -> Actions | None:
    """Return what decodes recorded actions of ``space``, as numbers or one-hot vectors."""
    for categorical in (True, False):
        with contextlib.suppress(ConfigError):
            actions = Actions(space, 1, categorical, batched=True)
            if all(f.key in files and files[f.key].shape == f.shape for f in actions.fields):
                return actions
    return None


def _boxes(files: Files) -> tuple[Space, Space]:
    """Return spaces that hold whatever has the shape and dtype of the data."""
    shown = {
        key: _box(file)
        for key, file in files.items()
        if (NEXT, *key) in files and key[-1] not in (*END_FLAGS, "step_count", "is_init", "reward")
    }
    acted = {key[1:]: _box(file) for key, file in files.items() if key[0] == ACTION[0]}
    if not shown:
        raise TensorFileError("Minari's episodes need an entry at the root and under 'next'")
    if list(shown) == [OBSERVATION]:
        return shown[OBSERVATION], _nested(acted)
    return _nested(shown), _nested(acted)


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
