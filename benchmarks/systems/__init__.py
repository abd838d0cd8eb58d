"""Systems to measure: GleanRL, hand-written loops, other libraries, bare transport."""
