"""PettingZoo environments, of several agents, with TensorDict methods."""

from __future__ import annotations

import copy
import enum
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, EnvError, PolicyError, UnknownEnvError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, format_key
from gleanrl.core.layout import Group
from gleanrl.core.options import check_int
from gleanrl.core.platforms import imported
from gleanrl.core.window import Array
from gleanrl.envs.base import EnvBase, close_all
from gleanrl.envs.spaces import Actions, leaf_field, observation_leaves, space_spec
from gleanrl.envs.specs import Binary, Composite, TensorSpec, Unbounded
from gleanrl.envs.stock import is_stock, stock
from gleanrl.envs.tensordict import spec_trees, widened
from gleanrl.envs.validation import NUMBERS, check_reset
from gleanrl.envs.writers import LeafWriter
from gleanrl.memory.tensordicts import tensordict_over

ALIVE: Key = ("mask",)
ALLOWED: Key = ("action_mask",)
_FLAGS = (DONE, TERMINATED, TRUNCATED)
_FAMILIES = ("mpe", "butterfly", "sisl", "classic", "atari")
Moves = dict[str, Any]


class MarlGroupMapType(enum.Enum):
    """The assignment of agents to groups."""

    ALL_IN_ONE_GROUP = 1
    """One group, ``"agents"``."""
    ONE_GROUP_PER_AGENT = 2
    """Each agent is a group of its own name."""

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return the agents of each group."""
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


@stock
class PettingZooEnv(EnvBase):
    """A PettingZoo environment, parallel or turn-based (AEC).

    Similar agents form a group, with a nested TensorDict of its own: ``(group,
    "observation")`` is ``[n_agents, ...]``, ``("next", group, "reward")`` ``[n_agents, 1]`` and
    each agent's ``"done"``, ``"terminated"`` and ``"truncated"`` ``[n_agents, 1]``. The flags at
    the root say when the episode ends for all: then agents that had not ended are truncated.
    The entries of ``Dict`` observations are in the group, under their own names.

    An agent that has ended, or does not take part yet, shows zeros, and its ``(group, "mask")`` is
    False. In a turn-based environment the mask marks the agent whose turn it is. Rewards are at the
    step of their occurrence, also those of other agents, so their sum is the return.

    Example:
        >>> env = PettingZooEnv("mpe/simple_spread_v3")
        >>> env.rollout(3)["next", "agent", "reward"].shape
        torch.Size([3, 3, 1])
    """

    _returns_all = True

    def __init__(
        self,
        task: str | Any | Callable[..., Any],
        parallel: bool = True,
        *,
        return_state: bool = False,
        group_map: Any = None,
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
            group_map: The agents of each group, or a `MarlGroupMapType` (ours or TorchRL's). By
                default ``agent_0`` and ``agent_1`` are the group ``"agent"`` of a parallel
                environment, and each agent of a turn-based one is a group of its own.
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
        env: Any = _make(task, parallel, make_kwargs)
        self.parallel = not _is_a(env, "AECEnv")
        if not self.parallel and use_mask is False:
            raise ConfigError(
                "use_mask=False: a turn-based environment needs the mask, which says whose turn it "
                "is; drop the argument"
            )
        self.done_on_any = self.parallel if done_on_any is None else done_on_any
        self.use_mask = not (self.parallel and self.done_on_any) if use_mask is None else use_mask
        self.return_state = return_state
        self.categorical_actions = categorical_actions
        self.group_map = _grouped(group_map, list(env.possible_agents), self.parallel)
        agents = [agent for names in self.group_map.values() for agent in names]
        game = _Game(env, env if self.parallel else _Turns(env), agents, self.done_on_any)
        game.seed = None if seed is None else check_int("seed", seed, least=0)
        game.restart({})
        game.fresh = True
        absent = sorted(set(agents) - set(game.alive))
        if absent and not self.use_mask:
            raise EnvError(f"agents {absent} do not take part at first; pass use_mask=True")
        self._take([game])

    @classmethod
    def joined(cls, envs: Sequence[Any]) -> PettingZooEnv | None:
        """Return single environments as one batch, taken over; ``None`` if they are not alike."""
        first = envs[0]
        if any(not isinstance(env, PettingZooEnv) or env.batch_size for env in envs):
            return None
        if not is_stock(*envs) or any(env._alike() != first._alike() for env in envs):
            return None
        batch: PettingZooEnv = copy.copy(first)
        batch._batch = torch.Size((len(envs),))
        batch._take([env._games[0] for env in envs])
        return batch

    def _alike(self) -> tuple[Any, ...]:
        own = self.group_map, self.done_on_any, self.use_mask, self.device, self.specs_assigned
        return *own, spec_trees(self)

    def _take(self, games: list[_Game]) -> None:
        self._games = games
        self._groups = [
            _Agents(name, agents, games, self.categorical_actions)
            for name, agents in self.group_map.items()
        ]
        self._sizes = [Group((g.name,), (len(g.agents),), (None,)) for g in self._groups]
        self._declare(*(widened(tree, self._batch) for tree in self._specs()))

    def _specs(self) -> list[Composite]:
        """Return the specs of one environment."""
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

    @property
    def members(self) -> tuple[Any, ...]:
        """The PettingZoo environments inside, wrappers included."""
        return tuple(game.env for game in self._games)

    @property
    def env(self) -> Any:
        """The PettingZoo environment; the first, if this is a batch of them."""
        return self._games[0].env

    # -- stepping --------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        chosen = self._games
        if mask is not None:  # that of the root: single agents are not reset
            flat = mask.reshape(len(chosen), -1).any(1).tolist()
            chosen = [game for game, wanted in zip(chosen, flat, strict=True) if wanted]
        for game in chosen:
            if not game.fresh or options:
                game.restart(options)
            game.fresh = False
        return self._pack()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        moves: list[Moves] = [{} for _ in self._games]
        for group in self._groups:
            group.add_moves(moves, tensordict)
        rewards = [game.step(own) for game, own in zip(self._games, moves, strict=True)]
        return self._pack(rewards)

    def _pack(self, rewards: Sequence[Moves] | None = None) -> TensorDictBase:
        games, start = self._games, 0
        data: dict[Key, Array] = {}
        flags = np.stack([game.flags for game in games], 1)
        for group in self._groups:
            name, end = group.name, start + len(group.agents)
            group.show(data)
            if self.use_mask:
                acting = [[agent in game.acting for agent in group.agents] for game in games]
                data[name, *ALIVE] = np.array(acting)
            for key, own in zip(_FLAGS, flags, strict=True):
                data[name, *key] = own[:, start:end]
            if rewards is not None:
                data[name, *REWARD] = _narrow(
                    [[r.get(a, 0.0) for a in group.agents] for r in rewards]
                )
            start = end
        over = np.array([game.over for game in games])
        for index, key in enumerate(_FLAGS):
            data[key] = over[:, index : index + 1]
        if self.return_state:
            data[("state",)] = np.stack([game.env.state() for game in games])
        tensors = {key: torch.from_numpy(value) for key, value in data.items()}
        if not self._batch:
            tensors = {key: value[0] for key, value in tensors.items()}
        packed = tensordict_over(tensors, self._batch, [None] * len(self._batch), self._sizes)
        return packed if self.device is None else packed.to(self.device)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset where the root's end flag is set; flags of single agents reset nothing."""
        done = tensordict.get("done")
        return self.reset(tensordict.set("_reset", done)) if bool(done.any()) else tensordict

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions among the currently allowed ones."""
        for group in self._groups:
            if group.allowed is not None:
                allowed = torch.from_numpy(group.allowed).reshape(
                    *self._batch, *group.allowed.shape[1:]
                )
                for spec in self._env_specs.action[group.name].values(True, True):
                    spec.update_mask(allowed)
        return super().rand_action(tensordict)

    # -- life ------------------------------------------------------------------------------------

    def _set_seed(self, seed: Any, static: bool = False) -> None:
        for index, game in enumerate(self._games):
            game.seed, game.fresh = seed if static else seed + index, False

    def _close(self) -> None:
        close_all(self.members)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(agents)}" for name, agents in self.group_map.items())
        batch = f"batch_size={tuple(self.batch_size)}, device={self.device}"
        return f"{type(self).__name__}({self.env}, agents={{{sizes}}}, {batch})"


class PettingZooWrapper(PettingZooEnv):
    """A `PettingZooEnv` around a built environment."""

    def __init__(self, env: Any, **options: Any) -> None:
        """Take over ``env``; ``options`` are those of `PettingZooEnv`."""
        super().__init__(env, **options)


class _Game:
    """One environment, with its agents' last observations and the ended agents."""

    def __init__(self, env: Any, play: Any, agents: Sequence[str], done_on_any: bool) -> None:
        """Step ``env`` by the methods of ``play``; ``agents`` are in the order of `flags`."""
        self.env, self._play, self._agents, self._any = env, play, agents, done_on_any
        self.flags = np.zeros((3, len(agents), 1), bool)
        """Each agent's flags, as in `_FLAGS`."""
        self.over = (False, False, False)
        """The flags of the episode."""
        self.alive: list[str] = []
        self.acting: Sequence[str] = ()
        """The agents whose actions the next step carries out."""
        self.observations: Mapping[str, Any] = {}
        self.infos: Mapping[str, Any] = {}
        self.seed: int | None = None
        """Of the next reset."""
        self.fresh = False
        """Whether the next reset has already been made."""

    def restart(self, options: Mapping[str, Any]) -> None:
        """Begin an episode."""
        seed, self.seed = self.seed, None
        found = self._play.reset(seed=seed, options=dict(options) or None)
        pair = check_reset(found, f"{self.env}: reset", "(observations, infos)")
        self.observations, self.infos = pair
        self.alive = list(self._play.agents)
        if not self.alive:
            raise EnvError(
                f"{self.env}: reset left `agents` empty, so its episode is over before it begins; "
                "put those into it that take part"
            )
        self.flags.fill(False)
        self.over = (False, False, False)
        self._choose()

    def step(self, moves: Moves) -> Moves:
        """Return the rewards; an ended episode does not change."""
        if self.over[0]:
            return {}
        if len(moves) != len(self.alive):
            moves = {agent: moves[agent] for agent in self.alive}
        rewards: Moves
        self.observations, rewards, dead, late, self.infos = self._play.step(moves)
        if any(dead.values()) or any(late.values()) or self._play.agents != self.alive:
            self._end(dead, late)
        self._choose()
        return rewards

    def _choose(self) -> None:
        turn = self._play.turn if isinstance(self._play, _Turns) else self.alive
        self.acting = () if self.over[0] else turn

    def _end(self, dead: Mapping[str, Any], late: Mapping[str, Any]) -> None:
        """Note the ended agents, and whether the episode ended."""
        present, flags = self._play.agents, self.flags
        alive = [a for a in self._agents if a in present and not (dead.get(a) or late.get(a))]
        left = set(self.alive) - set(alive)
        for index, agent in enumerate(self._agents):
            if agent in alive:
                flags[:, index] = False
            elif agent in left:  # also without a flag
                cut = bool(late.get(agent, False))
                flags[:, index, 0] = True, bool(dead.get(agent, False)) or not cut, cut
        self.alive = alive
        done, terminated, truncated = flags
        if self._any:
            self.over = bool(done.any()), bool(terminated.any()), bool(truncated.any())
        elif not alive:
            whole = bool((terminated == done).all())
            self.over = True, whole, not whole
        if self.over[0]:
            flags[2] |= ~done
            flags[0] = True


