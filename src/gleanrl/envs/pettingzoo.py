"""PettingZoo environments, of several agents, with TensorDict methods."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, EnvError, UnknownEnvError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key
from gleanrl.core.layout import Group
from gleanrl.core.options import check_int
from gleanrl.core.protocols import Array
from gleanrl.envs.base import OwnBatch
from gleanrl.envs.spaces import Actions, leaf_field, observation_leaves, space_spec
from gleanrl.envs.specs import Binary, Composite, TensorSpec, Unbounded
from gleanrl.envs.validation import check_reset, check_rewards, write_rewards
from gleanrl.memory.trees import tensordict_over

ALIVE: Key = ("mask",)
ALLOWED: Key = ("action_mask",)
_FLAGS = (DONE, TERMINATED, TRUNCATED)
_FAMILIES = ("mpe", "butterfly", "sisl", "classic", "atari")
Moves = dict[str, Any]


@runtime_checkable
class GroupMap(Protocol):
    """A rule that puts agents into groups; TorchRL's ``MarlGroupMapType`` is one, too."""

    def get_group_map(self, agent_names: list[str], /) -> dict[str, list[str]]:
        """Return the agents of each group."""


class MarlGroupMapType(enum.Enum):
    """How agents are put into groups."""

    ALL_IN_ONE_GROUP = 1
    """One group, ``"agents"``."""
    ONE_GROUP_PER_AGENT = 2
    """Each agent is a group of its own name."""

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return the agents of each group."""
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


class PettingZooEnv(OwnBatch):
    """A PettingZoo environment, parallel or turn-based (AEC).

    Agents that are alike form a group, with a nested TensorDict of its own: ``(group,
    "observation")`` is ``[n_agents, ...]``, ``("next", group, "reward")`` ``[n_agents, 1]`` and
    each agent's ``"done"``, ``"terminated"`` and ``"truncated"`` ``[n_agents, 1]``. The flags at
    the root say when the episode ends for all: then agents that had not ended are truncated.
    Entries of ``Dict`` observations stand in the group under their own names.

    An agent that has ended, or does not take part yet, shows zeros, and its ``(group, "mask")`` is
    False. In a turn-based environment the mask says whose turn it is; rewards stand at the step in
    which they arise, also those of agents whose turn it is not, so that their sum is the return.

    Example:
        >>> env = PettingZooEnv("mpe/simple_spread_v3")
        >>> env.rollout(3)["next", "agent", "reward"].shape
        torch.Size([3, 3, 1])
    """

    def __init__(
        self,
        task: str | Any | Callable[..., Any],
        parallel: bool = True,
        *,
        return_state: bool = False,
        group_map: GroupMap | Mapping[str, Sequence[str]] | None = None,
        use_mask: bool | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        device: torch.device | str | None = None,
        **make_kwargs: Any,
    ) -> None:
        """Make the environment and reset it once; the first `reset` returns that episode.

        Args:
            task: An id (``"mpe/simple_spread_v3"``, ``"simple_spread_v3"``), a built environment,
                or a callable that makes one.
            parallel: Whether an id is made as a parallel environment; else as a turn-based one.
            return_state: Show the global state as ``"state"``.
            group_map: The agents of each group. By default ``agent_0`` and ``agent_1`` are the
                group ``"agent"`` of a parallel environment, and each agent of a turn-based one is a
                group of its own.
            use_mask: Show ``"mask"``. By default it is shown where agents can be absent: always in
                turn-based environments, otherwise unless ``done_on_any``.
            categorical_actions: Discrete actions as indices; otherwise as one-hot vectors.
            seed: Seeds the first reset.
            done_on_any: End the episode when the first agent ends, instead of the last. By default
                true for parallel environments and false for turn-based ones.
            device: Where data are returned.
            make_kwargs: Passed on to what makes the environment.

        Raises:
            UnknownEnvError: an id that does not exist.
            ConfigError: no PettingZoo environment, agents of one group that differ, or arguments
                that do not fit together.
            EnvError: agents are absent at first, and there is no mask to say so.
        """
        super().__init__(device=device)
        self.env: Any = _make(task, parallel, make_kwargs)
        """The PettingZoo environment."""
        self.parallel = not _is_a(self.env, "AECEnv")
        if not self.parallel and use_mask is False:
            raise ConfigError(
                "use_mask=False: a turn-based environment needs the mask, which says whose turn it "
                "is; drop the argument"
            )
        self.done_on_any = self.parallel if done_on_any is None else done_on_any
        self.use_mask = not (self.parallel and self.done_on_any) if use_mask is None else use_mask
        self.return_state = return_state
        self._game: Any = self.env if self.parallel else _Turns(self.env)
        agents = list(self.env.possible_agents)
        self.group_map = _grouped(group_map, agents, self.parallel)
        self._seed: int | None = None if seed is None else check_int("seed", seed, least=0)
        self._first: tuple[Any, Any] | None = self._restart({})
        self._groups = [
            _Agents(name, members, self.env, self._first, categorical_actions)
            for name, members in self.group_map.items()
        ]
        self._sizes = [Group((g.name,), (len(g.agents),), (None,)) for g in self._groups]
        self._agents = tuple(agent for group in self._groups for agent in group.agents)
        self._flags = np.zeros((3, len(self._agents), 1), bool)
        """Each agent's flags, as in `_FLAGS`."""
        self._alive: list[str] = list(self._game.agents)
        absent = sorted(set(self._agents) - set(self._alive))
        if absent and not self.use_mask:
            raise EnvError(f"agents {absent} do not take part at first; pass use_mask=True")
        self._declare(*self._specs())

    def _specs(self) -> list[Composite]:
        shown, acted, rewarded, ended = (Composite() for _ in range(4))
        flag = Binary(shape=(1,), dtype=torch.bool)
        ended.update({key: flag.clone() for key in _FLAGS})
        for group in self._groups:
            n, seen = len(group.agents), group.specs()
            if self.use_mask:
                seen[ALIVE] = Binary(shape=(), dtype=torch.bool)
            rewards, flags = {REWARD: Unbounded((1,))}, dict.fromkeys(_FLAGS, flag)
            found: list[Any] = [seen, group.actions.specs, rewards, flags]
            for tree, specs in zip((shown, acted, rewarded, ended), found, strict=True):
                own = {key: spec.expand(n, *spec.shape) for key, spec in specs.items()}
                tree.set(group.name, Composite(own, shape=(n,)))
        if self.return_state:
            state = torch.as_tensor(self.env.state())
            shown.set("state", Unbounded(state.shape, dtype=state.dtype))
        return [shown, acted, rewarded, ended]

    # -- stepping --------------------------------------------------------------------------------

    def _restart(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        seed, self._seed = self._seed, None
        found = self._game.reset(seed=seed, options=dict(options) or None)
        return check_reset(found, f"{self.env}: reset", "(observations, infos)")

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if tensordict is not None and mask is not None and not bool(mask.any()):
            # Single agents are not reset: the root decides.
            known = self._env_specs
            return tensordict.select(*known.observation.leaves(), *known.done.leaves())
        first, self._first = self._first, None
        if first is None or self._seed is not None or options:
            first = self._restart(options)
        self._alive = list(self._game.agents)
        self._flags.fill(False)
        return self._pack(*first, (False, False, False))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        moves: Moves = {}
        for group in self._groups:
            moves |= group.moves(tensordict)
        if len(moves) != len(self._alive):
            moves = {agent: moves[agent] for agent in self._alive}
        observations, rewards, dead, late, infos = self._game.step(moves)
        over = (False, False, False)
        agents = self._game.agents
        if any(dead.values()) or any(late.values()) or agents != self._alive or not agents:
            over = self._end(dead, late)
        return self._pack(observations, infos, over, rewards)

    def _end(self, dead: Mapping[str, Any], late: Mapping[str, Any]) -> tuple[bool, bool, bool]:
        """Note which agents ended; return the flags of the root."""
        agents, flags = self._game.agents, self._flags
        alive = [a for a in self._agents if a in agents and not (dead.get(a) or late.get(a))]
        left = set(self._alive) - set(alive)
        for index, agent in enumerate(self._agents):
            if agent in alive:
                flags[:, index] = False
            elif agent in left:  # also without a flag
                cut = bool(late.get(agent, False))
                flags[:, index, 0] = True, bool(dead.get(agent, False)) or not cut, cut
        self._alive = alive
        done, terminated, truncated = flags
        if self.done_on_any:
            over = bool(done.any()), bool(terminated.any()), bool(truncated.any())
        else:
            whole = bool((terminated == done).all())
            over = (True, whole, not whole) if not alive else (False, False, False)
        if over[0]:
            flags[2] |= ~done
            flags[0] = True
        return over

    def _pack(
        self,
        observations: Mapping[str, Any],
        infos: Mapping[str, Any],
        over: tuple[bool, bool, bool],
        rewards: Mapping[str, Any] | None = None,
    ) -> TensorDictBase:
        data: dict[Key, Array] = {}
        acting = () if over[0] else self._alive if self.parallel else self._game.turn
        start = 0
        for group in self._groups:
            name, end = group.name, start + len(group.agents)
            group.show(data, observations, infos, acting)
            if self.use_mask:
                data[name, *ALIVE] = np.array([agent in acting for agent in group.agents])
            for key, flags in zip(_FLAGS, self._flags, strict=True):
                data[name, *key] = flags[start:end].copy()
            if rewards is not None:
                given = [rewards.get(agent, 0.0) for agent in group.agents]
                narrow = data[name, *REWARD] = np.empty((len(given), 1), np.float32)
                write_rewards(narrow, check_rewards([given], when=""), when="")
            start = end
        for key, flag in zip(_FLAGS, over, strict=True):
            data[key] = np.array([flag])
        if self.return_state:
            data[("state",)] = np.array(self.env.state())
        tensors = {key: torch.from_numpy(value) for key, value in data.items()}
        packed = tensordict_over(tensors, (), (), self._sizes)
        return packed if self.device is None else packed.to(self.device)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset if the root's end flag is set: those of single agents reset nothing."""
        return self.reset(tensordict) if bool(tensordict.get("done")) else tensordict

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions, of those that are allowed now."""
        for group in self._groups:
            if group.allowed is not None:
                for spec in self._env_specs.action.get(group.name).values(True, True):
                    spec.update_mask(torch.from_numpy(group.allowed))
        return super().rand_action(tensordict)

    # -- life ------------------------------------------------------------------------------------

    def _spread_seed(self, seed: int, static: bool) -> None:
        self._seed, self._first = seed, None

    def _close(self) -> None:
        self.env.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(agents)}" for name, agents in self.group_map.items())
        return f"{type(self).__name__}({self.env}, agents={{{sizes}}}, device={self.device})"


class PettingZooWrapper(PettingZooEnv):
    """A `PettingZooEnv` around an environment that was built already."""

    def __init__(self, env: Any, **options: Any) -> None:
        """Take over ``env``; ``options`` are those of `PettingZooEnv`."""
        super().__init__(env, **options)


class _Agents:
    """One group: agents that see and do alike."""

    def __init__(
        self,
        name: str,
        agents: Sequence[str],
        env: Any,
        first: tuple[Mapping[str, Any], Mapping[str, Any]],
        categorical: bool,
    ) -> None:
        """Read the spaces of ``agents``; ``first`` is what the first reset returned.

        Raises:
            ConfigError: agents that differ.
            EnvError: an observation that its space does not declare.
        """
        self.name, self.agents = name, tuple(agents)
        observed, acted = (
            _same(name, agents, kind) for kind in (env.observation_space, env.action_space)
        )
        leaves = {leaf.key: leaf for leaf in observation_leaves(observed)}
        mask = leaves.pop(ALLOWED, None)
        self._leaves = [(leaf, leaf_field(leaf)) for leaf in leaves.values()]
        self._spaces = leaves
        self.actions = Actions(acted, len(agents), categorical)
        for agent in set(agents) & set(first[0]):
            for leaf, field in self._leaves:
                shape = np.shape(leaf.of(first[0][agent]))
                if shape != field.shape:
                    raise EnvError(
                        f"agent {agent!r} observes {'.'.join(field.key)!r} with shape {shape}, "
                        f"its observation space declares {field.shape}; correct one of them"
                    )
        self._mask_place = 0
        """Where action masks are: 0 for observations, 1 for infos."""
        told = [info["action_mask"] for info in first[1].values() if "action_mask" in info]
        self.allowed: Array | None = None
        """Which actions are allowed now, ``[n_agents, n_actions]``."""
        if mask is not None:
            self.allowed = np.ones((len(agents), *(mask.space.shape or ())), bool)
        elif told and isinstance(acted, spaces.Discrete):
            self.allowed, self._mask_place = np.ones((len(agents), len(told[0])), bool), 1

    def specs(self) -> dict[Key, TensorSpec]:
        """Return what one agent is shown."""
        found = {key: space_spec(leaf.space) for key, leaf in self._spaces.items()}
        if self.allowed is not None:
            found[ALLOWED] = Binary(shape=self.allowed.shape[1:], dtype=torch.bool)
        return found

    def moves(self, tensordict: TensorDictBase) -> Moves:
        """Return each agent's action."""
        part = tensordict.get(self.name)
        actions = [part.get(key).detach().cpu().numpy() for key in self.actions.specs]
        return dict(zip(self.agents, self.actions.decode(actions), strict=True))

    def show(
        self,
        data: dict[Key, Array],
        observations: Mapping[str, Any],
        infos: Mapping[str, Any],
        acting: Sequence[str],
    ) -> None:
        """Add what the agents see to ``data``; zero for those that see nothing."""
        for leaf, field in self._leaves:
            rows = data[self.name, *field.key] = np.zeros(
                (len(self.agents), *field.shape), field.numpy_dtype
            )
            for index, agent in enumerate(self.agents):
                if agent in observations:
                    rows[index] = leaf.of(observations[agent])
        if self.allowed is not None:
            # Agents that do not act, or have no choice, may do anything: something must be drawn.
            self.allowed = np.ones_like(self.allowed)
            for index, agent in enumerate(self.agents):
                told = (observations, infos)[self._mask_place].get(agent, {})
                if agent in acting and np.any(told.get("action_mask", False)):
                    self.allowed[index] = told["action_mask"]
            data[self.name, *ALLOWED] = self.allowed


class _Turns:
    """A turn-based (AEC) environment with the methods of a parallel one.

    A step carries out the action of the agent whose turn it is. Agents that have ended are taken
    out at once, so that it is always the turn of one that has not.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    @property
    def agents(self) -> list[str]:
        """The agents that have not ended."""
        return list(self._env.agents)

    @property
    def turn(self) -> tuple[str, ...]:
        """The agent that acts next."""
        return (self._env.agent_selection,) if self._env.agents else ()

    def reset(self, **arguments: Any) -> tuple[Moves, Moves]:
        """Return observations and infos."""
        self._env.reset(**arguments)
        return self._settle()

    def step(self, moves: Moves) -> tuple[Moves, Moves, Moves, Moves, Moves]:
        """Return observations, rewards of this step alone, terminations, truncations and infos."""
        env = self._env
        if not env.agents:
            return {}, {}, {}, {}, {}
        env.step(moves[env.agent_selection])
        flags = dict(env.terminations), dict(env.truncations)
        rewards = dict(env.rewards)
        return self._settle()[0], rewards, *flags, dict(env.infos)

    def _settle(self) -> tuple[Moves, Moves]:
        """Take ended agents out; return what all saw last, and infos."""
        env = self._env
        ended = [a for a in env.agents if env.terminations[a] or env.truncations[a]]
        seen, infos = {agent: env.observe(agent) for agent in ended}, dict(env.infos)
        while ended and env.agents and _over(env):
            env.step(None)
        # What is allowed is known of the agent whose turn it is.
        return seen | {agent: env.observe(agent) for agent in env.agents}, infos | dict(env.infos)


def _over(env: Any) -> bool:
    agent = env.agent_selection
    return bool(env.terminations[agent] or env.truncations[agent])


def is_pettingzoo_env(obj: Any) -> bool:
    """Tell whether ``obj`` is a PettingZoo environment; imports nothing."""
    return _is_a(obj, "ParallelEnv", "AECEnv")


def _is_a(obj: Any, *names: str) -> bool:
    module = sys.modules.get("pettingzoo.utils.env")  # loaded where there are environments
    return module is not None and isinstance(obj, tuple(getattr(module, name) for name in names))


def _make(task: Any, parallel: bool, kwargs: Mapping[str, Any]) -> Any:
    if isinstance(task, str):
        module = _module(task)
        return (module.parallel_env if parallel else module.env)(**kwargs)
    made = task(**kwargs) if callable(task) else task
    if not is_pettingzoo_env(made) or (made is task and kwargs):
        raise ConfigError(
            f"PettingZooEnv got a {type(made).__name__} and the arguments {sorted(kwargs)}; give "
            "an id, a callable that makes a pettingzoo.ParallelEnv or AECEnv, or one that is built "
            "(and no arguments to make it)"
        )
    return made


def _module(task: str) -> Any:
    """Return the module of an id: ``"mpe/simple_spread_v3"``, with or without the family."""
    if importlib.util.find_spec("pettingzoo") is None:
        raise ConfigError(f"{task!r} needs PettingZoo; run `pip install 'gleanrl[pettingzoo]'`")
    family, _, name = task.rpartition("/")
    packages = ["mpe2" if each == "mpe" else f"pettingzoo.{each}" for each in _FAMILIES]
    for package in packages:
        wanted = package.rpartition(".")[2] in (family, f"{family}2") or not family
        if wanted and importlib.util.find_spec(package):
            module = f"{package}.{name}"
            if importlib.util.find_spec(module):
                return importlib.import_module(module)
    raise UnknownEnvError(
        f"no PettingZoo environment is called {task!r} in the packages that are installed; ids are "
        f"FAMILY/NAME_vN with the families {', '.join(_FAMILIES)} (`pip install mpe2` for mpe)"
    )


def _grouped(
    given: GroupMap | Mapping[str, Sequence[str]] | None, agents: list[str], parallel: bool
) -> dict[str, list[str]]:
    if isinstance(given, GroupMap):
        given = given.get_group_map(agents)
    if given is None and not parallel:
        given = MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(agents)
    if given is None:
        found: dict[str, list[str]] = {}
        for agent in agents:
            stem, _, number = agent.rpartition("_")
            found.setdefault(stem if stem and number.isdigit() else agent, []).append(agent)
        given = found
    members = [agent for names in given.values() for agent in names]
    if sorted(members) != sorted(agents):
        raise ConfigError(
            f"group_map has the agents {members}; every agent of the environment must be in "
            f"exactly one group: {agents}"
        )
    return {name: list(names) for name, names in given.items()}


def _same(name: str, agents: Sequence[str], space_of: Callable[[str], Any]) -> Any:
    first = space_of(agents[0])
    for agent in agents:
        if space_of(agent) != first:
            raise ConfigError(
                f"{agent!r} has the {space_of.__name__} {space_of(agent)} and {agents[0]!r} has "
                f"{first}, so they cannot be in one group, {name!r}; put them into different "
                "groups with group_map="
            )
    return first
