"""Every backend does the same: one suite, which a backend's own class inherits."""

import functools

import pytest
import rig
from backend_rig import ScriptedBackend, StampedSource, check_stamps, collect, plan

from gleanrl import ClosedError
from gleanrl.core import messages as m
from gleanrl.engine.batch_delivery import BatchOptions
from gleanrl.engine.engine import Engine
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.launchers.local import LocalLauncher
from gleanrl.transport.network import NetworkBackend
from gleanrl.transport.process import ProcessBackend


class Failing(StampedSource):
    """Worker 1 raises where it is told to."""

    def __init__(self, worker, when):
        if when == "build" and worker == 1:
            raise LookupError("no such thing")
        super().__init__(worker)
        self._when = when

    def collect(self, window, steps, stop, random):
        if self._when == "collect" and self._worker == 1:
            raise LookupError("no such thing")
        return super().collect(window, steps, stop, random)

    def get(self, path):
        if path == "nothing":
            raise AttributeError("there is nothing")
        return super().get(path)


class BackendConformance:
    """What every backend does. A new kind of worker says in a subclass how its backend is made."""

    def backend(self, open_window):
        """Return a backend whose rollouts lie in the windows that `open_window` maps."""
        raise NotImplementedError

    @pytest.fixture
    def make(self):
        engines = []

        def build(factory=StampedSource, workers=2, steps=8):
            engine = Engine(self.backend, [factory] * workers)
            engines.append(engine)
            plan(engine, steps, BatchOptions(stacked=True))
            return engine

        yield build
        for engine in engines:
            engine.close(5.0)

    def test_batches_are_whole_and_in_worker_order(self, make):
        engine = make(workers=3)
        for number in range(5):
            assert check_stamps(collect(engine)) == [w * 10**6 + number for w in range(3)]

    def test_what_the_learner_keeps_never_changes(self, make):
        engine, learner = make(), rig.KeepingLearner()
        for number in range(12):
            batch = collect(engine)
            if number % 3:
                learner.take(batch)
        learner.check_unchanged()

    def test_batches_outlive_the_workers(self, make):
        engine = make()
        batch = collect(engine)
        engine.close(5.0)
        assert check_stamps(batch) == [0, 10**6]

    def test_commands_return_values_in_worker_order(self, make):
        engine = make()
        collect(engine)
        assert engine.request_all(m.GetState()) == [{"rollouts": 1}] * 2
        engine.request(1, m.SetState({"rollouts": 7}))
        assert check_stamps(collect(engine)) == [1, 10**6 + 7]
        assert engine.request(1, m.Get("num_envs")) == 2

    @pytest.mark.parametrize("when", ["build", "collect"])
    def test_what_a_worker_raises_arrives_as_its_own_class(self, make, when):
        with pytest.raises(LookupError, match="no such thing"):
            collect(make(functools.partial(Failing, when=when)))

    def test_a_failed_command_leaves_the_worker_usable(self, make):
        engine = make(functools.partial(Failing, when="never"))
        with pytest.raises(AttributeError, match="there is nothing"):
            engine.request(0, m.Get("nothing"))
        assert check_stamps(collect(engine)) == [0, 10**6]

    def test_closing_twice_is_fine_and_collecting_afterwards_is_not(self, make):
        engine = make()
        engine.close(5.0)
        engine.close(5.0)
        with pytest.raises(ClosedError, match="shut down"):
            collect(engine)


class TestInline(BackendConformance):
    def backend(self, open_window):
        return InlineBackend(open_window)


class TestScripted(BackendConformance):
    def backend(self, open_window):
        return ScriptedBackend(open_window)


class TestProcesses(BackendConformance):
    def backend(self, open_window):
        return ProcessBackend()


@pytest.mark.slow
class TestNodes(BackendConformance):
    def backend(self, open_window):
        return NetworkBackend(open_window, LocalLauncher())
