"""A block that two processes shard between them, each with half of its parameters and of what its optimiser keeps."""

from torch import distributed
from torch.distributed.fsdp import fully_shard

from zgtrain import causal_lm


def block(block_id, **args):
    made = causal_lm.block(block_id, **args)
    if distributed.is_initialized():
        for layer in made.decoder.layers:
            fully_shard(layer)
        fully_shard(made)
    return made
