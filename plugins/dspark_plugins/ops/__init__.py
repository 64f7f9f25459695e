"""The device operations as `torch.ops.dspark.*`: importing this package registers all five.

Every op has a plain reference (CPU), a kernel in the Triton language (CUDA) and a fake one (shapes, for tracing and
export). Arguments are tensors and scalars alone; what is written in place is said by the op's schema.
"""

from dspark_plugins.ops.block_attention import block_attention
from dspark_plugins.ops.block_sample import block_sample
from dspark_plugins.ops.paged_attention import paged_attention
from dspark_plugins.ops.schedule import schedule
from dspark_plugins.ops.verify import verify

__all__ = ["block_attention", "block_sample", "paged_attention", "schedule", "verify"]
