"""Small TensorDict environments, each odd in one way; built on TorchRL's `EnvBase`."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from torchrl.envs import EnvBase


class Toy(EnvBase):
    """A point of three coordinates that the action pushes; episodes last two to six steps.

    Randomness comes from a generator of its own, at resets only.
    """

    def __init__(self, batch: tuple[int, ...] = (), action: Any = None, truncates: bool = True):
        super().__init__(device="cpu", batch_size=batch)
        self.generator = torch.Generator().manual_seed(0)
        self.action_spec = (action or continuous())(batch)
        self.observation_spec = Composite(self.shown(), shape=batch)
        self.reward_spec = Unbounded((*batch, 1))
        names = ("done", "terminated", "truncated") if truncates else ("done", "terminated")
        self.truncates = truncates
        self.full_done_spec = Composite(
            {name: Binary(n=1, shape=(*batch, 1), dtype=torch.bool) for name in names}, shape=batch
        )
        self.x = torch.zeros(*batch, 3)
        self.count, self.length = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))

    # -- what subclasses change -------------------------------------------------------------------

    def shown(self) -> dict[str, Any]:
        """Return the observation's specs."""
        return {"observation": Unbounded((*self.batch_size, 3))}

    def show(self) -> dict[Any, Any]:
        """Return the observation's entries."""
        return {"observation": self.x.clone()}

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return a number per environment that depends on the action."""
        action = tensordict.get("action").detach().to(torch.float32)
        weights = torch.linspace(-1, 1, max(action[(0,) * len(self.batch_size)].numel(), 1))
        return (action.reshape(*self.batch_size, -1) * weights).sum(-1)

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        """Return the reward."""
        return (self.x.sum(-1) + push).unsqueeze(-1)

    # -- EnvBase ----------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        where = torch.ones(self.batch_size, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            where = tensordict.get("_reset").reshape(*self.batch_size, -1).any(-1)
        fresh = torch.randn(self.x.shape, generator=self.generator)
        length = torch.randint(2, 7, self.count.shape, generator=self.generator)
        self.x = torch.where(where.unsqueeze(-1), fresh, self.x)
        self.length = torch.where(where, length, self.length)
        self.count = torch.where(where, 0, self.count)
        return TensorDict(self.show(), batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        push = self.push(tensordict)
        self.x = torch.tanh(0.9 * self.x.roll(1, -1) + 0.3 * push.unsqueeze(-1) + 0.05)
        self.count = self.count + 1
        over = (self.count >= self.length).unsqueeze(-1)
        late = over & (self.length % 2 == 0).unsqueeze(-1) & self.truncates
        ends = {"done": over, "terminated": over & ~late}
        if self.truncates:
            ends["truncated"] = late
        entries = {**self.show(), "reward": self.gain(push), **ends}
        return TensorDict(entries, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed)


# -- actions --------------------------------------------------------------------------------------


def continuous(*shape: int) -> Any:
    return lambda batch: Unbounded((*batch, *(shape or (2,))))


def bounded(low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda batch: Bounded(low, high, (*batch, *shape), dtype=dtype)


def number() -> Any:
    return lambda batch: Unbounded(batch)


def index(n: int, *shape: int) -> Any:
    return lambda batch: Categorical(n, (*batch, *shape))


def onehot(n: int, dtype: torch.dtype = torch.bool) -> Any:
    return lambda batch: OneHot(n, (*batch, n), dtype=dtype)


def multi(*nvec: int) -> Any:
    return lambda batch: MultiCategorical(nvec, (*batch, len(nvec)))


def multi_onehot(*nvec: int) -> Any:
    return lambda batch: MultiOneHot(nvec, (*batch, sum(nvec)))


def binary(n: int, dtype: torch.dtype = torch.int8) -> Any:
    return lambda batch: Binary(n, (*batch, n), dtype=dtype)


# -- observations ---------------------------------------------------------------------------------


class Double(Toy):
    """Shows and rewards in float64."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reward_spec = Unbounded((*self.batch_size, 1), dtype=torch.float64)

    def shown(self) -> dict[str, Any]:
        return {"observation": Unbounded((*self.batch_size, 3), dtype=torch.float64)}

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.double()}

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        return super().gain(push).double() / 3


