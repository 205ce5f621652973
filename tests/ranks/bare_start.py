"""What gemctl's start-up is measured against: a plain script under torchrun that does the first step and no more.

torchrun --nproc-per-node 4 -m tests.ranks.bare_start config.yaml      # rank 0 prints when the step has ended
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gemctl.config.compose import from_yaml
from gemctl.data.loader import Loader
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.specs import feature_spec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper


def main(path: str) -> None:
    config = from_yaml(Path(path).read_text(), path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = feature_spec.load(config.data.spec)
    topology = resolve(config.topology, config.launcher)
    model = assemble(config, spec, topology, torch.device("cpu"))
    model.initialise(config.run.seed)
    optimizer = DenseOptimizer(model.dense, config.optim.dense)
    batch = config.train.global_batch
    loader = Loader(config.data, spec, global_batch=batch, seed=config.run.seed, rank=rank, world=world)
    index, rows = next(loader)
    Stepper(config, model, optimizer, Ledger()).step(index, rows, -(-batch // world), Flags())
    if rank == 0:
        sys.stdout.write(f"first step ended {time.time()}\n")
        sys.stdout.flush()
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
