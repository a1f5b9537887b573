"""The objects that a user holds: a run and its validation, an accumulator, a probe, and what they are set up from."""