class Half(Toy):
    """Shows float16 numbers."""

    def shown(self) -> dict[str, Any]:
        return {"observation": Unbounded((*self.batch_size, 3), dtype=torch.float16)}

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.half()}


class Pixels(Toy):
    """Shows a picture."""

    def shown(self) -> dict[str, Any]:
        shape = (*self.batch_size, 3, 8, 8)
        return {"observation": Bounded(0, 255, shape, dtype=torch.uint8)}

    def show(self) -> dict[Any, Any]:
        picture = (self.x.sigmoid() * 255).to(torch.uint8)
        return {"observation": picture[..., None, None].expand(*self.batch_size, 3, 8, 8).clone()}


class Scalar(Toy):
    """Shows a number of shape ``()``."""

    def shown(self) -> dict[str, Any]:
        return {"observation": Unbounded(self.batch_size)}

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.sum(-1)}


class Several(Toy):
    """Shows floats, whole numbers, flags and nested entries."""

    def shown(self) -> dict[str, Any]:
        batch = self.batch_size
        inner = {
            "speed": Unbounded((*batch, 2)),
            "deep": Composite(z=Unbounded(batch), shape=batch),
        }
        return {
            "observation": Unbounded((*batch, 3)),
            "count": Unbounded((*batch, 1), dtype=torch.int64),
            "flag": Binary(1, (*batch, 1), dtype=torch.bool),
            "inner": Composite(inner, shape=batch),
        }

    def show(self) -> dict[Any, Any]:
        return {
            "observation": self.x.clone(),
            "count": self.count.unsqueeze(-1).clone(),
            "flag": (self.x.sum(-1) > 0).unsqueeze(-1),
            "inner": TensorDict(
                {"speed": self.x[..., :2] * 2, "deep": {"z": self.x.sum(-1)}},
                batch_size=self.batch_size,
            ),
        }


class Nested(Toy):
    """Shows its observation under ``("data", "observation")``."""

    def shown(self) -> dict[str, Any]:
        inner = Composite(observation=Unbounded((*self.batch_size, 3)), shape=self.batch_size)
        return {"data": inner}

    def show(self) -> dict[Any, Any]:
        return {"data": TensorDict({"observation": self.x.clone()}, batch_size=self.batch_size)}


class Masked(Toy):
    """Shows which actions it allows, and refuses others."""

    def shown(self) -> dict[str, Any]:
        return {
            "observation": Unbounded((*self.batch_size, 3)),
            "action_mask": Binary(4, (*self.batch_size, 4), dtype=torch.bool),
        }

    def show(self) -> dict[Any, Any]:
        mask = torch.arange(4) != (self.count % 4).unsqueeze(-1)
        return {"observation": self.x.clone(), "action_mask": mask}


class Words(Toy):
    """Shows a string."""

    def shown(self) -> dict[str, Any]:
        return {
            "observation": Unbounded((*self.batch_size, 3)),
            "text": NonTensor(shape=self.batch_size, example_data="step 0"),
        }

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.clone(), "text": f"step {int(self.count.sum())}"}


class Ragged(Toy):
    """Shows one more number at every step."""

    def shown(self) -> dict[str, Any]:
        return {
            "observation": Unbounded((*self.batch_size, 3)),
            "trace": Unbounded((*self.batch_size, -1)),
        }

    def show(self) -> dict[Any, Any]:
        length = 1 + int(self.count.max())
        trace = self.x.sum(-1, keepdim=True).expand(*self.batch_size, length).clone()
        return {"observation": self.x.clone(), "trace": trace}


