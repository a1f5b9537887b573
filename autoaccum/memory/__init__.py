"""The memory of a device: its limits and peaks, what its faults look like, a simulated one for tests, and the clock."""
