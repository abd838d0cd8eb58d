"""Operations on tensors: recorded once, proven by replay, watched and replayed."""
