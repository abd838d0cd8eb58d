"""GleanRL and its peers on the same work: ``python -m benchmarks`` runs everything.

One thread for everybody: the libraries below read these variables when they are first imported,
so this module must come before any of them (``python -m benchmarks`` sees to that).
"""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
