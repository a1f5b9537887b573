"""Does the run compute what it says? Cut windows are measured against whole ones, and what is found is said."""