# -- steps and resets -----------------------------------------------------------------------------


class Reusing(Toy):
    """Returns the same tensors every time, overwritten."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen, self.paid = self.x.clone(), torch.zeros(*self.batch_size, 1)
        self.over = {
            name: torch.zeros(*self.batch_size, 1, dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }

    def show(self) -> dict[Any, Any]:
        return {"observation": self.seen.copy_(self.x)}

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        return self.paid.copy_(super().gain(push))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        for name, buffer in self.over.items():
            out.set(name, buffer.copy_(out.get(name)))
        return out


class Views(Toy):
    """Shows views of its state, which later steps change in place."""

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x}

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        held = self.x
        out = super()._step(tensordict)
        self.x = held.copy_(self.x)
        out.set("observation", self.x)
        return out


class Extra(Toy):
    """Adds an entry to its steps that no spec declares."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("speed", self.x[..., :2] - 1)


class ExtraAlways(Toy):
    """Shows an entry that no spec declares, after resets and steps."""

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.clone(), "speed": self.x[..., :2] - 1}


class Listening(Toy):
    """Rewards what the policy wrote beside the action, and echoes it."""

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        return super().gain(push) + self.heard

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        known = ("loc", "logits", "action_value", "params", "state_value", "note", "hidden")
        found = [tensordict.get(key) for key in known if key in tensordict.keys()]
        values = [value.detach().float().reshape(*self.batch_size, -1).sum(-1) for value in found]
        self.heard = sum(values, torch.zeros(self.batch_size)).unsqueeze(-1)
        return super()._step(tensordict)


class Meddling(Toy):
    """Clamps the action in place: the batch holds what it made of it."""

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        tensordict.get("action").clamp_(-0.1, 0.1)
        return super().push(tensordict)


class Replacing(Toy):
    """Sets another action in the TensorDict it is given."""

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        tensordict.set("action", tensordict.get("action") * 0.5)
        return super().push(tensordict)


class Stateless(Toy):
    """Keeps nothing: everything is in the TensorDict."""

    def shown(self) -> dict[str, Any]:
        return {
            "observation": Unbounded((*self.batch_size, 3)),
            "count": Unbounded((*self.batch_size, 1), dtype=torch.int64),
        }

    def show(self) -> dict[Any, Any]:
        return {"observation": self.x.clone(), "count": self.count.unsqueeze(-1).clone()}

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.x = tensordict.get("observation").clone()
        self.count = tensordict.get("count").squeeze(-1).clone()
        return super()._step(tensordict)


class Pays(Toy):
    """Gives two rewards."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reward_spec = Unbounded((*self.batch_size, 2))

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().gain(push), self.x[..., :1]], -1)


class PaysWhole(Toy):
    """Gives whole numbers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reward_spec = Unbounded((*self.batch_size, 1), dtype=torch.int64)

    def gain(self, push: torch.Tensor) -> torch.Tensor:
        return (super().gain(push) * 10).long()


class Scaled(Toy):
    """Overrides ``step``."""

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict = super().step(tensordict)
        tensordict["next", "reward"] = tensordict["next", "reward"] * 3
        return tensordict


class ResetsLouder(Toy):
    """Overrides ``reset``."""

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super().reset(tensordict, **kwargs)
        return out.set("observation", out.get("observation") * 2)


class BothAtOnce(Toy):
    """Overrides ``step_and_maybe_reset``."""

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> Any:
        now, then = super().step_and_maybe_reset(tensordict)
        now["next", "reward"] = now["next", "reward"] + 1
        return now, then


class Fails(Toy):
    """Raises at its ninth step."""

    steps = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        if self.steps == 9:
            raise ArithmeticError("the ninth step")
        return super()._step(tensordict)


def patched(env: Toy) -> Toy:
    """Patch ``_step`` of this one instance."""
    step = env._step

    def louder(tensordict: TensorDictBase) -> TensorDictBase:
        out = step(tensordict)
        return out.set("reward", out.get("reward") * 5)

    env._step = louder
    return env


