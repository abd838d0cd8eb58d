"""An episode of a dataset as a video: its environment is made again and gets the same actions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, GleanError
from gleanrl.core.keys import NEXT
from gleanrl.core.platforms import imported
from gleanrl.core.window import Array
from gleanrl.envs.spaces import Actions, Leaf, observation_leaves
from gleanrl.recording.dataset import Dataset
from gleanrl.recording.episodes import Episode, episodes_of
from gleanrl.recording.origin import decoder, make_env

_FPS = 30


class ReplayError(GleanError, RuntimeError):
    """An episode cannot be shown."""


def play(dataset: Dataset, number: int, path: Path | None) -> list[tuple[str, str]]:
    """Write episode ``number`` as a video; return lines about it.

    Raises:
        ConfigError: there is no such episode.
        ReplayError: its environment cannot be made again, and its observations are no images.
    """
    imageio = imported("imageio.v2", "video", "--play", ReplayError)
    episodes = episodes_of(dataset)
    if number >= len(episodes):
        raise ConfigError(f"there is no episode {number}: {len(episodes)} are numbered from 0")
    path = path or dataset.directory / f"episode-{number}.mp4"
    if path.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"--video {path} has to end in .mp4 or .gif")
    if path.is_symlink():  # the directory may come from anyone
        raise ReplayError(f"{path} is a link; choose another file with --video")
    images = _image_key(episodes[number])
    replay, note, fps = None, "", _FPS
    try:
        replay = Replay(dataset, episodes, number)
        frames, fps = replay.frames(), replay.fps
    except GleanError as err:
        if images is None:
            raise
        frames, note = iter(episodes[number].read(images)), f"recorded images: {err}"
    gif = path.suffix == ".gif"
    more: dict[str, Any] = {"duration": 1000 / fps} if gif else {"fps": fps, "macro_block_size": 2}
    with contextlib.ExitStack() as end:
        if replay is not None:
            end.callback(replay.env.close)
        video: Any = end.enter_context(imageio.get_writer(path, **more))
        for image in frames:
            video.append_data(_picture(image))
    if replay is not None:
        note = replay.verdict()
    return [
        ("episode", f"{number} ({len(episodes[number]):,} steps)"),
        ("video", str(path)),
        ("replay", note),
    ]


class Replay:
    """The environment of an episode, made again and stepped to the start of the episode."""

    def __init__(self, dataset: Dataset, episodes: Sequence[Episode], number: int) -> None:
        """Make the environment, and repeat its steps before the episode.

        Raises:
            ReplayError: the card does not say how.
            ConfigError: it is not registered, or cannot be made.
        """
        facts, self._episode = dataset.metadata.facts, episodes[number]
        count = facts.get("num_envs")
        if not isinstance(count, int) or count < 1 or not isinstance(facts.get("seed"), int):
            raise ReplayError(
                "the card has no seed or no number of environments; call set_seed before collecting"
            )
        index, turn = self._episode.id % count, self._episode.id // count
        mine = [episode for episode in episodes if episode.id % count == index]
        before = mine[:turn]
        if [episode.id // count for episode in mine[: turn + 1]] != list(range(turn + 1)):
            raise ReplayError(
                f"episode {number} is number {turn} of environment {index} since it was seeded, "
                "and earlier ones are not in the dataset"
            )
        self.env = make_env(facts, render_mode="rgb_array")
        self.fps = int(self.env.metadata.get("render_fps") or _FPS)
        self._leaves: Sequence[Leaf] = observation_leaves(self.env.observation_space)
        self._differs: int | None = None
        seed = facts["seed"] + (0 if facts.get("static_seed") else index)
        self._first, _ = self.env.reset(seed=seed)
        for episode in before:
            for action in self._actions(episode):
                if any(self.env.step(action)[2:4]):
                    break
            self._first, _ = self.env.reset()

    def _actions(self, episode: Episode) -> Sequence[Any]:
        files = {file.key: file for file in episode.part.files}
        actions: Actions | None = decoder(self.env.action_space, files, len(episode))
        if actions is None:
            raise ReplayError(f"the recorded actions are not of {self.env.action_space}")
        values: Sequence[Any] = actions.decode([episode.read(k).numpy() for k in actions.specs])
        return values

    def frames(self) -> Iterator[Array]:
        """Yield a picture of every step, the first and the last included."""
        roots = [self._episode.read(leaf.key) for leaf in self._leaves]
        after = [self._episode.read((NEXT, *leaf.key)) for leaf in self._leaves]
        self._compare(0, self._first, [entry[0] for entry in roots])
        yield self._render()
        for step, action in enumerate(self._actions(self._episode)):
            observation, _, terminated, truncated, _ = self.env.step(action)
            self._compare(step + 1, observation, [entry[step] for entry in after])
            yield self._render()
            if terminated or truncated:
                break

    def _render(self) -> Array:
        try:
            picture = self.env.render()
        except Exception as err:
            raise ReplayError(f"the environment does not render: {err}") from err
        return np.asarray(picture)

    def _compare(self, step: int, observation: Any, recorded: Sequence[torch.Tensor]) -> None:
        if self._differs is not None:
            return
        for leaf, value in zip(self._leaves, recorded, strict=True):
            now = torch.as_tensor(np.asarray(leaf.of(observation))).to(value.dtype)
            if now.shape != value.shape or not torch.equal(now, value):
                self._differs = step

    def verdict(self) -> str:
        """Return whether the environment repeated the recorded observations."""
        if self._differs is None:
            return "every observation is the recorded one"
        return (
            f"the video is NOT the recorded episode: observations differ from step {self._differs} "
            "on (another version, wrappers, or an environment that draws elsewhere)"
        )


def _image_key(episode: Episode) -> Any:
    """Return the entry that holds images, if there is one."""
    found = [file.key for file in episode.part.files if _is_image(file.shape, file.dtype)]
    return next((key for key in found if key[0] != NEXT), None)


def _is_image(shape: Sequence[int], dtype: torch.dtype) -> bool:
    plain = len(shape) == 2 or (len(shape) == 3 and (shape[-1] in (1, 3) or shape[0] <= 4))
    return dtype is torch.uint8 and plain and min(shape[-3:-1] or shape) > 0 and max(shape) >= 16


def _picture(image: Any) -> Array:
    """Return an image as ``[H, W]`` or ``[H, W, 3]``; of stacked ones the last."""
    picture = np.asarray(image)
    if picture.ndim == 3 and picture.shape[-1] not in (1, 3, 4):
        picture = picture.transpose(1, 2, 0) if picture.shape[0] == 3 else picture[-1]
    return picture[..., 0] if picture.ndim == 3 and picture.shape[-1] == 1 else picture
