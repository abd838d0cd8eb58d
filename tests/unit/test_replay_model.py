"""Whatever is done in whatever order by two who share a buffer: a dictionary says what is in it."""

import copy
import pickle
from contextlib import suppress

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

SIZE = 12


def rows(first, count):
    number = torch.arange(first, first + count)
    wide = number.unsqueeze(1) * 3 + torch.arange(4)
    return TensorDict({"number": number, "wide": wide, "next": {"wide": wide + 3}}, [count])


class Buffers(RuleBasedStateMachine):
    @initialize(
        shared=st.booleans(),
        kind=st.sampled_from([LazyTensorStorage, LazyMemmapStorage]),
        once=st.sampled_from([{}, {"compact": True}, {"stacks": {"wide": 2}}]),
    )
    def make(self, shared, kind, once):
        rb = ReplayBuffer(
            storage=kind(SIZE, **once), sampler=SamplerWithoutReplacement(), shared=shared
        )
        self.once, self.shared = once, shared
        self.next, self.model, self.count = 0, {}, 0
        self.adopt(rb)

    def adopt(self, rb):
        other = pickle.loads(pickle.dumps(rb)) if self.shared else rb
        self.both = (rb, other)

    def store(self, places):
        for place in places:
            self.model[place] = self.next
            self.next += 1
            self.count += 1

    @rule(count=st.integers(1, 5), which=st.integers(0, 1))
    def extend(self, count, which):
        self.store(self.both[which].extend(rows(self.next, count)).tolist())

    @precondition(lambda self: self.next)
    @rule(count=st.integers(1, 5), which=st.integers(0, 1), written=st.booleans())
    def fail(self, count, which, written):
        """Nothing is left of a write that an interrupt ended."""
        storage = self.both[which].storage
        values, _ = storage.prepare(rows(self.next, count), 0)
        with suppress(KeyboardInterrupt), storage.ring.append(count, count) as first:
            for n in range(count):
                self.model.pop((first + n) % SIZE, None)
            if written:
                storage.write(first, count, values, 0)
            raise KeyboardInterrupt

    @rule(which=st.integers(0, 1))
    def empty(self, which):
        self.both[which].empty()
        self.model, self.count = {}, 0

    @rule(way=st.sampled_from(["state", "copy", "other"]))
    def move(self, way):
        rb = self.both[0]
        if way == "copy":
            rb = copy.deepcopy(rb)
        elif way == "state":
            rb.load_state_dict(rb.state_dict())
        else:
            state = self.both[1].state_dict()
            storage = LazyTensorStorage(SIZE, **self.once)
            rb = ReplayBuffer(
                storage=storage, sampler=SamplerWithoutReplacement(), shared=self.shared
            )
            rb.load_state_dict(state)
        self.adopt(rb)

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 5))
    def sample(self, count):
        """No number twice in an epoch, and none that came after it began."""
        sample = self.both[0].sample(count)
        numbers = sample["number"].tolist()
        assert (sample["next", "wide"] == sample["wide"] + 3).all()
        assert set(numbers) <= set(self.model.values())
        assert len(numbers) == len(set(numbers))

    @invariant()
    def contents_are_those_of_the_model(self):
        for rb in getattr(self, "both", ()):
            assert (len(rb), rb.write_count) == (len(self.model), self.count)
            if self.model:
                everything = rb[:]
                assert everything["number"].tolist() == [self.model[p] for p in sorted(self.model)]
                expected = everything["number"].unsqueeze(1) * 3 + torch.arange(4)
                assert (everything["wide"] == expected).all()
                assert (everything["next", "wide"] == expected + 3).all()


TestBuffers = Buffers.TestCase
TestBuffers.settings = settings(examples(60), stateful_step_count=30)
