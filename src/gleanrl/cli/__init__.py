"""The ``gleanrl`` command: collect data and inspect them."""
