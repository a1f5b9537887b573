"""Windows from any kind of data, readable again until they commit.

The order of samples is a function of (seed, epoch), and what a sample looks like of (seed, epoch, position): never of
the plan, the workers or a replay. A window is asked for its samples by position, so a replay asks again, in other
sizes. What is kept for that, until the window commits:

=============================  ========================================================================
tensors                        their indices; rows are gathered afresh each time
map-style Dataset              the samples that were read, and past a budget nothing: they are read again
map-style Dataset + workers    the micro-batches that the workers collated, cut to other sizes on demand;
                               those of a user's collate_fn are collated anew, for their padding depends on the size
iterable of samples            the samples
iterable of batches            the batches, cut and joined
=============================  ========================================================================

Where a user's collate_fn makes larger batches of longer samples, a window is read whole, also by workers, and serves
its samples longest first: a micro-batch is then one of neighbours, which need little padding. What it serves is still
a function of (seed, epoch) alone.

sources opens what the user passes, and base says what each kind of source promises. tensors, datasets and streams are
the kinds; pieces and grouped keep a window until it commits; batches cuts and joins; lengths, packing and randomness
are what these need.
"""
