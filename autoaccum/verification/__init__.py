"""Does the run compute what it says? What the first window that is cut shows, and what is said of it."""
