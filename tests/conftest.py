"""One thread a test process where several share the machine: their pools would only wait for one another."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
