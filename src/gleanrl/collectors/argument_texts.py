"""The meaning of every argument of collectors, by topic, in the order in which `help` lists them.

A key such as ``"Collector.sync"`` is the meaning for that collector alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

TEXTS: Mapping[str, Mapping[str, str]] = {
    "Batches": {
        "frames_per_batch": "Frames of one batch. Synchronous workers divide them among "
        "themselves; an asynchronous worker makes whole batches. A list has one number per worker.",
        "Collector.frames_per_batch": "Frames of one batch, over all environments; rounded up to "
        "whole steps.",
        "total_frames": "Frames, over all workers, after which iteration ends, rounded up to whole "
        "batches; -1 or None for endless collection.",
        "init_random_frames": "Act at random, without calling the policy, for this many frames "
        "over all workers (rounded up to whole batches). Other outputs of the policy are zero in "
        "them.",
        "cat_results": '``"stack"`` (default) stacks the rollouts of the workers along a new first '
        "dimension. A number concatenates them along that dimension (-1: time). Synchronous "
        "collectors only.",
        "split_trajs": "Deliver one padded row per trajectory with a mask.",
        "trajs_per_batch": "Deliver exactly this many whole trajectories per batch.",
        "traj_format": '``"padded"`` (with a mask) or ``"cat"``, for ``trajs_per_batch``.',
        "traj_quota": 'With ``"equal"`` each environment gives equally many trajectories to a '
        "batch, in the order of collection, so that short ones are not preferred. "
        "``trajs_per_batch`` is then rounded up to a multiple of the environments of all workers.",
        "track_traj_ids": 'Deliver ``("collector", "traj_ids")``.',
        "set_truncated": "Mark the last step of every batch as truncated.",
        "compact_obs": "Leave out the observations under ``next``. The last observation of an "
        "episode and of a batch is lost then, because no other row holds it. A buffer with a "
        "compact storage needs these observations, and stores each once.",
        "postproc": "Applied to each batch in this process, after ``split_trajs``. Workers that "
        "write into a buffer apply it to each of their rollouts.",
        "return_same_td": "Deliver the same `TensorDict` each time, filled with the next batch.",
    },
    "Environments": {
        "num_envs": "Number of environments to make from one id or callable, in each worker. A "
        "batch is ``[num_envs, T]``.",
        "create_env_kwargs": "Arguments of environments, or a list with one mapping per worker.",
        "Collector.create_env_kwargs": "Arguments for ``create_env_fn`` or for `gymnasium.make`.",
        "max_frames_per_traj": "Truncate and reset an episode after this many steps; zero, "
        "negative or None for no limit. Adds ``step_count``.",
        "reset_at_each_iter": "Reset all environments before each batch.",
        "categorical_action_encoding": "Discrete actions as indices; ``False`` for one-hot "
        "vectors.",
        "observation_dtype": "Cast floating observations to this dtype.",
        "info_keys": "Numeric ``info`` entries to deliver; a mapping gives their shapes and "
        "dtypes.",
        "on_env_error": 'The reaction to an exception of an environment. ``"raise"`` raises it. '
        '``"restart"`` closes the environment, builds it anew and resets it, alone, with a warning '
        "that has the traceback; also while it is first built. Its trajectory ends with the last "
        "whole step, truncated if that "
        "is in the same rollout. The frame of the step that raised is no transition: its "
        '``("collector", "mask")`` is False and its trajectory id -1. Needs single Gymnasium '
        "environments from ids or callables.",
        "max_env_restarts": "How often each environment may be built anew: a number, or "
        "``(number, seconds)`` for so many within that time. After that, the error is raised.",
        "check_finite": "Raise on NaN or infinity in observations and rewards.",
    },
    "Policy": {
        "policy_factory": "A callable that makes the policy in each worker, or a list with one per "
        "worker. A ``policy`` given as well is only the source of weights.",
        "Collector.policy_factory": "A callable that returns the policy, instead of ``policy``.",
        "exploration_type": "How a probabilistic policy acts; RANDOM by default.",
        "trust_policy": "Call the policy on a TensorDict, without examining it.",
        "auto_register_policy_transforms": "By default, policies get the entries that they read of "
        "``is_init`` and zeroed recurrent states; with ``False`` the environment must deliver "
        "them.",
        "fast": "Replace parts of environment and policy by faster ones that are proven to give "
        "the same data; `explain` lists them. With ``False``, policies, and all environments "
        "except vector ones, are called unmodified, on TensorDicts. Vector environments are always "
        "stepped by their own ``step``.",
        "compile_policy": "Compile the policy with `torch.compile`; a mapping gives its arguments.",
        "cudagraph_policy": "Run the policy as a CUDA graph; a mapping gives its arguments.",
    },
    "Weights": {
        "weight_sync_schemes": "Per model id; a `NoWeightSyncScheme` keeps that model fixed. By "
        "default weights travel through shared memory to processes, through torch.distributed to "
        "nodes and through Ray to actors.",
        "weight_recv_schemes": "Models that the outer collector may update, if this collector runs "
        "in a worker; see `register_scheme_receiver`.",
        "track_policy_version": "Deliver ``policy_version``: ``True``, or a `PolicyVersion` to "
        "count with.",
        "update_at_each_batch": "Send the policy's weights before (synchronous) or after "
        "(asynchronous) each batch.",
        "update_after_each_batch": "Send the policy's weights at the request for the next batch: "
        "to all workers, or with ``sync=False`` to the worker of the last batch.",
        "max_weight_update_interval": "The largest number of batches for which a worker waits for "
        "new weights; -1 for no limit.",
        "update_interval": "Another name of ``max_weight_update_interval``.",
        "DistributedSyncCollector.update_interval": "Number of batches between two updates of all "
        "nodes. An update is sent at the request for the next batch.",
    },
    "Replay buffer": {
        "replay_buffer": "An object with ``extend`` (and ``add``). It gets the batches, and "
        "iteration yields ``None``. Worker processes write into a `ReplayBuffer` of tensors by "
        "themselves; the collector shares it if necessary. A `Recorder` writes the frames to disk.",
        "extend_buffer": "Store whole batches; ``False`` stores step by step with ``add``, one "
        "element per step and worker. In a storage of ``[env, time]`` both are the same.",
        "trajs_per_write": "With a replay buffer: at most so many whole trajectories per "
        "write, 1 by default.",
    },
    "Devices": {
        "device": "The value of each of the three below that is not given. Each of the four is one "
        "device, or a list with one per worker.",
        "Collector.device": "The value of each of the three below that is not given.",
        "storing_device": "The device of batches; the CPU if workers differ.",
        "Collector.storing_device": "The device of batches.",
        "policy_device": "The device of policies.",
        "Collector.policy_device": "The device of the policy; a copy runs if the policy is on "
        "another device.",
        "env_device": "The device of environments.",
        "Collector.env_device": "The device of the environment.",
    },
    "Workers": {
        "backend": '``"gloo"``, ``"nccl"``, ``"mpi"`` or ``"ucc"``, of torch.distributed.',
        "Collector.backend": '``"inline"`` (alias ``"direct"``): in this process. ``"process"`` '
        '(alias ``"multiprocessing"``) makes a `MultiSyncCollector` or `MultiAsyncCollector`, '
        '``"distributed"`` and ``"submitit"`` a `DistributedCollector`, ``"rpc"`` an '
        '`RPCCollector`, ``"ray"`` a `RayCollector`.',
        "MultiSyncCollector.backend": '``"process"``, or ``"inline"``: the same workers in this '
        "process.",
        "num_collectors": 'Number of worker processes; implies ``backend="process"``.',
        "RayCollector.num_collectors": "Number of actors; not needed for a list of environments.",
        "num_workers": "Number of workers; not needed for a list of environments.",
        "sync": "Whether a batch holds rollouts of all workers.",
        "Collector.sync": "Whether the batches of several workers hold rollouts of all; ``False`` "
        "by default.",
        "MultiSyncCollector.sync": "Chooses the subclass of `MultiCollector`.",
        "backend_options": "Arguments that only the collectors with workers have.",
        "collector_class": "The class of the collector in each worker; one other than `Collector` "
        'runs unmodified. Nodes and Ray actors also take the names ``"single"`` (default), '
        '``"sync"`` and ``"async"``.',
        "collector_kwargs": "Further arguments of the workers' collectors, or a list with one "
        "mapping per worker.",
        "num_workers_per_collector": 'Workers of a worker\'s ``"sync"`` or ``"async"`` collector.',
        "worker_idx": "This collector's index among its parent's workers.",
        "init_fn": "A function that every worker calls first.",
        "num_threads": "torch threads of this process while workers run; by default their present "
        "number less one per worker, or, with central inference, their present number.",
        "inference": 'The place of the policy. ``"workers"``: each worker has a copy. '
        '``"central"``: one policy acts in the environments of all workers, and workers only step '
        "environments; collectors over processes.",
        "policy_process": "With central inference: whether the policy is in a process of its own "
        "(the default if asynchronous), or acts in this one while the collector is iterated.",
        "max_batch_size": "With asynchronous central inference, the most environments that a call "
        "of the policy acts for; by default all that wait.",
        "min_batch_size": "With asynchronous central inference, the environments that the policy "
        "waits for, at most for ``max_wait_s`` seconds.",
        "max_wait_s": "Seconds that an environment waits for others; see ``min_batch_size``.",
        "max_ahead": "With asynchronous central inference, the most steps that the environments of "
        "a worker (or group) may be ahead of those of the slowest one with a rollout under way; "
        "then they wait. By default they never wait for others.",
        "env_groups": "With central inference, parts of the environments that take turns: while "
        "one part steps, the policy acts in another. 2 pays if a call of the policy takes about as "
        "long as a worker's steps. A batch has the first part's environments first.",
        "transition_chunk_size": "With asynchronous central inference, the steps of a rollout; a "
        "batch puts the rollouts that arrive first one after another in time, as many as "
        "``frames_per_batch`` asks for. By default a batch is one rollout.",
        "num_sub_threads": "torch threads of each worker.",
        "worker_affinity": "The processors that each worker process may use: a list with one "
        'collection per worker, a callable that returns that of a worker, or ``"auto"`` for equal '
        "shares of what this process may use, whole cores next to each other.",
        "driver_affinity": "The processors of the process with the policy; see ``policy_process``.",
        "preemptive_threshold": "Share of the workers that finish their rollouts. The collector "
        "then stops the others, and a mask marks the steps that they did not reach. If the share "
        "is less than one worker, every worker makes one step. Synchronous collectors only.",
        "interruptor": "An `Interruptor` that can end rollouts early.",
        "start_timeout": "Seconds in which each worker's process must start (all nodes and actors, "
        "time in a queue included). All workers have the same time again to build environments.",
        "timeout": "Seconds that one rollout of a worker may take; a worker that takes longer is "
        "killed. By default the collector waits as long as the worker shows signs of life, with a "
        "warning every minute. A rollout in this thread cannot be ended: a warning has the stack. "
        'With ``inference="central"`` it bounds one step of the environments.',
        "on_failure": 'The reaction to a lost worker. ``"raise"`` raises `WorkerDied`. '
        '``"continue"`` warns, and the other workers collect the missing frames; a batch of all '
        "workers has a mask, which is False in the lost worker's part. "
        '``"relaunch"`` starts a replacement: a batch of all workers waits for it, otherwise it '
        'collects as soon as it is up. The launchers ``"torchrun"`` and ``"submitit_delayed"`` '
        'cannot replace nodes. With ``inference="central"`` a replacement begins in the step that '
        'the lost worker owes; with ``"continue"`` the mask is False from that step on.',
        "max_relaunches": "Replacements of each worker, failed ones included: a number, or "
        "``(number, seconds)`` for so many within that time. After that, a batch of all workers "
        "raises the last error, and otherwise collection continues without the worker.",
        "max_lag": "Policy versions that a batch's weights may be behind the learner's. An older "
        "batch is discarded and counted; its unfinished trajectories are continued by no later "
        "frames. A hundred such batches in a row are an error. By default every batch is "
        "delivered.",
    },
    "Nodes and actors": {
        "launcher": '``"mp"``: processes of this machine. ``"submitit"``: Slurm jobs. '
        '``"submitit_delayed"``: jobs that `submitit_delayed_launcher` has started. '
        '``"torchrun"``: the other ranks of the learner\'s job. ``"manual"``: the processes in '
        "which you run the printed commands.",
        "slurm_kwargs": "Parameters of `submitit.AutoExecutor` for the jobs of "
        '``launcher="submitit"``, and GleanRL\'s own ``cluster`` (``"local"`` for processes of '
        "this machine) and ``folder`` (of logs; by default ``gleanrl_jobs`` in the working "
        "directory).",
        "host": "Address of this machine on which the learner listens, and which nodes can reach. "
        'By default the launcher chooses it (the loopback interface for ``"mp"``).',
        "tcp_port": "The port to which nodes connect. The default is the environment variable "
        "``TCP_PORT``, else 10003, or the next free port.",
        "heartbeat": "Seconds without a sign of life after which a node, or for a node its "
        "learner, counts as dead.",
        "ray_init_config": "Arguments of `ray.init`, if this process is not yet connected to Ray; "
        '``{"address": "auto"}`` connects to the cluster of this machine.',
        "remote_configs": "Options of the actors: ``num_cpus`` (1 by default), ``num_gpus``, "
        "``resources``, ``scheduling_strategy``, ``runtime_env``, …, or a list with one mapping "
        "per actor.",
    },
    "Hooks, progress, logs, signals": {
        "pre_collect_hook": "Called before each batch is collected; in every worker, before each "
        "of its rollouts.",
        "post_collect_hook": "Called with each batch before it is delivered. A worker calls it "
        "with each of its rollouts, or with the rows that it stores if workers write into a "
        "buffer. The memory is reused, so clone data that you keep. The hook may change values in "
        "place; new entries need ``postproc``.",
        "progress": "Show progress on standard error, also during the start of workers and "
        "environments: one redrawn line on a terminal, a line every two seconds elsewhere. A "
        "string is its label.",
        "logger": "A callable, or a list of callables, that the collecting thread calls with "
        "``stats()`` after each batch. `CSVLogger`, `TensorBoardLogger` and `WandbLogger` are "
        "closed with the collector. A logger that raises is not called again, and a warning says "
        "so.",
        "preemption_path": "Where SIGTERM has the collector save its state, with its replay buffer "
        "if that is a `ReplayBuffer`, before the next batch; then `Preempted` ends the program, "
        "with exit code 143. The collector handles the signal from its construction to its "
        "`shutdown`, and calls the handler from before after the save.",
        "grace": "Seconds from SIGTERM to the end of the process, for ``preemption_path``. If no "
        "batch is requested within half of them, or if collection is in the background, the state "
        "is saved while the program does something else, and `Preempted` is raised there.",
    },
    "Retired or without effect": {
        "exploration_mode": "Retired spelling of ``exploration_type``.",
        "weight_updater": "Retired: a `WeightUpdaterBase`, or a callable that returns one. It "
        "sends weights instead of the schemes.",
        "replay_buffer_chunk": "Retired spelling of ``extend_buffer``.",
        "local_init_rb": "Retired, changes nothing.",
        "reset_when_done": "``True`` only: ended environments are reset.",
        "use_buffers": "Accepted; memory is always preallocated.",
        "no_cuda_sync": "Accepted; the collector waits only for its own copies.",
        "use_env_creator": "Accepted; factories of environments always travel by value.",
        "visible_devices": "Retired, changes nothing.",
        "tensorpipe_options": "Retired, changes nothing.",
    },
}


_ALL = {key: text for texts in TEXTS.values() for key, text in texts.items()}


def text_of(name: str, collector: str = "") -> str:
    """Return the meaning of an argument, for a ``collector`` that may give it another one."""
    return _ALL.get(f"{collector}.{name}") or _ALL[name]


def by_topic(names: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each topic with its arguments among ``names``."""
    for topic, texts in TEXTS.items():
        if own := [name for name in texts if name in names]:
            yield topic, own
