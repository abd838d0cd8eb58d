"""PettingZoo environments, of several agents, with TensorDict methods."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from gleanrl.core.errors import ConfigError, EnvError, UnknownEnvError, note
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, next_key
from gleanrl.core.layout import DoneGroup, EnvLayout, Field, Group
from gleanrl.core.options import check_int
from gleanrl.core.platforms import imported
from gleanrl.core.window import Array, Window
from gleanrl.envs.base import EnvBase, close_all
from gleanrl.envs.result_checks import NUMBERS, check_reset
from gleanrl.envs.result_writers import LeafWriter
from gleanrl.envs.row_env import EnvRows, RowEnv, refuse_seed
from gleanrl.envs.spaces import Actions, leaf_field, observation_leaves, space_spec
from gleanrl.envs.specs import Binary, Categorical, Unbounded
from gleanrl.envs.state_kinds import Node
from gleanrl.operations.proofs import remembered

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


@remembered
class PettingZooEnv(RowEnv):
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

    rows: PettingZooRows

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
            make_kwargs: Arguments of the function that makes the environment.

        Raises:
            UnknownEnvError: an id that does not exist.
            ConfigError: no PettingZoo environment, agents of one group that differ, or arguments
                that do not fit together.
            EnvError: agents are absent at first, and there is no mask to say so.
        """
        env: Any = _make(task, parallel, make_kwargs)
        parallel = not _is_a(env, "AECEnv")
        if not parallel and use_mask is False:
            raise ConfigError(
                "use_mask=False: a turn-based environment needs the mask, which says whose turn it "
                "is; drop the argument"
            )
        any_ends = parallel if done_on_any is None else done_on_any
        masked = not (parallel and any_ends) if use_mask is None else use_mask
        groups = _grouped(group_map, list(env.possible_agents), parallel)
        agents = [agent for names in groups.values() for agent in names]
        game = _Game(env, env if parallel else _Turns(env), agents, any_ends)
        game.seed = None if seed is None else check_int("seed", seed, least=0)
        game.restart({})
        game.fresh = True
        absent = sorted(set(agents) - set(game.alive))
        if absent and not masked:
            raise EnvError(f"agents {absent} do not take part at first; pass use_mask=True")
        options = _Options(groups, any_ends, masked, return_state, categorical_actions)
        super().__init__(PettingZooRows([game], (), options), device=device)
        self.parallel, self.group_map = parallel, groups

    @property
    def members(self) -> tuple[Any, ...]:
        """The PettingZoo environments inside, wrappers included."""
        return tuple(game.env for game in self.rows.games)

    @property
    def env(self) -> Any:
        """The PettingZoo environment."""
        return self.members[0]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(agents)}" for name, agents in self.group_map.items())
        return f"{type(self).__name__}({self.env}, agents={{{sizes}}}, device={self.device})"


class PettingZooWrapper(PettingZooEnv):
    """A `PettingZooEnv` around a built environment."""

    def __init__(self, env: Any, **options: Any) -> None:
        """Take over ``env``; ``options`` are those of `PettingZooEnv`."""
        super().__init__(env, **options)


@dataclass(frozen=True, slots=True)
class _Options:
    """How games are shown; those with the same options can be one batch."""

    group_map: Mapping[str, Sequence[str]]
    done_on_any: bool
    use_mask: bool
    return_state: bool
    categorical_actions: bool


