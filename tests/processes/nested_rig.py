"""Collectors and policies of a user; apart, since every worker imports the module they are in."""

import torch
from torch import nn

from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector


class OwnSync(MultiSyncCollector):
    """A collector of the user's: what it may do with batches nobody knows."""


class OwnAsync(MultiAsyncCollector):
    """Another one."""


class OwnSingle(Collector):
    """A third one, without workers."""


class Shown(nn.Module):
    """Shows its weights and what it was told beside them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(1, 1)
        nn.init.zeros_(self.head.bias)

    def forward(self, observation):
        lead = observation.shape[:-1]
        seen = torch.stack([self.weight[0], self.head.bias[0], self._told()])
        return torch.zeros(lead, dtype=torch.int64), seen.expand(*lead, 3)

    def _told(self):
        return torch.zeros(())

    def set(self, value):
        with torch.no_grad():
            self.weight.fill_(value)
            self.head.bias.fill_(value)


class Told(Shown):
    """Has extra state: a plain number."""

    number = 0

    def _told(self):
        return torch.full((), float(self.number))

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]

    def set(self, value):
        super().set(value)
        self.number = value
