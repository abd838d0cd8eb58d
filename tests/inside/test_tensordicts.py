"""TensorDicts made without checks are those the checking constructor makes."""

import torch
from tensordict import TensorDict

from gleanrl.memory.tensordicts import nest, tensordict_over


def test_it_is_what_the_public_constructor_makes():
    flat = {
        ("observation",): torch.rand(2, 3, 4),
        ("next", "observation"): torch.rand(2, 3, 4),
        ("next", "reward"): torch.rand(2, 3, 1),
        ("a", "b", "c"): torch.rand(2, 3),
    }
    made = tensordict_over(flat, (2, 3), [None, "time"])
    checked = TensorDict(nest(flat), batch_size=(2, 3), names=[None, "time"])
    assert (made == checked).all()
    for one, two in ((made, checked), (made["next"], checked["next"]), (made["a"], checked["a"])):
        assert one.batch_size == two.batch_size
        assert one.names == two.names
        assert one.device == two.device
        assert one.is_locked == two.is_locked
        assert type(one) is type(two)
    assert made["next", "reward"].data_ptr() == flat["next", "reward"].data_ptr()
    made.set(("next", "extra"), torch.ones(2, 3))
    assert made.reshape(-1).batch_size == (6,)
    assert made[:, 1:].names == [None, "time"]
    assert made.clone()["a", "b"].names == [None, "time"]
