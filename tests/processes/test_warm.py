"""Programs of tests that are forked find what those that are started would find."""

import os
import resource
import subprocess

import warm

FOUND = r"""
import locale, os, random, resource, signal, sys, tempfile, time, warnings
umask = os.umask(0)
print(umask, time.tzname, tempfile.gettempdir(), resource.getrlimit(resource.RLIMIT_NOFILE))
print(locale.setlocale(locale.LC_CTYPE), os.sched_getaffinity(0), os.getpriority(0, 0))
print(sys.orig_argv[1:], sys.argv, sys.stdin.closed)
print(*warnings.filters[:2])
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
"""


def test_forked_programs_find_what_others_find(tmp_path, python):
    environment = {
        **os.environ, "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore:this"
    }  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def inherited() -> None:
        os.umask(0o037)
        os.nice(1)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))

    forked, started = (
        subprocess.run(
            [interpreter, "-W", "error::UserWarning", "-c", FOUND, "word"],
            env=environment,
            preexec_fn=inherited,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for interpreter in (python, warm.PYTHON)
    )
    assert forked.stdout.splitlines() == started.stdout.splitlines()
    assert forked.stderr == started.stderr == ""
