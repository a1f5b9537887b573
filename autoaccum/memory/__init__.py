"""The memory of a device: its limits and peaks, what its faults look like, and a simulated one for tests."""
