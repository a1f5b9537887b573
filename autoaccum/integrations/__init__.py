"""Ready-made arguments for models of other libraries."""
