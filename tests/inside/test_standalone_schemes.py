"""Schemes that two processes of the user's own use without a collector, with shorter waits."""

import pytest
from torch import nn

from gleanrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_receiver_gives_up_waiting(kind, monkeypatch):
    monkeypatch.setattr("gleanrl.weights.scheme._WAIT_S", 0.05)
    scheme = kind()
    scheme.init_on_sender(model=nn.Linear(2, 3), num_workers=1)
    scheme.connect()
    with pytest.raises(TimeoutError, match="worker 0 has not taken"):
        scheme.send()
    other = kind()
    other.init_on_sender(model=nn.Linear(2, 3), num_workers=1)
    other.init_on_receiver(model_id="policy", worker_idx=0, model=nn.Linear(2, 3))
    with pytest.raises(TimeoutError, match="the sender must call connect"):
        other.connect()
