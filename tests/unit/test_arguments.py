"""The arguments of every collector: signatures, help, and names that do not fit."""

import inspect
import pydoc
import re
from collections import UserList

import numpy as np
import pytest

from gleanrl import collectors
from gleanrl.collectors import (
    Collector,
    DistributedCollector,
    MultiCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from gleanrl.collectors.arguments import CollectorArguments
from gleanrl.collectors.arguments import read as arguments_of
from gleanrl.core.errors import ConfigError
from gleanrl.data import LazyTensorStorage

KINDS = {
    "C": ["Collector"],
    "M": ["MultiCollector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector"],
    "D": ["DistributedCollector"],
    "S": ["DistributedSyncCollector"],
    "P": ["RPCCollector"],
    "R": ["RayCollector"],
}
# As they were when each constructor wrote its arguments out: name, annotation, default | kinds.
SIGNATURES = """
create_env_fn: Any = required | CMDSPR
policy: Any = None | CMDSPR
frames_per_batch: int = required | C
total_frames: int | None = -1 | CMDSPR
max_frames_per_traj: int | None = None | CMDSPR
init_random_frames: int | None = None | CMDSPR
reset_at_each_iter: bool = False | CMDSPR
postproc: Callable[[TensorDictBase], TensorDictBase] | None = None | CMDSPR
split_trajs: bool | None = None | CMDSPR
exploration_type: InteractionType | None = None | CMDSPR
exploration_mode: str | None = None | CMDSPR
set_truncated: bool = False | CMDSPR
replay_buffer: Any = None | CMDSPR
extend_buffer: bool = True | CMDSPR
trust_policy: bool | None = None | CMDSPR
compile_policy: bool | Mapping[str, Any] | None = None | CMDSPR
weight_updater: Any = None | CMDSPR
weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None | CMDSPR
weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None | CMDSPR
track_policy_version: bool | PolicyVersion = False | CMDSPR
track_traj_ids: bool = True | CMDSPR
trajs_per_batch: int | None = None | CMDSPR
trajs_per_write: int | None = None | CMDSPR
traj_format: str = 'padded' | CMDSPR
traj_quota: str | None = None | CMDSPR
pre_collect_hook: Callable[[], None] | None = None | CMDSPR
post_collect_hook: Callable[[Any], None] | None = None | CMDSPR
on_env_error: str = 'raise' | CMDSPR
max_env_restarts: int | tuple[int, float] = 10 | CMDSPR
compact_obs: bool = False | CMDSPR
num_envs: int | None = None | CMDSPR
categorical_action_encoding: bool = True | CMDSPR
observation_dtype: dtype | None = None | CMDSPR
info_keys: Sequence[str] | Mapping[str, tuple[Sequence[int], dtype]] = () | CMDSPR
check_finite: bool = False | CMDSPR
fast: bool = True | CMDSPR
timeout: float | None = None | CMDSPR
progress: bool | str = False | CMDSPR
logger: Callable[[Any], object] | Sequence[Callable[[Any], object]] | None = None | CMDSPR
preemption_path: str | PathLike[str] | None = None | CMDSPR
grace: float = 30.0 | CMDSPR
reset_when_done: bool = True | CM
interruptor: Interruptor | None = None | CM
inference: str = 'workers' | CM
env_groups: int = 1 | CM
policy_process: bool | None = None | CM
max_batch_size: int | None = None | CM
min_batch_size: int = 1 | CM
max_wait_s: float = 0.01 | CM
max_ahead: int | None = None | CM
transition_chunk_size: int | None = None | CM
use_buffers: bool | None = None | CM
replay_buffer_chunk: bool | None = None | CM
local_init_rb: bool | None = None | CM
auto_register_policy_transforms: bool | None = None | CM
cudagraph_policy: bool | Mapping[str, Any] | None = None | CMR
no_cuda_sync: bool = False | CMR
worker_idx: int | None = None | CMR
policy_factory: Callable[[], Any] | None = None | C
device: device | str | int | None = None | C
storing_device: device | str | int | None = None | C
policy_device: device | str | int | None = None | C
env_device: device | str | int | None = None | C
create_env_kwargs: Mapping[str, Any] | None = None | C
return_same_td: bool = False | C
backend: str | None = None | CM
num_collectors: int | None = None | CR
sync: bool | None = None | CM
backend_options: Mapping[str, Any] | None = None | C
frames_per_batch: int | Sequence[int] = required | MDSPR
policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None | MDSPR
device: device | str | int | None | Sequence[device | str | int | None] = None | MDSPR
storing_device: device | str | int | None | Sequence[device | str | int | None] = None | MDSPR
env_device: device | str | int | None | Sequence[device | str | int | None] = None | MDSPR
policy_device: device | str | int | None | Sequence[device | str | int | None] = None | MDSPR
create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None | MDSPR
collector_class: Any = None | MDSPR
num_sub_threads: int = 1 | MDSPR
cat_results: str | int | None = None | MDSPR
init_fn: Callable[[], Any] | None = None | MDSPR
start_timeout: float = 120.0 | MDSPR
on_failure: str = 'raise' | MDSPR
max_relaunches: int | tuple[int, float] = 3 | MDSPR
max_lag: int | None = None | MDSPR
num_workers: int | None = None | M
worker_affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | str | None = None | M
driver_affinity: Sequence[int] | None = None | M
update_at_each_batch: bool = False | M
preemptive_threshold: float | None = None | M
num_threads: int | None = None | M
collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None | DSPR
num_workers_per_collector: int = 1 | DSPR
slurm_kwargs: Mapping[str, Any] | None = None | DSP
backend: str = 'gloo' | DSP
launcher: str | Launcher = 'submitit' | DSP
tcp_port: int | str | None = None | DSP
heartbeat: float = 60.0 | DSP
host: str | None = None | DSP
sync: bool = False | DPR
update_after_each_batch: bool = False | DPR
max_weight_update_interval: int | None = -1 | DPR
update_interval: int | None = None | DP
update_interval: int = 1 | S
visible_devices: Sequence[Any] | None = None | P
tensorpipe_options: Mapping[str, Any] | None = None | P
ray_init_config: Mapping[str, Any] | None = None | R
remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None | R
use_env_creator: bool = False | R
"""


def expected(letter):
    for line in SIGNATURES.strip().splitlines():
        signature, _, kinds = line.rpartition(" | ")
        if letter in kinds:
            name, _, rest = signature.partition(": ")
            annotation, _, default = rest.rpartition(" = ")
            yield name, (sorted(annotation.split(" | ")), default)


def shown(annotation):
    """Return the parts of an annotation, without the modules of what it names."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", str(annotation))
    return sorted(re.sub(r"[\w.]+\.(\w+)", r"\1", text).split(" | "))


def signature(what):
    return {
        p.name: (shown(p.annotation), "required" if p.default is p.empty else repr(p.default))
        for p in inspect.signature(what, eval_str=True).parameters.values()
        if p.name != "self"
    }


CLASSES = [(letter, name) for letter, names in KINDS.items() for name in names]


@pytest.mark.parametrize(("letter", "name"), CLASSES)
def test_signatures_are_complete(letter, name):
    kind = getattr(collectors, name)
    for what in (kind, kind.__init__):
        assert signature(what) == dict(expected(letter))
        for argument in inspect.signature(what).parameters.values():
            named = argument.name in ("self", "create_env_fn", "policy")
            wanted = argument.POSITIONAL_OR_KEYWORD if named else argument.KEYWORD_ONLY
            assert argument.kind is wanted


@pytest.mark.parametrize(("letter", "name"), CLASSES)
def test_every_argument_is_documented(letter, name):
    text = inspect.getdoc(getattr(collectors, name).__init__)
    described = re.split(r"\n\n(?=\S)", text[text.index("Args:") :])[0]
    documented = dict(re.findall(r"^    (\w+)(?:=(\S+))?: \S", described, re.M))
    documented["policy"] = "None"  # which the signature shows
    defaults = {name: default for name, (_, default) in expected(letter)}
    assert {name: default or "required" for name, default in documented.items()} == defaults
    assert "**given" not in text
    assert max(map(len, described.splitlines())) <= 92


def test_help_lists_each_argument_once_by_topic():
    shown = pydoc.render_doc(Collector, renderer=pydoc.plaintext)
    assert (
        shown.count("Collector(create_env_fn, policy=None, *, frames_per_batch, **arguments)") == 1
    )
    assert shown.count("total_frames=-1: ") == shown.count("post_collect_hook=None: ") == 1
    assert max(len(line) for line in shown.splitlines() if "frames_per_batch" in line) <= 100
    environments = shown[shown.index("-- Environments --") : shown.index("-- Policy --")]
    assert "  num_envs=None: " in environments


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, DistributedCollector])
@pytest.mark.parametrize("name", ["num_env", "n_envs", "nenvs", "n_env"])
def test_misspelt_names_say_what_was_meant(kind, name):
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes no {name}=.*mean num_envs=\?"):
        kind("CartPole-v1", frames_per_batch=8, **{name: 2})
    with pytest.raises(TypeError, match="takes no total_frame=; did you mean total_frames="):
        kind("CartPole-v1", frames_per_batch=8, total_frame=2)
    with pytest.raises(TypeError, match=r"takes no seed=; call set_seed\(...\) of the collector$"):
        kind("CartPole-v1", frames_per_batch=8, seed=0)
    with pytest.raises(TypeError, match="takes no tea=$"):
        kind("CartPole-v1", frames_per_batch=8, tea=2)


@pytest.mark.parametrize(
    ("kind", "name", "of"),
    [
        (Collector, "preemptive_threshold", "MultiSyncCollector"),
        (MultiSyncCollector, "return_same_td", "Collector"),
        (MultiSyncCollector, "launcher", "DistributedCollector"),
        (DistributedCollector, "num_threads", "MultiSyncCollector"),
        (RPCCollector, "ray_init_config", "RayCollector"),
        (RayCollector, "tcp_port", "DistributedCollector"),
    ],
)
def test_arguments_of_other_collectors_say_whose_they_are(kind, name, of):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no {name}=: .* argument of {of}"):
        kind("CartPole-v1", frames_per_batch=8, **{name: 1})


@pytest.mark.parametrize(("letter", "name"), CLASSES)
def test_what_is_needed_is_named(letter, name):
    if name != "MultiCollector":
        with pytest.raises(TypeError, match=f"{name} needs frames_per_batch="):
            getattr(collectors, name)(["CartPole-v1"])


@pytest.mark.parametrize(("letter", "name"), CLASSES)
def test_flags_are_bools(letter, name):
    kind, flags = getattr(collectors, name), [n for n, (t, _) in expected(letter) if "bool" in t]
    assert {"set_truncated", "split_trajs", "fast", "compile_policy", "progress"} < {*flags}
    for flag in {*flags} - SELECTED.get(name, {}).keys():
        for value in (2, 0.5):
            with pytest.raises(TypeError, match=rf"^{flag} \({value}\) must be a bool"):
                kind(["nothing"], frames_per_batch=8, **{flag: value}, **SELECTED.get(name, {}))
    with pytest.raises(TypeError, match=r"split_trajs \('yes'\) must be a bool$"):
        kind(["nothing"], frames_per_batch=8, split_trajs="yes", **SELECTED.get(name, {}))
    with pytest.raises(TypeError, match=r"set_truncated \(None\) must be a bool$"):
        kind(["nothing"], frames_per_batch=8, set_truncated=None, **SELECTED.get(name, {}))


@pytest.mark.parametrize("yes", [np.True_, 1, np.int64(1)])
def test_flags_may_be_numpys_or_numbers(yes):
    given = {"frames_per_batch": 8, "split_trajs": yes, "compile_policy": yes, "progress": yes}
    read = arguments_of(CollectorArguments, "Collector", {**given, "fast": not yes})
    assert [read[name] for name in given] == [8, True, True, True]
    assert [type(read[name]) for name in ("split_trajs", "compile_policy", "fast")] == [bool] * 3
    with MultiCollector(["CartPole-v1"], sync=yes, backend="inline", frames_per_batch=8) as made:
        assert type(made) is MultiSyncCollector


def test_a_subclass_of_multi_collector_is_synchronous():
    class Own(MultiCollector):
        pass

    with Own(["CartPole-v1"] * 2, frames_per_batch=8, backend="inline") as collector:
        assert collector.next().shape == (2, 4)


def test_numbers_may_be_numpys_and_lists_any_sequence():
    options = {"timeout": np.float32(9), "start_timeout": np.int64(99), "frames_per_batch": 8}
    options |= {"device": UserList(["cpu"] * 2), "create_env_kwargs": UserList([{}, {}])}
    options |= {"policy_factory": UserList([lambda: None] * 2)}
    options |= {"preemptive_threshold": np.float32(0.5), "backend": "inline", "total_frames": 8}
    with MultiSyncCollector(UserList(["CartPole-v1"] * 2), **options) as collector:
        assert collector.num_workers == 2
    with Collector("CartPole-v1", num_collectors=np.int64(2), frames_per_batch=8) as collector:
        assert collector.num_workers == 2
    assert [LazyTensorStorage(size).max_size for size in (np.int64(9), 1e3)] == [9, 1000]
    with pytest.raises(ConfigError, match=r"max_size \(0\) must be at least 1"):
        LazyTensorStorage(0)


SELECTED = {"MultiCollector": {"sync": True}}


def test_flags_of_nodes_collectors_are_bools():
    kwargs = [{"set_truncated": "yes"}]
    with pytest.raises(TypeError, match=r"set_truncated \('yes'\) must be a bool"):
        DistributedCollector(["nothing"], frames_per_batch=8, collector_kwargs=kwargs)
