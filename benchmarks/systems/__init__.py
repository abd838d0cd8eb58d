"""What is measured: ours, hand-written loops, peers, and bare transport."""