# -- actions and groups ---------------------------------------------------------------------------


class Parts(Toy):
    """Wants two actions, under ``("action", "move")`` and ``("action", "turn")``."""

    def __init__(self, batch: tuple[int, ...] = ()):
        super().__init__(batch)
        parts = Composite(move=Unbounded((*batch, 2)), turn=Categorical(3, batch), shape=batch)
        self.full_action_spec = Composite(action=parts, shape=batch)

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        move, turn = tensordict.get(("action", "move")), tensordict.get(("action", "turn"))
        return move.detach().sum(-1) + turn.float()


class Agents(Toy):
    """Three agents in a group with a batch size of its own, each with a reward and an end."""

    agents = 3

    def __init__(self, batch: tuple[int, ...] = ()):
        super().__init__(batch)
        group = (*batch, self.agents)
        self.full_action_spec = Composite(
            agents=Composite(action=Unbounded((*group, 2)), shape=group), shape=batch
        )
        self.full_reward_spec = Composite(
            agents=Composite(reward=Unbounded((*group, 1)), shape=group), shape=batch
        )

    def shown(self) -> dict[str, Any]:
        group = (*self.batch_size, self.agents)
        inner = Composite(observation=Unbounded((*group, 3)), shape=group)
        return {"agents": inner, "state": Unbounded((*self.batch_size, 3))}

    def show(self) -> dict[Any, Any]:
        group = (*self.batch_size, self.agents)
        seen = self.x.unsqueeze(-2) * torch.arange(1.0, 4.0).unsqueeze(-1)
        return {"agents": TensorDict({"observation": seen}, batch_size=group), "state": self.x + 0}

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        return tensordict.get(("agents", "action")).detach().sum((-1, -2)) / 6

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        reward = out.pop("reward").unsqueeze(-2) * torch.arange(1.0, 4.0).unsqueeze(-1)
        out.get("agents").set("reward", reward)
        return out


class Different(Toy):
    """Two agents whose observations differ in shape: a lazy stack."""

    def __init__(self, batch: tuple[int, ...] = ()):
        super().__init__(batch)
        one = Composite(action=Unbounded((*batch, 2)), shape=batch)
        self.full_action_spec = Composite(
            agents=torch.stack([one, one.clone()], len(batch)), shape=batch
        )

    def shown(self) -> dict[str, Any]:
        batch = self.batch_size
        specs = [Composite(observation=Unbounded((*batch, n)), shape=batch) for n in (2, 3)]
        return {"agents": torch.stack(specs, len(batch))}

    def show(self) -> dict[Any, Any]:
        tds = [
            TensorDict({"observation": self.x[..., :n].clone()}, self.batch_size) for n in (2, 3)
        ]
        return {"agents": LazyStackedTensorDict.lazy_stack(tds, len(self.batch_size))}

    def push(self, tensordict: TensorDictBase) -> torch.Tensor:
        return tensordict.get(("agents", "action")).detach().sum((-1, -2)) / 6


class GroupEnds(Agents):
    """Ends are the group's: ``("agents", "done")``, beside the root's."""

    def __init__(self, batch: tuple[int, ...] = ()):
        super().__init__(batch)
        group = (*batch, self.agents)
        flags = {n: Binary(1, (*group, 1), dtype=torch.bool) for n in ("done", "terminated")}
        root = {n: Binary(1, (*batch, 1), dtype=torch.bool) for n in ("done", "terminated")}
        self.truncates = False
        self.full_done_spec = Composite(agents=Composite(flags, shape=group), **root, shape=batch)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        for name in ("done", "terminated"):
            whole = out.get(name).unsqueeze(-2)
            early = (self.count.unsqueeze(-1) >= torch.tensor([1, 2, 9])).unsqueeze(-1)
            out.get("agents").set(name, whole | early)
        return out
