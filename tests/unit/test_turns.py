"""FairLock: whoever waits comes before the one who had it, also among those who give up."""

import sys
import threading

from gleanrl.transport.interrupts import FairLock


def test_whoever_asked_first_is_next_also_before_the_one_who_had_it():
    turns, order, asked = FairLock(), [], threading.Barrier(2)
    assert turns.acquire(None)

    def other():
        asked.wait(5)
        assert turns.acquire(5)
        order.append("other")
        turns.release()

    thread = threading.Thread(target=other)
    thread.start()
    asked.wait(5)
    while turns._next.acquire(False):  # the only way to know that it is in the queue
        turns._next.release()
    turns.release()
    assert turns.acquire(5)
    order.append("first")
    turns.release()
    thread.join(5)
    assert order == ["other", "first"]


def test_it_can_be_taken_again_by_its_holder():
    turns = FairLock()
    assert turns.acquire(None)
    assert turns.acquire(0.0)
    turns.release()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(turns.acquire(0.0)))
    thread.start()
    thread.join(5)
    assert seen == [False]
    turns.release()
    thread = threading.Thread(target=lambda: seen.append(turns.acquire(0.0)))
    thread.start()
    thread.join(5)
    assert seen == [False, True]


def test_many_threads_never_hold_it_together():
    turns, inside, most = FairLock(), [0], [0]

    def work():
        for _ in range(300):
            if turns.acquire(0.001):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
                turns.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
    assert turns.acquire(0.0)


def test_a_signal_handler_may_take_it_wherever_it_comes():
    turns, times = FairLock(), 0

    def come(frame, event, _):
        nonlocal times
        frame.f_trace_opcodes = True
        if event == "opcode":
            times += turns.acquire(0.0)
            turns.release()
        return come

    sys.settrace(come)
    try:
        got = turns.acquire(None)
        turns.release()
    finally:
        sys.settrace(None)
    assert got
    assert times > 20
    thread = threading.Thread(target=lambda: turns.acquire(None))
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
