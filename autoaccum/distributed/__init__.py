"""Several ranks that train one model, on ``torch.distributed`` alone."""