class _Agents:
    """One group of every game: agents with the same observation and action spaces."""

    def __init__(
        self, name: str, agents: Sequence[str], games: Sequence[_Game], categorical: bool
    ) -> None:
        """Read the spaces of ``agents``; ``games`` were reset.

        Raises:
            ConfigError: agents that differ.
            EnvError: an observation that its space does not declare.
        """
        self.name, self.agents, self._games = name, tuple(agents), games
        env, first = games[0].env, games[0].observations
        observed, acted = (
            _same(name, agents, kind) for kind in (env.observation_space, env.action_space)
        )
        self._spaces = {leaf.key: leaf for leaf in observation_leaves(observed)}
        mask = self._spaces.pop(ALLOWED, None)
        found = [(leaf, leaf_field(leaf)) for leaf in self._spaces.values()]
        self._readers = [(field, LeafWriter(leaf, field, casts=True).read) for leaf, field in found]
        self.actions = Actions(acted, len(agents) * len(games), categorical)
        for agent in set(agents) & set(first):
            for _, read in self._readers:
                read(f"agent {agent!r}", (first[agent],))
        told = any("action_mask" in info for info in games[0].infos.values())
        self._in_info = mask is None
        self.allowed: Array | None = None
        """The currently allowed actions, ``[n_games, n_agents, n_actions]``."""
        if mask is not None:
            self.allowed = np.ones((len(games), len(agents), *(mask.space.shape or ())), bool)
        elif told and isinstance(acted, spaces.Discrete):
            self.allowed = np.ones((len(games), len(agents), int(acted.n)), bool)

    def specs(self) -> dict[Key, TensorSpec]:
        """Return the specs of one agent's data."""
        found = {key: space_spec(leaf.space) for key, leaf in self._spaces.items()}
        if self.allowed is not None:
            found[ALLOWED] = Binary(shape=self.allowed.shape[2:], dtype=torch.bool)
        return found

    def add_moves(self, moves: Sequence[Moves], tensordict: TensorDictBase) -> None:
        """Add each agent's action to the moves of its game."""
        part, n = tensordict.get(self.name), len(self.agents)
        rows = []
        for key, spec in self.actions.specs.items():
            action, shape = part.get(key).detach().cpu().numpy(), (len(moves) * n, *spec.shape)
            if action.size != math.prod(shape):
                wants = (*tensordict.batch_size, n, *spec.shape)
                raise PolicyError(
                    f"the policy wrote {format_key((self.name, *key))} with shape "
                    f"{action.shape}; the environment wants {wants}: an action of each agent"
                )
            rows.append(action.reshape(shape))
        values = self.actions.decode(rows)
        for index, own in enumerate(moves):
            own.update(zip(self.agents, values[index * n : index * n + n], strict=True))

    def show(self, data: dict[Key, Array]) -> None:
        """Add the agents' observations to ``data``; zero for agents without one."""
        agents, games = self.agents, self._games
        for field, read in self._readers:
            rows = np.zeros((len(games), len(agents), *field.shape), field.numpy_dtype)
            for mine, game in zip(rows, games, strict=True):
                for index, agent in enumerate(agents):
                    if agent in game.observations:
                        mine[index] = read(f"agent {agent!r}", (game.observations[agent],))
            data[self.name, *field.key] = rows
        if self.allowed is not None:
            # Agents that do not act, or have no choice, may do anything: something must be drawn.
            self.allowed = np.ones_like(self.allowed)
            for mine, game in zip(self.allowed, games, strict=True):
                said = game.infos if self._in_info else game.observations
                for index, agent in enumerate(agents):
                    told = said.get(agent, {}).get("action_mask") if agent in game.acting else None
                    if told is not None and np.any(told):
                        mine[index] = told
            data[self.name, *ALLOWED] = self.allowed


def _narrow(rewards: Sequence[Sequence[Any]]) -> Array:
    """Return rewards ``[n_games, n_agents, 1]`` as float32."""
    cause: Exception | None = None
    try:
        values = np.array(rewards)
        if values.dtype.kind in NUMBERS:
            with np.errstate(over="raise"):
                return values.astype(np.float32).reshape(len(rewards), -1, 1)
    except (TypeError, ValueError, FloatingPointError) as err:
        cause = err
    raise EnvError(
        f"the environment returned the rewards {rewards!r:.200}; each must be a number that "
        "float32 can hold"
    ) from cause


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
        """Remove ended agents; return all agents' last observations, and infos."""
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
    imported("pettingzoo", "pettingzoo", repr(task))
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


def _grouped(given: Any, agents: list[str], parallel: bool) -> dict[str, list[str]]:
    if given is None and not parallel:
        given = MarlGroupMapType.ONE_GROUP_PER_AGENT
    if not (given is None or isinstance(given, Mapping)):
        given = given.get_group_map(agents)
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
