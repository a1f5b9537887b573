"""One optimizer step, all or nothing. Start here: ``step.py`` takes it, ``transaction.py`` makes its gradient."""
