"""The ``gleanrl`` command: collect, and look at what was collected."""
