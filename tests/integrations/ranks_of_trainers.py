"""A training that torchrun starts on several ranks: the stock Trainer's or ours; each rank writes down what it saw."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer

from autoaccum.integrations.transformers import AutoAccumTrainer
from tests.integrations.trainer_runs import arguments, gpt2, in_double, made, texts, train

if __name__ == "__main__":
    path, kind, micro_batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with in_double():
        if kind == "stock":
            args = arguments(path, per_device_train_batch_size=8, ddp_backend="gloo")
            run = train(Trainer, made(gpt2), args, texts())
        else:
            args = arguments(path, ddp_backend="gloo", save_strategy="steps", save_steps=3)
            run = train(AutoAccumTrainer, made(gpt2), args, texts(), effective_batch=16, micro_batch=micro_batch)
            if run.trainer.model_wrapped is not run.trainer.model:
                raise SystemExit("the model was wrapped")
    norms = [float(gradient.norm()) for gradient in run.gradients]
    found = {"losses": run.losses, "norms": norms, "logged": run.logged, "steps": run.trainer.state.global_step}
    (path / f"{kind}{run.trainer.args.process_index}.json").write_text(json.dumps(found))
    # Threads of gloo that still hold what DistributedDataParallel gave them abort an interpreter that ends: 2 of 39 runs,
    # with the group destroyed. The stock Trainer's process ends without that; ours ends as each process does.
    if kind == "stock":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
