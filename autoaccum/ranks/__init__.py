"""Several processes that train one model together: what they tell each other, and what each of them computes."""
