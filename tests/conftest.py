"""What holds for every test."""

import signal

# Processes started with SIGINT ignored (`nohup ... &`) hand that on: tests of Ctrl-C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