class PettingZooRows(EnvRows):
    """Steps ``P`` games with the same agents."""

    def __init__(
        self,
        games: Sequence[_Game],
        batch_shape: tuple[int, ...],
        options: _Options,
        face: EnvBase | None = None,
    ) -> None:
        """Take over ``games``, which were reset, out of the user's environment ``face``."""
        self.games, self.face, self.options = games, face, options
        self.stateful = list(games)
        self._groups = [
            _Agents(name, agents, games, options) for name, agents in options.group_map.items()
        ]
        groups = self._groups
        self.observation_specs = {k: spec for group in groups for k, spec in group.shown.items()}
        self.action_specs = {k: spec for group in groups for k, spec in group.acted.items()}
        if options.return_state:
            state = torch.as_tensor(games[0].env.state())
            self.observation_specs[("state",)] = Unbounded(state.shape, dtype=state.dtype)
        ends = [DoneGroup((group.name,), (len(group.agents), 1)) for group in groups]
        # An agent's flags stay while the episode of the others goes on, as observations do.
        flags = [Field(key, end.shape, torch.bool) for end in ends for key in end.keys()]
        shown, acted = (
            [Field(key, tuple(spec.shape), spec.dtype) for key, spec in specs.items()]
            for specs in (self.observation_specs, self.action_specs)
        )
        self.layout = EnvLayout(
            batch_shape=batch_shape,
            observations=(*shown, *flags),
            actions=tuple(acted),
            rewards=tuple(
                Field((group.name, *REWARD), (len(group.agents), 1), torch.float32)
                for group in groups
            ),
            dones=(DoneGroup(()), *ends),
            infos=[field.key for field in flags],
            groups=tuple(Group((g.name,), (len(g.agents),), (None,)) for g in groups),
        )

    def joined(
        self, others: Sequence[Any], face: EnvBase, options: Any, fresh: bool
    ) -> PettingZooRows:
        games = [game for part in (self, *others) for game in part.games]
        return PettingZooRows(games, tuple(face.batch_size), self.options, face)

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        there = window.keys()
        self._rows = {
            field.key: (
                window.rows(field.key)[1:] + carry.rows(field.key),
                window.rows(next_key(field.key)) if next_key(field.key) in there else None,
            )
            for field in self.layout.observations
        }
        self._over = [window.rows(next_key(key)) for key in _FLAGS]
        self._rewards = [window.rows(next_key(field.key)) for field in self.layout.rewards]
        for group in self._groups:
            group.begin(window)

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        rewards = self._play(t)
        for index in cut:
            self.games[index].cut()
        for rows, group in zip(self._rewards, self._groups, strict=True):
            rows[t][...] = _narrow([[r.get(a, 0.0) for a in group.agents] for r in rewards])
        for key, values in self._show(self.games).items():
            root, after = self._rows[key]
            root[t][...] = values
            if after is not None:
                after[t][...] = values
        ended = [index for index, game in enumerate(self.games) if game.over[0]]
        for index in ended:
            for rows, flag in zip(self._over, self.games[index].over, strict=True):
                rows[t][index] = flag
        if ended and resets:
            began = monotonic()
            for key, values in self._restarted(ended, {}).items():
                self._rows[key][0][t][ended] = values
            self.reset_s += monotonic() - began
        return ended

    def _play(self, t: int) -> list[Moves]:
        """Step every game with the actions in row ``t``; return the rewards."""
        moves: list[Moves] = [{} for _ in self.games]
        for group in self._groups:
            group.add_moves(moves, t)
        rewards = []
        for index, (game, own) in enumerate(zip(self.games, moves, strict=True)):
            try:
                rewards.append(game.step(own))
            except Exception as err:
                note(err, f"environment {index} raised this; its actions were {own!r:.200}")
                raise
        return rewards

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        refuse_seed(options)
        chosen = list(range(len(self.games)) if envs is None else envs)
        for key, values in self._restarted(chosen, options).items() if chosen else ():
            carry.rows(key)[0][chosen] = values

    def _restarted(self, chosen: Sequence[int], options: Mapping[str, Any]) -> dict[Key, Array]:
        games = [self.games[index] for index in chosen]
        for game in games:
            if not game.fresh or options:
                game.restart(options)
            game.fresh = False
        return self._show(games)

    def _show(self, games: Sequence[_Game]) -> dict[Key, Array]:
        """Return the root entries of ``games``."""
        data: dict[Key, Array] = {}
        flags, start = np.stack([game.flags for game in games], 1), 0
        for group in self._groups:
            end = start + len(group.agents)
            group.show(data, games)
            for key, own in zip(_FLAGS, flags, strict=True):
                data[group.name, *key] = own[:, start:end]
            start = end
        if self.options.return_state:
            data[("state",)] = np.stack([game.env.state() for game in games])
        return data

    def seed(self, seed: int, static: bool = False) -> None:
        for index, game in enumerate(self.games):
            game.seed, game.fresh = seed if static else seed + index, False

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        super().resume(snapshot, allow_pickle)
        self._show(self.games)  # what specs of actions allow

    def close(self) -> None:
        close_all(game.env for game in self.games)


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
        found = self._play.reset(**{"seed": seed, "options": None, **options})
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

    def cut(self) -> None:
        """Truncate the episode, unless it is over."""
        if not self.over[0]:
            self.flags[0] = self.flags[2] = True
            self.over = (True, False, True)

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
        self, name: str, agents: Sequence[str], games: Sequence[_Game], options: _Options
    ) -> None:
        """Read the spaces of ``agents``; ``games`` were reset."""
        self.name, self.agents = name, tuple(agents)
        env, first = games[0].env, games[0].observations
        observed, acted = (
            _same(name, agents, kind) for kind in (env.observation_space, env.action_space)
        )
        spaces_of = {leaf.key: leaf for leaf in observation_leaves(observed)}
        mask = spaces_of.pop(ALLOWED, None)
        found = [(leaf, leaf_field(leaf)) for leaf in spaces_of.values()]
        self._readers = [(field, LeafWriter(leaf, field, casts="f").read) for leaf, field in found]
        for agent in set(agents) & set(first):
            for _, read in self._readers:
                read(f"agent {agent!r}", (first[agent],))
        self._decode = Actions(acted, len(agents) * len(games), options.categorical_actions)
        specs = {key: space_spec(leaf.space) for key, leaf in spaces_of.items()}
        told = any("action_mask" in info for info in games[0].infos.values())
        self._in_info, size = mask is None, None if mask is None else mask.space.shape
        if mask is None and told and isinstance(acted, spaces.Discrete):
            size = (int(acted.n),)
        self._allowed: dict[int, Array] = {}
        """By game, the currently allowed actions, ``[n_agents, n_actions]``."""
        self.acted = self._of_agents(self._decode.specs)
        """The specs of actions, with the masks of actions that are allowed now."""
        if size is not None:
            allowed = np.ones((len(games), len(agents), *size), bool)
            self._allowed = {id(game): own for game, own in zip(games, allowed, strict=True)}
            specs[ALLOWED] = Binary(shape=size, dtype=torch.bool)
            for spec in self.acted.values():
                if isinstance(spec, Categorical):
                    spec.update_mask(torch.from_numpy(allowed))
                    spec.stepwise = False
        self._masked = options.use_mask
        if self._masked:
            specs[ALIVE] = Binary(shape=(), dtype=torch.bool)
        self.shown = self._of_agents(specs)
        """The specs of observations."""

    def _of_agents(self, specs: Mapping[Key, Any]) -> dict[Key, Any]:
        n = len(self.agents)
        return {(self.name, *key): spec.expand(n, *spec.shape) for key, spec in specs.items()}

    def begin(self, window: Window) -> None:
        self._rows = [window.rows(key) for key in self.acted]

    def add_moves(self, moves: Sequence[Moves], t: int) -> None:
        """Add each agent's action in row ``t`` to the moves of its game."""
        n = len(self.agents)
        rows = [own[t].reshape(len(moves) * n, *own[t].shape[2:]) for own in self._rows]
        values = self._decode.decode(rows)
        for index, own in enumerate(moves):
            own.update(zip(self.agents, values[index * n : index * n + n], strict=True))

    def show(self, data: dict[Key, Array], games: Sequence[_Game]) -> None:
        """Add the agents' observations in ``games`` to ``data``; zero for agents without one."""
        agents = self.agents
        for field, read in self._readers:
            rows = np.zeros((len(games), len(agents), *field.shape), field.numpy_dtype)
            for mine, game in zip(rows, games, strict=True):
                for index, agent in enumerate(agents):
                    if agent in game.observations:
                        mine[index] = read(f"agent {agent!r}", (game.observations[agent],))
            data[self.name, *field.key] = rows
        if self._masked:
            acting = [[agent in game.acting for agent in agents] for game in games]
            data[self.name, *ALIVE] = np.array(acting)
        if self._allowed:
            data[self.name, *ALLOWED] = np.stack([self._allow(game) for game in games])

    def _allow(self, game: _Game) -> Array:
        """Note the actions that are allowed in ``game`` now.

        Agents that do not act, or have no choice, may do anything: something must be drawn.
        """
        allowed = self._allowed[id(game)]
        allowed.fill(True)
        said = game.infos if self._in_info else game.observations
        for index, agent in enumerate(self.agents):
            told = said.get(agent, {}).get("action_mask") if agent in game.acting else None
            if told is not None and np.any(told):
                allowed[index] = told
        return allowed


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
        make = vars(_module(task)).get("parallel_env" if parallel else "env")
        if make is None:
            form = "parallel" if parallel else "turn-based"
            raise ConfigError(f"{task!r} has no {form} form: pass parallel={not parallel}")
        return make(**kwargs)
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
