"""How windows are cut: the search, the plans, the schedules and the noise scale. Pure decisions that need no torch."""
